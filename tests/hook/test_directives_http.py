"""Polls over HTTP: what is asked, acknowledged and refused, failover, stop and goodbye."""

import http.client
import logging
import threading
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from guard import __version__
from guard.hook import directives as polls
from guard.hook.config import HookConfig
from guard.hook.directives import BODY_LIMIT, Directives
from guard.hook.failsafe import LOGGER_NAME
from guard.hook.transport import Reply
from tests.hook.fake_transport import FakeTransport
from tests.hook.polling import BACKEND, ENGINE, answer, directive


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


@pytest.mark.parametrize(
    ("ending", "told"),
    [({"leaving": True}, [""]), ({"leaving": True, "error": "Runtime&Error"}, ["?error=Runtime%26Error"]), ({}, [])],
)
def test_an_engine_that_ends_says_goodbye_a_poller_that_is_replaced_does_not(
    service: Any, ending: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(polls, "GOODBYE_SECONDS", 10.0)  # a busy machine may need longer than an engine's end waits
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
    directives.stop(30.0, **ending)
    release.set()
    byes = [(seen.method, seen.path) for seen in service.seen if seen.method != "GET"]
    assert byes == [("DELETE", f"/v1/directives/%5B%3A%3A1%5D%3A8000%20x/1{query}") for query in told]


def test_a_goodbye_that_nobody_hears_holds_nobody_up(caplog: pytest.LogCaptureFixture):
    directives = Directives(HookConfig(endpoints=("http://127.0.0.1:9",)), ENGINE, [BACKEND], "model")
    directives.start()
    directives.stop(10.0, leaving=True)
    assert "kvguard-directives" not in [thread.name for thread in threading.enumerate()]
    assert all("no directives" in record.message for record in caplog.records)


@pytest.mark.parametrize("error", [http.client.CannotSendRequest("Request-sent"), RuntimeError("reader went away")])
def test_a_goodbye_that_fails_in_whatever_way_is_no_news(error: Exception, caplog: pytest.LogCaptureFixture):
    transport = Goodbyes(error)
    directives = Directives(HookConfig(endpoints=("http://unused",)), ENGINE, [BACKEND], "model", transport=transport)
    with caplog.at_level(logging.DEBUG, LOGGER_NAME):
        directives.start()
        directives.stop(10.0, leaving=True)
    assert transport.methods[-2:] == ["DELETE", "DELETE"]
    assert transport.closed
    byes = [record for record in caplog.records if "goodbye" in record.message]
    assert [(record.levelno, repr(error) in record.message) for record in byes] == [(logging.DEBUG, True)] * 2


class Goodbyes(FakeTransport):
    """Answers every poll and fails every goodbye."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.methods: list[str] = []
        self.closed = False

    def send(self, method: str, *_: Any, **__: Any) -> Reply:
        self.methods.append(method)
        if method == "DELETE":
            raise self.error
        return answer(directive("off"))

    def close(self) -> None:
        self.closed = True
