"""Two Soft-RoCE devices on one wire, two Soft-iWARP devices on another; see lab/guest/network.sh for the addresses."""

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from guard.probe.prober import Prober, Sample, Target
from guard.probe.rdma import KIND, command, environment
from guard.probe.rdma_program import Program

NEAR, FAR = "10.77.0.1", "10.77.0.2"
NEAR6, FAR6 = "fd77::1", "fd77::2"
IWARP_NEAR, IWARP_FAR = "10.78.0.1", "10.78.0.2"
PYTHON = "/usr/bin/python3"  # the distribution's, which has pyverbs; the tests run under another
PATIENCE = 60.0
FULL = os.environ.get("KVGUARD_RDMA_FULL") == "1"

Serve = Callable[..., AbstractContextManager[Program]]


def sh(*words: str) -> str:
    """Runs a command that must succeed."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextmanager
def netem(*words: str) -> Iterator[None]:
    """Both wires, in the direction from near to far, under a netem rule."""
    for wire in ("veth0", "veth2"):
        sh("tc", "qdisc", "replace", "dev", wire, "root", "netem", *words, "limit", "10000")
    try:
        yield
    finally:
        for wire in ("veth0", "veth2"):
            sh("tc", "qdisc", "del", "dev", wire, "root")


def target(host: str, port: int, **options: str | float | bool) -> Target:
    """A target of the RDMA prober with time to spare: the guest is slow to start programs."""
    return Target(
        target=f"rdma://{host}:{port}", prober="rdma", timeout=2.0, options={"interpreter": PYTHON, **options}
    )


@contextmanager
def probing(host: str, port: int, **options: str | float | bool) -> Iterator[Prober]:
    """A prober that is closed in the end."""
    prober = KIND.make(target(host, port, **options))
    try:
        yield prober
    finally:
        prober.close()


def measured(prober: Prober, count: int, timeout: float = 1.0) -> Sample:
    """A round, once the program has started."""
    sample = prober.probe(count, timeout)
    for _ in range(20):
        if not sample.problem.startswith("starting"):
            break
        sample = prober.probe(count, timeout)
    return sample


@contextmanager
def serving(device: str, bind: str, port: int, *words: str) -> Iterator[Program]:
    """A target; it says `listening` before it is handed out, or what is wrong."""
    arguments = ["serve", "--device", device, "--bind", bind, "--port", str(port), *words]
    program = Program(command(PYTHON, *arguments), environment())
    try:
        said = program.receive(PATIENCE)
        assert said is not None
        assert said.get("event") == "listening", said
        yield program
    finally:
        program.end()


@pytest.fixture(scope="session")
def bare() -> Sample:
    """What a probe says while the guest has no RDMA device at all."""
    with probing(FAR, 18515) as prober:
        return measured(prober, 1, 5.0)


@pytest.fixture(scope="session")
def devices(bare: Sample) -> None:
    """rxe0, siw0 on the near ends of their wires; rxe1, siw1 on the far ends."""
    for number in (0, 1):
        sh("rdma", "link", "add", f"rxe{number}", "type", "rxe", "netdev", f"veth{number}")
        sh("rdma", "link", "add", f"siw{number}", "type", "siw", "netdev", f"veth{number + 2}")


@pytest.fixture(scope="session")
def ports() -> Iterator[int]:
    """Control ports, ten apart: iWARP takes the ones behind."""
    return itertools.count(19000, 10)


@pytest.fixture(scope="session")
def roce(devices: None, ports: Iterator[int]) -> Iterator[int]:
    """Control port of a RoCE target on the far end."""
    port = next(ports)
    with serving("rxe1", FAR, port):
        yield port


@pytest.fixture(scope="session")
def iwarp(devices: None, ports: Iterator[int]) -> Iterator[int]:
    """Control port of an iWARP target on the far end."""
    port = next(ports)
    with serving("siw1", IWARP_FAR, port, "--sessions", "8"):
        yield port
