"""Five thousand malformed bodies; `make chaos` does a million."""

from tests.ingest.fuzz import run


def test_malformed_bodies_are_refused_or_taken_in_part_and_cost_no_memory() -> None:
    found, early, late = run(5000, seed=11)
    assert sum(found.values()) == 5000
    assert found["refused"] > 500
    assert found["partial"] > 500
    assert found["taken"] > 100
    assert late - early < 64 << 20
