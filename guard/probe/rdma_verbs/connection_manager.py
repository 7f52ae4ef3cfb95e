"""One queue pair by rdma_cm, which iWARP (RFC 5040) needs: its connections are TCP connections of the device."""

from __future__ import annotations

from typing import Any

from .completion import Completions
from .control import whole
from .layout import Verbs
from .queue_pair import READ_BYTES, SIZE
from .trouble import VERBS, Trouble


class CmQueuePair:
    """A queue pair that rdma_cm connects. Its calls block, up to the connection manager's own time-outs."""

    def __init__(self, verbs: Verbs, *, event: bool) -> None:
        self._verbs, self._event = verbs, event
        self._id: Any = None
        self._listener: Any = None
        self._addresses: list[Any] = []
        self._completions: Completions | None = None
        self._memory: Any = None
        self.gid = None

    @property
    def completions(self) -> Completions:
        """The queue on which reads complete."""
        if self._completions is None:
            raise Trouble(VERBS, "rdma_cm: not connected")
        return self._completions

    @property
    def memory(self) -> Any:
        """The memory region that is read, or read into."""
        return self._memory

    def listen(self, address: str, port: int) -> None:
        """Listens on the device that has `address`."""
        e = self._verbs.e
        try:
            self._listener = self._verbs.cmid.CMID(
                creator=self._info(src=address, src_service=str(port), flags=e.RAI_PASSIVE)
            )
            self._listener.listen(1)
        except self._verbs.error as error:
            raise Trouble(VERBS, f"rdma_cm cannot listen on {address}:{port}: {error}") from None

    def accept(self) -> None:
        """Accepts the one connection that is expected; blocks until it comes."""
        try:
            self._id = self._listener.get_request()
            self._prepare(self._id.reg_read)
            self._id.accept(self._verbs.cmid.ConnParam(resources=1, depth=1))
        except self._verbs.error as error:
            raise Trouble(VERBS, f"rdma_cm cannot accept: {error}") from None

    def connect(self, host: str, port: int, source: str) -> None:
        """Connects to a listening peer from the local address `source`, which also chooses the device."""
        try:
            info = self._info(src=source, dst=host, dst_service=str(port))
            self._id = self._verbs.cmid.CMID(creator=info)
            # iWARP writes the answer of a READ by the peer's hand: the memory read into must allow that.
            self._prepare(self._id.reg_write)
            self._id.connect(self._verbs.cmid.ConnParam(resources=1, depth=1, retry=3))
        except self._verbs.error as error:
            raise Trouble(VERBS, f"rdma_cm cannot connect from {source} to {host}:{port}: {error}") from None

    @property
    def device(self) -> str:
        """The device that the addresses chose."""
        return str(self._id.dev_name)

    def _info(self, **named: Any) -> Any:
        info = self._verbs.cmid.AddrInfo(port_space=self._verbs.e.RDMA_PS_TCP, **named)
        self._addresses.append(info)
        return info

    def _prepare(self, register: Any) -> None:
        verbs, e = self._verbs, self._verbs.e
        self._completions = Completions(verbs, self._id.context, event=self._event)
        cq = self._completions.cq
        cap = verbs.qp.QPCap(max_send_wr=4, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        self._id.create_qp(verbs.qp.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, sq_sig_all=1))
        self._memory = register(SIZE)

    def offer(self) -> dict[str, Any]:
        """What the peer needs to read."""
        return {"rkey": int(self._memory.rkey), "addr": int(self._memory.buf)}

    def read_request(self, peer: dict[str, Any]) -> tuple[Any, Any]:
        """As `QueuePair.read_request`; rdma_cm needs no work request object."""
        addr, rkey = whole(peer, "addr"), whole(peer, "rkey")
        post, signaled = self._id.post_read, self._verbs.e.IBV_SEND_SIGNALED
        return lambda memory: post(memory, READ_BYTES, addr, rkey, signaled), self._memory

    def close(self) -> None:
        """Ends the connection and frees everything."""
        for item in (self._memory, self._id, self._completions, self._listener, *self._addresses):
            try:
                if item is not None:
                    item.close()
            except self._verbs.error:
                continue
        self._memory = self._id = self._completions = self._listener = None
        self._addresses.clear()
