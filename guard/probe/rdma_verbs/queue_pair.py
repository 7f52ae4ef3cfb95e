"""One RC queue pair on InfiniBand or RoCEv2, its addresses exchanged over the control connection."""

from __future__ import annotations

import random
from typing import Any

from .completion import Completions
from .control import whole
from .gid import Gid, choose
from .layout import Verbs
from .trouble import PORT_DOWN, PROTOCOL, VERBS, WRONG_GID, Trouble

SIZE = 4096
READ_BYTES = 16
PATTERN = b"kvguard-rdma-ok!"
PORT = 1
QP_TIMEOUT = 14
"""Exponent of the queue pair's own time-out, 4.096 us * 2**14 = 67 ms; after it the device sends again."""
QP_RETRIES = 3
LINK_INFINIBAND = 1
PORT_ACTIVE = 4


class QueuePair:
    """An RC queue pair with its memory. `offer` goes to the peer, `connect` takes the peer's."""

    def __init__(self, verbs: Verbs, device: str, *, event: bool, gid_index: int | None, local: str, peer: str) -> None:
        self._verbs, self._opened = verbs, []  # type: tuple[Verbs, list[Any]]
        try:
            self._open(device, event=event, gid_index=gid_index, local=local, peer=peer)
        except verbs.error as error:
            self.close()
            raise Trouble(VERBS, f"{device}: {error}") from None
        except BaseException:
            self.close()
            raise

    def _open(self, device: str, *, event: bool, gid_index: int | None, local: str, peer: str) -> None:
        verbs, e = self._verbs, self._verbs.e
        context = self._keep(verbs.device.Context(name=device))
        port = context.query_port(PORT)
        if port.state != PORT_ACTIVE:
            raise Trouble(PORT_DOWN, f"port {PORT} of {device} is not active (state {port.state})")
        self.infiniband = port.link_layer == LINK_INFINIBAND
        self.gid: Gid | None = None
        if not self.infiniband:
            self.gid = choose(gid_table(context), index=gid_index, local=local, peer=peer)
        self._lid, self._mtu, self._psn = int(port.lid), int(port.active_mtu), random.getrandbits(24)
        self._access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
        pd = self._keep(verbs.pd.PD(context))
        self.memory = self._keep(verbs.mr.MR(pd, SIZE, self._access))
        self.completions = self._keep(Completions(verbs, context, event=event))
        cq = self.completions.cq
        cap = verbs.qp.QPCap(max_send_wr=4, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        init = verbs.qp.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, sq_sig_all=1)
        self._qp = self._keep(verbs.qp.QP(pd, init))

    def _keep(self, item: Any) -> Any:
        self._opened.append(item)
        return item

    def offer(self) -> dict[str, Any]:
        """What the peer needs to connect and to read."""
        return {
            "gid": self.gid.text if self.gid else "",
            "lid": self._lid,
            "qpn": int(self._qp.qp_num),
            "psn": self._psn,
            "mtu": self._mtu,
            "rkey": int(self.memory.rkey),
            "addr": int(self.memory.buf),
        }

    def connect(self, peer: dict[str, Any]) -> None:
        """Takes the queue pair through INIT and RTR to RTS.

        Raises:
            Trouble: the peer's addresses cannot be used from here.
        """
        verbs = self._verbs
        attr = verbs.qp.QPAttr(port_num=PORT)
        attr.qp_access_flags = self._access
        attr.pkey_index = 0
        attr.path_mtu = min(self._mtu, whole(peer, "mtu"))
        attr.dest_qp_num = whole(peer, "qpn")
        attr.rq_psn, attr.sq_psn = whole(peer, "psn"), self._psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1  # with 0 every READ fails
        attr.min_rnr_timer, attr.rnr_retry = 12, 7
        attr.timeout, attr.retry_cnt = QP_TIMEOUT, QP_RETRIES
        try:
            attr.ah_attr = self._path(peer)
            self._qp.to_rts(attr)
        except verbs.error as error:
            if self.gid is None:
                raise Trouble(VERBS, f"cannot connect to LID {peer.get('lid')}: {error}") from None
            raise Trouble(WRONG_GID, f"no path from GID {self.gid} to the peer's GID {peer['gid']}: {error}") from None

    def _path(self, peer: dict[str, Any]) -> Any:
        addr = self._verbs.addr
        if self.gid is None:
            return addr.AHAttr(port_num=PORT, is_global=0, dlid=whole(peer, "lid"))
        gid = peer.get("gid")
        if not isinstance(gid, str) or not gid:
            raise Trouble(PROTOCOL, "the peer is on InfiniBand, this end on RoCE")
        if Gid(0, gid, 2).address.version != self.gid.address.version:
            raise Trouble(WRONG_GID, f"no path from GID {self.gid} to the peer's GID {Gid(0, gid, 2).address}")
        route = addr.GlobalRoute(dgid=addr.GID(gid), sgid_index=self.gid.index, hop_limit=64)
        return addr.AHAttr(port_num=PORT, is_global=1, gr=route)

    def read_request(self, peer: dict[str, Any]) -> tuple[Any, Any]:
        """The function that posts one READ of the peer's memory, and its argument; both are used again and again."""
        verbs, e = self._verbs, self._verbs.e
        piece = verbs.wr.SGE(self.memory.buf, READ_BYTES, self.memory.lkey)
        # Entries and requests are freed by close() alone; made once they also cost nothing per read.
        request = verbs.wr.SendWR(
            wr_id=1, opcode=e.IBV_WR_RDMA_READ, num_sge=1, sg=[piece], send_flags=e.IBV_SEND_SIGNALED
        )
        self._keep(piece)
        self._keep(request)
        request.set_wr_rdma(whole(peer, "rkey"), whole(peer, "addr"))
        return self._qp.post_send, request

    def close(self) -> None:
        """Frees everything, newest first; what fails to close does not keep the rest open."""
        while self._opened:
            item = self._opened.pop()
            try:
                item.close()
            except self._verbs.error:
                continue


def gid_table(context: Any) -> list[Gid]:
    """The GID table of the port."""
    rows = [row for row in context.query_gid_table(256) if row.port_num == PORT]
    return [Gid(row.gid_index, str(context.query_gid(PORT, row.gid_index)).strip(), int(row.gid_type)) for row in rows]
