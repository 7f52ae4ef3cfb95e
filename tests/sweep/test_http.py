"""Engine and service as the sweep sees them over HTTP: small servers that answer what vLLM and kvguard answer."""

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from guard.errors import SweepError
from guard.sweep.engine import Engine, Prompts
from guard.sweep.service import Service
from tests.probe.servers import certificate


class Fake(ThreadingHTTPServer):
    """Answers by (method, path) with (status, body); keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.over: list[str | None] = []  # the states over which was written
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def will(self, method: str, path: str, status: int, body: Any) -> None:
        self.answers.setdefault((method, path), []).append((status, body))


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, self.path, json.loads(body) if body else None))
        self.server.over.append(self.headers.get("If-Match") or self.headers.get("If-None-Match"))
        found = self.server.answers.get((self.command, path), [(404, {"detail": "no"})])
        status, answer = found.pop(0) if len(found) > 1 else found[0]
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = handle_one  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    server.will("GET", "/v1/models", 200, {"data": [{"id": "m"}]})
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


ANSWER = stream({"choices": [{"text": "a"}]}, {"choices": [], "usage": {"prompt_tokens": 100}})


def test_a_completion_is_timed_and_named(fake):
    fake.will("POST", "/v1/completions", 200, ANSWER)
    with Engine(fake.url) as engine:
        answer = engine.complete("hello", 3)
    assert engine.model == "m"
    assert answer.prompt_tokens == 100
    assert 0.0 < answer.ttft < 60.0
    assert answer.request_id.startswith("cmpl-kvguard-sweep-")
    body = fake.asked[-1][2]
    assert (body["model"], body["prompt"], body["max_tokens"], body["stream"]) == ("m", "hello", 3, True)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, {"message": "prompt too long"}, "400.*prompt too long"),
        (200, stream({"error": {"message": "engine dead"}, "choices": []}), "engine dead"),
        (200, stream({"choices": []}), "without a token"),
    ],
)
def test_what_vllm_refuses_is_said(fake, status, body, said):
    fake.will("POST", "/v1/completions", status, body)
    with Engine(fake.url) as engine, pytest.raises(SweepError, match=said):
        engine.complete("hello", 3)


def test_nobody_there_is_said():
    with pytest.raises(SweepError, match="no vLLM answers"):
        Engine("http://127.0.0.1:1")


def test_local_tiers_are_told_to_forget(fake):
    fake.will("POST", "/reset_prefix_cache", 200, {"success": False})
    fake.will("POST", "/reset_prefix_cache", 200, {"success": True})
    with Engine(fake.url) as engine:
        engine.forget()
    assert [asked[1] for asked in fake.asked[1:]] == ["/reset_prefix_cache"] * 2

    fake.will("POST", "/clear", 200, {"status": "ok"})
    with Engine(fake.url, ((f"{fake.url}/clear", '{"tier": "l1"}'),)) as engine:
        engine.forget()
    assert fake.asked[-1] == ("POST", "/clear", {"tier": "l1"})


def test_an_engine_that_cannot_forget_says_what_to_set(fake):
    with Engine(fake.url) as engine, pytest.raises(SweepError, match="VLLM_SERVER_DEV_MODE=1"):
        engine.forget()


def test_prompts_are_distinct_and_as_long_as_wanted(fake):
    fake.will("POST", "/v1/completions", 200, ANSWER)  # 400 letters are 100 tokens here
    with Engine(fake.url) as engine:
        prompts = Prompts(engine, 2000, seed=7)
        again = Prompts(engine, 2000, seed=7)
    texts = [prompts.make(number) for number in range(20)]
    assert {len(text) for text in texts} == {8000}
    assert len({text[:100] for text in texts}) == 20
    assert texts == [again.make(number) for number in range(20)]


def test_a_switch_waits_for_the_hook_and_goes_away(fake):
    put = {"acknowledged": ["host:8000/0"], "pending": [], "override": {"etag": '"5"'}}
    fake.will("PUT", "/v1/offload/engine%3Ahost%3A8000/0", 200, put)
    fake.will("DELETE", "/v1/offload/engine%3Ahost%3A8000/0", 200, {})
    with Service(fake.url, scope="engine:host:8000/0") as service:
        service.refuse_override()  # 404: there is none
        service.switch("off")
        service.restore()
        service.restore()
    kinds = [asked[0] for asked in fake.asked]
    assert kinds == ["GET", "PUT", "DELETE"]
    assert fake.over == [None, "*", '"5"']
    body = fake.asked[1][2]
    assert (body["mode"], body["stores"], body["on_lease_expiry"]) == ("off", False, "open")
    assert body["ttl_seconds"] > 0
    assert "wait=" in fake.asked[1][1]


def test_a_hook_that_does_not_follow_is_named(fake):
    put = {"acknowledged": [], "override": {"etag": '"5"'}}
    fake.will("PUT", "/v1/offload/fleet", 200, {**put, "pending": ["host:8000/0"]})
    fake.will("PUT", "/v1/offload/fleet", 200, {**put, "pending": []})
    fake.will("DELETE", "/v1/offload/fleet", 200, {})
    with Service(fake.url) as service:
        with pytest.raises(SweepError, match="host:8000/0"):
            service.switch("off")
        with pytest.raises(SweepError, match="no engine polls"):
            service.switch("off")
        service.restore()
    assert [asked[0] for asked in fake.asked] == ["PUT", "PUT", "DELETE"]  # it was in force all the same


def test_a_switch_of_somebody_else_stands(fake):
    put = {"acknowledged": ["host:8000/0"], "pending": [], "override": {"etag": '"5"'}}
    fake.will("PUT", "/v1/offload/fleet", 200, put)
    fake.will("PUT", "/v1/offload/fleet", 412, {"detail": "the switch changed meanwhile"})
    fake.will("DELETE", "/v1/offload/fleet", 412, {"detail": "the switch changed meanwhile"})
    with Service(fake.url) as service:
        service.switch("on")
        with pytest.raises(SweepError, match="somebody else has switched"):
            service.switch("off")
        service.restore()
    assert [asked[0] for asked in fake.asked] == ["PUT", "PUT"]
    assert fake.over == ["*", '"5"']
    with Service(fake.url) as service:
        service._etag = '"5"'
        service.restore()  # 412: not an error, there is nothing to put back


def test_an_override_in_force_is_named(fake):
    fake.will("GET", "/v1/offload/fleet", 200, {"scope": "fleet", "mode": "off"})
    with Service(fake.url) as service, pytest.raises(SweepError, match="fleet: off; clear it first"):
        service.refuse_override()


def test_a_record_is_waited_for(fake, monkeypatch):
    path = "/v1/requests/cmpl-1-0"
    fake.will("GET", path, 404, {})
    fake.will("GET", path, 200, {"requests": [{"decision": "remote"}]})
    with Service(fake.url) as service:
        assert service.record("cmpl-1-0") == {"decision": "remote"}
        monkeypatch.setattr("guard.sweep.service.RECORD_SECONDS", 0.0)
        with pytest.raises(SweepError, match="is the hook on"):
            service.record("cmpl-2-0")


def test_a_token_is_sent_and_a_refusal_is_said(fake):
    fake.will("PUT", "/v1/offload/fleet", 403, {"detail": "needs scope admin"})
    with Service(fake.url, token="t") as service, pytest.raises(SweepError, match=r"403.*needs scope admin"):
        service.switch("on")
    with Service("http://127.0.0.1:1") as service, pytest.raises(SweepError, match="does not answer"):
        service.switch("on")


def test_https_is_trusted_by_its_authority_only(tmp_path: Path, needs: Any):
    needs("openssl")
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = Fake()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.will("GET", "/v1/inflection", 200, {"estimates": []})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = server.url.replace("http:", "https:")
    try:
        with Service(url, verify=ssl.create_default_context(cafile=str(cert))) as service:
            assert service.inflection() == {"estimates": []}
        with Service(url) as service, pytest.raises(SweepError, match="does not answer"):
            service.inflection()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
