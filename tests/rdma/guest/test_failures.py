"""What is missing or broken is said with what to install or check; nothing crashes, nothing hangs, all of it heals."""

import socket
import time
from collections.abc import Iterator

import pytest

from guard.probe.prober import Sample
from tests.rdma.guest.conftest import FAR, IWARP_FAR, IWARP_NEAR, NEAR, measured, netem, probing, serving


def test_no_device_at_all(bare: Sample) -> None:
    assert bare.problem.startswith("no-device: this host has no RDMA device")
    assert "rdma link" in bare.problem
    assert bare.sent == 0


def test_no_device_of_that_name(roce: int) -> None:
    with probing(FAR, roce, device="mlx5_9", source=NEAR) as prober:
        sample = measured(prober, 4)
    assert sample.problem.startswith("no-device: this host has no RDMA device mlx5_9; it has ")
    assert "rxe0" in sample.problem
    assert sample.sent == 0


def test_no_such_gid(roce: int) -> None:
    with probing(FAR, roce, device="rxe0", source=NEAR, gid_index=200) as prober:
        sample = measured(prober, 4)
    assert sample.problem.startswith("wrong-gid: the port has no GID 200; it has 0: fe80")
    assert "ibv_devinfo" in sample.problem
    assert (sample.rtts, sample.sent) == ((), 0)


def test_gid_of_another_family_than_the_peer_s(devices: None, ports: Iterator[int]) -> None:
    """The target is told to use its IPv6 entry, the prober its IPv4 one."""
    port = next(ports)
    with (
        serving("rxe1", FAR, port, "--gid-index", "2"),
        probing(FAR, port, device="rxe0", source=NEAR, gid_index=1) as prober,
    ):
        sample = measured(prober, 4)
    assert sample.problem.startswith("wrong-gid: no path from GID ")
    assert "fd77::2" in sample.problem
    assert (sample.rtts, sample.sent) == ((), 0)


@pytest.mark.parametrize("transport", ["roce", "iwarp"])
def test_dead_wire_then_healed(request: pytest.FixtureRequest, transport: str) -> None:
    device, far, near = ("rxe0", FAR, NEAR) if transport == "roce" else ("siw0", IWARP_FAR, IWARP_NEAR)
    with probing(far, request.getfixturevalue(transport), device=device, source=near) as prober:
        assert measured(prober, 4).problem == ""
        with netem("loss", "100%"):
            for number in range(3):  # the held session first, then attempts to connect anew
                start = time.monotonic()
                sample = prober.probe(2, 1.0)
                took = time.monotonic() - start
                print(f"{transport}, round {number}: {took:.2f} s, {sample.problem}")
                assert sample.problem.startswith("dead-wire: ")
                assert sample.sent >= 1
                assert sample.rtts == ()
                assert took < 2.0 + 3.0
        for _ in range(10):
            healed = measured(prober, 4, 2.0)
            if not healed.problem:
                break
            time.sleep(1.0)
        assert healed.problem == ""
        assert len(healed.rtts) == 4


def test_peer_gone_then_back(devices: None, ports: Iterator[int]) -> None:
    port = next(ports)
    with probing(FAR, port, device="rxe0", source=NEAR) as prober:
        with serving("rxe1", FAR, port):
            assert measured(prober, 4).problem == ""
        gone = prober.probe(4, 1.0)  # the held session
        absent = prober.probe(4, 1.0)  # nobody listens
        with serving("rxe1", FAR, port):
            back = prober.probe(4, 1.0)
    assert gone.problem.startswith("peer-gone: the target has ended the session")
    assert absent.problem.startswith("peer-gone: cannot connect to 10.77.0.2")
    assert "kvguard probe serve --rdma" in absent.problem
    assert (gone.sent, absent.sent) == (1, 1)
    assert back.problem == ""


def test_sessions_are_bounded_and_freed(devices: None, ports: Iterator[int]) -> None:
    port = next(ports)
    with (
        serving("rxe1", FAR, port, "--sessions", "1"),
        probing(FAR, port, device="rxe0", source=NEAR) as first,
        probing(FAR, port, device="rxe0", source=NEAR) as second,
    ):
        assert measured(first, 2).problem == ""
        assert measured(second, 2).problem.startswith("peer-busy: all 1 sessions are in use")
        first.close()
        for _ in range(20):
            sample = measured(second, 2)
            if not sample.problem:
                break
            time.sleep(0.2)
        assert sample.problem == ""


def test_a_stranger_on_the_control_port_changes_nothing(devices: None, ports: Iterator[int]) -> None:
    port = next(ports)
    with serving("rxe1", FAR, port), probing(FAR, port, device="rxe0", source=NEAR) as prober:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"x" * 20_000):
            with socket.create_connection((FAR, port), 10) as stranger:
                stranger.sendall(words)
                stranger.settimeout(10)
                assert b'"protocol"' in stranger.recv(4096)
        assert measured(prober, 4).problem == ""


def test_iwarp_and_roce_do_not_mix(iwarp: int) -> None:
    with probing(IWARP_FAR, iwarp, device="rxe0") as prober:
        sample = measured(prober, 2)
    assert sample.problem.startswith("protocol: siw1 speaks cm, the peer rc: iWARP and RoCE do not mix")
