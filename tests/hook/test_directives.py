import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from guard import __version__, semconv
from guard.hook.config import HookConfig
from guard.hook.directives import BODY_LIMIT, WAIT_SECONDS, Directives
from guard.hook.failsafe import Failsafe
from guard.hook.transport import Reply
from guard.wire import Directive, DirectiveSet

ENGINE = "10.0.0.1:8000/0"
BACKEND = "lmcache-mp/resp"


def directive(mode: str = "off", **more: Any) -> Directive:
    return Directive(**{"id": "d-1", "engine_id": ENGINE, "backend": BACKEND, "mode": mode, **more})


def answer(*items: Directive, etag: str = '"e1"', **changed: Any) -> Reply:
    data = DirectiveSet(engine_id=ENGINE, etag=etag, directives=items).to_json()
    return Reply(200, json.dumps({**data, **changed}).encode())


RENEWED = Reply(304, b"")


@dataclass
class FakeTransport:
    """Gives one answer per poll; `asked` holds the headers of each."""

    answers: list[Reply | Exception] = field(default_factory=list)
    asked: list[Mapping[str, str]] = field(default_factory=list)
    failovers: int = 0

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        assert (method, body, limit) == ("GET", None, 256 * 1024)
        assert timeout == WAIT_SECONDS + 5
        self.asked.append(headers)
        reply = self.answers.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def failover(self) -> None:
        self.failovers += 1

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    @property
    def tags(self) -> list[str | None]:
        return [headers.get("If-None-Match") for headers in self.asked]


class Bench:
    def __init__(self, clock: Any, *answers: Reply | Exception) -> None:
        self.clock = clock
        self.transport = FakeTransport(list(answers))
        self.failsafe = Failsafe()
        self.directives = Directives(
            HookConfig(endpoints=("http://unused",)),
            ENGINE,
            [BACKEND],
            "model",
            clock=clock,
            transport=self.transport,
            failsafe=self.failsafe,
        )

    def poll(self, *answers: Reply | Exception) -> float:
        self.transport.answers += answers
        return self.directives.poll()

    @property
    def mode(self) -> str | None:
        found = self.directives.current(BACKEND)
        return found.mode if found else None


@pytest.fixture
def bench(clock: Any) -> Bench:
    return Bench(clock)


def test_nothing_is_in_force_before_the_first_answer(bench: Bench):
    assert bench.directives.current(BACKEND) is None


def test_an_answer_is_applied_and_acknowledged_at_once(bench: Bench):
    assert bench.poll(answer(directive("off"))) == 0.0
    assert bench.directives.current(BACKEND) == directive("off")
    assert bench.directives.current("another") is None
    assert bench.poll(answer(directive("on", id="d-2"), etag='"e2"')) == 0.0
    assert bench.mode == "on"
    bench.poll(RENEWED)
    assert bench.transport.tags == [None, '"e1"', '"e2"']


@pytest.mark.parametrize(("tag", "sent"), [("abc", '"abc"'), ('"abc"', '"abc"'), ('W/"abc"', 'W/"abc"')])
def test_the_tag_is_quoted_for_http(tag: str, sent: str, bench: Bench):
    bench.poll(answer(directive("off"), etag=tag))
    bench.poll(RENEWED)
    assert bench.transport.tags == [None, sent]


def test_the_lease_runs_out_on_the_second(bench: Bench):
    bench.poll(answer(directive("off", lease_seconds=15.0)))
    bench.clock.advance(14.999)
    assert bench.mode == "off"
    bench.clock.advance(0.001)
    assert bench.mode is None


def test_304_renews_the_lease_by_its_length(bench: Bench):
    bench.poll(answer(directive("off")))
    for _ in range(10):
        bench.clock.advance(14.0)
        bench.poll(RENEWED)
    bench.clock.advance(14.0)
    assert bench.mode == "off"
    bench.clock.advance(1.0)
    assert bench.mode is None


def test_an_expired_set_is_not_acknowledged_and_a_304_does_not_revive_it(bench: Bench):
    bench.poll(answer(directive("off")))
    bench.clock.advance(15.0)
    assert bench.poll(RENEWED) > 0.0
    assert bench.transport.tags == [None, None]
    assert bench.mode is None
    bench.poll(answer(directive("off")))
    assert bench.mode == "off"


def test_a_304_that_nobody_asked_for_is_garbage(bench: Bench):
    assert bench.poll(RENEWED) > 0.0
    assert bench.mode is None


@pytest.mark.parametrize("ttl", [60.0, 3.0, None])
def test_keep_outlives_the_lease_until_its_ttl(ttl: float | None, bench: Bench):
    bench.poll(answer(directive("off", on_lease_expiry=semconv.LEASE_KEEP, ttl_seconds=ttl)))
    bench.clock.advance(14.9)
    assert bench.mode == "off"
    bench.clock.advance(5.0)
    assert bench.mode == (None if ttl == 3.0 else "off")
    bench.clock.advance(40.0)
    assert bench.mode == (None if ttl == 3.0 else "off")
    bench.clock.advance(0.2)
    assert bench.mode == ("off" if ttl is None else None)
    bench.clock.advance(1e9)
    assert bench.mode == ("off" if ttl is None else None)


def test_a_renewal_does_not_lengthen_the_ttl(bench: Bench):
    bench.poll(answer(directive("off", on_lease_expiry=semconv.LEASE_KEEP, ttl_seconds=20.0)))
    bench.clock.advance(10.0)
    bench.poll(RENEWED)
    bench.clock.advance(14.9)
    assert bench.mode == "off"  # the lease, to 25
    bench.clock.advance(0.2)
    assert bench.mode is None  # not 10 + 20


def test_open_does_not_outlive_the_lease(bench: Bench):
    bench.poll(answer(directive("off", on_lease_expiry=semconv.LEASE_OPEN, ttl_seconds=60.0)))
    bench.clock.advance(15.0)
    assert bench.mode is None


def test_a_cleared_override_ends_keep(bench: Bench):
    bench.poll(answer(directive("off", on_lease_expiry=semconv.LEASE_KEEP)))
    bench.poll(answer(directive("auto"), etag='"e2"'))
    assert bench.mode == "auto"
    bench.clock.advance(15.0)
    assert bench.mode is None


def test_a_backend_that_is_no_longer_named_has_no_directive(bench: Bench):
    bench.poll(answer(directive("off")))
    bench.poll(answer(etag='"e2"'))
    assert bench.mode is None
    bench.poll(RENEWED)
    assert bench.transport.tags[-1] == '"e2"'


DEEP = b"[" * 200_000

BAD: dict[str, Reply | Exception] = {
    "down": ConnectionRefusedError("refused"),
    "stopped": TimeoutError("timed out"),
    "not found": Reply(404, b"{}"),
    "unauthorized": Reply(401, b"{}"),
    "error": Reply(500, b""),
    "busy": Reply(503, b"", 2.0),
    "moved": Reply(302, b""),
    "empty": Reply(200, b""),
    "garbage": Reply(200, b"\x00\xff garbage"),
    "list": Reply(200, b"[]"),
    "deep": Reply(200, DEEP),
    "nan": Reply(200, b"NaN"),
    "newer set": answer(directive("on"), schema=2),
    "newer directive": answer(directive("on", schema=2)),
    "another engine": answer(directive("on"), engine_id="10.0.0.2:8000/0"),
    "unknown mode": answer(directive("sideways")),
    "lease NaN": answer(directive("on", lease_seconds=float("nan"))),
    "ttl beyond numbers": answer(directive("off", ttl_seconds=10**400)),
    "lease of ages": answer(directive("on", lease_seconds=1e9)),
    "no list": answer(directives={}),
    "evil tag": answer(directive("on"), etag='"a"\r\nX-Evil: 1'),
    "no tag": answer(directive("on"), etag=""),
    "long tag": answer(directive("on"), etag='"' + "x" * 300 + '"'),
    "foreign tag": answer(directive("on"), etag='"\u00e9"'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_news_lets_the_lease_run_out_and_nothing_else(name: str, bench: Bench, caplog: pytest.LogCaptureFixture):
    bench.poll(answer(directive("off")))
    bench.clock.advance(10.0)
    waits = [bench.poll(BAD[name]) for _ in range(4)]
    assert all(wait > 0.0 for wait in waits)
    assert max(waits) <= 2.0
    assert bench.mode == "off"
    bench.clock.advance(5.0)
    assert bench.mode is None
    assert bench.failsafe.errors == 0
    assert len(caplog.records) == 1  # once, not four times
    bench.poll(answer(directive("auto"), etag='"e9"'))
    assert bench.mode == "auto"


def test_a_refusal_says_what_may_be_the_matter(bench: Bench, caplog: pytest.LogCaptureFixture):
    for status in (401, 403):
        bench.poll(Reply(status, b"{}"))
    token, name = (record.getMessage() for record in caplog.records)
    assert "KVGUARD_TOKEN_FILE" in token
    assert "allowed_hosts" not in token
    assert "KVGUARD_TOKEN_FILE" in name
    assert "allowed_hosts" in name


def test_retry_after_is_honoured(bench: Bench):
    assert bench.poll(Reply(429, b"", 9.0)) == 9.0


def test_an_answer_in_the_middle_of_an_outage_starts_the_backoff_over(bench: Bench):
    for _ in range(10):
        bench.poll(TimeoutError())
    bench.poll(answer(directive("off")))
    assert bench.poll(TimeoutError()) <= 0.1


def test_a_service_that_answers_at_once_for_ever_is_slowed_down(bench: Bench):
    waits = [bench.poll(answer(directive("off"), etag=f'"{number}"')) for number in range(40)]
    assert waits == [0.0] * 8 + [0.05] * 32
    assert [bench.poll(RENEWED), bench.poll(answer(directive("off"), etag='"39"'))] == [0.5, 0.5]


def test_an_operator_who_switches_ten_times_a_second_is_not_slowed_down(clock: Any):
    class Slow(FakeTransport):
        def send(self, *args: Any, **kwargs: Any) -> Reply:
            clock.advance(0.1)  # the service held the poll for that long
            return super().send(*args, **kwargs)

    bench = Bench(clock)
    bench.directives._transport = bench.transport = Slow()
    waits = [bench.poll(answer(directive("off"), etag=f'"{number}"')) for number in range(40)]
    assert waits == [0.0] * 40


def test_the_question_names_engine_backends_model_and_versions(service: Any):
    service.reply = lambda _: (404, {}, b"")
    directives = Directives(
        HookConfig(endpoints=(service.url,), instance="[::1]:8000"),
        "[::1]:8000 x/1",
        ["lmcache-mp/resp", "mooncake-store/tcp"],
        "org/model & co",
    )
    directives.poll()
    directives._transport.close()
    parts = urlsplit(service.seen[0].path)
    assert parts.path == "/v1/directives/%5B%3A%3A1%5D%3A8000%20x/1"
    assert parse_qs(parts.query) == {
        "wait": ["5"],
        "schema": ["1"],
        "backend": ["lmcache-mp/resp", "mooncake-store/tcp"],
        "model": ["org/model & co"],
        "hook": [__version__],
        "instance": ["[::1]:8000"],
    }


def test_the_tag_reaches_the_service_only_after_the_set_is_applied(service: Any):
    """What the service reads as an acknowledgement must be one: checked at the moment when the request comes in."""
    applied: list[tuple[str | None, str | None]] = []
    enough = threading.Event()

    def reply(seen: Any) -> tuple[int, dict[str, str], bytes]:
        found = directives.current(BACKEND)
        applied.append((seen.headers.get("if-none-match"), found.id if found else None))
        number = len(applied)
        if number >= 6:
            enough.set()
            return 304, {}, b""
        return 200, {}, answer(directive("off", id=f'"e{number}"'), etag=f'"e{number}"').body

    service.reply = reply
    directives = Directives(HookConfig(endpoints=(service.url,)), ENGINE, [BACKEND], "model")
    directives.start()
    directives.start()
    assert [thread.name for thread in threading.enumerate()].count("kvguard-directives") == 1
    assert enough.wait(10)
    directives.stop(5.0)
    assert applied[:6] == [(None, None)] + [(f'"e{number}"', f'"e{number}"') for number in range(1, 6)]
    assert "kvguard-directives" not in [thread.name for thread in threading.enumerate()]


def test_two_backends_change_together(service: Any):
    """A reader that looks at one table sees one set, whenever it looks."""
    other = "mooncake-store/tcp"
    stop = threading.Event()
    torn: list[tuple[str, str]] = []
    number = 0

    def reply(_: Any) -> tuple[int, dict[str, str], bytes]:
        nonlocal number
        number += 1
        items = (directive("off", id=f"{number}"), directive("off", id=f"{number}", backend=other))
        return 200, {}, answer(*items, etag=f'"{number}"').body

    service.reply = reply
    directives = Directives(HookConfig(endpoints=(service.url,)), ENGINE, [BACKEND, other], "model")

    def read() -> None:
        while not stop.is_set():
            table = directives._table
            if len(table) == 2 and table[BACKEND][0].id != table[other][0].id:
                torn.append((table[BACKEND][0].id, table[other][0].id))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        directives.poll()
    stop.set()
    reader.join(5)
    directives._transport.close()
    assert torn == []
    assert directives.current(other) == directive("off", id="20", backend=other)


def test_a_huge_body_is_refused(service: Any):
    service.reply = lambda _: (200, {}, b" " * BODY_LIMIT + answer(directive("off")).body)
    directives = Directives(HookConfig(endpoints=(service.url,)), ENGINE, [BACKEND], "model")
    assert directives.poll() > 0.0
    assert directives.current(BACKEND) is None


def test_fails_over_without_waiting(new_service: Any):
    bad, good = new_service(), new_service()
    bad.reply = lambda _: (500, {}, b"")
    good.reply = lambda _: (200, {}, answer(directive("off")).body)
    directives = Directives(HookConfig(endpoints=(bad.url, good.url)), ENGINE, [BACKEND], "model")
    assert directives.poll() == 0.0
    assert directives.poll() == 0.0
    directives._transport.close()
    found = directives.current(BACKEND)
    assert found is not None
    assert found.mode == "off"


def test_stop_ends_a_poll_that_the_service_holds(service: Any, caplog: pytest.LogCaptureFixture):
    held, release = threading.Event(), threading.Event()

    def reply(_: Any) -> tuple[int, dict[str, str], bytes]:
        held.set()
        release.wait(20)
        return 304, {}, b""

    service.reply = reply
    directives = Directives(HookConfig(endpoints=(service.url,)), ENGINE, [BACKEND], "model")
    directives.start()
    assert held.wait(10)
    directives.stop(10.0)
    alive = "kvguard-directives" in [thread.name for thread in threading.enumerate()]
    release.set()
    assert not alive
    assert caplog.records == []


@pytest.mark.parametrize(("leaving", "told"), [(True, ["DELETE"]), (False, [])])
def test_an_engine_that_ends_says_goodbye_a_poller_that_is_replaced_does_not(
    service: Any, leaving: bool, told: list[str]
):
    held, release = threading.Event(), threading.Event()

    def reply(request: Any) -> tuple[int, dict[str, str], bytes]:
        if request.method == "DELETE":
            return 204, {}, b""
        held.set()
        release.wait(20)
        return 304, {}, b""

    service.reply = reply
    directives = Directives(HookConfig(endpoints=(service.url,)), "[::1]:8000 x/1", [BACKEND], "model")
    directives.start()
    assert held.wait(10)
    directives.stop(10.0, leaving=leaving)
    release.set()
    byes = [seen for seen in service.seen if seen.method != "GET"]
    assert [seen.method for seen in byes] == told
    assert {seen.path for seen in byes} <= {"/v1/directives/%5B%3A%3A1%5D%3A8000%20x/1"}


def test_a_goodbye_that_nobody_hears_holds_nobody_up(caplog: pytest.LogCaptureFixture):
    directives = Directives(HookConfig(endpoints=("http://127.0.0.1:9",)), ENGINE, [BACKEND], "model")
    directives.start()
    directives.stop(10.0, leaving=True)
    assert "kvguard-directives" not in [thread.name for thread in threading.enumerate()]
    assert all("no directives" in record.message for record in caplog.records)


def test_an_internal_error_is_counted_and_polling_goes_on(clock: Any):
    again = threading.Event()

    class Buggy(FakeTransport):
        def send(self, *args: Any, **kwargs: Any) -> Reply:
            if bench.failsafe.errors:
                again.set()
                raise OSError
            raise ZeroDivisionError

    bench = Bench(clock)
    bench.directives._transport = Buggy()
    bench.directives.start()
    assert again.wait(10)
    bench.directives.stop(5.0)
    assert bench.failsafe.errors == 1
