import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.classes import CLASSES, class_of
from guard.correlate.ids import join_key


@pytest.mark.parametrize(
    ("prompt", "running", "expected"),
    [
        (0, 0, "0-512/c0-4"), (511, 4, "0-512/c0-4"), (512, 5, "512-1k/c5-16"), (1023, 16, "512-1k/c5-16"),
        (1024, 17, "1k-2k/c17-64"), (2047, 64, "1k-2k/c17-64"), (2048, 65, "2k-4k/c65+"), (16384, 1, "16k-32k/c0-4"),
        (131071, 1, "64k-128k/c0-4"), (131072, 1, "128k+/c0-4"), (10**9, 10**9, "128k+/c65+"), (-5, -5, "0-512/c0-4"),
    ],
)  # fmt: skip
def test_class_of(prompt, running, expected):
    assert class_of(prompt, running) == expected


@settings(deadline=None)
@given(st.integers(-10, 1 << 50), st.integers(-10, 1 << 50))
def test_classes_are_bounded(prompt, running):
    assert class_of(prompt, running) in CLASSES
    assert len(set(CLASSES)) == 40


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("cmpl-9f1c", "cmpl-9f1c"),
        ("cmpl-9f1c-0-deadbeef", "cmpl-9f1c-0"),
        ("0_cmpl-9f1c-deadbeef", "cmpl-9f1c"),
        ("12_cmpl-9f1c", "cmpl-9f1c"),
        ("chatcmpl-0a1b2c3d4e5f60718293a4b5c6d7e8f9", "chatcmpl-0a1b2c3d4e5f60718293a4b5c6d7e8f9"),
        ("123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
        ("id-DEADBEEF", "id-DEADBEEF"),
        ("", ""),
    ],
)
def test_join_key(name, key):
    assert join_key(name) == key


@settings(deadline=None)
@given(st.text("abc-_0123", min_size=1, max_size=20), st.integers(0, 63), st.integers(0, (1 << 32) - 1))
def test_every_internal_id_leads_to_its_external_one(external, index, suffix):
    if join_key(external) != external:  # the client's own id looks like an internal one: time tells those apart
        return
    for internal in (f"{external}-{suffix:08x}", f"{index}_{external}", f"{index}_{external}-{suffix:08x}"):
        assert join_key(internal) == external
