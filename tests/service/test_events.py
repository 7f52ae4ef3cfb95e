import asyncio

from guard import semconv
from guard.service.events import Events
from guard.wire import Event


def event(message: str) -> Event:
    return Event(at=1.0, kind=semconv.EVENT_RTT, scope="fleet", message=message)


def test_events_are_numbered_and_the_oldest_drop_off():
    told: list[Event] = []
    events = Events(told.append, kept=2)
    for message in "abc":
        events.publish(event(message))
    assert [(number, item.message) for number, item in events.since(0)] == [(2, "b"), (3, "c")]
    assert events.since(3) == []
    assert [item.message for item in told] == ["a", "b", "c"]


async def _waits() -> None:
    events = Events()
    assert await events.wait(0, 0.01) == []
    waiting = asyncio.create_task(events.wait(0, 10.0))
    await asyncio.sleep(0)
    events.publish(event("a"))
    assert [item.message for _, item in await waiting] == ["a"]


def test_an_event_wakes_those_who_wait():
    asyncio.run(_waits())
