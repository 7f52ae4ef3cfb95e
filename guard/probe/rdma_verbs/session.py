"""The side that measures: connects to a target, then times READs of 16 bytes, one at a time."""

from __future__ import annotations

import time
from typing import Any

from .connection_manager import CmQueuePair
from .control import Control, connect, whole
from .layout import TRANSPORT_IWARP, Verbs, name_of
from .queue_pair import PATTERN, PORT, QP_TIMEOUT, QueuePair, gid_table
from .trouble import DEAD_WIRE, NO_DEVICE, PEER_GONE, PROTOCOL, REFUSED, Trouble

RETRANSMIT_SECONDS = 4.096e-6 * 2**QP_TIMEOUT
"""A READ that took this long was sent again by the device: a lost packet, not a round trip."""
WC_RETRY_EXCEEDED = 12  # enum ibv_wc_status
_STATUS = {
    1: "local length error", 2: "local queue pair error", 4: "local protection error", 5: "request flushed",
    9: "remote invalid request", 10: "remote access error", 11: "remote operation error", 12: "retries exceeded",
    13: "receiver-not-ready retries exceeded",
}  # fmt: skip


class Session:
    """A connection to one target. `read` may be called until it raises; then only `close` is left."""

    def __init__(self, verbs: Verbs, *, host: str, port: int, device: str, gid_index: int | None, source: str,
                 event: bool, seconds: float) -> None:  # fmt: skip
        verbs.devices()  # what is missing here is told before anybody is asked
        self._control = connect(host, port, source, seconds)
        self._end: QueuePair | CmQueuePair | None = None
        try:
            chosen = choose_device(verbs, device, self._control.local)
            self.device = name_of(chosen)
            if chosen.transport_type == TRANSPORT_IWARP:
                self.transport = "iwarp"
                self._end = end = CmQueuePair(verbs, event=event)
                peer = self._by_cm(end, host, source or self._control.local, device)
            else:
                queue_pair = QueuePair(
                    verbs, self.device, event=event, gid_index=gid_index, local=self._control.local, peer=""
                )
                self._end = queue_pair
                self.transport = "infiniband" if queue_pair.infiniband else "roce-v2"
                self._control.send({"kvguard": 1, "transport": "rc", **queue_pair.offer()})
                peer = self._control.receive()
                queue_pair.connect(peer)
            self.gid = str(self._end.gid or "")
            self._post, self._request = self._end.read_request(peer)
            self._check(seconds)
        except BaseException:
            self.close()
            raise

    def _by_cm(self, end: CmQueuePair, host: str, source: str, named: str) -> dict[str, Any]:
        self._control.send({"kvguard": 1, "transport": "cm"})
        end.connect(host, whole(self._control.receive(), "cm_port"), source)
        if named and end.device != named:
            raise Trouble(NO_DEVICE, f"the way to {host} from {source} leads over {end.device}, not {named}")
        self.device = end.device
        return self._control.receive()

    def _check(self, seconds: float) -> None:
        """The first READ also fills the caches along the way, and shows that the right memory answers."""
        self.read(seconds)
        if self._end is None or self._end.memory.read(len(PATTERN), 0) != PATTERN:
            raise Trouble(PROTOCOL, "the READ brought something else than the target's pattern")

    def read(self, timeout: float) -> float | None:
        """Seconds of one READ; None where a packet of it was lost and sent again by the device.

        Raises:
            Trouble: the target is gone or refuses, or nothing answers.
        """
        if self._end is None:
            raise Trouble(PEER_GONE, "the session is closed")
        wait = self._end.completions.wait
        start = time.perf_counter()
        self._post(self._request)
        completion = wait(timeout)
        seconds = time.perf_counter() - start
        if completion is not None and completion.status == 0:
            return seconds if seconds < RETRANSMIT_SECONDS else None
        raise self._failed(completion, seconds)

    def _failed(self, completion: Any, seconds: float) -> Trouble:
        what = "no completion" if completion is None else _STATUS.get(completion.status, f"status {completion.status}")
        if self._control.peer_closed():
            return Trouble(PEER_GONE, f"the target has ended the session ({what})")
        if completion is None or completion.status == WC_RETRY_EXCEEDED:
            return Trouble(DEAD_WIRE, f"a READ got no answer in {seconds * 1e3:.0f} ms ({what})")
        return Trouble(REFUSED, f"a READ failed: {what}")

    def close(self) -> None:
        """Frees the queue pair, then tells the target by closing the control connection."""
        end, self._end = self._end, None
        if end is not None:
            end.close()
        control: Control = self._control
        control.close()


def choose_device(verbs: Verbs, name: str, local: str) -> Any:
    """The device to use: the named one; else the only one; else the one that has the address `local`.

    An iWARP device's GIDs are no addresses: one stands for all of them, since rdma_cm chooses among them by address.

    Raises:
        Trouble: there is no device, none of that name, or several and none with that address.
    """
    devices = {name_of(device): device for device in verbs.devices()}
    listed = ", ".join(devices)
    if name:
        if name not in devices:
            raise Trouble(NO_DEVICE, f"this host has no RDMA device {name}; it has {listed}")
        return devices[name]
    if len(devices) == 1:
        return next(iter(devices.values()))
    iwarp = [device for device in devices.values() if device.transport_type == TRANSPORT_IWARP]
    for known, device in devices.items():
        if device in iwarp:
            continue
        context = verbs.device.Context(name=known)
        try:
            addresses = {str(gid.address) for gid in gid_table(context) if context.query_port(PORT).link_layer != 1}
        finally:
            context.close()
        if local in addresses:
            return device
    if iwarp:
        return iwarp[0]
    raise Trouble(NO_DEVICE, f"several RDMA devices ({listed}), none with the address {local}", "name one: device=")
