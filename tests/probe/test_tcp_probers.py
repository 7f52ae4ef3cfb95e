"""The probers over TCP against servers on loopback: what they send, hold, and say when something is wrong."""

import re
import socket
import ssl

import pytest

from guard.probe import endpoint as addresses
from guard.probe.endpoint import Dialer, Endpoint
from guard.probe.prober import Sample, Target
from guard.probe.registry import make
from tests.probe.servers import Server, certificate, free_port, redis


def pong(data: bytes) -> bytes:
    return b"+PONG\r\n" * data.count(b"PING")


def probe(target: str, prober: str, count: int = 3, timeout: float = 2.0, **options: object) -> Sample:
    made = make(Target(target=target, prober=prober, options=options))  # type: ignore[arg-type]
    try:
        return made.probe(count, timeout)
    finally:
        made.close()


def good(sample: Sample, count: int = 3) -> bool:
    return len(sample.rtts) == sample.sent == count and not sample.problem and all(0 < rtt < 2 for rtt in sample.rtts)


def test_resp_holds_one_connection():
    with Server(pong) as server:
        made = make(Target(target=f"redis://127.0.0.1:{server.port}", prober="resp"))
        assert all(good(made.probe(3, 2.0)) for _ in range(5))
        made.close()
        assert server.connections == 1


def test_a_connection_that_the_server_closed_between_rounds_is_no_loss():
    with Server(pong) as server:
        made = make(Target(target=f"127.0.0.1:{server.port}", prober="resp"))
        assert good(made.probe(3, 2.0))
        server.drop()
        for _ in range(100):  # until the end of the connection has come
            assert good(made.probe(3, 2.0))
            if server.connections == 2:
                break
        assert server.connections == 2
        made.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda _: b"-NOAUTH Authentication required.\r\n", "-NOAUTH Authentication required."),
        (lambda _: b"-LOADING Redis is loading the dataset in memory\r\n", "-LOADING"),
        (lambda _: b"HTTP/1.1 400 Bad Request\r\n", "HTTP/1.1 400"),
        (lambda _: None, "closed by the other side|Connection reset"),
        (lambda _: b"", "no answer in time"),
        (lambda _: b"x" * 90_000, "too long"),
    ],
)
def test_resp_says_what_is_wrong_and_starts_afresh(answer, problem):
    with Server(answer) as server:
        made = make(Target(target=f"127.0.0.1:{server.port}", prober="resp"))
        sample = made.probe(3, 0.3)
        assert (sample.rtts, sample.sent) == ((), 1)
        assert re.search(problem, sample.problem), sample.problem
        server.answer = pong
        assert good(made.probe(3, 2.0))
        made.close()


def test_resp_with_a_password_against_redis(tmp_path, needs):
    needs("redis-server")
    port = free_port()
    (tmp_path / "secret").write_text("sesame\n")
    (tmp_path / "wrong").write_text("nope\n")
    with redis(tmp_path, "--requirepass", "sesame", port=port):
        assert good(probe(f"127.0.0.1:{port}", "resp", password_file=str(tmp_path / "secret")))
        assert good(probe(f"127.0.0.1:{port}", "resp", password_file=str(tmp_path / "secret"), username="default"))
        refused = probe(f"127.0.0.1:{port}", "resp", password_file=str(tmp_path / "wrong"))
        assert refused.problem.startswith("AUTH: -WRONGPASS")
        assert "check password_file" in refused.problem
        assert "-NOAUTH" in probe(f"127.0.0.1:{port}", "resp").problem


@pytest.fixture
def tls(tmp_path, needs):
    needs("openssl")
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


def test_tls_is_checked(tls):
    cert, context = tls
    with Server(pong, tls=context) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        assert good(probe(url, "resp", ca_file=str(cert)))
        assert "certificate not trusted" in probe(url, "resp").problem
        assert "certificate not trusted" in probe(url, "resp", ca_file=str(cert), server_name="store.example").problem
        plain = probe(f"redis://127.0.0.1:{server.port}", "resp", timeout=0.5)
        assert not plain.rtts


def test_http_over_tls(tls):
    cert, context = tls
    with Server(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", tls=context) as server:
        assert good(probe(f"https://127.0.0.1:{server.port}/health", "http", ca_file=str(cert)))
        assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", ""),
        (b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n", ""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", ""),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "status 503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "use prober tcp"),
        (b"HTTP/1.0 200 OK\r\n\r\nok", "tells no length"),
        (b"+PONG\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "no answer in time"),
    ],
)
def test_http(answer, problem):
    asked: list[bytes] = []
    with Server(lambda data: (asked.append(data), answer)[1]) as server:
        sample = probe(f"http://127.0.0.1:{server.port}/metrics?x=1", "http", timeout=0.5)
        assert asked[0].startswith(b"GET /metrics?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
        assert problem in sample.problem
        assert good(sample) is (not problem)


def test_http_sends_the_token_of_a_file(tmp_path):
    (tmp_path / "token").write_text("abc\n")
    asked: list[bytes] = []
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    with Server(lambda data: (asked.append(data), answer)[1]) as server:
        probe(f"http://127.0.0.1:{server.port}/", "http", token_file=str(tmp_path / "token"))
    assert b"\r\nAuthorization: Bearer abc\r\n" in asked[0]


def test_tcp_connects_anew_and_echo_holds():
    with Server(lambda data: data) as server:
        assert good(probe(f"127.0.0.1:{server.port}", "tcp"))
    with Server(lambda data: data) as server:
        assert good(probe(f"127.0.0.1:{server.port}", "tcp", mode="echo"))
        assert server.connections == 1
        server.answer = lambda _: b"nonsense"
        assert "not an echo server" in probe(f"127.0.0.1:{server.port}", "tcp", mode="echo").problem


def test_nobody_listens():
    for prober in ("resp", "tcp"):
        sample = probe(f"127.0.0.1:{free_port()}", prober)
        assert (sample.rtts, sample.sent, sample.problem) == ((), 1, "connect: Connection refused")


def test_a_name_that_does_not_resolve():
    assert "does not resolve" in probe("no-such-host.invalid:1", "tcp").problem


@pytest.mark.parametrize("prober", ["resp", "tcp", "http"])
def test_ipv6(prober):
    answers = {"resp": pong, "tcp": lambda data: data}
    http = lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"  # noqa: E731
    with Server(answers.get(prober, http), family=socket.AF_INET6) as server:
        scheme = "http://" if prober == "http" else ""
        assert good(probe(f"{scheme}[::1]:{server.port}", prober))


def test_a_name_is_resolved_once_per_interval(monkeypatch):
    now, asked = [0.0], []
    real = socket.getaddrinfo

    def resolve(host, port, *args, **more):
        asked.append(host)
        return real("127.0.0.1", port, *args, **more)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)
    with Server(pong) as server:
        dialer = Dialer(Endpoint("", "store.example", server.port), 30.0, clock=lambda: now[0])
        for _ in range(100):
            dialer.connect(2.0).close()
            now[0] += 0.5
        assert asked == ["store.example"] * 2
        assert dialer.moved(("127.0.0.1", server.port)) is False
        assert dialer.moved(("10.9.9.9", server.port)) is True
