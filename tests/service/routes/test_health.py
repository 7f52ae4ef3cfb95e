"""Health, metrics, the API document, and errors that are problems everywhere."""

from typing import Any

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from guard import __version__
from guard.service import shapes
from guard.service.runtime import Runtime

pytestmark = pytest.mark.anyio


async def test_live_and_ready_until_the_loop_is_stuck(client: httpx2.AsyncClient, runtime: Runtime, hands: Any) -> None:
    assert (await client.get("/livez")).text == "ok\n"
    assert (await client.get("/readyz?verbose")).text == "[+]loop ok\n[+]ledger ok\n[+]history ok\nok\n"
    runtime.tick = lambda: None  # type: ignore[method-assign]
    hands.advance(6)
    for path in ("/livez", "/readyz"):
        answer = await client.get(path)
        assert (answer.status_code, "[-]loop failed: no tick for 6.0 s" in answer.text) == (503, True)


async def test_a_tick_that_fails_costs_one_tick(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    def broken(_: int) -> Any:
        raise RuntimeError("boom")

    runtime.joiner.advance = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        runtime.tick()
    assert (await client.get("/livez")).status_code == 200


async def test_metrics_of_an_engine_in_both_formats(client: httpx2.AsyncClient, runtime: Runtime, hands: Any) -> None:
    await client.get("/v1/directives/10.0.0.1:8000/3?backend=a/b&model=m&instance=10.0.0.1:8000")
    await client.put("/v1/offload/fleet", json={"mode": "off"})
    hands.advance(3)
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_families((await client.get("/metrics")).text)
        for sample in family.samples
    }
    engine = ("engine_id", "10.0.0.1:8000/3")
    joined = (("engine", "3"), engine, ("model_name", "m"), ("vllm_instance", "10.0.0.1:8000"))
    assert found["kvguard_engine_info", joined] == 1
    assert found["kvguard_directive_age_seconds", (engine,)] == 3
    modes = [dict(labels)["mode"] for name, labels in found if name == "kvguard_offload_mode"]
    assert modes == ["off"]
    assert found["kvguard_build_info", (("version", __version__),)] == 1
    answer = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in text_string_to_metric_families(answer.text)} >= {"kvguard_offload_mode"}


async def test_errors_of_the_framework_are_problems(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    cases = (
        ("GET", "/nothing", 404), ("POST", "/livez", 405), ("GET", "/v1/traces", 405),
        ("POST", "/v1/directives/e", 405), ("GET", "/v1/offload/history?limit=x", 422),
    )  # fmt: skip
    for method, path, status in cases:
        answer = await client.request(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), path
        problem = answer.json()
        assert set(problem) >= {"type", "title", "status", "detail", "instance"}
        assert (problem["status"], problem["instance"]) == (status, path.partition("?")[0])
    assert "allow" in (await client.post("/livez")).headers


async def test_what_nobody_expected_is_a_problem_without_details(client: httpx2.AsyncClient, runtime: Runtime) -> None:
    runtime.window = None  # type: ignore[assignment]
    answer = await client.get("/v1/correlation")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert "NoneType" not in answer.text


async def test_the_api_document_names_every_route(client: httpx2.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    paths = {path: sorted(set(item) - {"parameters"}) for path, item in document["paths"].items()}
    assert paths == {
        "/v1/traces": ["post"],
        "/v1/directives/{engine_id}": ["delete", "get"],
        "/v1/offload": ["get"],
        "/v1/offload/history": ["get"],
        "/v1/offload/{scope}": ["delete", "get", "put"],
        "/v1/objectives": ["delete", "get", "put"],
        "/v1/correlation": ["get"],
        "/v1/requests": ["get"],
        "/v1/requests/{any_id}": ["get"],
        "/v1/events": ["get"],
        "/v1/picture": ["get"],
        "/v1/probes": ["get"],
        "/v1/inflection": ["get"],
        "/livez": ["get"],
        "/readyz": ["get"],
        "/metrics": ["get"],
    }
    assert set(document["components"]["schemas"]) >= {"SwitchIn", "Switched", "OffloadOut", "EngineRow", "HistoryOut"}
    assert set(document["components"]["schemas"]["EngineRow"]["properties"]) == set(shapes.EngineRow.model_fields)
