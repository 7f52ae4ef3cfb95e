import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from guard.hook.config import HookConfig
from guard.hook.transport import HttpTransport, Reply, Token


def get(transport: HttpTransport, path: str = "/x", *, timeout: float = 5.0, limit: int = 1000) -> Reply:
    return transport.send("GET", path, headers={}, body=None, timeout=timeout, limit=limit)


Connect = Callable[..., HttpTransport]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes transports and closes them at the end."""
    made: list[HttpTransport] = []

    def make(*endpoints: str, **settings: Path) -> HttpTransport:
        made.append(HttpTransport(HookConfig(endpoints=endpoints, **settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def raw_server() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Starts a TCP server whose connections are handled by the function it is given; returns its URL."""
    sockets: list[socket.socket] = []

    def start(handle: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def loop() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                sockets.append(peer)
                with contextlib.suppress(OSError):
                    handle(peer)

        threading.Thread(target=loop, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for item in sockets:
        with contextlib.suppress(OSError):
            item.shutdown(socket.SHUT_RDWR)
        item.close()


def test_keeps_its_connection_and_puts_the_prefix_before_the_path(connect: Connect, service: Any):
    transport = connect(service.url + "/prefix")
    assert get(transport) == Reply(200, b"{}", None)
    assert get(transport).status == 200
    assert [seen.path for seen in service.seen] == ["/prefix/x"] * 2
    assert service.seen[0].peer == service.seen[1].peer


def test_a_connection_that_was_closed_while_idle_is_opened_again_at_once(connect: Connect, service: Any):
    service.reply = lambda _: (200, {"Connection": "close"}, b"one")
    transport = connect(service.url)
    assert get(transport).body == b"one"
    assert get(transport).body == b"one"


def test_a_silently_dropped_idle_connection_is_retried_once(connect: Connect, raw_server: Any):
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"] * 2
    connections: list[int] = []

    def handle(peer: socket.socket) -> None:
        connections.append(1)
        peer.recv(65536)
        peer.sendall(answers.pop())
        peer.close()  # although HTTP/1.1 said that it stays open

    transport = connect(raw_server(handle))
    assert get(transport).body == b"ok"
    assert get(transport).body == b"ok"
    assert len(connections) == 2


def test_failover_turns_to_the_next_endpoint_and_round_again(connect: Connect, new_service: Any):
    one, two = new_service(), new_service()
    transport = connect(one.url, two.url)
    get(transport)
    transport.failover()
    get(transport)
    transport.failover()
    get(transport)
    assert (len(one.seen), len(two.seen)) == (2, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_is_an_oserror(connect: Connect, answer: bytes, raw_server: Any):
    def handle(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(answer)
        peer.close()

    transport = connect(raw_server(handle))
    for _ in range(2):
        with pytest.raises(OSError):  # noqa: PT011
            get(transport)


def test_a_service_that_never_answers_times_out(connect: Connect, raw_server: Any):
    transport = connect(raw_server(lambda _: None))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        get(transport, timeout=0.2)
    assert time.monotonic() - began < 5.0


def test_a_body_that_trickles_in_for_ever_times_out(connect: Connect, raw_server: Any):
    def handle(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            peer.sendall(b"x")
            time.sleep(0.02)

    transport = connect(raw_server(handle))
    with pytest.raises(TimeoutError):
        get(transport, timeout=0.3)


def test_a_large_body_is_refused_without_reading_it_all(connect: Connect, service: Any):
    service.reply = lambda _: (200, {}, b"x" * 1001)
    transport = connect(service.url)
    with pytest.raises(OSError, match="larger than 1000"):
        get(transport)
    service.reply = lambda _: (200, {}, b"x" * 1000)
    assert len(get(transport).body) == 1000


def test_nobody_listens(connect: Connect):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConnectionRefusedError):
        get(connect(url))


@pytest.mark.parametrize("reused", [False, True])
def test_abort_ends_a_request_on_another_thread(reused: bool, connect: Connect, raw_server: Any):
    asked = threading.Event()
    connections: list[int] = []

    def handle(peer: socket.socket) -> None:
        connections.append(1)
        if reused:
            peer.recv(65536)
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        peer.recv(65536)
        asked.set()

    transport = connect(raw_server(handle))
    if reused:
        get(transport)
    failures: list[OSError] = []

    def request() -> None:
        try:
            get(transport, timeout=30.0)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=request)
    thread.start()
    assert asked.wait(5)
    transport.abort()
    thread.join(5)
    assert not thread.is_alive()
    assert len(failures) == len(connections) == 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("99999", 60.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0), ("-1", 1.0), ("nonsense", 1.0)],
)
def test_retry_after(connect: Connect, value: str, seconds: float, service: Any):
    service.reply = lambda _: (503, {"Retry-After": value}, b"")
    assert get(connect(service.url)) == Reply(503, b"", seconds)


def test_token_is_read_again_when_its_file_changes(connect: Connect, service: Any, tmp_path: Path):
    path = tmp_path / "token"
    transport = connect(service.url, token_file=path)
    get(transport)  # not mounted yet
    path.write_text("first\n")
    get(transport)
    replacement = tmp_path / "next"
    replacement.write_text("second")
    replacement.rename(path)
    get(transport)
    path.unlink()  # in the middle of a rotation
    get(transport)
    assert [seen.headers.get("authorization") for seen in service.seen] == [
        None,
        "Bearer first",
        "Bearer second",
        "Bearer second",
    ]


@pytest.mark.parametrize("content", [b"", b"two words", b"a\r\nX-Evil: 1", b"\xff\xfe", b"\n"])
def test_an_unusable_token_is_not_sent(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "token"
    path.write_bytes(content)
    token = Token(path)
    assert token.headers() == {}
    assert token.headers() == {}
    assert len(caplog.records) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_https_trusts_the_ca_file_and_nothing_else(connect: Connect, tmp_path: Path, raw_server: Any):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
            "-out", str(certificate),
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def handle(peer: socket.socket) -> None:
        with context.wrap_socket(peer, server_side=True) as secure:
            secure.recv(65536)
            secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    url = raw_server(handle).replace("http:", "https:")
    assert get(connect(url, ca_file=certificate)).body == b"ok"
    with pytest.raises(ssl.SSLCertVerificationError):
        get(connect(url))


def test_a_ca_file_that_is_none_costs_a_line(connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "ca.pem"
    path.write_text("not a certificate")
    connect("https://127.0.0.1:1", ca_file=path)
    assert "KVGUARD_CA_FILE" in caplog.records[0].getMessage()
