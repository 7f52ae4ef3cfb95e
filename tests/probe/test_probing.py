"""Probes in the service: rows, metrics, health, events, and the RTT of joined requests."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from guard.errors import ConfigError
from guard.metrics import Telemetry
from guard.probe.prober import Sample
from guard.service.probing import Probing
from guard.settings import load
from guard.wire import Event, FetchRecord
from tests.probe.servers import Server
from tests.service.conftest import clean_env
from tests.service.conftest import serve as _serve

serve = _serve
BACKEND = "lmcache-mp/resp"


def probing(tmp_path: Path, text: str, wall: list[float], events: list[Event]) -> tuple[Probing, Telemetry]:
    file = tmp_path / "kvguard.toml"
    file.write_text(text)
    telemetry = Telemetry(lambda: wall[0])
    return Probing(load({}, file).settings, lambda: wall[0], telemetry, events.append), telemetry


def sample(rtt: float) -> Sample:
    return Sample(rtts=(rtt, 1.1 * rtt, 1.2 * rtt, 2 * rtt), sent=4)


TABLE = f'[[probes]]\ntarget = "10.0.0.5:6379"\nprober = "resp"\nbackend = "{BACKEND}"\n'


def fetch(**more: Any) -> FetchRecord:
    return FetchRecord(span_id="f", attempt=1, start_ns=0, seconds=0.1, outcome="ok", **more)


class Row:
    """What `stamp` looks at of a request."""

    def __init__(self, arrival: float, backend: str = BACKEND, fetches: tuple[FetchRecord, ...] = ()) -> None:
        self.arrival_ns = int(arrival * 1e9)
        self.backend = backend
        self.fetches = list(fetches)
        self.rtt: float | None = None
        self.rtt_source = ""


def test_requests_get_the_idle_rtt_of_their_time_and_the_fetch_wins(tmp_path):
    wall = [1000.0]
    probes, _ = probing(tmp_path, TABLE, wall, [])
    for second in range(1000, 1020):
        probes.take(probes.targets[0], float(second), sample(1e-3 if second < 1010 else 4e-3))
    before, after, told = Row(1005.4), Row(1017.4), Row(1005.4, fetches=(fetch(network_rtt=7e-4),))
    other, late = Row(1005.4, backend="nixl/x"), Row(1005.4)
    by_address = Row(1005.4, backend="nixl/x", fetches=(fetch(server="10.0.0.5:6379"),))
    for row in (before, after, told, other, late, by_address):
        probes.stamp(row)  # type: ignore[arg-type]
    assert [(row.rtt, row.rtt_source) for row in (before, after, told, other, by_address)] == [
        (1e-3, "resp"), (4e-3, "resp"), (7e-4, "fetch"), (None, ""), (1e-3, "resp"),
    ]  # fmt: skip
    late.fetches.append(fetch(network_rtt=6e-4))  # its span came after the request was joined
    probes.stamp(late)  # type: ignore[arg-type]
    assert (late.rtt, late.rtt_source) == (6e-4, "fetch")


def test_a_step_becomes_one_event_with_its_evidence(tmp_path):
    wall, events = [1000.0], list[Event]()
    probes, _ = probing(tmp_path, TABLE, wall, events)
    for second in range(60):
        probes.take(probes.targets[0], 1000.0 + second, sample(1e-4 if second < 30 else 3e-4))
    [event] = events
    assert (event.kind, event.scope) == ("rtt", f"backend:{BACKEND}")
    assert 1030.0 <= event.at <= 1034.0
    assert event.message == "idle RTT to 10.0.0.5:6379 went from 100 us to 300 us (3x)"
    assert event.evidence["before_seconds"] == pytest.approx(1e-4, rel=0.01)
    assert event.evidence["source"] == "measured"


def test_rows_metrics_and_problem(tmp_path):
    wall = [1000.0]
    probes, telemetry = probing(tmp_path, TABLE, wall, [])
    assert probes.problem == "1 of 1 targets; resp 10.0.0.5:6379: not probed yet"
    for second in range(10):
        probes.take(probes.targets[0], 1000.0 + second, sample(1e-3))
    probes.take(probes.targets[0], 1010.0, Sample(sent=1, problem="probe: no answer in time"))
    wall[0] = 1010.5
    assert probes.problem == "1 of 1 targets; resp 10.0.0.5:6379: probe: no answer in time"
    [row] = probes.rows()
    assert (row["target"], row["prober"], row["backend"], row["source"]) == (
        "10.0.0.5:6379", "resp", BACKEND, "measured",
    )  # fmt: skip
    assert (row["idle_seconds"], row["rtt_seconds"]["n"], row["rtt_seconds"]["p50"]) == (
        1e-3,
        40,
        pytest.approx(1.15e-3),
    )
    assert row["rtt_seconds"]["p50_low"] <= row["rtt_seconds"]["p50"] <= row["rtt_seconds"]["p50_high"]
    assert row["loss_ratio"] == pytest.approx(1 / 41)
    assert row["crossing"] == {"level_seconds": pytest.approx(1e-3), "last": None}
    assert [(list(labels), value) for _, labels, value in probes.gauges()] == [(["resp", "10.0.0.5:6379"], 1e-3)]
    text = telemetry.render(openmetrics=False).decode()
    labels = 'prober="resp",target="10.0.0.5:6379"'
    assert f"kvguard_rtt_seconds_count{{{labels}}} 40" in text
    for outcome, count in (("ok", 40), ("failed", 1)):
        assert f'kvguard_probes_total{{{labels},outcome="{outcome}"}} {count}' in text
    probes.take(probes.targets[0], 1011.0, sample(1e-3))
    assert probes.problem == ""


def test_the_controller_learns_whether_a_backend_answers(tmp_path):
    wall = [1000.0]
    probes, _ = probing(tmp_path, TABLE, wall, [])
    assert probes.link(BACKEND) == (None, None)
    probes.take(probes.targets[0], 1000.0, sample(1e-3))
    assert probes.link(BACKEND) == (1e-3, True)
    assert probes.link("nixl/x") == (None, None)
    for second in range(1, 30):
        probes.take(probes.targets[0], 1000.0 + second, Sample(sent=1, problem="probe: no answer in time"))
    wall[0] = 1029.5
    assert probes.link(BACKEND) == (None, False)


def test_without_probes_there_is_nothing(tmp_path):
    probes, _ = probing(tmp_path, "", [1000.0], [])
    assert (probes.targets, probes.rows(), probes.problem, list(probes.gauges())) == ([], [], "", [])
    row = Row(1000.0)
    probes.stamp(row)  # type: ignore[arg-type]
    assert row.rtt is None


def test_a_bad_target_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"probes\[0\].target"):
        probing(tmp_path, '[[probes]]\ntarget = "x"\nprober = "resp"\n', [0.0], [])


def test_a_service_probes_and_shows_it(tmp_path, serve):
    with Server(lambda data: b"+PONG\r\n" * data.count(b"PING")) as server:
        tables = [{"target": f"127.0.0.1:{server.port}", "prober": "resp", "backend": BACKEND, "interval_seconds": 0.2,
                   "count": 1}]  # fmt: skip
        served = serve(KVGUARD_SERVE_PROBES=json.dumps(tables))
        with httpx2.Client(base_url=served.url, timeout=30) as client:
            for _ in range(600):
                [row] = client.get("/v1/probes").json()["probes"]
                if row["rtt_seconds"]["n"] >= 10:
                    break
                time.sleep(0.05)  # another process measures
            assert row["rtt_seconds"]["n"] >= 10
            assert row["problem"] == ""
            assert 0 < row["idle_seconds"] <= row["rtt_seconds"]["p50"] < 1
            assert row["crossing"]["level_seconds"] > 0
            assert "[+]probes ok\n" in client.get("/readyz?verbose").text
            assert "kvguard_rtt_idle_seconds{" in client.get("/metrics").text
            assert client.post("/v1/probes", json={"target": "10.0.0.1:1"}).status_code == 405
            assert client.get("/v1/probes?target=10.0.0.1:1").json()["probes"][0]["target"] == row["target"]
            server.__exit__()
            for _ in range(600):
                text = client.get("/readyz?verbose")
                if "degraded" in text.text:
                    break
                time.sleep(0.05)
            assert text.status_code == 200
            assert "[!]probes degraded: 1 of 1 targets; resp 127.0.0.1" in text.text
        assert served.stop() == 0


def test_a_service_with_a_bad_target_does_not_start(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "guard.cli", "serve", "--port", "0", "--state-dir", str(tmp_path)],
        env=clean_env(KVGUARD_SERVE_PROBES='[{"target": "store", "prober": "resp"}]'),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "probes[0].target" in done.stderr
