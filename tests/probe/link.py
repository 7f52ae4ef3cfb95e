"""Measures over the lab's TUN injector; run inside a fresh network namespace by test_link.py, prints JSON.

    unshare --net sh -c 'ip link set lo up; exec python -m tests.probe.link measure DIR TUNDELAY'

Redis, an echo server and an HTTP server stand in the far namespace that the injector makes. Delays come in cycles, so
that a busy spell of the machine hits all of them, and of each the least is taken, which loses what the machine adds.
The injector's own error (its sleeps end up to 100 us late in each direction) is told by two witnesses on a plain
connection made for that delay: the least RTT that its program saw, and the least that the kernel saw.
"""

import itertools
import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from guard.probe.config import ProbeSettings, targets
from guard.probe.history import Track
from guard.probe.prober import Prober, Sample, Target
from guard.probe.registry import make
from guard.probe.schedule import Schedule
from guard.probe.tcpinfo import TcpInfo
from lab.injector.control import Injector
from tests.probe.servers import Server, redis

NEAR, FAR, NEAR6, FAR6 = "10.99.0.1", "10.99.0.2", "fd99::1", "fd99::2"
REDIS, ECHO, HTTP = 6379, 7007, 8080
DELAYS_US = (0, 200, 1000, 5000, 20_000)
CYCLES = 5
MOST_SECONDS = 60
FEWEST, MOST = 8, 100
STEP_US = (500, 1500)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

TARGETS = {
    "resp": Target(target=f"{FAR}:{REDIS}", prober="resp"),
    "resp-ipv6": Target(target=f"redis://[{FAR6}]:{REDIS}", prober="resp"),
    "tcp": Target(target=f"{FAR}:{REDIS}", prober="tcp"),
    "echo": Target(target=f"{FAR}:{ECHO}", prober="tcp", options={"mode": "echo"}),
    "http": Target(target=f"http://{FAR}:{HTTP}/", prober="http"),
}


class Client:
    """Stands for vLLM: a connection that asks for values, and that no prober knows of."""

    def __init__(self, prefix: tuple[str, ...] = ()) -> None:
        self.sock = socket.create_connection((FAR, REDIS), timeout=10)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = int(self.sock.getsockname()[1])

    def ask(self, times: int) -> list[float]:
        """How long each question took, us."""
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            self.sock.sendall(b"*1\r\n$4\r\nPING\r\n")
            self.sock.recv(100)
            taken.append((time.perf_counter() - start) * 1e6)
        return taken


def connect() -> float:
    """How long a plain connect takes, us."""
    with socket.socket() as sock:
        start = time.perf_counter()
        sock.connect((FAR, REDIS))
        return (time.perf_counter() - start) * 1e6


def main(command: str, *words: str) -> None:
    if command == "serve":
        with Server(lambda data: data, host=FAR, port=ECHO), Server(lambda _: OK, host=FAR, port=HTTP):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            sys.stdin.read()  # until the other side is done with us
    elif command == "ask":  # a KV client inside the far namespace
        client = Client()
        client.ask(20)
        sys.stdout.write(f"{client.port}\n")
        sys.stdout.flush()
        sys.stdin.read()
    else:
        directory, tundelay = Path(words[0]), words[1]
        wire = subprocess.Popen(
            [tundelay, directory / "wire.sock", NEAR, FAR, "1500"], stdout=subprocess.PIPE, text=True
        )
        assert wire.stdout is not None
        try:
            _, pid, tid = wire.stdout.readline().split()
            far = f"/proc/{pid}/task/{tid}/ns/net"
            enter = ("nsenter", f"--net={far}")
            for prefix, address in (((), NEAR6), (enter, FAR6)):
                subprocess.run(
                    [*prefix, "ip", "-6", "addr", "add", f"{address}/64", "dev", "lab0", "nodad"], check=True
                )
            flags = ("--bind", FAR, FAR6, "127.0.0.1", "--protected-mode", "no")
            with redis(directory, *flags, port=REDIS, prefix=enter), Child(*enter, *_me("serve")):
                injector = Injector(directory / "wire.sock")
                result = {
                    "follow": follow(injector), "tcpinfo": tcpinfo(injector), "netns": inside(far, enter),
                    "step": step(injector), "lost": lost(injector),
                }  # fmt: skip
        finally:
            wire.kill()
            wire.wait()
        sys.stdout.write(json.dumps(result) + "\n")


class Child:
    """A process that lives until its stdin ends; `first` is the first line that it said."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.first = self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)


def _me(*words: str) -> list[str]:
    return [sys.executable, "-m", "tests.probe.link", *words]


def settled(delay: int, rtts: list[float]) -> bool:
    """Whether the three lowest agree: on a busy machine it takes long until a few probes go undisturbed."""
    lowest = sorted(rtts)[:3]
    return lowest[-1] - lowest[0] <= max(4.0, 0.01 * delay)


def follow(injector: Injector) -> dict[str, dict[int, dict[str, float]]]:
    """Least and median RTT in us of each prober at each delay."""
    probers: dict[str, Prober] = {name: make(target) for name, target in TARGETS.items()}
    seen: dict[str, dict[int, list[float]]] = {name: {delay: [] for delay in DELAYS_US} for name in TARGETS}
    seen |= {name: {delay: [] for delay in DELAYS_US} for name in ("witness", "witness-connect", "kernel")}
    begun = time.monotonic()
    for cycle in itertools.count():
        if cycle >= CYCLES and (
            time.monotonic() - begun > MOST_SECONDS
            or all(settled(delay, rtts) for rows in seen.values() for delay, rtts in rows.items())
        ):
            break
        for delay in DELAYS_US:
            injector.rtt(delay)
            count = max(FEWEST, min(MOST, 40_000 // max(delay, 1)))  # short ones are cheap and easily disturbed
            client = Client()
            seen["witness"][delay] += client.ask(count)
            seen["witness-connect"][delay] += [connect() for _ in range(count)]
            seen["kernel"][delay].append(ss(client.port)["min_rtt"])
            client.sock.close()
            for name, prober in probers.items():
                sample = prober.probe(count, 5.0)
                assert len(sample.rtts) == count, (name, sample)
                seen[name][delay] += [rtt * 1e6 for rtt in sample.rtts]
    for prober in probers.values():
        prober.close()
    injector.rtt(0)
    return {
        name: {delay: {"min": min(rtts), "p50": sorted(rtts)[len(rtts) // 2]} for delay, rtts in by_delay.items()}
        for name, by_delay in seen.items()
    }


def tcpinfo(injector: Injector) -> dict[str, Any]:
    """The kernel's RTT of a KV client's connection as the prober reads it, as ss does, and at each delay."""
    client, held = Client(), make(TARGETS["resp"])
    held.probe(3, 5.0)  # a prober's own connection to the same place, which is not to be taken for KV traffic
    prober = make(Target(target=f"{FAR}:{REDIS}", prober="tcpinfo"))
    assert isinstance(prober, TcpInfo)
    rows = []
    for _ in range(CYCLES):
        for delay in DELAYS_US:
            injector.rtt(delay)
            client.ask(60)  # smoothed with weight 1/8: by then the old delay is forgotten
            [one] = prober.connections()
            sample = prober.probe(1, 1.0)
            rows.append({
                "delay": delay, "port": one.local_port, "rtt": one.rtt * 1e6, "min_rtt": one.min_rtt * 1e6,
                "retransmits": one.retransmits, "ss": ss(client.port), "sample": [rtt * 1e6 for rtt in sample.rtts],
                "facts": dict(sample.facts),
            })  # fmt: skip
    injector.rtt(0)
    time.sleep(0.5)
    silent = prober.probe(1, 1.0)
    prober.close()
    held.close()
    return {"port": client.port, "rows": rows, "silent": [list(silent.rtts), silent.sent, silent.problem]}


def ss(port: int) -> dict[str, float]:
    """RTT, least RTT (us) and retransmits of the connection from a local port, by iproute2's ss."""
    text = subprocess.run(
        ["ss", "-tinH", "dst", FAR, "sport", "=", f":{port}"], check=True, capture_output=True, text=True
    ).stdout
    rtt, least = re.search(r"\brtt:([\d.]+)/", text), re.search(r"\bminrtt:([\d.]+)", text)
    retransmits = re.search(r"\bretrans:\d+/(\d+)", text)
    assert rtt is not None, text
    assert least is not None, text
    return {"rtt": float(rtt[1]) * 1e3, "min_rtt": float(least[1]) * 1e3,
            "retransmits": float(retransmits[1]) if retransmits else 0.0}  # fmt: skip


def inside(far: str, enter: tuple[str, ...]) -> dict[str, Any]:
    """The same from outside of the namespace in which the client lives."""
    target = Target(target=f"{FAR}:{REDIS}", prober="tcpinfo", options={"netns": far})
    with Child(*enter, *_me("ask")) as child:
        prober = make(target)
        assert isinstance(prober, TcpInfo)
        ports = [one.local_port for one in prober.connections()]
        prober.close()
        here = Path("/proc/thread-self/ns/net").stat().st_ino
    missing = make(Target(target=f"{FAR}:{REDIS}", prober="tcpinfo", options={"netns": "no-such-namespace"}))
    return {
        "port": int(child.first), "ports": ports, "stayed": here == Path("/proc/self/ns/net").stat().st_ino,
        "missing": missing.probe(1, 1.0).problem,
    }  # fmt: skip


def step(injector: Injector) -> dict[str, Any]:
    """From the injected step to the crossing event, at default settings."""
    injector.rtt(STEP_US[0])
    [target] = targets([ProbeSettings(target=f"{FAR}:{REDIS}", prober="resp")], 20.0)
    track, told = Track(target), threading.Event()
    learned, rounds = threading.Event(), list[float]()

    def take(_: Target, at: float, sample: Sample) -> None:
        rounds.append(at)
        if track.add(at, sample) is not None:
            told.set()
        if track.detector.level is not None:
            learned.set()

    schedule = Schedule([(target, make(target))], take, seed=1)
    schedule.start()
    assert learned.wait(60)
    level = track.detector.level
    injector.rtt(STEP_US[1])
    start, before = time.time(), len(rounds)
    assert told.wait(60)
    seconds = time.time() - start
    schedule.stop()
    assert track.shift is not None
    gaps = [b - a for a, b in zip(rounds[before - 1 :], rounds[before:], strict=False)]
    return {
        "interval": target.interval, "count": target.count, "seconds": seconds, "level": level,
        "rounds": sum(at > start for at in rounds[before:]), "longest_gap": max(gaps), "before": track.shift.before,
        "after": track.shift.after,
    }  # fmt: skip


def lost(injector: Injector) -> dict[str, Any]:
    """A wire that eats everything, and heals."""
    prober = make(TARGETS["resp"])
    injector.rtt(0)
    before = prober.probe(4, 1.0)
    injector.loss(1_000_000)
    start = time.monotonic()
    during = prober.probe(4, 0.5)
    seconds = time.monotonic() - start
    injector.loss(0)
    after = prober.probe(4, 5.0)
    prober.close()
    return {
        "before": len(before.rtts), "during": len(during.rtts), "problem": during.problem, "seconds": seconds,
        "after": len(after.rtts),
    }  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
