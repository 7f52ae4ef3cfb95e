import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from guard.errors import ConfigError, SweepError
from guard.sweep import injector
from guard.sweep.proxy import CHUNK, DelayProxy, Pipe


@pytest.fixture
def echo():
    """An echo server: what a store is to a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(client,), daemon=True).start()

        def answer(client: socket.socket) -> None:
            with client:
                while data := client.recv(65536):
                    client.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def trip(sock: socket.socket, data: bytes = b"x") -> float:
    began = time.monotonic()
    sock.sendall(data)
    left = len(data)
    while left:
        left -= len(sock.recv(65536))
    return time.monotonic() - began


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_proxy_adds_a_round_trip_and_takes_it_away(echo):
    with DelayProxy(("127.0.0.1", 0), echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        near = min(trip(sock) for _ in range(5))
        proxy.rtt_seconds = 0.05
        far = [trip(sock) for _ in range(5)]
        proxy.rtt_seconds = 0.0
        again = min(trip(sock) for _ in range(5))
    assert min(far) >= 0.05  # never less than what was asked for
    assert near < 0.05
    assert again < 0.05


def test_proxy_delays_overlap(echo):
    with DelayProxy(("127.0.0.1", 0), echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        proxy.rtt_seconds = 0.1
        began = time.monotonic()
        for number in range(10):
            sock.sendall(bytes([number]) * 100)
            time.sleep(0.001)
        got = b""
        while len(got) < 1000:
            got += sock.recv(65536)
        assert time.monotonic() - began < 10 * 0.1  # one after the other they would take ten round trips
        assert got == b"".join(bytes([number]) * 100 for number in range(10))


def test_proxy_holds_no_more_than_it_may_and_loses_nothing(monkeypatch: pytest.MonkeyPatch):
    content, most, buffer = os.urandom(16 << 20), 1 << 20, 1 << 17
    pipes: list[Pipe] = []
    taken = 0

    def kept(*args: Any, **more: Any) -> Pipe:
        pipes.append(Pipe(*args, **more))
        return pipes[-1]

    def small(*socks: socket.socket) -> None:  # what is accepted inherits its listener's; set, they do not grow
        for sock in socks:
            for which in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, which, buffer)

    def send(sock: socket.socket) -> None:
        nonlocal taken
        with sock:
            for at in range(0, len(content), 1 << 16):
                sock.sendall(content[at : at + (1 << 16)])
                taken = at + (1 << 16)

    monkeypatch.setattr("guard.sweep.proxy.Pipe", kept)
    with (
        socket.create_server(("127.0.0.1", 0)) as store,
        DelayProxy(("127.0.0.1", 0), store.getsockname(), most=most) as proxy,
    ):
        proxy.rtt_seconds = 0.001
        small(store, proxy._listener)
        client = socket.create_connection(("127.0.0.1", proxy.port))
        with store.accept()[0] as reader:
            reader.settimeout(30)
            until(lambda: len(pipes) == 2)
            small(client, *proxy._open)
            sender = threading.Thread(target=send, args=(client,))
            sender.start()
            until(lambda: pipes[0]._held >= most)  # full, while nobody reads
            sender.join(1.0)  # which a proxy that goes on taking would end
            assert most <= pipes[0]._held < most + CHUNK
            assert most <= taken + (1 << 16) < most + 2 * CHUNK + 4 * 2 * buffer + (2 << 16)  # Linux doubles buffers
            got = bytearray()
            while data := reader.recv(1 << 20):
                got += data
        sender.join(30)
    assert bytes(got) == content


def test_proxy_whose_store_goes_away_while_it_is_full_ends_the_connection():
    with (
        socket.create_server(("127.0.0.1", 0)) as store,
        DelayProxy(("127.0.0.1", 0), store.getsockname(), most=1 << 16) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as sock,
    ):
        sock.settimeout(0.5)
        far = store.accept()[0]
        with pytest.raises(TimeoutError):
            sock.sendall(bytes(64 << 20))
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        sock.settimeout(10)
        with pytest.raises(OSError, match=r"reset|[Pp]ipe"):
            sock.sendall(bytes(64 << 20))


def test_proxy_ends_its_connections(echo):
    proxy = DelayProxy(("127.0.0.1", 0), echo)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as sock:
        trip(sock)
        proxy.close()
        assert sock.recv(10) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def test_proxy_without_a_store_hangs_up():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = unused.getsockname()
    with (
        DelayProxy(("127.0.0.1", 0), nobody) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as sock,
    ):
        assert sock.recv(10) == b""


def test_command_gets_the_round_trip_time(tmp_path):
    out = tmp_path / "out"
    made = injector.parse(f"command:{sys.executable} -c \"open(r'{out}','a').write('{{us}} {{ms}};')\"")
    made.set(0.0015)
    made.restore()
    assert out.read_text() == "1500 1.5;0 0;"


def test_a_command_that_fails_says_so():
    made = injector.parse(f"command:{sys.executable} -c \"raise SystemExit('no such device {{us}}')\"")
    with pytest.raises(SweepError, match="exit code 1: no such device 200"):
        made.set(0.0002)
    with pytest.raises(SweepError, match="No such file"):
        injector.parse("command:/no/such/program {us}").set(0.0)


@pytest.mark.parametrize(
    "text", ["", "proxy", "proxy:1.2.3.4:5", "proxy:a=b", "proxy:127.0.0.1:99999=h:1", "netem:", "command:true", "tc"]
)
def test_an_injector_that_is_none_is_a_usage_error(text):
    with pytest.raises(ConfigError, match="injector"):
        injector.parse(text)


def test_no_injector_measures_one_tier_only():
    made = injector.parse("none")
    made.set(0.0)
    with pytest.raises(SweepError, match="--injector"):
        made.set(0.001)


def test_an_address_in_use_is_said(echo):
    with pytest.raises(SweepError, match="cannot listen on"):
        injector.parse(f"proxy:{echo[0]}:{echo[1]}=127.0.0.1:1")


def test_ipv6_addresses():
    assert injector.address("[::1]:6379") == ("::1", 6379)
    assert injector.address("redis.svc:6379") == ("redis.svc", 6379)


def test_netem_in_a_namespace_of_its_own(needs):
    """Delays a device by tc, and leaves the device as it was."""
    needs("tc", "unshare", "ip", root=True)
    code = """
import subprocess, sys
from guard.sweep import injector
run = lambda *c: subprocess.run(c, check=True, capture_output=True, text=True).stdout
run("ip", "link", "set", "lo", "up")
made = injector.parse("netem:lo")
made.set(0.003)
assert "delay 3ms" in run("tc", "qdisc", "show", "dev", "lo")
try:
    injector.parse("netem:lo")
except Exception as error:
    assert "netem qdisc already" in str(error)
else:
    raise SystemExit("a second netem was accepted")
made.restore(); made.restore()
assert "netem" not in run("tc", "qdisc", "show", "dev", "lo")
"""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    if "Specified qdisc kind is unknown" in done.stderr or "qdisc kind is unknown" in done.stderr:
        pytest.skip("this kernel has no netem")
    assert done.returncode == 0, done.stderr


def test_median_of_the_proxys_delay_is_what_was_asked_for(echo):
    """Against a pair of round trips with and without, taken in turn, so that a busy machine slows both."""
    with DelayProxy(("127.0.0.1", 0), echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        added = []
        for _ in range(15):
            proxy.rtt_seconds = 0.0
            without = trip(sock)
            proxy.rtt_seconds = 0.02
            added.append(trip(sock) - without)
    assert median(added) == pytest.approx(0.02, rel=0.5)
