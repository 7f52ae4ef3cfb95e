"""What a page of another origin cannot do, and what ours can."""

import httpx2
import pytest

pytestmark = pytest.mark.anyio
FLEET = "/v1/offload/fleet"


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this host
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "null"},
        {"Origin": "http://["},
    ],
    ids=str,
)
async def test_a_foreign_page_cannot_write(client: httpx2.AsyncClient, headers: dict[str, str]) -> None:
    for method, path in (("PUT", FLEET), ("DELETE", FLEET), ("POST", "/v1/traces")):
        answer = await client.request(method, path, headers=headers, content=b'{"mode": "off"}')
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:kvguard:problem:cross-origin")
        assert answer.headers["content-type"] == "application/problem+json"
    assert (await client.get("/v1/offload/history")).json()["switches"] == []
    assert (await client.get("/v1/offload", headers=headers)).status_code == 200  # CORS keeps the answer from it


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://127.0.0.1"},
    ],
    ids=str,
)
async def test_the_console_and_programs_can(client: httpx2.AsyncClient, headers: dict[str, str]) -> None:
    assert (await client.put(FLEET, headers=headers, json={"mode": "off"})).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_switch_is_json_or_nothing(client: httpx2.AsyncClient, kind: str) -> None:
    answer = await client.put(FLEET, content=b'{"mode": "off"}', headers={"content-type": kind} if kind else {})
    assert answer.status_code in (415, 422)
    assert (await client.get("/v1/offload")).json()["overrides"] == []


@pytest.mark.parametrize("path", ["/", "/v1/offload", "/livez", "/nothing", "/metrics"])
async def test_every_answer_has_a_strict_policy(client: httpx2.AsyncClient, path: str) -> None:
    headers = (await client.get(path)).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers.get_list("content-security-policy") == [policy]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == ("no-cache" if path == "/" else "no-store")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/offload/..%2f..%2fetc%2fpasswd",
        "/assets/..%2f..%2f..%2fsettings.py",
        "/assets/../pages.py",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/requests/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    ],
)
async def test_no_path_leads_to_a_file(client: httpx2.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code in (400, 404)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("scope", ["model:a%0d%0aX-Injected:%20yes", "engine:a%00b", "backend:%1b[2J"])
async def test_no_scope_reaches_a_header_or_a_terminal(client: httpx2.AsyncClient, scope: str) -> None:
    answer = await client.put(f"/v1/offload/{scope}", json={"mode": "off"})
    assert answer.status_code in (400, 404)  # a newline is in no path at all
    assert answer.headers["content-type"] == "application/problem+json"
    assert "x-injected" not in answer.headers
