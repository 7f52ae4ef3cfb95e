"""A pyverbs without hardware: the calls that the probe makes, on one imaginary RoCE device whose READs always arrive.

Copied into a package by `tests/rdma/conftest.py`. Environment: FAKE_DEVICES (names), FAKE_READ (`ok`, `silent`, or a
completion's status), FAKE_STATE (port state), FAKE_GIDS (`index:gid:type`, comma-separated), FAKE_RTR=fail, FAKE_LEAK
(file that gets one line per object made and closed).
"""

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

from pyverbs.pyverbs_error import PyverbsRDMAError

GIDS = "0:fe80:0000:0000:0000:0000:0000:0000:0001:1,1:fe80:0000:0000:0000:0000:0000:0000:0001:2," + ",".join(
    f"{index}:0000:0000:0000:0000:0000:ffff:7f00:0001:{kind}" for index, kind in ((2, 1), (3, 2))
)


class Closes:
    def __init__(self, *args, **named):
        self.args, self.named = args, named
        self._log("+")

    def close(self):
        self._log("-")

    def _log(self, sign):
        if "FAKE_LEAK" in os.environ:
            with Path(os.environ["FAKE_LEAK"]).open("a") as file:
                file.write(f"{sign}{type(self).__name__}\n")


def get_device_list():
    names = os.environ.get("FAKE_DEVICES", "fake0")
    if names == "error":
        raise PyverbsRDMAError("Failed to get devices list")
    return [SimpleNamespace(name=name.encode(), transport_type=0) for name in names.split(",") if name]


class Context(Closes):
    def query_port(self, port):
        state = int(os.environ.get("FAKE_STATE", "4"))
        return SimpleNamespace(state=state, link_layer=2, lid=0, active_mtu=3)

    def _table(self):
        rows = [row for row in os.environ.get("FAKE_GIDS", GIDS).split(",") if row]
        return {int(row.partition(":")[0]): row.partition(":")[2].rpartition(":") for row in rows}

    def query_gid_table(self, size):
        return [SimpleNamespace(port_num=1, gid_index=i, gid_type=int(k)) for i, (_, _, k) in self._table().items()]

    def query_gid(self, port, index):
        return self._table()[index][0] + "\n"


class PD(Closes):
    pass


class MR(Closes):
    rkey, lkey = 7, 8

    def __init__(self, pd, size, access):
        super().__init__(pd)
        self._memory = ctypes.create_string_buffer(size)
        self.buf = ctypes.addressof(self._memory)

    def write(self, data, size):
        ctypes.memmove(self.buf, data, size)

    def read(self, size, offset):
        return ctypes.string_at(self.buf + offset, size)


class CompChannel(Closes):
    def __init__(self, context):
        super().__init__(context)
        self._reader, self.writer = os.pipe()

    @property
    def fd(self):
        return self._reader

    def get_cq_event(self, cq):
        os.read(self._reader, 1)

    def close(self):
        super().close()
        os.close(self._reader)
        os.close(self.writer)


class CQ(Closes):
    def __init__(self, context, size, cq_context, channel, vector):
        super().__init__(context)
        self.channel, self.done, self.armed = channel, [], False

    def req_notify(self):
        self.armed = True

    def ack_events(self, count):
        pass

    def poll(self, count):
        found, self.done = self.done[:count], self.done[count:]
        return len(found), found


class QPAttr(SimpleNamespace):
    pass


class QP(Closes):
    qp_num = 11

    def __init__(self, pd, init):
        super().__init__(pd)
        self._cq = init.scq

    def to_rts(self, attr):
        if os.environ.get("FAKE_RTR") == "fail":
            raise PyverbsRDMAError("Failed to modify QP state to RTR", 22)

    def post_send(self, request):
        outcome = os.environ.get("FAKE_READ", "ok")
        if outcome == "silent":
            return
        if outcome == "ok":
            ctypes.memmove(request.named["sg"][0].args[0], b"kvguard-rdma-ok!", 16)
        self._cq.done.append(SimpleNamespace(status=0 if outcome == "ok" else int(outcome)))
        if self._cq.channel is not None and self._cq.armed:
            self._cq.armed = False
            os.write(self._cq.channel.writer, b"!")


class SGE(Closes):
    pass


class SendWR(Closes):
    def set_wr_rdma(self, rkey, address):
        self.remote = (rkey, address)


def plain(**named):
    return SimpleNamespace(**named)


QPCap = QPInitAttr = GlobalRoute = AHAttr = plain


def GID(text):  # noqa: N802
    return text
