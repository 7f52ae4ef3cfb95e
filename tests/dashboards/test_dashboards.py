"""The dashboards: fresh, of Grafana's own shape, every metric on one, every query answered by a real Prometheus."""

import json
import re
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from alerts import alerting, recording
from dashboards import __main__ as generate
from dashboards import history, queries
from guard import semconv

FOLDER = Path(generate.__file__).parent
PAGES = {one.uid: one for one in generate.DASHBOARDS}
RECORDED = {rule.record for _, group in recording.GROUPS for rule in group}
VLLM = {
    "vllm:num_requests_waiting", "vllm:request_queue_time_seconds", "vllm:request_success_total",
    "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total",
}  # fmt: skip
# What may be empty over the planted story, and why.
EMPTY = {
    ("Limits in force", 1): "the planted controller sets no limit in bytes",
}
# Keys that Prometheus annotations have and the typed model (which stops before data sources) has not.
UNTYPED = {("annotations", "list", "expr"), ("annotations", "list", "step"), ("annotations", "list", "titleFormat")}


def lost(before, after, path=()):
    """Paths of what Grafana's typed model did not carry over."""
    if isinstance(before, dict):
        for key, value in before.items():
            if not isinstance(after, dict) or key not in after:
                yield (*path, key)
            else:
                yield from lost(value, after[key], (*path, key))
    elif isinstance(before, list):
        assert isinstance(after, list), path
        assert len(before) == len(after), path
        for one, other in zip(before, after, strict=True):
            yield from lost(one, other, path)
    elif before != after:
        yield (*path, repr(before))


def through_the_typed_model(data):
    register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(json.loads(json.dumps(data))), cls=JSONEncoder))


def metrics_in(expr):
    """Names of metrics, histogram series folded into their metric; recording rules as they are."""
    found = set()
    for name in re.findall(r"\b(?:kvguard_[a-z_]+|vllm:[a-z_]+|[a-z_]+:[a-z0-9_]+:[a-z0-9_]+)", expr):
        found.add(name if name in RECORDED else re.sub(r"_(bucket|sum|count)$", "", name))
    return found


def used_by(page):
    return set().union(*(metrics_in(query.expr) for panel in page.panels for query in panel.queries))


def test_files_are_fresh():
    for name, text in generate.files().items():
        assert (FOLDER / name).read_text() == text, f"{name} is stale: make generate"
    assert {path.name for path in FOLDER.glob("*.json")} == set(generate.files())


@pytest.mark.parametrize("uid", PAGES)
def test_grafanas_typed_model_knows_every_key(uid):
    data = json.loads((FOLDER / f"{uid}.json").read_text())
    assert set(lost(data, through_the_typed_model(data))) <= UNTYPED


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        (("panels", 1), "descripton"), (("panels", 1, "options"), "colourMode"),
        (("panels", 1, "targets", 0), "legend"),
        (("panels", 1, "fieldConfig", "defaults"), "units"), (("templating", "list", 1), "multiple"),
    ],
)  # fmt: skip
def test_a_misspelled_key_is_found(where, wrong):
    data = json.loads((FOLDER / "kvguard-overview.json").read_text())
    place = data
    for step in where:
        place = place[step]
    place[wrong] = "x"
    assert wrong in {path[-1] for path in lost(data, through_the_typed_model(data))}


def test_every_metric_that_is_used_exists_and_every_metric_is_used():
    ours = {metric.name for metric in semconv.METRICS}
    shown = set().union(*map(used_by, PAGES.values()))
    rules = set().union(*(metrics_in(rule.expr) for _, group in recording.GROUPS for rule in group))
    alerted = set().union(*(metrics_in(alert.expr) for alert in alerting.ALERTS))
    assert shown | rules | alerted <= ours | RECORDED | VLLM
    through_rules = set().union(*(metrics_in(r.expr) for _, g in recording.GROUPS for r in g if r.record in shown))
    assert ours - shown - through_rules == set()
    assert RECORDED - shown - alerted <= {recording.burn_ratio(window) for window in recording.WINDOWS}
    assert shown | rules | alerted >= VLLM


@pytest.mark.parametrize("uid", PAGES)
def test_every_panel_says_which_metric_it_shows(uid):
    for panel in PAGES[uid].panels:
        named = metrics_in(panel.description)
        assert named, panel.title
        known = {metric.name for metric in semconv.METRICS} | RECORDED | VLLM
        assert named <= known | {"vllm:external_prefix_cache_hits"}, panel.title
    titles = [panel.title for panel in PAGES[uid].panels]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("uid", PAGES)
def test_what_all_dashboards_share(uid):
    data = json.loads((FOLDER / f"{uid}.json").read_text())
    assert data["uid"] == uid
    assert "id" not in data
    assert [one["name"] for one in data["templating"]["list"]] == [
        "datasource",
        "job",
        "model_name",
        "engine_id",
        "backend",
    ]
    (link,) = data["links"]
    assert (link["tags"], link["includeVars"], link["keepTime"]) == (["kvguard"], True, True)
    assert "kvguard" in data["tags"]
    assert {one["name"] for one in data["annotations"]["list"]} == {"crossings", "switches"}
    ids = [panel["id"] for panel in data["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in data["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alerts_lead_to_dashboards_that_exist():
    assert {alert.dashboard for alert in alerting.ALERTS} <= set(PAGES)


def test_provisioning_finds_the_dashboards_and_traces():
    provisioning = FOLDER / "provisioning"
    provider = yaml.safe_load((provisioning / "dashboards" / "kvguard.yml").read_text())["providers"][0]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    sources = {
        one["uid"]: one
        for one in yaml.safe_load((provisioning / "datasources" / "kvguard.yml").read_text())["datasources"]
    }
    exemplars = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert exemplars == [{"name": "trace_id", "datasourceUid": "tempo"}]
    assert set(sources) == {"prometheus", "tempo"}


@pytest.fixture(scope="module")
def story(tmp_path_factory, needs):
    needs("prometheus", "promtool")
    with history.server(tmp_path_factory.mktemp("story")) as found:
        yield found


@pytest.mark.parametrize("uid", PAGES)
def test_every_query_returns_data(story, uid):
    server, end = story
    empty = set()
    for panel in PAGES[uid].panels:
        for number, query in enumerate(panel.queries):
            found = queries.ranged(server, query.expr, end - history.MINUTES * 60, end)
            if not any(float(value) == float(value) for one in found for _, value in one["values"]):
                empty.add((panel.title, number))
    assert empty == {key for key in EMPTY if key[0] in {panel.title for panel in PAGES[uid].panels}}


@pytest.mark.parametrize("uid", PAGES)
def test_every_variable_offers_values_and_narrows(story, uid):
    server, end = story
    data = json.loads((FOLDER / f"{uid}.json").read_text())
    values = {
        one["name"]: queries.variable_values(server, one["query"]["query"], end)
        for one in data["templating"]["list"] if one["type"] == "query"
    }  # fmt: skip
    assert values["job"] == ["kvguard"]
    assert values["model_name"] == ["llama-3.1-8b"]
    assert len(values["engine_id"]) == 4
    assert values["backend"] == ["lmcache-mp/resp", "lmcache/redis"]
    chosen = {"job": "kvguard", "model_name": "llama-3.1-8b", "engine_id": values["engine_id"][0], "backend": ".*"}
    narrowed = server.query(queries.filled('kvguard_kv_fetch_inflight{engine_id=~"$engine_id"}', chosen), time=end)
    assert len(narrowed) == 1


@pytest.mark.parametrize("uid", PAGES)
def test_annotations_mark_crossings_and_changes_of_state(story, uid):
    server, end = story
    for note in PAGES[uid].notes:
        assert queries.ranged(server, note.expr, end - history.MINUTES * 60, end), note.name


def test_the_story_is_seen(story):
    """Departure, then break-even, then healed; in that order and for that backend only."""
    server, end = story
    found = queries.ranged(
        server, 'max by (backend, value) (kvguard_verdict{dimension="state"})', end - history.MINUTES * 60, end
    )
    first = {(one["metric"]["backend"], one["metric"]["value"]): one["values"][0][0] for one in found}
    mp = "lmcache-mp/resp"
    assert first[mp, "ok"] < first[mp, "departed"] < first[mp, "harmful"]
    assert ("lmcache/redis", "departed") not in first
