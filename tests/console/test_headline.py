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
        ([AUTO._replace(state="bypass")], [cell("harmful")], "guarded", "Reads from a/b would hurt, and are stopped"),
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


def test_one_engine_that_still_reads_is_not_guarded():
    rows = [AUTO._replace(state="bypass"), AUTO]
    assert headline(rows, [cell("harmful")], 7).state == "harmful"


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
