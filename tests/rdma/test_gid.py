"""Which GID is chosen, of a host's with link-local, IPv4 and global IPv6 addresses, each in both RoCE kinds."""

import pytest

from guard.probe.rdma_verbs.gid import Gid, choose
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
