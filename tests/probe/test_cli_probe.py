"""`kvguard probe TARGET`."""

import json

import pytest
from typer.testing import CliRunner

from guard.cli.app import app
from guard.cli.probe import guess, histogram
from tests.probe.servers import Server, free_port


def run(*words: str):
    return CliRunner().invoke(app, ["probe", *words])


def pong(data: bytes) -> bytes:
    return b"+PONG\r\n" * data.count(b"PING")


def test_json_for_machines():
    with Server(pong) as server:
        done = run(f"redis://127.0.0.1:{server.port}", "--count", "8", "--interval", "0", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["prober"], data["source"], data["sent"], data["loss_ratio"]) == ("resp", "measured", 8, 0.0)
    assert 0 < data["rtt_seconds"]["min"] <= data["rtt_seconds"]["p50"] <= data["rtt_seconds"]["p99"] < 5


def test_a_table_and_a_histogram_for_people():
    with Server(pong) as server:
        done = run(f"127.0.0.1:{server.port}", "--prober", "resp", "--count", "30", "--interval", "0")
    assert done.exit_code == 0, done.output
    assert "30 of 30 rounds" in done.stdout
    assert "█" in done.stdout
    assert "measured" in done.stdout


def test_nothing_measured_is_status_1_and_says_why():
    done = run(f"127.0.0.1:{free_port()}", "--count", "1", "--json")
    assert done.exit_code == 1
    assert "Connection refused" in done.stderr
    assert json.loads(done.stdout)["loss_ratio"] == 1.0


def test_what_was_seen_is_shown_before_the_failure_on_a_line_of_its_own():
    done = run(f"127.0.0.1:{free_port()}", "--count", "1")
    assert done.exit_code == 1
    assert done.stdout.endswith("last failure: connect: Connection refused\n")
    assert done.stdout.count("1 of 1 rounds") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ftp://h:1",), "'ftp' is not one of"),
        (("h:1", "--prober", "resp", "-o", "passwrd=x"), "unknown key for prober resp"),
        (("h:1", "-o", "mode"), "not KEY=VALUE"),
    ],
)
def test_wrong_use_is_status_2(words, message):
    done = run(*words)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("target", "prober"),
    [("redis://h", "resp"), ("rediss://h", "resp"), ("http://h", "http"), ("https://h", "http"), ("/mnt/x", "path"),
     ("rdma://h", "rdma"), ("h:6379", "resp"), ("h:22", "tcp"), ("[::1]:22", "tcp")],
)  # fmt: skip
def test_guess(target, prober):
    assert guess(target) == prober


def test_histogram_counts_everything_once():
    bins = histogram([1e-4, 1.1e-4, 2e-4, 9e-4, 1e-3])
    assert sum(count for _, _, count in bins) == 5
    assert (bins[0][0], bins[-1][1], bins[-1][2]) == (1e-4, 1e-3, 2)
    assert histogram([1e-3, 1e-3]) == [(1e-3, 1e-3, 2)]
