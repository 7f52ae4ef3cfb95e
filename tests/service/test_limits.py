"""How often a client may call."""

from typing import Any

import pytest

from guard.service import limits
from guard.service.auth import Tokens
from guard.service.limits import Rates
from guard.settings import Settings


def test_a_burst_passes_then_one_at_a_time_and_quiet_fills_it_up_again() -> None:
    now = [100.0]
    rates = Rates(lambda: now[0], {"read": 2.0})
    assert [rates.take("read", "a") for _ in range(11)] == [0.0] * 11  # 5 s of 2 a second, and the one under way
    assert rates.take("read", "a") == pytest.approx(0.5)
    assert rates.take("read", "b") == 0.0  # others do not pay for it
    now[0] += 0.5
    assert rates.take("read", "a") == 0.0
    assert rates.take("read", "a") == pytest.approx(0.5)
    now[0] += 1000.0
    assert [rates.take("read", "a") for _ in range(11)] == [0.0] * 11
    assert rates.take("read", "a") > 0.0


def test_a_rate_of_0_and_an_unknown_kind_have_no_bound() -> None:
    rates = Rates(lambda: 0.0, {"read": 0.0})
    assert {rates.take(kind, "a") for kind in ("read", "ingest") for _ in range(1000)} == {0.0}


def test_many_clients_cost_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CLIENTS", 100)
    now = [0.0]
    rates = Rates(lambda: now[0], {"read": 1.0})
    for number in range(1000):
        now[0] += 0.001
        rates.take("read", str(number))
        assert len(rates._due) <= 101


@pytest.fixture
def slow(settings: Settings, make_runtime: Any, serving: Any, hands: Any, tmp_path: Any) -> Any:
    file = tmp_path / "tokens"
    file.write_text("ann admin ann-secret-0123456789\nbob read bob-secret-0123456789\n")
    chosen = settings.model_copy(update={"read_rate": 1.0, "write_rate": 1.0})
    return serving(make_runtime(chosen), Tokens(file, Rates.of(chosen, lambda: hands.mono)))


@pytest.mark.anyio
async def test_one_who_calls_too_often_is_told_when_to_come_back_and_others_are_served(slow: Any, hands: Any) -> None:
    ann, bob = ({"Authorization": f"Bearer {name}-secret-0123456789"} for name in ("ann", "bob"))
    async with slow as client:
        codes = [(await client.get("/v1/offload", headers=bob)).status_code for _ in range(7)]
        assert codes == [200] * 6 + [429]
        answer = await client.get("/v1/offload", headers=bob)
        assert (answer.headers["retry-after"], answer.json()["title"]) == ("1", "Too Many Requests")
        assert (await client.get("/v1/offload", headers=ann)).status_code == 200
        codes = [
            (await client.put("/v1/offload/fleet", headers=ann, json={"mode": "off"})).status_code for _ in range(7)
        ]
        assert codes == [200] * 6 + [429]
        assert (await client.get("/v1/directives/e/0", headers=ann)).status_code == 200  # hooks have no bound
        hands.advance(1.0)
        assert (await client.get("/v1/offload", headers=bob)).status_code == 200


@pytest.mark.anyio
async def test_guessing_tokens_is_slow_and_does_not_lock_out_those_who_have_one(slow: Any) -> None:
    async with slow as client:
        codes = [
            (await client.get("/v1/offload", headers={"Authorization": f"Bearer guess-{n}"})).status_code
            for n in range(40)
        ]
        assert codes == sorted(codes)
        assert 25 <= codes.count(401) <= 26  # 5 s of 5 a second
        ann = {"Authorization": "Bearer ann-secret-0123456789"}
        assert (await client.get("/v1/offload", headers=ann)).status_code == 200
