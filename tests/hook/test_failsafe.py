import json
import logging

import pytest

from guard.hook.failsafe import ERROR_LIMIT, LOGGER_NAME, Failsafe, logger


def _raise(failsafe: Failsafe, text: str = "{", where: str = "lookup") -> None:
    try:
        json.loads(text)["missing"]
    except (ValueError, KeyError) as caught:
        failsafe.record(where, caught)


def test_trips_at_the_limit_and_not_before():
    failsafe = Failsafe(limit=3)
    for expected in (False, False, True, True):
        _raise(failsafe)
        assert failsafe.tripped is expected
    assert failsafe.errors == 4


def test_errors_on_the_hooks_own_threads_count_but_do_not_trip():
    failsafe = Failsafe(limit=2)
    for _ in range(5):
        failsafe.record("exporter", ValueError("x"), own_thread=True)
    assert (failsafe.tripped, failsafe.errors) == (False, 5)
    _raise(failsafe)
    assert not failsafe.tripped
    _raise(failsafe)
    assert failsafe.tripped


def test_default_limit_is_twenty():
    failsafe = Failsafe()
    for _ in range(ERROR_LIMIT - 1):
        _raise(failsafe)
    assert (failsafe.tripped, failsafe.errors) == (False, 19)
    _raise(failsafe)
    assert (failsafe.tripped, failsafe.errors) == (True, 20)


def test_logs_one_line_per_kind_with_its_traceback_and_one_at_tripping(caplog: pytest.LogCaptureFixture):
    failsafe = Failsafe(limit=5)
    for _ in range(3):
        _raise(failsafe)
    _raise(failsafe, "{}")
    _raise(failsafe, where="store")
    _raise(failsafe, where="store")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert [("in lookup" in text, "in store" in text) for text in messages[:3]] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert "5 internal errors" in messages[3]
    assert [bool(record.exc_info) for record in caplog.records] == [True, True, True, False]


def test_a_broken_log_handler_does_not_raise():
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("disk full")

    log = logging.Logger("broken")  # noqa: LOG001  not part of the tree
    log.addHandler(Broken())
    failsafe = Failsafe(limit=2, log=log)
    _raise(failsafe)
    _raise(failsafe)
    assert failsafe.tripped
    assert failsafe.errors == 2


def test_lines_reach_the_handler_that_vllm_configures():
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    vllm = logging.getLogger("vllm")
    handler, propagate = Keep(), vllm.propagate
    vllm.addHandler(handler)
    vllm.propagate = False  # as vLLM sets it
    try:
        _raise(Failsafe())
    finally:
        vllm.removeHandler(handler)
        vllm.propagate = propagate
    assert LOGGER_NAME == "vllm.kvguard"
    assert logger.name == LOGGER_NAME
    assert len(lines) == 1
