"""What the verbs program costs: no memory per probe, no lock held while it waits."""

import json
import time
from pathlib import Path

import pytest

from tests.rdma.guest.conftest import FAR, FULL, IWARP_FAR, IWARP_NEAR, NEAR, PYTHON, measured, netem, probing, sh

PROBES = 300_000 if FULL else 50_000
"""Many, as the heap takes 0.7 MB of leaks before it grows, and may grow by 0.4 MB without any."""
BATCH = 1000
SESSIONS = 60 if FULL else 12


def resident(pid: int) -> int:
    """Resident set of a process, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} is gone")


@pytest.mark.parametrize("transport", ["roce", "iwarp"])
def test_no_leak_over_many_probes(request: pytest.FixtureRequest, transport: str) -> None:
    """A work request that is not closed costs 62 bytes (18.7 MB over 300,000, measured): less than half of that."""
    device, far, near = ("rxe0", FAR, NEAR) if transport == "roce" else ("siw0", IWARP_FAR, IWARP_NEAR)
    with probing(far, request.getfixturevalue(transport), device=device, source=near) as prober:
        sizes = []
        pid = None
        for _ in range(PROBES // BATCH + 2):
            sample = measured(prober, BATCH)
            assert sample.problem == ""
            assert len(sample.rtts) == BATCH
            pid = pid or prober.pid
            assert prober.pid == pid, "the program was started again"
            sizes.append(resident(prober.pid))
    grown = sizes[-1] - sizes[1]
    print(f"{transport}: resident {sizes[1] / 1e6:.2f} MB, after {PROBES} more probes {grown / 1e6:+.3f} MB")
    assert grown < 30 * PROBES


def test_no_leak_over_many_sessions(roce: int) -> None:
    """Everything of a session is freed: verbs objects by count, memory, descriptors."""
    with probing(FAR, roce, device="rxe0", source=NEAR) as prober:
        seen = []
        for number in range(SESSIONS):  # another kind of completion is another session in the same program
            prober._options = {**prober._options, "event": bool(number % 2)}
            assert measured(prober, 2).problem == ""
            owned = json.loads(sh("rdma", "-j", "resource", "show", "qp", "link", "rxe0"))
            mine = [entry for entry in owned if entry.get("pid") == prober.pid]
            descriptors = len(list(Path(f"/proc/{prober.pid}/fd").iterdir()))
            seen.append((len(mine), descriptors, resident(prober.pid)))
    print(f"queue pairs, descriptors, resident: {seen[3]} -> {seen[-1]}")
    assert {queue_pairs for queue_pairs, _, _ in seen} == {1}
    assert seen[-1][1] == seen[3][1]
    assert seen[-1][2] - seen[3][2] < 20_000 * SESSIONS


@pytest.mark.parametrize("mode", ["poll", "event"])
def test_other_threads_run_while_it_waits(roce: int, mode: str) -> None:
    with netem("delay", "30ms"):
        found = json.loads(sh(PYTHON, "-B", str(Path(__file__).with_name("waiting.py")), FAR, str(roce), NEAR, mode))
    print(mode, found)
    assert found["rtt"] > 0.030
    assert found["seconds"] > 0.6
    # The thread sleeps 1 ms between ticks; with the interpreter's lock held it would get none at all in 600 ms.
    assert found["ticks"] > 0.25 * found["seconds"] / 0.001


def test_a_hung_program_is_ended_and_replaced(roce: int) -> None:
    """SIGSTOP stands for a call that never returns."""
    with probing(FAR, roce, device="rxe0", source=NEAR) as prober:
        assert measured(prober, 2).problem == ""
        first = prober.pid
        sh("kill", "-STOP", str(first))
        start = time.monotonic()
        hung = prober.probe(2, 0.5)
        took = time.monotonic() - start
        for _ in range(20):
            healed = measured(prober, 2)
            if not healed.problem:
                break
            time.sleep(0.5)
        assert "hung" in hung.problem
        assert took < 1.0 + 0.5 + 3.0
        assert not Path(f"/proc/{first}").exists()
        assert healed.problem == ""
        assert prober.pid != first
