"""The real `kvguard serve`: start, stop, kill, what it refuses, and what it does to hostile clients."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "guard.cli", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=CLEAN | env, timeout=60)


LOADED_WHEN_READY = """
import os, signal, sys, guard.cli.app
from guard.service.server import serve
from guard.settings import load

def ready(url):
    print(*sorted({"httpx2", "numpy", "polars"} & sys.modules.keys()), "ready")
    os.kill(os.getpid(), signal.SIGTERM)

serve(load({"host": "127.0.0.1", "port": 0, "state_dir": sys.argv[1]}, None).settings, ready)
"""


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=20)


def test_sigterm_ends_it_cleanly_in_time_with_polls_under_way(serve: Callable[..., Any]) -> None:
    served = serve()
    tag = httpx2.get(f"{served.url}/v1/directives/e/0?backend=b").json()["etag"]
    request = f"GET /v1/directives/e/0?backend=b&wait=5 HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {tag}\r\n\r\n"
    polls = [connect(served.url) for _ in range(5)]
    for sock in polls:
        sock.sendall(request.encode())
    for _ in range(2):
        assert httpx2.get(f"{served.url}/livez").status_code == 200
    began = time.monotonic()
    assert served.stop(signal.SIGTERM) == 0
    assert time.monotonic() - began < 3
    for sock in polls:
        assert sock.recv(4096).startswith(b"HTTP/1.1 304")
        sock.close()
    assert '"event": "stopped"' in served.log[-1]


def test_kill_9_and_a_restart_keep_the_switches(serve: Callable[..., Any]) -> None:
    served = serve()
    for scope, mode in (("fleet", "off"), ("engine:h:8000/0", "on")):
        assert httpx2.put(f"{served.url}/v1/offload/{scope}", json={"mode": mode, "reason": "r"}).status_code == 200
    tag = httpx2.get(f"{served.url}/v1/directives/x/0?backend=b").json()["etag"]
    assert served.stop(signal.SIGKILL) == -signal.SIGKILL
    again = serve()
    data = httpx2.get(f"{again.url}/v1/offload").json()
    assert [(item["scope"], item["mode"]) for item in data["overrides"]] == [
        ("engine:h:8000/0", "on"),
        ("fleet", "off"),
    ]
    # A hook that goes on polling sees no change: the tag is made of the content.
    answer = httpx2.get(f"{again.url}/v1/directives/x/0?backend=b&wait=0", headers={"If-None-Match": tag})
    assert answer.status_code == 304


def test_the_service_may_open_as_many_files_as_it_is_allowed() -> None:
    code = (
        "import resource; from guard.service.server import allow_open_files\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); allow_open_files()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_what_takes_long_to_load_is_not_loaded_before_it_is_ready(tmp_path: Path) -> None:
    """Polls and spans need none of it; whoever asks for an analysis first waits for it, on a thread."""
    env = CLEAN | {"KVGUARD_SERVE_HISTORY_DIR": str(tmp_path / "history")}
    command = [sys.executable, "-c", LOADED_WHEN_READY, str(tmp_path / "state")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=60)
    assert (done.stdout, done.returncode) == ("ready\n", 0), done.stderr


def test_two_services_do_not_share_a_state_directory(serve: Callable[..., Any], tmp_path: Path) -> None:
    serve(state=tmp_path / "state")
    second = run("serve", "--port", "0", "--state-dir", str(tmp_path / "state"))
    assert (second.returncode, "in use by another kvguard service" in second.stderr) == (1, True)


def test_a_port_that_is_taken(serve: Callable[..., Any], tmp_path: Path) -> None:
    port = str(urlsplit(serve().url).port)
    second = run("serve", "--port", port, "--state-dir", str(tmp_path / "other"))
    assert second.returncode == 2
    assert f"port: 127.0.0.1:{port}: Address already in use" in second.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "prot: unknown key in"),
        ('port = "x"', "port: "),
        ("port = 70000", "port: "),
        ("port =", "config: "),
        ('host = "0.0.0.0"', "tokens_file: needed because host '0.0.0.0' is not loopback"),
        ('tokens_file = "/no/such/file"', "tokens_file: /no/such/file: No such file"),
    ],
)
def test_a_broken_config_stops_it_and_names_the_key(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "kvguard.toml"
    file.write_text(content)
    done = run("serve", "--config", str(file), "--state-dir", str(tmp_path / "state"))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_of_headers_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("no header")
    done = run("serve", "--state-dir", str(tmp_path / "state"), "--port", "0",
               KVGUARD_SERVE_FORWARD_ENDPOINT="http://127.0.0.1:9/v1/traces",
               KVGUARD_SERVE_FORWARD_HEADERS_FILE=str(tmp_path / "headers"))  # fmt: skip
    assert done.returncode == 2
    assert "headers line 1: not of the form NAME: VALUE" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_state_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("serve", "--port", "0", "--state-dir", str(tmp_path / "file" / "state"))
    assert done.returncode == 1
    assert f"state directory {tmp_path}/file/state: Not a directory" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 512 KiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_file_system(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = run("serve", "--port", "0", "--state-dir", str(small_disk / "state"))
    assert done.returncode == 1
    assert f"state directory {small_disk}/state: Read-only file system" in done.stderr


def test_a_full_disk_stops_switches_and_nothing_else(small_disk: Path, serve: Callable[..., Any]) -> None:
    served = serve(state=small_disk / "state")
    assert httpx2.put(f"{served.url}/v1/offload/fleet", json={"mode": "off"}).status_code == 200
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    refused = [
        answer
        for number in range(60)
        if (
            answer := httpx2.put(f"{served.url}/v1/offload/model:{number}", json={"mode": "on", "reason": "r" * 500})
        ).status_code
        != 200
    ]
    assert refused
    assert refused[0].status_code in (503, 507)
    assert f"state directory {small_disk}/state" in refused[0].json()["detail"]
    answer = httpx2.get(f"{served.url}/v1/directives/e/0?backend=b").json()
    assert answer["directives"][0]["mode"] == "off"
    headers = {"content-type": "application/json"}
    assert httpx2.post(f"{served.url}/v1/traces", content=b"{}", headers=headers).status_code == 200
    assert httpx2.get(f"{served.url}/readyz").status_code == 200
    filler.unlink()
    assert httpx2.put(f"{served.url}/v1/offload/fleet", json={"mode": "on"}).status_code == 200
    assert served.stop() == 0


def test_tokens_are_asked_for_and_reloaded(serve: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("boss admin boss-secret-0123456789\nhook ingest hook-secret-0123456789\n")
    served = serve(KVGUARD_SERVE_TOKENS_FILE=str(file))

    def code(method: str, path: str, name: str = "", **more: Any) -> int:
        headers = {"Authorization": f"Bearer {name}-secret-0123456789"} if name else {}
        return httpx2.request(method, served.url + path, headers=headers, **more).status_code

    switch = {"json": {"mode": "off"}}
    assert [code("GET", path) for path in ("/livez", "/readyz", "/v1/offload", "/metrics", "/v1/correlation")] == [
        200, 200, 401, 401, 401,
    ]  # fmt: skip
    assert [code("GET", "/v1/directives/e/0", who) for who in ("", "hook", "boss")] == [401, 200, 200]
    assert [code("PUT", "/v1/offload/fleet", who, **switch) for who in ("", "hook", "boss")] == [401, 403, 200]
    assert code("POST", "/v1/traces", "", content=b"{}") == 401
    file.write_text("next admin next-secret-0123456789\n")
    served.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 10
    while code("GET", "/v1/offload", "next") != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert code("GET", "/v1/offload", "boss") == 401
    assert not any("secret" in line for line in served.log)


def test_100_mb_get_413_and_cost_no_memory(serve: Callable[..., Any]) -> None:
    served = serve()
    piece = bytes(1 << 20)

    def rss() -> int:
        text = Path(f"/proc/{served.process.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0])

    before = rss()
    parts = urlsplit(served.url)
    for chunked in (False, True):
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        connection.putrequest("POST", "/v1/traces")
        connection.putheader("Content-Type", "application/x-protobuf")
        connection.putheader(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(100 << 20))))
        connection.endheaders()
        for _ in range(100):
            connection.send(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            connection.send(b"0\r\n\r\n")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("content-type")) == (413, "application/problem+json")
        answer.read()
        connection.request("GET", "/livez")  # the connection is still good
        assert connection.getresponse().status == 200
        connection.close()
    assert rss() - before < 60 * 1024


def test_endless_headers_are_cut_off(serve: Callable[..., Any]) -> None:
    served = serve()
    with connect(served.url) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for number in range(2000):
                sock.sendall(b"x-%d: %s\r\n" % (number, b"y" * 100))
            reply = sock.recv(4096)
        except OSError:
            reply = b""
        assert reply == b"" or reply.startswith(b"HTTP/1.1 4")
    assert httpx2.get(f"{served.url}/livez").status_code == 200


def test_a_slow_body_is_given_up(serve: Callable[..., Any]) -> None:
    served = serve(KVGUARD_SERVE_BODY_TIMEOUT_SECONDS="0.3")
    with connect(served.url) as sock:
        sock.sendall(
            b"POST /v1/traces HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")


def test_tls(serve: Callable[..., Any], tmp_path: Path) -> None:
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")],
        check=False, capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("needs openssl")
    served = serve(KVGUARD_SERVE_TLS_CERT_FILE=str(tmp_path / "cert"), KVGUARD_SERVE_TLS_KEY_FILE=str(tmp_path / "key"))
    assert served.url.startswith("https://")
    done = run("status", "--endpoint", served.url, "--ca-file", str(tmp_path / "cert"))
    assert (done.returncode, done.stderr) == (0, "")


async def _hook(url: str, number: int, applied: dict[str, list[str]]) -> None:
    """Polls like the real one: applies what comes and acknowledges it with the next poll."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    engine, tag = f"10.0.0.{number}:8000/0", ""
    try:
        while True:
            header = f'If-None-Match: "{tag}"\r\n' if tag else ""
            query = "wait=5&schema=1&backend=a/b&model=m&hook=0.1.0"
            writer.write(f"GET /v1/directives/{engine}?{query} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " in head[:20]:
                length = int(head.partition(b"content-length: ")[2].split()[0])
                data = json.loads(await reader.readexactly(length))
                tag = data["etag"]
                applied.setdefault(data["directives"][0]["mode"], []).append(engine)
    finally:
        writer.close()


def test_200_hooks_see_a_switch_and_acknowledge_it(serve: Callable[..., Any]) -> None:
    served = serve()

    async def play() -> None:
        applied: dict[str, list[str]] = {}
        hooks = [asyncio.create_task(_hook(served.url, number, applied)) for number in range(200)]
        async with httpx2.AsyncClient(base_url=served.url, timeout=70) as client:
            while len(applied.get("auto", ())) < 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            answer = await client.put("/v1/offload/fleet", json={"mode": "off"}, params={"wait": 40})
            assert (answer.json()["engines"], answer.json()["pending"]) == (200, [])
            assert len(answer.json()["acknowledged"]) == 200
            rows = (await client.get("/v1/offload")).json()["engines"]
            assert {(row["mode"], row["state"], row["acknowledged"]) for row in rows} == {("off", "bypass", True)}
            answer = await client.delete("/v1/offload/fleet", params={"wait": 40})
            assert (answer.json()["engines"], answer.json()["pending"]) == (200, [])
            assert [len(set(applied[mode])) for mode in ("off", "auto")] == [200, 200]
            assert len(applied["off"]) == 200  # each told once, nobody twice; auto is told anew as its pool grows
        for task in hooks:
            task.cancel()
        await asyncio.gather(*hooks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 100))


def test_without_tokens_a_name_that_is_led_here_reads_nothing_unless_it_is_allowed(serve: Callable[..., Any]) -> None:
    served = serve(KVGUARD_SERVE_ALLOWED_HOSTS='["kvguard.internal"]')
    port = served.url.rpartition(":")[2]
    for host, status in (
        ("127.0.0.1", 200), ("localhost", 200), ("kvguard.internal", 200), ("rebound.example", 403),
    ):  # fmt: skip
        for path in ("/v1/offload", "/metrics", "/v1/directives/e/0"):
            answer = httpx2.get(f"{served.url}{path}", headers={"Host": f"{host}:{port}"})
            assert answer.status_code == status, (host, path)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:kvguard:problem:unknown-host"
