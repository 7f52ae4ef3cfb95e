"""The decision, as a table: one line per rule and its neighbour that does not fire."""

from dataclasses import replace
from typing import Any

import pytest

from guard import gate, semconv
from guard.connectors import EXAMPLE, LMCACHE_MP, MOONCAKE_STORE, NIXL, OFFLOADING, UNKNOWN
from guard.costs import Traffic
from guard.gate import admit_load, admit_lookup
from guard.wire import Directive, Reads

BASE = Directive(id="d1", engine_id="h:8000/0", backend="lmcache-mp/resp", mode=semconv.MODE_AUTO)


def directive(mode: str = semconv.MODE_AUTO, **reads: float) -> Directive:
    return replace(BASE, mode=mode, reads=Reads(**reads))


def with_traffic(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts, those about traffic gathered into one."""
    return {
        "traffic": Traffic(**{key: facts[key] for key in Traffic._fields if key in facts}),
        **{key: value for key, value in facts.items() if key not in Traffic._fields},
    }


def lookup(given: Directive | None, capability=LMCACHE_MP, **facts):
    return admit_lookup(given, capability, **with_traffic({"prompt_tokens": 4000, "local_tokens": 0, **facts}))


def load(given: Directive | None, capability=LMCACHE_MP, **facts):
    return admit_load(given, capability, **with_traffic({"matched_tokens": 2048, **facts}))


def test_no_directive_admits_everything() -> None:
    facts = {"inflight": 10**6, "inflight_bytes": 10**12, "load_failed": True, "draw": 0.999}
    assert lookup(None, unusable=True, **facts) == ("remote", gate.NO_DIRECTIVE)
    assert load(None, matched_bytes=10**12, **facts) == ("remote", gate.NO_DIRECTIVE)


@pytest.mark.parametrize("mode", [semconv.MODE_ON, semconv.MODE_AUTO, semconv.MODE_OBSERVE])
def test_a_mode_that_is_not_off_admits_within_the_limits(mode: str) -> None:
    assert lookup(directive(mode)) == ("remote", mode)
    assert load(directive(mode)) == ("remote", mode)


def test_off_skips_where_the_connector_tolerates_it_else_declines() -> None:
    off = directive(semconv.MODE_OFF)
    assert lookup(off, LMCACHE_MP) == ("skip", "off")
    assert lookup(off, UNKNOWN) == ("remote", "off")
    assert load(off, UNKNOWN) == ("decline", "off")
    assert load(off, OFFLOADING) == ("decline", "off")


@pytest.mark.parametrize("mode", [semconv.MODE_OFF, semconv.MODE_AUTO])
def test_a_hand_off_is_never_refused(mode: str) -> None:
    given = directive(mode, max_inflight=0, min_tokens=10**6)
    assert lookup(given, handoff=True, load_failed=True, unusable=True) == ("remote", gate.HANDOFF)
    assert load(given, handoff=True, load_failed=True) == ("remote", gate.HANDOFF)
    assert load(given, NIXL) == ("remote", gate.HANDOFF)


@pytest.mark.parametrize(
    ("reads", "facts", "reason"),
    [
        ({"min_tokens": 4001}, {}, gate.MIN_TOKENS),
        ({"min_tokens": 4000}, {}, ""),
        ({"min_tokens": 1000}, {"local_tokens": 3001}, gate.MIN_TOKENS),
        ({"min_tokens": 1000}, {"local_tokens": 3000}, ""),
        ({"max_inflight": 0}, {}, gate.MAX_INFLIGHT),
        ({"max_inflight": 2}, {"inflight": 2}, gate.MAX_INFLIGHT),
        ({"max_inflight": 2}, {"inflight": 1}, ""),
        ({"max_inflight_bytes": 100}, {"inflight": 1, "inflight_bytes": 101}, gate.MAX_BYTES),
        ({"max_inflight_bytes": 100}, {"inflight": 1, "inflight_bytes": 100}, ""),
        ({"share": 0.5}, {"draw": 0.5}, gate.SHARE),
        ({"share": 0.5}, {"draw": 0.49}, ""),
        ({"share": 0.0}, {"draw": 0.0}, gate.SHARE),
        ({}, {"unusable": True}, gate.UNUSABLE),
    ],
)
def test_limits_of_the_skip_gate(reads: dict[str, float], facts: dict[str, float], reason: str) -> None:
    expected = ("skip", reason) if reason else ("remote", "auto")
    assert lookup(directive(**reads), **facts) == expected
    observed = lookup(directive(semconv.MODE_OBSERVE, **reads), **facts)
    assert observed == ("remote", f"would-{reason}" if reason else "observe")


@pytest.mark.parametrize(
    ("reads", "facts", "reason"),
    [
        ({"min_tokens": 2049}, {}, gate.MIN_TOKENS),
        ({"min_tokens": 2048}, {}, ""),
        ({"max_inflight": 1}, {"inflight": 1}, gate.MAX_INFLIGHT),
        ({"max_inflight_bytes": 100}, {"inflight": 1, "inflight_bytes": 60, "matched_bytes": 41}, gate.MAX_BYTES),
        ({"max_inflight_bytes": 100}, {"inflight": 1, "inflight_bytes": 60, "matched_bytes": 40}, ""),
        # one read larger than the limit may go when it is alone, else it could never go
        ({"max_inflight_bytes": 100}, {"inflight": 0, "inflight_bytes": 0, "matched_bytes": 1000}, ""),
        ({}, {"load_failed": True}, gate.LOAD_FAILED),
        ({}, {}, ""),
    ],
)
def test_limits_of_the_load_gate(reads: dict[str, float], facts: dict[str, float], reason: str) -> None:
    assert load(directive(**reads), **facts) == (("decline", reason) if reason else ("remote", "auto"))
    assert load(directive(semconv.MODE_OBSERVE, **reads), **facts).admitted


def test_after_a_failed_load_the_lookup_is_left_out_only_where_nobody_waits_for_it() -> None:
    assert lookup(directive(), MOONCAKE_STORE, load_failed=True) == ("skip", gate.LOAD_FAILED)
    assert lookup(directive(), EXAMPLE, load_failed=True) == ("skip", gate.LOAD_FAILED)
    assert lookup(directive(), LMCACHE_MP, load_failed=True) == ("remote", "auto")
    assert load(directive(), LMCACHE_MP, load_failed=True) == ("decline", gate.LOAD_FAILED)


def test_every_reason_is_announced() -> None:
    seen = set()
    for mode in semconv.MODES:
        for reads in ({}, {"min_tokens": 10**6}, {"max_inflight": 0}, {"share": 0.0}, {"max_inflight_bytes": 0}):
            for flags in ({}, {"load_failed": True}, {"handoff": True}):
                given = directive(mode, **reads)
                for capability in (LMCACHE_MP, UNKNOWN, MOONCAKE_STORE):
                    seen.add(lookup(given, capability, inflight=1, **flags).reason)
                    seen.add(load(given, capability, inflight=1, **flags).reason)
    assert seen <= set(gate.REASONS)
    assert len(seen) > 10
