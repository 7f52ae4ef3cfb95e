"""Every check of the doctor: what it finds, and what it lets pass."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar

import pytest

from guard import __version__
from guard.cli.doctor import commandline, environment, examine, installed, process, reach
from guard.cli.doctor.findings import Level
from guard.cli.doctor.installed import ENTRY_POINT, Facts

GOOD = '{"kv_connector": "LMCacheMPConnector", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"kvguard.store": "resp"}}'  # noqa: E501
THERE = Facts(
    executable="/v/bin/python", versions={"vllm": "0.32.0+cpu", "kvguard": __version__, "lmcache": "0.5.6"},
    entry_points=[["kvguard", ENTRY_POINT]], guards=[("/v/guard", True)],
)  # fmt: skip
ON = {"KVGUARD_ENDPOINT": "http://127.0.0.1:8420"}


def bad(findings, level=Level.PROBLEM):
    return {finding.check: finding.message for finding in findings if finding.level is level}


def line(config, *more):
    command = ["vllm", "serve", "m", *more, *(["--kv-transfer-config", config] if config else [])]
    return commandline.check(command, commandline.transfer_config(command), THERE)


class TestInstalled:
    def test_all_is_well(self):
        assert bad(installed.check(THERE)) == {}
        assert bad(installed.check(THERE), Level.WARNING) == {}

    @pytest.mark.parametrize(
        ("change", "check", "words"),
        [
            ({"versions": {"vllm": "0.25.1", "kvguard": __version__}}, "vllm", "older than 0.26"),
            ({"versions": {"vllm": "0.32.0"}, "guards": []}, "kvguard", "not installed"),
            ({"entry_points": []}, "entry point", "does not see its entry point"),
            ({"entry_points": [["kvguard", ENTRY_POINT]] * 2}, "entry point", "there are others"),
            ({"versions": {**THERE.versions, "guard": "1.1"}}, "package guard", "old PyPI package guard 1.1"),
            ({"guards": [("/x/guard", False), ("/v/guard", True)]}, "package guard", "/x/guard comes first"),
        ],
    )
    def test_problems(self, change, check, words):
        fields = {name: getattr(THERE, name) for name in ("executable", "versions", "entry_points", "guards")}
        found = bad(installed.check(Facts(**{**fields, **change})))
        assert list(found) == [check]
        assert words in found[check]

    def test_another_version_of_kvguard_is_a_warning(self):
        facts = Facts(**{name: getattr(THERE, name) for name in ("executable", "entry_points", "guards")},
                      versions={**THERE.versions, "kvguard": "0.0.9"})  # fmt: skip
        assert "0.0.9 there" in bad(installed.check(facts), Level.WARNING)["kvguard"]

    def test_another_interpreter_is_asked(self, tmp_path):
        package = tmp_path / "guard"
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('imported')\n")
        info = tmp_path / "vllm-0.31.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
        wrapper = tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        facts = installed.facts_of(str(wrapper))
        assert (facts.vllm, facts.guards[0]) == ("0.31.0", (str(package), False))
        assert "comes first" in bad(installed.check(facts))["package guard"]

    @pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
    def test_an_interpreter_that_cannot_be_asked(self, python):
        assert "cannot be asked" in bad(installed.check(installed.facts_of(python)))["python"]


class TestEnvironment:
    def test_all_is_well(self):
        assert bad(environment.check({**ON, "VLLM_PLUGINS": "lora, kvguard"}, explicit=False)) == {}

    @pytest.mark.parametrize(
        ("env", "check", "words"),
        [
            ({}, "hook", "KVGUARD_ENDPOINT is not set"),
            ({**ON, "KVGUARD_HOOK": "off"}, "hook", "KVGUARD_HOOK=off"),
            ({"KVGUARD_ENDPOINT": "nowhere:1"}, "hook", "no usable endpoint"),
            ({**ON, "VLLM_PLUGINS": "lora"}, "VLLM_PLUGINS", "'lora' drops kvguard"),
            ({**ON, "VLLM_PLUGINS": ""}, "VLLM_PLUGINS", "'' drops kvguard"),
        ],
    )
    def test_problems(self, env, check, words):
        assert words in bad(environment.check(env, explicit=False))[check]

    def test_what_the_hook_would_complain_about_is_a_warning(self, tmp_path):
        env = {**ON, "KVGUARD_RING": "many", "KVGUARD_TOKEN_FILE": str(tmp_path / "none")}
        messages = [one.message for one in environment.check(env, explicit=False) if one.level is Level.WARNING]
        assert len(messages) == 2
        assert messages[0].startswith("KVGUARD_TOKEN_FILE cannot be read")
        assert messages[1].startswith("KVGUARD_RING is not a whole number")

    def test_an_explicit_guard_needs_no_plugin(self):
        assert bad(environment.check({**ON, "VLLM_PLUGINS": "lora"}, explicit=True)) == {}

    def test_spans_to_kvguard_must_come_as_http(self):
        url = "http://127.0.0.1:8420/v1/traces"
        assert "which it does not speak" in bad(environment.check_tracing(ON, url))["tracing"]
        http_too = {**ON, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        assert bad(environment.check_tracing(http_too, url)) == {}
        assert bad(environment.check_tracing(ON, "http://collector:4317")) == {}

    def test_a_trace_parent_without_traces(self):
        env = {**ON, "KVGUARD_TRACE_PARENT": "on"}
        assert "drops the caller's headers" in bad(environment.check_tracing(env, None), Level.WARNING)["tracing"]
        assert list(environment.check_tracing(ON, None)) == []

    def test_rdma_devices_without_pyverbs(self, tmp_path):
        assert list(environment.check_rdma(tmp_path / "none")) == []
        (tmp_path / "mlx5_0").mkdir()
        found = list(environment.check_rdma(tmp_path))
        assert "mlx5_0" in found[0].message  # a warning or ok, by whether this machine has pyverbs


class TestCommandLine:
    def test_all_is_well(self):
        found = list(line(GOOD))
        assert [finding.level for finding in found] == [Level.OK, Level.OK]
        assert "skip saves lookup, prefetch from the store, load" in found[0].message

    @pytest.mark.parametrize(
        ("config", "check", "words"),
        [
            ("", "connector", "no --kv-transfer-config"),
            ("{", "connector", "is not JSON"),
            ("[]", "connector", "not a JSON object"),
            ('{"kv_connector": "MultiConnector"}', "connector", "has no children"),
            ('{"kv_connector": "ExampleConnector"}', "load failures", "not set (so: fail)"),
            ('{"kv_connector": "ExampleConnector", "kv_load_failure_policy": "fail"}', "load failures", "is fail"),
            ('{"kv_connector": "Guarded_ExampleConnector", "kv_load_failure_policy": "recompute"}', "connector",
             "kv_connector_module_path"),
        ],
    )  # fmt: skip
    def test_problems(self, config, check, words):
        found = bad(line(config))
        assert list(found) == [check]
        assert words in found[check]

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ('{"kv_connector": "NixlConnector"}', "hands KV from prefill to decode"),
            ('{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_producer"}', "hands KV from prefill to decode"),
            ('{"kv_connector": "NewConnector"}', "is not known"),
            ('{"kv_connector": "MooncakeStoreConnector"}', "was read from source only"),
        ],
    )
    def test_warnings(self, config, words):
        assert words in bad(line(config), Level.WARNING)["connector"]

    def test_children_of_a_multi_connector_are_looked_at(self):
        children = [{"kv_connector": "LMCacheMPConnector"}, {"kv_connector": "OffloadingConnector"}]
        config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
        messages = [one.message for one in line(json.dumps(config)) if one.check == "connector"]
        assert any(message.startswith("LMCacheMPConnector: skip") for message in messages)
        assert any(message.startswith("OffloadingConnector: no skip") for message in messages)

    def test_the_dotted_and_the_equals_form(self):
        command = ["vllm", "serve", "m", "--kv-transfer-config.kv_connector=ExampleConnector",
                   "--kv_transfer_config.kv_load_failure_policy", "recompute",
                   "--kv-transfer-config.kv_connector_extra_config.a", "1"]  # fmt: skip
        assert commandline.transfer_config(command).config == {
            "kv_connector": "ExampleConnector", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"a": 1},
        }  # fmt: skip
        assert commandline.option(["--otlp-traces-endpoint=x"], "otlp-traces-endpoint") == "x"

    def test_lmcache_that_is_not_installed(self):
        command = ["--kv-transfer-config", GOOD]
        facts = Facts(versions={"vllm": "0.32.0"})
        assert (
            "needs LMCache" in bad(commandline.check(command, commandline.transfer_config(command), facts))["lmcache"]
        )


class Answers(http.server.BaseHTTPRequestHandler):
    """Plays the service or vLLM: `pages` by path, `age` seconds behind."""

    pages: ClassVar[dict[str, tuple[int, str]]] = {}
    age = 0.0

    def do_GET(self):
        status, text = self.pages.get(self.path, (404, ""))
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time() - self.age, usegmt=True))
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/")
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_):
        pass


ROW = {"engine_id": "gpu7:8000/0", "instance": "gpu7:8000", "backend": "a/b", "mode": "auto",
       "last_poll_age_seconds": 0.4, "silent": False}  # fmt: skip
SERVICE = {
    "/livez": (200, "ok\n"), "/readyz?verbose": (200, "[+]loop ok\nok\n"), "/v1/traces": (200, "{}"),
    "/openapi.json": (200, json.dumps({"info": {"version": __version__}})),
    "/v1/offload": (200, json.dumps({"engines": [ROW]})),
}  # fmt: skip


@pytest.fixture
def play() -> Iterator:
    running = []

    def start(pages, age=0.0):
        handler = type("Handler", (Answers,), {"pages": pages, "age": age})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join(5)


class TestReach:
    def test_all_is_well(self, play):
        found = list(reach.check_service(reach.Reach(play(SERVICE))))
        assert [one.level for one in found] == [Level.OK] * 4, found

    @pytest.mark.parametrize(
        ("change", "check", "words"),
        [
            ({"/livez": (503, "failed")}, "service", "it answered 503"),
            ({"/livez": (302, "")}, "service", "it answered 302"),
            ({"/openapi.json": (200, "<html>")}, "service", "does not answer like kvguard"),
            ({"/v1/traces": (401, '{"detail": "send a token"}')}, "token", "send a token"),
            ({"/v1/traces": (403, '{"detail": "lacks the scope"}')}, "token", "lacks the scope"),
            (
                {"/v1/traces": (403, '{"detail": "is not us", "type": "urn:kvguard:problem:unknown-host"}')},
                "name",
                "not us",
            ),
        ],
    )
    def test_problems(self, play, change, check, words):
        found = bad(reach.check_service(reach.Reach(play(SERVICE | change))))
        assert words in found[check]

    def test_nobody_there_and_no_url(self):
        found = [*reach.check_service(reach.Reach("http://127.0.0.1:9, nowhere"))]
        assert [one.level for one in found] == [Level.PROBLEM] * 2
        assert ("refused" in found[0].message, "is not a URL" in found[1].message) == (True, True)

    def test_clocks_apart(self, play):
        assert "behind this one's" in bad(reach.check_service(reach.Reach(play(SERVICE, 60.0))), Level.WARNING)["clock"]
        assert (
            "ahead of this one's" in bad(reach.check_service(reach.Reach(play(SERVICE, -60))), Level.WARNING)["clock"]
        )

    def test_a_degraded_service_is_a_warning(self, play):
        pages = SERVICE | {"/readyz?verbose": (200, "[!]ledger degraded: disk full\nok\n")}
        assert "disk full" in bad(reach.check_service(reach.Reach(play(pages))), Level.WARNING)["service"]

    def test_an_engine_in_touch(self, play):
        engine = play({"/version": (200, '{"version": "0.32.0"}'), "/metrics": (200, "vllm:external_prefix_cache 1")})
        place = engine.removeprefix("http://")
        row = ROW | {"engine_id": f"{place}/0", "instance": place}
        service = reach.Reach(play(SERVICE | {"/v1/offload": (200, json.dumps({"engines": [row]}))}))
        found = list(reach.check_engine(engine, service))
        assert [one.level for one in found] == [Level.OK, Level.OK]
        assert "mode auto, last poll 0.4 s ago" in found[1].message
        silent = row | {"silent": True}
        service = reach.Reach(play(SERVICE | {"/v1/offload": (200, json.dumps({"engines": [silent]}))}))
        assert "silent" in bad(reach.check_engine(engine, service))["hook"]

    def test_an_engine_without_a_hook(self, play):
        engine = play({"/version": (200, '{"version": "0.32.0"}'), "/metrics": (200, "vllm:num_requests 1")})
        found = list(reach.check_engine(engine, reach.Reach(play(SERVICE))))
        assert "it knows 1 others" in bad(found)["hook"]
        assert any("no external prefix cache" in one.message for one in found)

    def test_no_engine_there(self):
        assert "cannot be asked" in bad(reach.check_engine("127.0.0.1:9", reach.Reach("")))["engine"]


def test_a_running_process_is_read(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], **ON, "VLLM_PLUGINS": "lora"}
    command = [sys.executable, "-c", "print(flush=True); input()", "--kv-transfer-config", GOOD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as running:
        assert running.stdout is not None
        running.stdout.readline()  # until then the kernel may still be loading it
        seen, variables, python = process(running.pid)
        running.communicate(b"\n", timeout=30)
    assert (seen, python) == (command, sys.executable)
    assert variables == env
    found = bad(examine(seen, env=variables, network=False))
    assert "'lora' drops kvguard" in found["VLLM_PLUGINS"]
    with pytest.raises(OSError, match="No such file"):
        process(1 << 22)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}
    command = [sys.executable, "-m", "guard.cli", "doctor", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=clean | env, timeout=60)


def test_exit_status_and_json() -> None:
    sick = run("--offline", "--json", "--", "vllm", "serve", "m", "--kv-transfer-config", GOOD)
    data = json.loads(sick.stdout)
    assert (sick.returncode, data["ok"]) == (1, False)
    assert [one["check"] for one in data["findings"] if one["level"] == "problem"] == ["hook"]
    well = run("--offline", "--", "vllm", "serve", "m", "--kv-transfer-config", GOOD, **ON)
    assert well.returncode == 0, well.stdout
    assert well.stdout.endswith("no problems, no warnings\n")
    nobody = run("--pid", "4194304")
    assert (nobody.returncode, nobody.stderr) == (2, "kvguard: --pid 4194304: no such process\n")
    assert run("--nonsense").returncode == 2


def test_it_works_where_only_the_hook_is_installed() -> None:
    code = (
        "import sys\n"
        "sys.modules['typer'] = None\n"  # what an environment without it looks like
        "sys.argv = ['kvguard', 'doctor', '--offline', '--json', '--', 'vllm', '--kv-transfer-config', sys.argv[1]]\n"
        "from guard.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, GOOD], check=False, capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **ON},
                          timeout=60)  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True), done.stderr
