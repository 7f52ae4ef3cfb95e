"""Directives as leases: applied, renewed, run out, acknowledged; by hand, without network."""

import threading
from typing import Any

import pytest

from guard import semconv
from guard.hook.config import HookConfig
from guard.hook.directives import BODY_LIMIT, WAIT_SECONDS, Directives
from guard.hook.failsafe import Failsafe
from guard.hook.transport import Reply
from tests.hook.fake_transport import FakeTransport
from tests.hook.polling import BACKEND, ENGINE, RENEWED, answer, directive


class Bench:
    def __init__(self, clock: Any, *answers: Reply | Exception) -> None:
        self.clock = clock
        self.transport = FakeTransport(*answers)
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
    asked = {(one.method, one.body, one.timeout, one.limit) for one in bench.transport.asked}
    assert asked == {("GET", None, WAIT_SECONDS + 5, BODY_LIMIT)}


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


def test_the_age_is_since_the_service_last_confirmed(bench: Bench):
    assert bench.directives.age() is None
    bench.poll(answer(directive("off")))
    bench.clock.advance(3.0)
    assert bench.directives.age() == 3.0
    bench.poll(RENEWED)
    assert bench.directives.age() == 0.0
    bench.clock.advance(2.0)
    bench.poll(OSError())
    assert bench.directives.age() == 2.0
