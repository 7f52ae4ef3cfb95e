import pytest

from guard.hook.traceparent import parse

GOOD = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def test_reads_a_parent_and_writes_a_child() -> None:
    context = parse(GOOD)
    assert context is not None
    assert context.sampled
    assert context.child(0xEF) == "00-" + "ab" * 16 + "-" + "0" * 14 + "ef-01"
    assert parse(GOOD[:-2] + "00").sampled is False
    assert parse("01" + GOOD[2:] + "-future").sampled


@pytest.mark.parametrize(
    "header",
    [
        None, 3, "", "x", GOOD.upper(), GOOD + "-x", "ff" + GOOD[2:],
        "00-" + "0" * 32 + "-" + "cd" * 8 + "-01", "00-" + "ab" * 16 + "-" + "0" * 16 + "-01",
    ],
)  # fmt: skip
def test_anything_else_is_no_parent(header: object) -> None:
    assert parse(header) is None
