"""One sentence: helping or hurting, and why."""

import pytest

from guard.estimate.shapes import Cell, Verdict
from guard.service.console.headline import Row, headline

AUTO = Row("a/b", "auto", "open", silent=False)


def cell(state, backend="a/b", reason="", class_="all"):
    return Cell(model="m", backend=backend, class_=class_, n=42, verdict=Verdict(state=state, reason=reason))


@pytest.mark.parametrize(
    ("rows", "cells", "state", "title"),
    [
        ([], [], "empty", "No engine yet"),
        ([AUTO._replace(silent=True)], [cell("ok")], "silent", "No engine answers"),
        ([AUTO._replace(mode="off", state="bypass")], [cell("ok")], "off", "Remote reads are off"),
        ([AUTO], [], "insufficient-data", "Too early to say whether remote reads pay"),
        ([AUTO], [cell("insufficient-data")], "insufficient-data", "Too early to say whether remote reads pay"),
        ([AUTO], [cell("ok")], "ok", "Remote reads pay off"),
        ([AUTO], [cell("departed")], "departed", "Reads from a/b still pay, but TTFT has departed from its best"),
        ([AUTO], [cell("harmful")], "harmful", "Reads from a/b cost more than recomputing"),
        ([AUTO._replace(state="bypass")], [cell("harmful")], "guarded", "The guard has stopped reads from a/b"),
        ([AUTO._replace(state="half-open")], [cell("ok")], "guarded", "The guard has stopped reads from a/b"),
        ([AUTO._replace(state="limited")], [cell("ok")], "ok", "Remote reads pay off"),
    ],
)
def test_state_and_title(rows, cells, state, title):
    assert headline(rows, cells, 7)[:2] == (state, title)


def test_the_worst_backend_is_named_and_the_better_ones_counted():
    told = headline(
        [AUTO, Row("c/d", "auto", "open", silent=False)],
        [
            cell("ok"),
            cell("harmful", "c/d", "RTT 4 ms is over break-even 2.5 ms"),
            cell("harmful", class_="1k-2k/c0-4"),
        ],
        7,
    )
    assert told.title == "Reads from c/d cost more than recomputing"
    assert told.why == "RTT 4 ms is over break-even 2.5 ms. 1 other backend is better."


def test_what_the_guard_stopped_is_told_with_where_and_why():
    rows = [
        AUTO._replace(state="bypass", reason="stalled"), AUTO, Row("c/d", "auto", "bypass", silent=False, reason="new"),
    ]  # fmt: skip
    told = headline(rows, [cell("harmful", reason="RTT is high")], 7)
    assert told.title == "The guard has stopped reads from a/b on 1 of 2 engines"
    assert told.why == (
        "A read under way is far older than it should be. Requests are recomputed; the guard tries again by itself."
        " 1 other backend is stopped too. RTT is high."
    )


def test_what_observe_would_have_stopped_is_not_stopped():
    told = headline([AUTO._replace(mode="observe", state="bypass")], [cell("harmful")], 7)
    assert told.state == "harmful"
    assert told.why.endswith("The mode is observe: nothing is throttled.")


def test_a_mode_that_forbids_throttling_is_named():
    assert "The mode is on: nothing is throttled." in headline([AUTO._replace(mode="on")], [cell("harmful")], 7).why


def test_who_is_off_on_purpose_is_told_why():
    told = headline([Row("a/b", "off", "bypass", silent=False, reason="INC-7")], [], 7)
    assert told.why.endswith("Reason given: INC-7")


def test_too_early_says_how_much_was_seen():
    assert headline([AUTO], [], 1).why.startswith("1 request seen.")
    assert headline([AUTO], [cell("insufficient-data", reason="RTT did not vary")], 9).why == (
        "9 requests seen: RTT did not vary."
    )
