"""Which GID is chosen, of a host's with link-local, IPv4 and global IPv6 addresses, each in both RoCE kinds."""

from types import SimpleNamespace

import pytest

from guard.probe.rdma_verbs.gid import Gid, choose
from guard.probe.rdma_verbs.session import choose_device
from guard.probe.rdma_verbs.trouble import Trouble

LINK_LOCAL, V4, OTHER_V4 = "fe80::1", "::ffff:10.0.0.1", "::ffff:10.9.0.1"
V6 = "2001:db8::1"
TABLE = [
    Gid(2 * number + (kind == 2), text, kind)
    for number, text in enumerate((LINK_LOCAL, OTHER_V4, V4, V6))
    for kind in (1, 2)
]


@pytest.mark.parametrize(
    ("wish", "index"),
    [
        ({}, 3),  # IPv4 first, the lowest index
        ({"local": "10.0.0.1"}, 5),  # the address that leads to the peer
        ({"local": "2001:db8::1"}, 7),
        ({"local": "::ffff:10.0.0.1"}, 5),
        ({"local": "fe80::1%eth0"}, 1),
        ({"local": "192.0.2.1"}, 3),  # control connection by another network
        ({"peer": "2001:0db8:0000:0000:0000:0000:0000:0002"}, 7),  # of the peer's family, not link-local
        ({"peer": "fe80::2"}, 1),  # link-local to link-local
        ({"peer": "::ffff:10.0.0.2", "local": "10.0.0.1"}, 5),
        ({"index": 1}, 1),
    ],
)
def test_choice(wish: dict[str, object], index: int) -> None:
    assert choose(TABLE, **wish).index == index


@pytest.mark.parametrize(
    ("table", "wish", "code", "words"),
    [
        (TABLE, {"index": 9}, "wrong-gid", "no GID 9; it has 0: fe80::1 RoCEv1"),
        (TABLE, {"index": 4}, "wrong-gid", "GID 4: 10.0.0.1 RoCEv1 is not RoCEv2"),
        (TABLE[:1], {}, "no-gid", "no RoCEv2 GID; it has 0: fe80::1 RoCEv1"),
        ([], {}, "no-gid", "it has none"),
        (TABLE[:2], {"peer": "::ffff:10.0.0.2"}, "wrong-gid", "the peer uses IPv4, this port has 1: fe80::1 RoCEv2"),
    ],
)
def test_no_choice(table: list[Gid], wish: dict[str, object], code: str, words: str) -> None:
    with pytest.raises(Trouble, match=words) as caught:
        choose(table, **wish)
    assert caught.value.code == code
    assert caught.value.hint


class Devices:
    """Two RoCE devices and one iWARP device, as `choose_device` asks for them."""

    class device:  # noqa: N801 - the module's name
        class Context:
            def __init__(self, name: str) -> None:
                self._gid = {"roce0": "::ffff:10.0.0.1", "roce1": "::ffff:10.1.0.1"}[name]

            def query_gid_table(self, size: int) -> list[SimpleNamespace]:
                return [SimpleNamespace(port_num=1, gid_index=0, gid_type=2)]

            def query_gid(self, port: int, index: int) -> str:
                return self._gid

            def query_port(self, port: int) -> SimpleNamespace:
                return SimpleNamespace(link_layer=2)

            def close(self) -> None:
                pass

    def __init__(self, *names: str) -> None:
        self._names = names

    def devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=n.encode(), transport_type=int(n.startswith("iwarp"))) for n in self._names]


@pytest.mark.parametrize(
    ("names", "named", "local", "chosen"),
    [
        (("roce0",), "", "192.0.2.1", b"roce0"),  # the only one, wherever the control connection goes
        (("roce0", "roce1"), "", "10.1.0.1", b"roce1"),
        (("iwarp0", "roce0", "roce1"), "", "10.1.0.1", b"roce1"),
        (("roce0", "iwarp0", "iwarp1"), "", "10.2.0.1", b"iwarp0"),  # any: rdma_cm chooses by the address
        (("roce0", "iwarp0"), "iwarp0", "10.0.0.1", b"iwarp0"),
    ],
)
def test_device(names: tuple[str, ...], named: str, local: str, chosen: bytes) -> None:
    assert choose_device(Devices(*names), named, local).name == chosen


def test_no_device_has_the_address() -> None:
    with pytest.raises(
        Trouble, match=r"several RDMA devices \(roce0, roce1\), none with the address 10\.9\.0\.1"
    ) as caught:
        choose_device(Devices("roce0", "roce1"), "", "10.9.0.1")
    assert (caught.value.code, caught.value.hint) == ("no-device", "name one: device=")
