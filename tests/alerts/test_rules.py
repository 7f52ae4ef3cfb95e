"""Every alert fires where it should, with its labels and annotations, and nowhere else; by promtool."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from alerts import __main__ as generate
from alerts import alerting, recording, thresholds

ROOT = Path(__file__).parent.parent.parent
CASES = yaml.safe_load((Path(__file__).parent / "cases.yml").read_text())
ALERTS = {alert.name: alert for alert in alerting.ALERTS}
RULES = generate.rules()


def promtool(directory, alerts, names):
    """Runs the cases of `names` against `alerts`; returns promtool's result."""
    burns = [group for group in RULES["groups"] if group["name"] == "kvguard-burn"]  # the others are not alerted on
    (directory / "rules.yml").write_text(generate.dump({"groups": burns}))
    (directory / "alerts.yml").write_text(generate.dump(alerts))
    tests = [test for name in names for test in cases_of(name)]
    document = {
        "rule_files": ["rules.yml", "alerts.yml"], "evaluation_interval": interval_of(names), "tests": tests,
        "group_eval_order": [group["name"] for group in (*burns, *alerts["groups"])],
    }  # fmt: skip
    (directory / "test.yml").write_text(generate.dump(document))
    return subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=directory, capture_output=True, text=True, check=False
    )


def cases_of(name):
    case = CASES[name]
    for fires in (case["fires"], case.get("fires_too")):
        if fires:
            annotations = {
                "summary": fires["summary"],
                "description": fires["description"],
                "runbook_url": f"{thresholds.RUNBOOKS}/{ALERTS[name].page}.md",
                "dashboard_url": f"{thresholds.GRAFANA}/d/{ALERTS[name].dashboard}",
            }
            expected = [{"exp_labels": fires["labels"], "exp_annotations": annotations}]
            yield one(f"{name} fires", fires, [(fires["not_yet"], name, []), (fires["at"], name, expected)])
    for number, silent in enumerate(case["silent"]):
        yield one(f"{name} does not fire ({number})", silent, [(silent.get("at", 10), name, [])])


def interval_of(names):
    """Evaluating days every 30 s would take long."""
    return max((CASES[name]["fires"].get("interval", "30s") for name in names), key=seconds)


def seconds(text):
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def one(title, case, checks):
    return {
        "name": title,
        "interval": case.get("interval", "1m"),
        "input_series": [{"series": series, "values": values} for series, values in case["series"].items()],
        "alert_rule_test": [
            {"eval_time": f"{at}m", "alertname": name, "exp_alerts": expected} for at, name, expected in checks
        ],
    }


def only(name, **change):
    """The rules of one alert, changed."""
    return {"groups": [{"name": "g", "rules": [ALERTS[name].rule() | change]}]}


def inverted(expr):
    """The expression with each comparison and each set operator turned round, one at a time."""
    turned = {">": "<=", ">=": "<", "<": ">=", "==": "!=", "unless": "and", " and": " unless"}
    for match in re.finditer(r"(?<![=!<>])(>=|==|>|<)(?=\s)|\bunless\b| and(?= )", expr):
        yield expr[: match.start()] + turned[match.group()] + expr[match.end() :]
    if "absent(" in expr:
        yield expr.replace("absent(", "(")


@pytest.fixture(autouse=True)
def _promtool(needs):
    needs("promtool")


def test_every_alert_has_cases_and_every_case_an_alert():
    assert list(CASES) == list(ALERTS)
    assert all(case["silent"] for case in CASES.values())


@pytest.mark.parametrize("name", ALERTS)
def test_alert(name, tmp_path):
    result = promtool(tmp_path, only(name), [name])
    assert result.returncode == 0, result.stdout + result.stderr


MUTANTS = [
    pytest.param(name, {"expr": expr}, id=f"{name}-{number}")
    for name, alert in ALERTS.items()
    for number, expr in enumerate(inverted(alert.expr))
] + [pytest.param(name, {"for": "0s"}, id=f"{name}-at-once") for name in ALERTS]


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_changed_rule_fails_its_test(name, change, tmp_path):
    result = promtool(tmp_path, only(name, **change), [name])
    assert result.returncode != 0, change
    assert "FAILED" in result.stdout + result.stderr


def test_every_alert_has_a_threshold_to_invert():
    assert {param.values[0] for param in MUTANTS if "expr" in param.values[1]} == set(ALERTS)


def test_generated_files_are_fresh():
    for name, content in generate.files().items():
        assert (ROOT / name).read_text() == content, f"{name} is stale: make generate"


def test_names_summaries_and_runbooks():
    for alert in ALERTS.values():
        assert re.fullmatch(r"KVGuard[A-Za-z0-9]+", alert.name)
        assert re.fullmatch(r"[A-Za-z][^{}]*\.", alert.summary), alert.name
        text = (ROOT / "docs" / "runbooks" / f"{alert.page}.md").read_text()
        for heading in ("## Meaning", "## Impact", "## Check", "## Act"):
            assert heading in text, alert.page
    pages = {path.stem for path in (ROOT / "docs" / "runbooks").glob("KVGuard*.md")}
    assert pages == {alert.page for alert in ALERTS.values()}


def test_recording_rules_are_named_by_level_metric_and_operation():
    for _, group in recording.GROUPS:
        for rule in group:
            assert re.fullmatch(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", rule.record)


def test_alertmanager_config_and_where_alerts_go(needs):
    needs("amtool")
    config = str(ROOT / "alerts" / "alertmanager.yml")
    result = subprocess.run(["amtool", "check-config", config], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for severity, receiver in (("critical", "page"), ("warning", "ticket"), ("info", "quiet")):
        routed = subprocess.run(
            ["amtool", "config", "routes", "test", f"--config.file={config}", f"severity={severity}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert routed.stdout.strip() == receiver


def test_prometheus_config():
    result = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", str(ROOT / "alerts" / "prometheus.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
