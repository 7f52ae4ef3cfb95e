"""What may happen to the hook's service while engines run, each as a context, and the wait until it is well again."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from lab.errors import LabError
from lab.processes import Process, wait_until
from lab.stack import Stack
from tests.lab.misbehaving import Misbehaving, garbage, newer


def polled(stack: Stack) -> None:
    """Waits until the hook has polled the service that runs now."""

    def row() -> bool:
        try:
            engines = stack.service.get("/v1/offload")["engines"]
        except (LabError, OSError):
            return False
        return bool(engines) and engines[0]["acknowledged"] and not engines[0]["silent"]

    wait_until(row, 30, "the hook to come back to the service")


@contextmanager
def signalled(number: signal.Signals, recover: Callable[[Process], None], stack: Stack) -> Iterator[None]:
    """The service's process is sent a signal, and made well again by `recover`."""
    stack.service_process.signal(number)
    try:
        yield
    finally:
        recover(stack.service_process)


def _anew(process: Process) -> None:
    process.stop()
    process.start()


killed = partial(signalled, signal.SIGKILL, _anew)
"""No service; a new one afterwards."""

stopped = partial(signalled, signal.SIGSTOP, lambda process: process.signal(signal.SIGCONT))
"""A service that takes connections and answers none, and goes on afterwards."""


@contextmanager
def replaced(answers: Callable[[int, str, str], bytes], stack: Stack) -> Iterator[None]:
    """Another program answers in the service's place; both kinds of question must have reached it."""
    port = int(stack.service.url.rpartition(":")[2])
    stack.service_process.stop()
    try:
        with Misbehaving(port, answers) as fake:
            yield
            wait_until(lambda: fake.asked["GET"] > 2 and fake.asked["POST"] > 0, 15, "the hook to ask the stand-in")
    finally:
        stack.service_process.start()


@contextmanager
def disk_full(stack: Stack) -> Iterator[None]:
    """The service's state lies on a file system without a free byte: switches fail and say so, all else goes on."""
    state = stack.run_dir / "state"
    stack.service_process.stop()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "kvlab", state], check=True, capture_output=True)
    try:
        stack.service_process.start()
        polled(stack)
        filler = state / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        status, problem = stack.service.call("PUT", "/v1/offload/fleet", {"mode": "off"})
        assert (status, problem["status"]) == (507, 507), problem
        yield
        polled(stack)
        assert stack.service.get("/v1/offload")["overrides"] == []
        filler.unlink()
        stack.service.switch("on", wait=10)
        stack.service.clear()
    finally:
        stack.service_process.stop()
        subprocess.run(["umount", state], check=True)
        stack.service_process.start()


FAULTS: dict[str, Callable[[Stack], AbstractContextManager[None]]] = {
    "nothing": lambda _: contextlib.nullcontext(),
    "killed": killed,
    "stopped": stopped,
    "garbage": partial(replaced, garbage),
    "newer-schema": partial(replaced, newer),
    "disk-full": disk_full,
}
