"""Invariants 1 and 5 at the poller: without the service, or with a bad one, vLLM behaves as without kvguard."""

import json
from dataclasses import replace
from typing import Any

import pytest

from guard import semconv
from guard.hook.config import HookConfig
from guard.hook.directives import Directives
from guard.hook.transport import Reply
from guard.wire import Directive, DirectiveSet
from tests.hook.fake_runtime import ENGINE, OFF
from tests.hook.fake_transport import FakeTransport


def answer(*items: Directive, **changed: Any) -> Reply:
    data = DirectiveSet(engine_id=ENGINE, etag='"e"', directives=items).to_json()
    return Reply(200, json.dumps({**data, **changed}).encode())


def poller(service: FakeTransport, clock: Any) -> Directives:
    config = HookConfig(endpoints=("http://unused",))
    return Directives(config, ENGINE, ["x"], "tiny", transport=service, clock=clock)


def test_invariant_1_a_lease_that_runs_out_opens_unless_the_operator_said_keep(clock: Any) -> None:
    opens = poller(FakeTransport(answer(replace(OFF, on_lease_expiry="open"))), clock)
    keeps = poller(FakeTransport(answer(replace(OFF, on_lease_expiry="keep", ttl_seconds=60.0))), clock)
    for directives in (opens, keeps):
        directives.poll()
        assert directives.current("x") is not None
    clock.advance(15.1)  # the service is gone
    assert opens.current("x") is None
    assert keeps.current("x") is not None
    clock.advance(45.0)
    assert keeps.current("x") is None  # keep lasts until its own end


@pytest.mark.parametrize(
    "reply",
    [
        OSError("refused"),
        Reply(500, b""),
        Reply(200, b"garbage"),
        Reply(200, b"[]"),
        answer(OFF, schema=semconv.SCHEMA + 1),
        answer(replace(OFF, mode="someday")),
        Reply(304, b""),
    ],
)
def test_invariant_1_an_unreadable_answer_leaves_vllm_as_without_kvguard(clock: Any, reply: Reply | Exception) -> None:
    directives = poller(FakeTransport(reply), clock)
    assert directives.poll() >= 0.0
    assert directives.current("x") is None


def test_invariant_1_the_hook_says_which_schema_it_reads(clock: Any) -> None:
    service = FakeTransport(answer())
    poller(service, clock).poll()
    assert f"schema={semconv.SCHEMA}" in service.asked[0].path


def test_invariant_5_a_hook_that_stepped_aside_acknowledges_nothing(clock: Any) -> None:
    """Else the operator would read that `off` is applied while every request reads."""
    service = FakeTransport(answer(OFF), Reply(304, b""), answer(OFF), answer(OFF))
    directives = poller(service, clock)
    for _ in range(2):
        directives.poll()
    assert [bool(tag) for tag in service.tags] == [False, True]
    for _ in range(20):
        directives._failsafe.record("test", ValueError("x"))
    assert directives._failsafe.tripped
    assert [directives.poll(), directives.poll()] == [5.0, 5.0]  # calmly
    assert not any(service.tags[2:])
