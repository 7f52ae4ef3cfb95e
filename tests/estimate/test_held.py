"""What a hit will find of a prompt, and what a lookup costs that is sent what vLLM holds itself."""

import random

import pytest

RATE = 5e9  # bytes per second of the planted store
TOKEN = 131072


def turns(request_of, backend, *, prefix=None):
    """Conversations of which vLLM holds a part; every fifth lookup finds no more than that."""
    rng = random.Random(3)
    for number in range(400):
        prompt = rng.randrange(2000, 8000)
        held = prefix if prefix is not None else prompt - rng.randrange(200, 400)
        local = rng.choice((0, rng.randrange(0, held)))
        matched = 0 if number % 5 == 0 else held - local
        sent = local + matched if backend.startswith("lmcache-mp/") else matched
        yield request_of(
            number, prompt=prompt, local=local, matched=matched, lookup=0.004 + sent * TOKEN / RATE,
            fetch=0.003 if matched else 0.0, prefill=0.02 + 1e-4 * (prompt - local - matched), backend=backend,
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["lmcache-mp/store", "mooncake-store/store"])
def test_a_conversation_lacks_its_last_turn_whatever_vllm_holds_of_it(request_of, pool_of, backend):
    lookup = pool_of(list(turns(request_of, backend))).lookup
    for prompt in (2000, 8000):
        held = lookup.held_tokens + lookup.held_per_token * (prompt - lookup.held_prompt)
        assert held == pytest.approx(prompt - 300, abs=15)
    assert lookup.hit_probability == pytest.approx(0.8, abs=0.02)
    # the store's rate is found again only where the bytes of the local match are counted as they are sent
    assert lookup.sends_local is backend.startswith("lmcache-mp/")
    assert lookup.seconds_per_byte == pytest.approx(1.0 / RATE, rel=0.02)
    assert lookup.t0 == pytest.approx(0.004, abs=0.0005)


def test_a_shared_prefix_is_as_long_in_every_prompt(request_of, pool_of):
    lookup = pool_of(list(turns(request_of, "mooncake-store/store", prefix=1500))).lookup
    assert (lookup.held_tokens, lookup.held_per_token) == (pytest.approx(1500.0), pytest.approx(0.0, abs=1e-6))
