"""The kernel's own RTT of another process's connection follows netem, in the guest whose clock counts instructions."""

import itertools
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from guard.probe import registry
from guard.probe.prober import Prober, Target
from tests.rdma.guest.conftest import FAR, NEAR, netem

SETTLE_SECONDS = 3.0
"""The smoothed RTT forgets by an eighth per exchange; a hundred a second are made."""

CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), source_address=(sys.argv[3], 0)) as sock:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        sock.sendall(b"x")
        sock.recv(1)
        time.sleep(0.01)
"""


SPINNER = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"


@pytest.fixture(scope="module", autouse=True)
def _busy() -> Iterator[None]:
    """Keeps the guest's processor from sleeping: its clock would go by the host's timers then, not by instructions."""
    spinner = subprocess.Popen([sys.executable, "-c", SPINNER])
    yield
    spinner.kill()
    spinner.wait(30)


@pytest.fixture(scope="module")
def prober() -> Iterator[Prober]:
    """Looks at the connection of another process to an echo server at the far end."""

    def echo(listener: socket.socket) -> None:
        with listener.accept()[0] as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := sock.recv(64):
                sock.sendall(data)

    with socket.create_server((FAR, 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        client = subprocess.Popen([sys.executable, "-c", CLIENT, FAR, str(port), NEAR])
        made = registry.make(Target(target=f"{FAR}:{port}", prober="tcpinfo"))
        try:
            yield made
        finally:
            made.close()
            client.terminate()
            client.wait(30)


def settled(prober: Prober) -> float:
    """The smoothed RTT once it has forgotten what was before, seconds."""
    time.sleep(SETTLE_SECONDS)
    found = []
    for _ in range(10):
        time.sleep(0.1)
        sample = prober.probe(1, 1.0)
        assert sample.problem == ""
        found += sample.rtts
    return statistics.median(found)


def test_kernels_rtt_follows_netem(prober: Prober) -> None:
    base = settled(prober)
    delays = (500e-6, 2000e-6, 10e-3)
    rtts = []
    for delay in delays:
        with netem("delay", f"{delay * 1e6:.0f}us"):
            rtts.append(settled(prober))
        print(f"tcpinfo: base {base * 1e6:.0f} us, netem {delay * 1e6:.0f} us, kernel's RTT {rtts[-1] * 1e6:.0f} us")
    # Without delay both ends want the guest's one processor at once, which costs up to 0.1 ms more than with any.
    for delay, rtt in zip(delays, rtts, strict=True):
        assert delay <= rtt <= delay * 1.1 + base + 50e-6
    for step, grown in zip(itertools.pairwise(delays), itertools.pairwise(rtts), strict=True):
        assert grown[1] - grown[0] == pytest.approx(step[1] - step[0], rel=0.1, abs=50e-6)
