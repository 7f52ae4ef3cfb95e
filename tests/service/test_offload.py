"""Which switch holds, and what the directive says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.history.shapes import Override
from guard.service import offload
from guard.service.offload import Overrides, directive, etag, matches, parse_scope

NOW = 1000.0


def override(scope: str, mode: str = "off", expires_at: float | None = None) -> Override:
    return Override(
        scope=scope, mode=mode, stores=True, on_lease_expiry="keep", expires_at=expires_at, reason="why", who="ann",
        since=1.0, revision=7,
    )  # fmt: skip


ALL = [
    override("fleet", "off"),
    override("model:org/m", "auto"),
    override("backend:lmcache-mp/resp", "observe"),
    override("engine:h:8000/0", "on"),
]


def test_the_narrowest_scope_wins() -> None:
    def resolve(overrides: Overrides) -> str | None:
        found = overrides.resolve("h:8000/0", "org/m", "lmcache-mp/resp", NOW)
        return found.scope if found else None

    overrides = Overrides(ALL)
    seen = []
    while (scope := resolve(overrides)) is not None:
        seen.append(scope)
        overrides.remove(scope)
    assert seen == ["engine:h:8000/0", "backend:lmcache-mp/resp", "model:org/m", "fleet"]


def test_a_switch_of_another_engine_model_or_backend_does_not_count() -> None:
    overrides = Overrides([override("engine:h:8000/1"), override("model:other"), override("backend:lmcache-mp")])
    assert overrides.resolve("h:8000/0", "org/m", "lmcache-mp/resp", NOW) is None


def test_a_switch_ends_with_its_time_and_the_wider_one_holds_again() -> None:
    overrides = Overrides([override("fleet", "auto"), override("engine:e", "off", expires_at=NOW)])
    assert overrides.resolve("e", "", "b", NOW - 0.001).mode == "off"  # type: ignore[union-attr]
    assert overrides.resolve("e", "", "b", NOW).mode == "auto"  # type: ignore[union-attr]
    assert [item.scope for item in overrides.expired(NOW)] == ["engine:e"]
    assert [item.scope for item in overrides.in_force(NOW)] == ["fleet"]


def test_off_means_bypass_and_nothing_else_does() -> None:
    states = {
        mode: directive("e", "b", override("fleet", mode), NOW).state for mode in ("on", "off", "auto", "observe")
    }
    assert states == {"on": "open", "off": "bypass", "auto": "open", "observe": "open"}


def test_without_a_switch_the_directive_is_auto_and_open() -> None:
    found = directive("e", "b", None, NOW)
    assert (found.mode, found.state, found.stores, found.on_lease_expiry) == ("auto", "open", True, "open")
    assert found.ttl_seconds is None


def test_the_id_changes_with_the_content_and_not_with_time() -> None:
    base = override("fleet", expires_at=NOW + 60)
    first, later = directive("e", "b", base, NOW), directive("e", "b", base, NOW + 30)
    assert first.id == later.id
    assert (first.ttl_seconds, later.ttl_seconds) == (60.0, 30.0)
    changes = [
        {"mode": "on"}, {"stores": False}, {"on_lease_expiry": "open"}, {"expires_at": NOW + 61}, {"reason": "other"},
    ]  # fmt: skip
    ids = {directive("e", "b", replace(base, **change), NOW).id for change in changes}  # type: ignore[arg-type]
    assert len(ids | {first.id}) == len(changes) + 1
    assert directive("e", "b", replace(base, who="bob", revision=9, since=5.0), NOW).id == first.id


def test_etag_depends_on_every_directive() -> None:
    a, b = directive("e", "a", None, NOW), directive("e", "b", None, NOW)
    assert len({etag([]), etag([a]), etag([b]), etag([a, b])}) == 4


@pytest.mark.parametrize(
    "text", ["fleet", "model:org/name", "backend:lmcache-mp/resp", "engine:10.0.0.1:8000/0", "engine:[::1]:8000/0"]
)
def test_scopes_with_slashes_and_colons(text: str) -> None:
    assert parse_scope(text) == text


@pytest.mark.parametrize("text", ["", "fleet:x", "Fleet", "model:", "pod:x", "engine:a\nb", "model:" + "x" * 257])
def test_what_is_no_scope(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a scope: fleet, model:NAME"):
        parse_scope(text)


@given(st.text(max_size=40))
def test_every_text_is_a_scope_or_a_value_error(text: str) -> None:
    try:
        assert parse_scope(text) == text
    except ValueError:
        assert not matches(text, "e", "m", ["b"]) or text.partition(":")[0] in offload.SCOPE_KINDS


def test_matches() -> None:
    engine = ("h:8000/0", "org/m", ("a", "b"))
    assert [scope for scope in ("fleet", "engine:h:8000/0", "model:org/m", "backend:b") if matches(scope, *engine)] == [
        "fleet", "engine:h:8000/0", "model:org/m", "backend:b",
    ]  # fmt: skip
    assert not any(matches(scope, *engine) for scope in ("engine:h:8000/1", "model:org", "backend:c"))


def test_default_on_lease_expiry() -> None:
    assert [offload.default_on_lease_expiry(mode) for mode in ("off", "on", "auto", "observe")] == [
        "keep", "open", "open", "open",
    ]  # fmt: skip
