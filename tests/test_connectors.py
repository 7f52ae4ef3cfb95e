"""The table recognises connectors by what they can do, then by name, and answers safely for the rest."""

from guard.connectors import (
    EXAMPLE,
    LMCACHE,
    LMCACHE_MP,
    MOONCAKE_STORE,
    NIXL,
    TABLE,
    UNKNOWN,
    capability_of,
)


def _class(name: str, *parents: type, **attributes: object) -> type:
    return type(name, parents or (object,), attributes)


def test_both_classes_behind_lmcache_mp_are_recognised_by_their_trackers() -> None:
    tracker = {"_get_or_create_request_tracker": lambda self, request: None}
    assert capability_of(_class("LMCacheMPConnectorUpstream", **tracker)) is LMCACHE_MP
    assert capability_of(_class("RenamedByADistribution", **tracker)) is LMCACHE_MP


def test_names_of_parents_count() -> None:
    assert capability_of(_class("Ours", _class("NixlBaseConnector"))) is NIXL
    assert capability_of(_class("LMCacheConnectorV1")) is LMCACHE
    assert capability_of(_class("ExampleConnector")) is EXAMPLE
    assert capability_of(_class("MooncakeStoreConnector")) is MOONCAKE_STORE


def test_an_unknown_connector_is_asked_and_refused_by_no_match_only() -> None:
    entry = capability_of(_class("SomebodysConnector"))
    assert entry is UNKNOWN
    assert (entry.skip, entry.decline, entry.partial, entry.stop_stores) == (False, True, False, False)


def test_no_entry_allows_partial_counts_or_refuses_hand_offs() -> None:
    for entry in TABLE:
        assert not entry.partial, entry.kind
        if entry.handoff:
            assert not entry.skip, entry.kind
            assert not entry.decline, entry.kind


def test_entries_are_distinct() -> None:
    kinds = [entry.kind for entry in TABLE]
    names = [name for entry in TABLE for name in entry.names]
    assert len(set(kinds)) == len(kinds)
    assert len(set(names)) == len(names)
