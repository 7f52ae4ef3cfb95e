"""`kvguard inflection` and `kvguard advise` on what the API answers."""

import json
from dataclasses import replace

import pytest

from guard.cli import advise, inflection
from guard.estimate.shapes import Cell, FetchModel, Figure, LookupModel, PrefillModel, Verdict
from guard.service.routes.inflection import cell_json

MS = 1e-3
CELL = Cell(
    model="m", backend="lmcache-mp/resp", class_="all", n=900, rtt_floor=0.2 * MS, rtt_now=MS, rtt_low=0.2 * MS,
    rtt_high=20 * MS, reference_tokens=4000.0, reference_matched=3840.0, bytes_per_token=2048.0,
    fetch=FetchModel(t0=0.08, kappa=62.0, n=600), lookup=LookupModel(t0=0.002, n=900),
    prefill=PrefillModel(a=0.01, b=1e-4, n=900), departure=Figure(value=0.5 * MS, low=0.4 * MS, high=0.6 * MS, n=600),
    break_even=Figure(value=4.7 * MS, low=4.4 * MS, high=5.1 * MS, n=600),
    knee=Figure(value=None, reason="no-knee: a straight line fits as well (p = 0.4)"),
    net_cost=Figure(value=-0.2, low=-0.25, high=-0.15, n=600),
    verdict=Verdict(state="departed", cause="rtt", shape="no-knee", reason="RTT 1 ms is above the departure point"),
)  # fmt: skip


class Answers:
    """Stands for the client: answers with these cells."""

    def __init__(self, *cells):
        self.cells = [cell_json(cell) for cell in cells]

    def get(self, path, params=None):
        assert path == "/v1/inflection"
        return {"cells": json.loads(json.dumps(self.cells))}


def inflection_of(*cells, **more):
    given = {"model": None, "backend": None, "class_": None, "everything": False, "as_json": False}
    inflection.show(Answers(*cells), **(given | more))


def advice_of(*cells, **more):
    given = {
        "model": None,
        "backend": None,
        "rtt": None,
        "prompt": None,
        "concurrency": None,
        "sla": None,
        "as_json": True,
    }
    advise.show(Answers(*cells), **(given | more))


def test_points_come_with_intervals_and_the_verdict_in_words(capsys):
    inflection_of(CELL)
    text = capsys.readouterr().out
    assert "4.70 ms [4.40 ms to 5.10 ms]" in text
    assert "RTT 1 ms is above the departure point" in text


def test_priors_are_labelled_and_thin_classes_hidden_unless_asked_for(capsys):
    thin = replace(CELL, class_="1k-2k/c0-4", pooled=True)
    inflection_of(replace(CELL, break_even=Figure(value=0.5 * MS, source="prior")), thin)
    text = capsys.readouterr().out
    assert "500 us (prior)" in text
    assert "1k-2k" not in text
    inflection_of(CELL, thin, everything=True)
    assert "1k-2k/c0-4 (pool)" in capsys.readouterr().out


def test_nothing_yet_is_said(capsys):
    inflection_of()
    assert "nothing was estimated yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rtt", "advice"), [(None, "remote"), (MS, "remote"), (8 * MS, "local"), (4.6 * MS, "measure")]
)
def test_advice_follows_the_measured_break_even(capsys, rtt, advice):
    advice_of(CELL, rtt=rtt)
    (told,) = json.loads(capsys.readouterr().out)["advice"]
    assert told["advice"] == advice


def test_advice_for_a_bound_projects_ttft(capsys):
    """0.082 + 62 * 1 ms + 0.01 + 160 * 0.1 ms = 0.17 s."""
    advice_of(CELL, rtt=MS, sla=0.16)
    (told,) = json.loads(capsys.readouterr().out)["advice"]
    assert told["advice"] == "local"
    assert "170 ms" in told["rules"][0]["text"]
    advice_of(CELL, rtt=MS, sla=0.2, as_json=False)
    assert "remote" in capsys.readouterr().out
