"""Prober, verbs program and target together, over a fake pyverbs: what each failure is called and what it leaves."""

import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from guard.errors import ConfigError
from guard.probe import rdma
from guard.probe.prober import Sample, Target
from guard.probe.rdma import RdmaProber
from guard.probe.rdma_program import Program

Launch = Callable[..., Program]
Pyverbs = Callable[[str], Path]


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def prober(
    port: int,
    path: Path | None,
    monkeypatch: pytest.MonkeyPatch,
    clock: Callable[[], float] = time.monotonic,
    **options: str | bool,
) -> Iterator[RdmaProber]:
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", str(path))
    target = Target(target=f"127.0.0.1:{port}", prober="rdma", options={"interpreter": sys.executable, **options})
    made = rdma.make(target, clock)
    assert isinstance(made, RdmaProber)
    try:
        yield made
    finally:
        made.close()


def probed(made: RdmaProber, count: int = 3, timeout: float = 2.0) -> Sample:
    """A round, once the program is up (a busy machine starts it slowly)."""
    for _ in range(30):
        sample = made.probe(count, timeout)
        if not sample.problem.startswith("starting"):
            return sample
    raise AssertionError(sample.problem)


def listening(launch: Launch, path: Path, *words: str, **environment: str) -> tuple[Program, int]:
    program = launch(path, "serve", "--device", "fake0", "--bind", "127.0.0.1", "--port", "0", *words, **environment)
    said = program.receive(60)
    assert said is not None
    assert said["event"] == "listening", said
    return program, said["address"][1]


@pytest.mark.parametrize("layout", ["44", "59"])
@pytest.mark.parametrize("completion", ["poll", "event"])
def test_reads_are_timed(
    pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch, layout: str, completion: str
) -> None:
    path = pyverbs(layout)
    _, port = listening(launch, path)
    with prober(port, path, monkeypatch, completion=completion) as made:
        sample = probed(made, 5)
        again = probed(made, 2)
    assert sample.problem == ""
    assert sample.sent == len(sample.rtts) == 5
    assert all(0.0 < rtt < 2.0 for rtt in sample.rtts)
    assert len(again.rtts) == 2


@pytest.mark.parametrize("completion", ["poll", "event"])
def test_all_objects_are_closed(
    pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, completion: str
) -> None:
    """One work request for all READs; queue pair, queue, channel, memory and the rest closed, newest first."""
    path = pyverbs("44")
    _, port = listening(launch, path)
    monkeypatch.setenv("FAKE_LEAK", str(tmp_path / "objects"))
    with prober(port, path, monkeypatch, completion=completion, device="fake0") as made:
        assert probed(made, 50).problem == ""
        made._options = {**made._options, "gid_index": 3}  # another session in the same program
        assert probed(made, 50).problem == ""
        made._options = {**made._options, "gid_index": 99}
        assert probed(made, 1).problem.startswith("wrong-gid")
    lines = (tmp_path / "objects").read_text().split()
    made_count = Counter(line[1:] for line in lines if line[0] == "+")
    closed = Counter(line[1:] for line in lines if line[0] == "-")
    assert made_count == closed
    assert made_count["SendWR"] == 2
    first = lines[: lines.index("-Context") + 1]
    order = [line[1:] for line in first if line[0] == "-"]
    wanted = ["SendWR", "SGE", "QP", "CQ", "CompChannel", "MR", "PD", "Context"]
    assert order == [name for name in wanted if name != "CompChannel" or completion == "event"]


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        ("12", "dead-wire: a READ got no answer"),
        ("silent", "dead-wire: a READ got no answer"),
        ("10", "refused: a READ failed: remote access error"),
        ("99", "refused: a READ failed: status 99"),
    ],
)
def test_failed_reads(
    pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch, read: str, problem: str
) -> None:
    path = pyverbs("44")
    _, port = listening(launch, path)
    monkeypatch.setenv("FAKE_READ", read)
    with prober(port, path, monkeypatch) as made:
        sample = probed(made, 3, 0.5)
    assert sample.problem.startswith(problem)
    assert (sample.rtts, sample.sent) == ((), 1)


def test_the_other_end_s_pattern_is_looked_at(
    pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pyverbs("44")
    _, port = listening(launch, path)
    fake = path / "pyverbs/_fake.py"
    fake.write_text(fake.read_text().replace('b"kvguard-rdma-ok!"', 'b"something-else!!"'))
    with prober(port, path, monkeypatch) as made:
        assert probed(made).problem.startswith("protocol: the READ brought something else")


def test_no_route(pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pyverbs("44")
    _, port = listening(launch, path, FAKE_RTR="fail")
    with prober(port, path, monkeypatch) as made:
        sample = probed(made)
    assert sample.problem.startswith("wrong-gid: no path from GID 3: 127.0.0.1 RoCEv2")


def test_peer_gone(pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pyverbs("44")
    target, port = listening(launch, path)
    with prober(port, path, monkeypatch) as made:
        assert probed(made).problem == ""
        target.end()
        # The fake's READs succeed all the same, so only connecting anew can show that nobody is there.
        made.close()
        sample = probed(made)
    assert sample.problem.startswith(f"peer-gone: cannot connect to 127.0.0.1:{port}")
    assert sample.sent == 1


def test_sessions_are_bounded(pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pyverbs("44")
    target, port = listening(launch, path, "--sessions", "1")
    with prober(port, path, monkeypatch) as first, prober(port, path, monkeypatch) as second:
        assert probed(first).problem == ""
        assert probed(second).problem.startswith("peer-busy: all 1 sessions are in use")
        first.close()
        while (event := target.receive(60)) is not None and event["event"] != "closed":
            pass
        assert event == {"event": "closed", "session": 0, "ok": True}
        assert probed(second).problem == ""


def test_a_target_ends_with_its_sessions(pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pyverbs("44")
    target, port = listening(launch, path)
    with prober(port, path, monkeypatch) as made:
        assert probed(made).problem == ""
        children = Path(f"/proc/{target.pid}/task/{target.pid}/children").read_text().split()
        assert len(children) == 1
        target.end()
        assert not Path(f"/proc/{children[0]}").exists()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{}\n", b'{"kvguard":1,"transport":"cm"}\n',
                                   b'{"kvguard":1,"transport":"rc","gid":7}\n', b"x" * 9000])  # fmt: skip
def test_strangers_get_an_answer_and_an_end(pyverbs: Pyverbs, launch: Launch, words: bytes) -> None:
    _, port = listening(launch, pyverbs("44"))
    with socket.create_connection(("127.0.0.1", port), 30) as stranger:
        stranger.sendall(words)
        stranger.settimeout(30)
        answer = stranger.recv(4096)
    assert b'"ok": false' in answer
    assert b'"protocol"' in answer


def test_an_interpreter_that_dies(pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in the library is a result, and the program is started again after the back-off."""
    path = pyverbs("44")
    _, port = listening(launch, path)
    device = path / "pyverbs/device.py"
    good = device.read_text()
    device.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    clock = Clock()
    with prober(port, path, monkeypatch, clock) as made:
        crashed = Sample(problem="the verbs program failed: it ended by SIGSEGV")
        assert made.probe(1, 60.0) == crashed
        device.write_text(good)
        clock.now = 0.99
        assert made.probe(1, 60.0) == crashed
        assert made.pid is None
        clock.now = 1.0
        assert made.probe(1, 60.0).problem == ""


def test_a_program_that_hangs_is_ended(pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pyverbs("44")
    _, port = listening(launch, path)
    clock = Clock()
    with prober(port, path, monkeypatch, clock) as made:
        assert made.probe(1, 60.0).problem == ""
        pid = made.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        sample = made.probe(1, 0.2)
        assert "hung" in sample.problem
        assert made.pid is None
        assert not Path(f"/proc/{pid}").exists()
        clock.now = 1.0
        assert made.probe(1, 60.0).problem == ""


def test_back_off_grows_and_ends_at_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, starts = Clock(), []
    with prober(1, tmp_path, monkeypatch, clock) as made:
        for second in range(200):
            clock.now = float(second)
            before = made.starts
            assert made.probe(1, 60.0).problem.startswith("pyverbs-absent: ")
            if made.starts > before:
                starts.append(second)
    assert starts == [0, 1, 3, 7, 15, 31, 63, 123, 183]


def test_the_first_interpreter_that_has_pyverbs(
    pyverbs: Pyverbs, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Absent in the first, broken in the second, fine in the third; all broken: what the last says."""
    path = pyverbs("44")
    _, port = listening(launch, path)
    wrappers = []
    for name, python_path in (("absent", "/nowhere"), ("broken", str(tmp_path / "broken")), ("good", str(path))):
        wrapper = tmp_path / f"python-{name}"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={python_path} exec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        wrappers.append(str(wrapper))
    (tmp_path / "broken/pyverbs").mkdir(parents=True)
    (tmp_path / "broken/pyverbs/__init__.py").write_text("raise KeyError('__reduce_cython__')\n")
    with prober(port, None, monkeypatch) as made:
        made._candidates = tuple(wrappers)
        assert probed(made).problem == ""
    with prober(port, None, monkeypatch) as made:
        made._candidates = tuple(wrappers[:2])
        sample = probed(made)
        assert sample.problem.startswith("pyverbs-broken: ")
        assert sample.sent == 0


@pytest.mark.parametrize(
    ("target", "options", "key"),
    [
        ("host", {}, "target"),
        ("redis://host:1", {}, "target"),
        ("host:1", {"completion": "guess"}, "completion"),
        ("host:1", {"gid_index": "one"}, "gid_index"),
        ("host:1", {"gid_index": 300}, "gid_index"),
        ("host:1", {"device": 5}, "device"),
        ("host:1", {"interpreter": "/no/python"}, "interpreter"),
    ],
)
def test_bad_settings_name_their_key(target: str, options: dict[str, str | int], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rdma.make(Target(target=target, prober="rdma", options=options))
    assert caught.value.key == key


def test_default_port_and_interpreters() -> None:
    made = rdma.make(Target(target="rdma://[::1]", prober="rdma"))
    assert isinstance(made, RdmaProber)
    assert (made._endpoint.host, made._endpoint.port) == ("::1", 18515)
    assert made._candidates == (sys.executable, "/usr/bin/python3")
    assert made.pid is None
