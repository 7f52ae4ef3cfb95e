"""`[[probes]]`: from the file or the environment, checked before the service starts."""

from pathlib import Path

import pytest

from guard.errors import ConfigError
from guard.probe.config import targets
from guard.settings import load

TWO = """
[[probes]]
target = "10.0.0.5:6379"
prober = "resp"
backend = "lmcache-mp/resp"

[[probes]]
target = "10.0.0.5:6379"
prober = "tcpinfo"
netns = "vllm"
"""


def write(path: Path, text: str) -> Path:
    file = path / "kvguard.toml"
    file.write_text(text)
    return file


def test_tables_and_defaults(tmp_path):
    settings = load({}, write(tmp_path, TWO)).settings
    resp, info = targets(settings.probes, settings.probe_packets_per_second)
    assert (resp.key, resp.backend, resp.interval, resp.count) == (("resp", "10.0.0.5:6379"), "lmcache-mp/resp", 1.0, 4)
    assert (info.interval, dict(info.options)) == (5.0, {"netns": "vllm"})


def test_the_environment_holds_json(monkeypatch, tmp_path):
    monkeypatch.setenv("KVGUARD_SERVE_PROBES", '[{"target": "h:1", "prober": "tcp", "interval_seconds": 2}]')
    loaded = load({}, write(tmp_path, TWO))
    assert [probe.target for probe in loaded.settings.probes] == ["h:1"]
    assert loaded.sources["probes"] == "environment"
    monkeypatch.setenv("KVGUARD_SERVE_PROBES", "[{")
    with pytest.raises(ConfigError, match=r"probes: not JSON .*KVGUARD_SERVE_PROBES"):
        load()


def test_default_count_keeps_within_the_packets(tmp_path):
    settings = load({}, write(tmp_path, '[[probes]]\ntarget = "h:1"\nprober = "tcp"\n')).settings
    [target] = targets(settings.probes, settings.probe_packets_per_second)
    assert target.count == 2  # of seven packets each


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        ('prober = "resp"', "probes[0].target", "required"),
        ('target = "h:1"\nprober = "icmp"', "probes[0].prober", "not one of rdma, resp, http, tcp, path, tcpinfo"),
        ('target = "h:1"\nprober = "resp"\npasswrd = "x"', "probes[0].passwrd", "unknown key for prober resp"),
        ('target = "h:1"\nprober = "resp"\npassword_file = "/no"', "probes[0].password_file", "No such file"),
        ('target = "h"\nprober = "tcp"', "probes[0].target", "not an address"),
        ('target = "x/y"\nprober = "path"', "probes[0].target", "not an absolute path"),
        ('target = "h:1"\nprober = "tcp"\nmode = "udp"', "probes[0].mode", "not connect or echo"),
        ('target = "h:1"\nprober = "resp"\ncount = 50', "probes[0].count", "at most 5"),
        ('target = "h:1"\nprober = "resp"\ninterval_seconds = 0.05', "probes[0].interval_seconds", "allows"),
        ('target = "h:1"\nprober = "resp"\ninterval_seconds = -1', "probes[0].interval_seconds", "greater"),
        ('target = "h:1"\nprober = "resp"\ncount = "many"', "probes[0].count", "integer"),
        ('target = "h:1"\nprober = "resp"\nbackend = "a\\nb"', "probes[0].backend", "pattern"),
        ('target = "h:1"\nprober = "resp"\n[probes.x]\ny = 1', "probes[0].x", "unknown key"),
        ('target = "redis://u:pw@h"\nprober = "resp"', "probes[0].target", "holds a password"),
    ],
)
def test_errors_name_table_and_key(tmp_path, table, key, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load({}, write(tmp_path, f"[[probes]]\n{table}\n"))
    assert caught.value.key == key


def test_the_same_target_twice(tmp_path):
    table = '[[probes]]\ntarget = "h:1"\nprober = "resp"\n'
    with pytest.raises(ConfigError, match=r"probes\[1\].target: h:1 is there already"):
        load({}, write(tmp_path, table + table))


def test_more_than_the_limit(tmp_path):
    text = "".join(f'[[probes]]\ntarget = "h{index}:1"\nprober = "resp"\n' for index in range(257))
    with pytest.raises(ConfigError, match="257 targets; at most 256"):
        load({}, write(tmp_path, text))
