"""Idle, slow and endless connections of a real server: they are cut, and directives go on."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from guard.service.server import _listen
from guard.settings import Settings


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=20)


def ends(sock: socket.socket) -> bool:
    """Whether the server closes; waits for it."""
    try:
        return sock.recv(4096) == b""
    except ConnectionError:
        return True


def polls(url: str) -> bool:
    return httpx2.get(f"{url}/v1/directives/e/0?backend=b").status_code == 200


def test_who_says_nothing_or_dribbles_is_cut_off_in_time(serve: Callable[..., Any]) -> None:
    served = serve(KVGUARD_SERVE_HEADER_TIMEOUT_SECONDS="0.5")
    silent, started, second = connect(served.url), connect(served.url), connect(served.url)
    started.sendall(b"GET /livez HTTP/1.1\r\nHo")
    second.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert second.recv(4096).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    while True:  # the second request on a kept connection, byte by byte
        try:
            second.sendall(b"\r\n" if time.monotonic() - began < 0.2 else b"G")
            second.settimeout(0.05)
            if second.recv(4096) == b"":
                break
        except TimeoutError:
            assert time.monotonic() - began < 10
        except ConnectionError:
            break
    assert ends(silent)
    assert ends(started)
    assert polls(served.url)
    for sock in (silent, started, second):
        sock.close()


def test_a_header_line_without_end_is_cut_off(serve: Callable[..., Any]) -> None:
    served = serve(KVGUARD_SERVE_MAX_HEADER_BYTES="4096")
    with connect(served.url) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nx: ")
        sent = 0
        try:
            while sent < 50 << 20:
                sock.sendall(b"y" * 4096)
                sent += 4096
        except ConnectionError:
            pass
        assert sent < 20 << 20  # what the kernel holds
    assert polls(served.url)


def test_too_many_connections_cost_the_oldest_idle_one(serve: Callable[..., Any]) -> None:
    served = serve(KVGUARD_SERVE_MAX_CONNECTIONS="20")
    tag = httpx2.get(f"{served.url}/v1/directives/e/0?backend=b").json()["etag"]
    poll = connect(served.url)  # the oldest of all, but busy
    poll.sendall(
        f'GET /v1/directives/e/0?backend=b&wait=5 HTTP/1.1\r\nHost: [::1]\r\nIf-None-Match: "{tag}"\r\n\r\n'.encode()
    )
    idle = [connect(served.url) for _ in range(60)]
    assert polls(served.url)
    assert all(ends(sock) for sock in idle[:30])
    answer = httpx2.put(f"{served.url}/v1/offload/fleet", json={"mode": "off"})
    assert answer.status_code == 200
    assert poll.recv(65536).startswith(b"HTTP/1.1 200")
    for sock in (poll, *idle):
        sock.close()


def test_two_requests_sent_at_once_are_both_answered(serve: Callable[..., Any]) -> None:
    served = serve()
    with connect(served.url) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        sock.settimeout(10)
        held = b""
        while held.count(b"HTTP/1.1 200") < 3:
            piece = sock.recv(4096)
            assert piece
            held += piece


def test_a_client_that_takes_nothing_of_its_answer_is_the_kernels_to_end(tmp_path: Path) -> None:
    with _listen(Settings(port=0, state_dir=tmp_path)) as listening:
        listening.setblocking(True)
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
