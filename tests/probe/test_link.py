"""Probers over the lab's injector in network namespaces of their own, against real Redis.

Skipped where namespaces, Redis or gcc are missing; CI has them and fails instead.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quiet

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory, needs: Any) -> dict[str, Any]:
    problem = "" if Path("/dev/net/tun").exists() else "no /dev/net/tun"
    needs("redis-server", "gcc", "ip", "ss", "unshare", "nsenter", root=True, problem=problem)
    directory = tmp_path_factory.mktemp("link")
    tundelay = directory / "tundelay"
    subprocess.run(
        ["gcc", "-O2", "-std=gnu11", "-pthread", "-o", tundelay, ROOT / "lab/injector/tundelay.c"], check=True
    )
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, "-m", "tests.probe.link",
         "measure", directory, tundelay],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    (directory / "link.json").write_text(json.dumps(found, indent=1))
    return found


def least(link: dict[str, Any], name: str) -> dict[int, float]:
    """Delay and least RTT, us."""
    return {int(delay): row["min"] for delay, row in link["follow"][name].items()}


@pytest.mark.parametrize("prober", ["resp", "resp-ipv6", "tcp", "echo", "http"])
def test_probers_follow_an_injected_delay_within_10_percent_or_30_us(link, prober):
    seen = least(link, prober)
    wire = least(link, "witness-connect" if prober == "tcp" else "witness")  # what the injector really does
    # The same figure as a plain program's on that link. Not its growth over a bare link: there the program that asks
    # in a tight loop never sleeps, and what waking up costs a prober (40 us) is hidden by the first real delay.
    for delay in sorted(seen)[1:]:
        assert abs(seen[delay] - wire[delay]) <= max(30.0, 0.1 * delay), (prober, seen, wire)
    assert seen[0] < seen[200] < seen[1000]


def test_the_injector_delays_as_it_was_told(link):
    wire = least(link, "kernel")
    for delay, rtt in wire.items():
        assert delay <= rtt - wire[0] + 30.0 <= delay + max(300.0, 0.15 * delay), wire


def test_tcpinfo_sees_what_ss_sees_on_the_same_connection(link):
    for row in link["tcpinfo"]["rows"]:
        assert row["port"] == link["tcpinfo"]["port"]
        assert row["rtt"] == pytest.approx(row["ss"]["rtt"], abs=1.0)
        assert row["min_rtt"] == pytest.approx(row["ss"]["min_rtt"], abs=1.0)
        assert row["retransmits"] == row["ss"]["retransmits"]
        assert row["sample"] == [pytest.approx(row["rtt"])]  # the prober's own connection is not among them
        assert row["facts"]["connections"] == 1.0
        assert row["facts"]["delivery_rate_bytes_per_second"] > 0


def test_tcpinfo_follows_the_delay_of_the_namespace(link):
    seen: dict[int, float] = {}
    for row in link["tcpinfo"]["rows"]:
        seen[row["delay"]] = min(row["rtt"], seen.get(row["delay"], row["rtt"]))
    wire = least(link, "kernel")
    for delay, rtt in seen.items():  # smoothed, so not as sharp as a probe
        assert abs((rtt - seen[0]) - (wire[delay] - wire[0])) <= max(100.0, 0.1 * delay), (seen, wire)


def test_a_silent_connection_says_nothing_and_is_no_loss(link):
    rtts, sent, problem = link["tcpinfo"]["silent"]
    assert (rtts, sent) == ([], 0)
    assert "silent since the last look" in problem


def test_tcpinfo_looks_into_another_namespace(link):
    found = link["netns"]
    assert found["ports"] == [found["port"]]
    assert found["stayed"]
    assert "No such file" in found["missing"]


def test_a_step_is_told_within_5_s_at_default_settings(link):
    step = link["step"]
    assert (step["interval"], step["count"]) == (1.0, 4)
    assert step["rounds"] <= 5  # the one under way when the step came may be the first
    if step["longest_gap"] < 1.3:  # else the machine stood still and the clock says nothing
        assert step["seconds"] <= 5.0
    assert step["after"] - step["before"] == pytest.approx(1e-3, rel=0.15)


def test_a_dead_wire_is_loss_and_heals(link):
    lost = link["lost"]
    assert (lost["before"], lost["during"], lost["after"]) == (4, 0, 4)
    assert lost["problem"] == "probe: no answer in time"
