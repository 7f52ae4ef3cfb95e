"""The side that is measured: passive, since the device alone answers READs. One process per session.

A session's process is ended by its own alarm while it sets up, by the end of the control connection afterwards, and by
the kernel with this one. Its end frees all that it held, whatever state the device was in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from .connection_manager import CmQueuePair
from .control import Control
from .layout import TRANSPORT_IWARP, Verbs, name_of
from .queue_pair import PATTERN, QueuePair
from .session import choose_device
from .trouble import PEER_BUSY, PROTOCOL, VERBS, Trouble

SETUP_SECONDS = 15
PR_SET_PDEATHSIG = 1


class Target:
    """Serves READs on one device. `say` gets one event after the other: listening, opened, closed, refused, failed."""

    def __init__(self, verbs: Verbs, device: str, *, bind: str, port: int, gid_index: int | None, sessions: int,
                 say: Callable[[dict[str, Any]], None]) -> None:  # fmt: skip
        self._verbs, self._gid_index, self._sessions, self._say = verbs, gid_index, sessions, say
        chosen = choose_device(verbs, device, bind)
        self._device, self._iwarp = name_of(chosen), chosen.transport_type == TRANSPORT_IWARP
        if not self._iwarp:  # says at once what the first session would stumble over
            QueuePair(verbs, self._device, event=False, gid_index=gid_index, local="", peer="").close()
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (bind, port), family=family, backlog=16, dualstack_ipv6=bind == "::" and socket.has_dualstack_ipv6()
            )
        except OSError as error:
            raise Trouble(
                VERBS, f"cannot listen on {bind}:{port}: {error}", "choose another --bind or --port"
            ) from None
        self._port = self._listener.getsockname()[1]
        self._children: dict[int, int] = {}  # process id -> slot

    def run(self, stop: int) -> None:
        """Serves until the descriptor `stop` becomes readable."""
        self._say({"event": "listening", "device": self._device, "address": self._listener.getsockname()[:2]})
        watched: list[socket.socket | int] = [self._listener, stop]
        while stop not in (ready := select.select(watched, [], [], 1.0)[0]):
            self._reap()
            if ready:
                self._accept()
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        while self._children:
            self._reap(os.WEXITED)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:  # it went away again
            return
        name = str(address[0])
        with sock:
            slot = next((n for n in range(self._sessions) if n not in self._children.values()), None)
            if slot is None:
                self._say({"event": "refused", "peer": name})
                with contextlib.suppress(Trouble):
                    Control(sock).send(Trouble(PEER_BUSY, f"all {self._sessions} sessions are in use").as_dict())
                return
            child = os.fork()
            if child:
                self._children[child] = slot
                self._say({"event": "opened", "peer": name, "session": slot})
                return
            os._exit(self._session(sock, slot, os.getppid()))

    def _reap(self, flags: int = os.WEXITED | os.WNOHANG) -> None:
        while self._children:
            ended = os.waitid(os.P_ALL, 0, flags)
            if ended is None:
                return
            slot = self._children.pop(ended.si_pid, None)
            self._say({"event": "closed", "session": slot, "ok": ended.si_status == 0})

    def _session(self, sock: socket.socket, slot: int, parent: int) -> int:
        """The whole life of a session, in a process of its own; returns its exit code."""
        self._listener.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SETUP_SECONDS)  # also ends a call that blocks inside the library
        control = Control(sock)
        try:
            end = self._answer(control, control.receive(), slot)
            signal.alarm(0)
            control.wait_closed()
            end.close()
        except Trouble as trouble:
            self._say({"event": "failed", "session": slot, **trouble.as_dict()})
            with contextlib.suppress(Trouble):
                control.send(trouble.as_dict())
            return 1
        return 0

    def _answer(self, control: Control, hello: dict[str, Any], slot: int) -> QueuePair | CmQueuePair:
        if hello.get("kvguard") != 1:
            raise Trouble(PROTOCOL, "not a kvguard RDMA probe")
        wanted, mine = hello.get("transport"), "cm" if self._iwarp else "rc"
        if wanted != mine:
            raise Trouble(PROTOCOL, f"{self._device} speaks {mine}, the peer {wanted}: iWARP and RoCE do not mix")
        if self._iwarp:
            by_cm = CmQueuePair(self._verbs, event=False)
            cm_port = self._port + 1 + slot
            by_cm.listen(control.local, cm_port)
            control.send({"ok": True, "cm_port": cm_port})
            by_cm.accept()
            by_cm.memory.write(PATTERN, len(PATTERN))
            control.send({"ok": True, **by_cm.offer()})
            return by_cm
        peer = hello.get("gid")
        end = QueuePair(
            self._verbs, self._device, event=False, gid_index=self._gid_index, local=control.local,
            peer=peer if isinstance(peer, str) else "",
        )  # fmt: skip
        end.memory.write(PATTERN, len(PATTERN))
        end.connect(hello)
        control.send({"ok": True, **end.offer()})
        return end


def stop_on_signals() -> int:
    """A descriptor that becomes readable at SIGTERM, SIGINT or the end of standard input's writer."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    sys.stdout.flush()
    return reader
