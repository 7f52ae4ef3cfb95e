"""docker-compose.yml, the Dockerfile and deploy/: well-formed, safe by default, and wired so that data arrives.

Not run here, for want of images and a daemon: the containers themselves, and what they run that is not installed
(OpenTelemetry Collector, Tempo, Grafana, vLLM, LMCache). What is installed runs with the very files that are mounted.
"""

import contextlib
import json
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from alerts import servers
from alerts.servers import Prometheus
from dashboards import queries
from dashboards.__main__ import DASHBOARDS

ROOT = Path(__file__).parent.parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
NO_HEALTHCHECK = {"otelcol": "its image holds no program that could ask", "traffic": "it serves nothing"}
PATIENCE = 90.0
# Panels without data under the demo's traffic, and why; all others have data within `PATIENCE`.
EMPTY = {
    "vLLM's queue time, with and without remote loads": "no vLLM in the demo",
    "Remote hits that vLLM counts": "no vLLM in the demo",
    "Requests that wait in vLLM": "no vLLM in the demo",
    "Spans received and forwarded": "the history is not on",
    "Spans lost or without their request": "nothing is lost",
    "Limits in force": "no limit in bytes",
    "Probes that fail": "none fails",
}


def resource(name):
    return [one for one in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / name).read_text()) if one]


def test_composes_own_config_takes_it(needs):
    needs("docker-compose")
    result = subprocess.run(
        ["docker-compose", "--profile", "demo", "--profile", "lab", "config"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert set(yaml.safe_load(result.stdout)["services"]) == set(SERVICES)


def test_the_compose_specification_takes_it():
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        "docker-compose.yml",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_specification_would_find_a_mistake(tmp_path):
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text((ROOT / "docker-compose.yml").read_text().replace("restart:", "restrat:", 1))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(wrong)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode != 0


def test_what_the_issue_asks_for_is_there():
    assert {"kvguard", "otelcol", "prometheus", "alertmanager", "grafana", "tempo", "redis"} <= {
        name for name, one in SERVICES.items() if not one.get("profiles")
    }
    assert {profile for one in SERVICES.values() for profile in one.get("profiles", ())} == {"demo", "lab"}


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_pinned_unprivileged_and_watched(name):
    service = SERVICES[name]
    image, _, tag = service["image"].partition(":")
    own = image.startswith("kvguard")
    assert own or re.fullmatch(r"v?\d+\.\d+(\.\d+)?(-[a-z0-9.]+)?", tag), service["image"]
    assert service["user"].split(":")[0] not in ("0", "root")
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    checked = "healthcheck" in service and not service["healthcheck"].get("disable")
    assert checked is (name not in NO_HEALTHCHECK)
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
    environment = service.get("environment", {})
    assert not [key for key in environment if "PASSWORD" in key and not key.endswith("__FILE")]
    for volume in service.get("volumes", ()):
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            assert (ROOT / source).exists(), source
            assert mode == ["ro"], volume
        else:
            assert source in COMPOSE["volumes"], volume
        del target


def test_secrets_are_made_once_random_and_never_committed(tmp_path):
    command = [str(ROOT / "deploy" / "secrets.sh"), str(tmp_path / "secrets")]
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert set(COMPOSE["secrets"]) <= set(made) | {"kvguard_tokens"}
    assert len({made[name] for name in made if name.endswith(("token", "password"))}) == 5
    assert made["kvguard_read_token"] in made["kvguard_tokens"]
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    again = tmp_path / "again"
    subprocess.run([command[0], str(again)], check=True, capture_output=True)
    assert (again / "redis_password").read_text() != made["redis_password"]
    assert "deploy/secrets/" in (ROOT / ".gitignore").read_text().split()


def test_dockerfile():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert all(":" in base for base in bases)
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    assert "--require-hashes" in "\n".join(lines)
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"


def test_kubernetes():
    deployment, claim = resource("deployment.yml")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")} == {
        "/livez",
        "/readyz",
    }
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    (service,) = resource("service.yml")
    assert service["spec"]["selector"] == labels
    (monitor,) = resource("servicemonitor.yml")
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "kvguard"
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert claim["metadata"]["name"] == pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    (rule,) = resource("prometheusrule.yml")
    committed = [
        group for name in ("rules", "alerts")
        for group in yaml.safe_load((ROOT / "alerts" / f"kvguard.{name}.yml").read_text())["groups"]
    ]  # fmt: skip
    assert rule["spec"]["groups"] == committed
    (kustomization,) = resource("kustomization.yml")
    assert all((ROOT / "deploy" / "kubernetes" / name).exists() for name in kustomization["resources"])


class Stack:
    """The services whose programs are installed, with the files that docker-compose.yml mounts.

    Changed in the copies: names and ports of the other services, the folders of secrets and state, and the scrape
    interval (15 s to 1 s).
    """

    def __init__(self, directory):
        self.directory = directory
        self.secrets = directory / "secrets"
        subprocess.run([str(ROOT / "deploy" / "secrets.sh"), str(self.secrets)], check=True, capture_output=True)
        self.ports = {name: servers.free_port() for name in ("kvguard", "redis")}
        self.rewritten = {
            "/run/secrets/": f"{self.secrets}/",
            "kvguard:8420": f"127.0.0.1:{self.ports['kvguard']}",
            "redis:6379": f"127.0.0.1:{self.ports['redis']}",
            "/var/lib/kvguard": str(directory / "state"),
            'host = "0.0.0.0"': 'host = "127.0.0.1"',
            "port = 8420": f"port = {self.ports['kvguard']}",
            "port 6379": f"port {self.ports['redis']}",
            "bind * -::*": "bind 127.0.0.1",
            "otelcol:4328": f"127.0.0.1:{servers.free_port()}",  # not installed: counted
        }

    def mounted(self, service, target):
        """A copy of the file that `service` has at `target`, with this machine's addresses."""
        for volume in SERVICES[service]["volumes"]:
            source, where, *_ = volume.split(":")
            if source.startswith(".") and Path(target).is_relative_to(where):
                path = ROOT / source / Path(target).relative_to(where)
                text = path.read_text()
                for old, new in self.rewritten.items():
                    text = text.replace(old, new)
                copy = self.directory / f"{service}-{path.name}"
                copy.write_text(text)
                return copy
        raise AssertionError(f"{target} is not mounted into {service}")

    @contextlib.contextmanager
    def run(self):
        with contextlib.ExitStack() as stack:
            command = SERVICES["redis"]["command"]
            self.enter(stack, [command[0], str(self.mounted("redis", command[1]))], "redis")
            config = self.mounted("kvguard", "/etc/kvguard/kvguard.toml")
            url = f"http://127.0.0.1:{self.ports['kvguard']}"
            serve = [sys.executable, "-m", "guard.cli", "serve", "--config", str(config)]
            self.enter(stack, serve, "kvguard", ready=f"{url}/readyz")
            manager = stack.enter_context(
                servers.alertmanager(
                    self.mounted("alertmanager", "/etc/alertmanager/alertmanager.yml"), self.directory / "am"
                )
            )
            self.rewritten |= {"alertmanager:9093": manager, "15s": "1s", "10s": "1s"}
            yield self.prometheus(stack), url

    def prometheus(self, stack):
        port = servers.free_port()
        self.rewritten["localhost:9090"] = f"127.0.0.1:{port}"
        config = self.mounted("prometheus", "/etc/prometheus/prometheus.yml")
        for name in ("kvguard.rules.yml", "kvguard.alerts.yml"):
            (self.directory / name).write_text((ROOT / "alerts" / name).read_text())
        (self.directory / "targets").mkdir(exist_ok=True)
        (self.directory / "targets" / "vllm.yml").write_text((ROOT / "alerts" / "targets" / "vllm.yml").read_text())
        flags = [flag for flag in SERVICES["prometheus"]["command"] if flag.startswith("--enable-feature")]
        command = [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={self.directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", *flags,
        ]  # fmt: skip
        self.enter(stack, command, "prometheus", ready=f"http://127.0.0.1:{port}/-/ready")
        return Prometheus(f"http://127.0.0.1:{port}")

    def enter(self, stack, command, name, ready=""):
        stack.enter_context(servers.process(command, self.directory / f"{name}.log", ready))

    def traffic(self, stack, url):
        service = SERVICES["traffic"]
        words = [*service["entrypoint"], *service["command"]]
        words = [
            word.replace("http://kvguard:8420", url).replace("/run/secrets/", f"{self.secrets}/") for word in words
        ]
        words[0] = sys.executable
        words += ["--speed", "4"]  # the link of the demo's script degrades within half a minute
        return stack.enter_context(servers.process(words, self.directory / "traffic.log"))

    def ask(self, url, path):
        token = (self.secrets / "kvguard_read_token").read_text()
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


def eventually(what, said):
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < end, said() if callable(said) else said
        time.sleep(0.3)
    return found


def test_what_is_installed_runs_together_and_the_demos_data_arrive(tmp_path, needs):
    needs("redis-server", "prometheus", servers.program(*servers.ALERTMANAGER))
    stack = Stack(tmp_path)
    with stack.run() as (prometheus, url), contextlib.ExitStack() as more:
        traffic = stack.traffic(more, url)
        for job in ("kvguard", "prometheus", "alertmanager"):
            eventually(lambda: prometheus.query(f'up{{job="{job}"}} == 1'), f"{job} is not scraped")  # noqa: B023
        assert len(prometheus.get("alertmanagers")["activeAlertmanagers"]) == 1
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 30
        eventually(lambda: prometheus.query("sum(rate(kvguard_decisions_total[10s])) > 0"), "no requests of the demo")
        probed = 'kvguard_probes_total{prober="resp",outcome="ok"} > 0'
        eventually(lambda: prometheus.query(probed), "Redis is not probed with the password of the secrets")
        budget = eventually(lambda: prometheus.query("kvguard_sla_budget_ratio"), "no budget of the objective")
        assert {round(float(one["value"][1]), 6) for one in budget} == {0.05}
        assert {one["metric"]["model_name"] for one in budget} == {
            one["metric"]["model_name"] for one in prometheus.query("kvguard_engine_info")
        }
        found = prometheus.query("kvguard_engine_info")
        assert {one["metric"]["job"] for one in found} == {"kvguard"}
        assert {"engine_id", "vllm_instance", "engine", "model_name"} <= set(found[0]["metric"])

        def without_data():
            return {
                panel.title for page in DASHBOARDS for panel in page.panels for query in panel.queries
                if not prometheus.query(queries.filled(query.expr))
            }  # fmt: skip

        eventually(lambda: without_data() <= set(EMPTY), without_data)

        # An exemplar of a slow fetch leads to its trace, and that to the request.
        def exemplars():
            asked = {
                "query": "kvguard_kv_fetch_duration_seconds_bucket",
                "start": time.time() - 300,
                "end": time.time(),
            }
            return [one for series in prometheus.get("query_exemplars", **asked) for one in series["exemplars"]]

        slowest = max(eventually(exemplars, "no exemplar"), key=lambda one: float(one["value"]))
        trace_id = slowest["labels"]["trace_id"]
        explained = stack.ask(url, f"/v1/requests/{trace_id}")["requests"]
        seconds = [fetch["seconds"] for request in explained for fetch in request["fetches"]]
        assert any(abs(one - float(slowest["value"])) < 1e-6 for one in seconds)
        bad = [
            rule for group in prometheus.get("rules")["groups"] for rule in group["rules"] if rule["health"] == "err"
        ]
        assert bad == []
        traffic.send_signal(signal.SIGTERM)
        assert traffic.wait(20) == 0
