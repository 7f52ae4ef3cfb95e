"""The long poll: registers, acknowledges, wakes at once, forgets."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from guard.control.shapes import BYPASS
from guard.history.shapes import Override
from guard.service.directives import Poll, Registry, RegistryFullError
from guard.service.offload import Overrides

pytestmark = pytest.mark.anyio


def off(scope: str, **more: Any) -> Override:
    fields: dict[str, Any] = {
        "mode": "off", "stores": True, "on_lease_expiry": "keep", "expires_at": None, "reason": "", "who": "ann",
        "since": 1.0,
    } | more  # fmt: skip
    return Override(scope=scope, **fields)


@pytest.fixture
def overrides() -> Overrides:
    return Overrides()


@pytest.fixture
def registry(overrides: Overrides, hands: Any) -> Registry:
    return Registry(overrides, hands.clock(), max_engines=3, retention_seconds=100)


async def applied(registry: Registry, poll: Poll) -> Poll:
    """A hook that polls and applies; the poll it sends next."""
    found = await registry.poll(poll, 0)
    assert found is not None
    return poll._replace(applied=found.etag)


async def test_the_first_poll_is_answered_at_once(registry: Registry) -> None:
    found = await registry.poll(Poll("h:1/0", "m", ("a", "b")), 5)
    assert found is not None
    assert found.engine_id == "h:1/0"
    assert [(item.backend, item.mode) for item in found.directives] == [("a", "auto"), ("b", "auto")]


async def test_no_news_is_none_after_the_wait(registry: Registry) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    assert await registry.poll(poll, 0.01) is None


async def test_a_switch_wakes_the_poll_and_the_next_poll_acknowledges(
    registry: Registry, overrides: Overrides, hands: Any
) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    waiting = asyncio.create_task(registry.poll(poll, 5))
    await asyncio.sleep(0)
    engine = registry.engines["e"]
    assert engine.waiting == 1
    assert engine.acknowledged
    overrides.put(off("fleet"))
    registry.publish()
    assert not engine.acknowledged
    found = await asyncio.wait_for(waiting, 1)
    assert found is not None
    assert found.directives[0].state == "bypass"
    hands.advance(0.5)
    assert await registry.poll(poll._replace(applied=found.etag), 0) is None
    assert engine.acknowledged
    assert engine.applied["a"] == (found.directives[0].id, hands.wall)
    hands.advance(3)
    await registry.poll(poll._replace(applied=found.etag), 0)
    assert engine.applied["a"][1] == hands.wall - 3  # when it was applied, not when it last polled


async def test_a_switch_of_one_backend_leaves_the_other_acknowledged(registry: Registry, overrides: Overrides) -> None:
    await registry.poll(await applied(registry, Poll("e", "m", ("a", "b"))), 0)
    overrides.put(off("backend:b"))
    registry.publish()
    engine = registry.engines["e"]
    assert (engine.applies("a"), engine.applies("b"), engine.acknowledged) == (True, False, False)


async def test_a_switch_that_changes_nothing_for_an_engine_does_not_wake_it(
    registry: Registry, overrides: Overrides
) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    waiting = asyncio.create_task(registry.poll(poll, 0.05))
    await asyncio.sleep(0)
    overrides.put(off("engine:other"))
    registry.publish()
    assert await waiting is None


async def test_what_changed_for_one_engine_is_worked_out_for_that_one_alone(
    registry: Registry, overrides: Overrides
) -> None:
    for name in ("a", "b"):
        await registry.poll(Poll(name, "m", ("x",)), 0)
    asked: list[str] = []
    registry.plans = lambda engine, _: asked.append(engine)
    registry.publish(["b", "gone"])
    assert asked == ["b"]
    registry.publish()
    assert asked == ["b", "a", "b"]


async def test_a_hook_that_starts_anew_has_applied_nothing(registry: Registry) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    await registry.poll(poll, 0)
    assert registry.engines["e"].acknowledged
    await registry.poll(poll._replace(applied=""), 0)
    assert not registry.engines["e"].acknowledged


async def test_a_hook_on_an_older_set_is_told_at_once(registry: Registry, overrides: Overrides) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    overrides.put(off("fleet"))
    registry.publish()
    found = await registry.poll(poll, 5)
    assert found is not None
    assert found.directives[0].mode == "off"


async def test_the_tag_is_the_same_after_a_restart_of_the_service(hands: Any) -> None:
    tags = []
    for _ in range(2):
        registry = Registry(Overrides([off("fleet")]), hands.clock(), max_engines=3, retention_seconds=100)
        found = await registry.poll(Poll("e", "m", ("a",), applied="unknown"), 5)
        assert found is not None
        tags.append(found.etag)
    assert tags[0] == tags[1]


async def test_age_silence_and_forgetting(registry: Registry, hands: Any) -> None:
    await registry.poll(Poll("e", "m", ("a",)), 0)
    engine = registry.engines["e"]
    hands.advance(15)
    assert (registry.age(engine), registry.silent(engine)) == (15.0, False)
    assert registry.concerned("fleet") == [engine]
    hands.advance(0.1)
    assert registry.silent(engine)
    assert registry.concerned("fleet") == []
    registry.forget_silent()
    assert "e" in registry.engines
    hands.advance(100)
    registry.forget_silent()
    assert registry.engines == {}


async def test_an_engine_that_says_goodbye_is_gone_at_once_and_told_and_may_come_back(registry: Registry) -> None:
    await registry.poll(Poll("e", "m", ("a",)), 0)
    assert [event.message for event in registry.news()] == ["engine e polls"]
    registry.leave("e")
    registry.leave("e")
    assert registry.engines == {}
    assert [(event.message, event.scope) for event in registry.news()] == [("engine e left", "engine:e")]
    assert registry.news() == []
    await registry.poll(Poll("e", "m", ("a",)), 0)
    assert [event.message for event in registry.news()] == ["engine e polls"]


async def test_an_engine_that_crashed_is_silent_at_once_until_it_comes_back(registry: Registry, hands: Any) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    waiting = asyncio.create_task(registry.poll(poll, 5))
    await asyncio.sleep(0)
    registry.news()
    for _ in range(2):  # a hook that does not hear the answer says it again
        registry.leave("e", "RuntimeError")
    assert await asyncio.wait_for(waiting, 1) is None
    assert registry.silent(registry.engines["e"])
    assert registry.asked() == registry.concerned("fleet") == []
    (event,) = registry.news()
    assert (event.message, event.evidence["error"]) == ("engine e crashed: RuntimeError", "RuntimeError")
    hands.advance(60)
    assert registry.age(registry.engines["e"]) == 60.0
    assert registry.news() == []
    await registry.poll(poll, 0)
    assert not registry.silent(registry.engines["e"])
    assert [event.message for event in registry.news()] == ["engine e polls again"]


async def test_an_engine_that_crashed_is_forgotten_as_any_silent_one(registry: Registry, hands: Any) -> None:
    await registry.poll(Poll("e", "m", ("a",)), 0)
    registry.leave("e", "RuntimeError")
    hands.advance(100)
    registry.forget_silent()
    assert "e" in registry.engines
    hands.advance(0.1)
    registry.forget_silent()
    assert registry.engines == {}
    registry.leave("e", "RuntimeError")
    assert registry.engines == {}


async def test_a_waiting_hook_is_not_silent(registry: Registry, hands: Any) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    waiting = asyncio.create_task(registry.poll(poll, 0.05))
    await asyncio.sleep(0)
    hands.advance(1000)
    assert registry.age(registry.engines["e"]) == 0.0
    await waiting
    assert registry.age(registry.engines["e"]) == 0.0


async def test_a_full_registry_lets_a_silent_engine_go_but_no_live_one(registry: Registry, hands: Any) -> None:
    for name in ("a", "b", "c"):
        await registry.poll(Poll(name), 0)
    with pytest.raises(RegistryFullError):
        await registry.poll(Poll("d"), 0)
    await registry.poll(Poll("a"), 0)
    hands.advance(10)
    await registry.poll(Poll("b"), 0)
    await registry.poll(Poll("c"), 0)
    hands.advance(10)
    await registry.poll(Poll("d"), 0)
    assert sorted(registry.engines) == ["b", "c", "d"]


async def test_an_engine_that_changes_its_backends_gets_directives_for_them(registry: Registry) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    found = await registry.poll(poll._replace(backends=("b",)), 5)
    assert found is not None
    assert [item.backend for item in found.directives] == ["b"]


async def test_closing_ends_every_poll(registry: Registry) -> None:
    poll = await applied(registry, Poll("e", "m", ("a",)))
    waiting = asyncio.create_task(registry.poll(poll, 5))
    await asyncio.sleep(0)
    registry.close()
    assert await asyncio.wait_for(waiting, 1) is None
    assert await asyncio.wait_for(registry.poll(poll, 5), 1) is None


POLL = Poll("h/0", "m", ("a/b",))


async def test_the_first_directive_is_the_one_that_the_controller_gives(make_runtime: Any, settings: Any) -> None:
    runtime = make_runtime(settings)
    first = await runtime.registry.poll(POLL, 0)
    runtime.tick()
    assert await runtime.registry.poll(POLL._replace(applied=first.etag), 0) is None
    await runtime.close()


async def test_a_throttled_engine_is_still_throttled_at_its_first_poll_after_a_restart(
    make_runtime: Any, settings: Any, hands: Any
) -> None:
    runtime = make_runtime(settings)
    await runtime.registry.poll(POLL, 0)
    runtime.tick()
    unit = runtime.controlling.units[POLL.engine_id, POLL.backends[0]]
    unit.state = replace(unit.state, name=BYPASS, since=hands.mono, reason="failures", backoff=30.0)
    runtime.controlling._changed = True
    hands.advance(6)
    runtime.tick()
    await runtime.close()

    runtime = make_runtime(settings)
    (directive,) = (await runtime.registry.poll(POLL, 0)).directives
    assert (directive.state, directive.reads.share) == (BYPASS, 0.0)
    await runtime.close()
