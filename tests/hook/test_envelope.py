"""What crosses processes: the envelope, and timing that survives vLLM's aggregation over ranks."""

import pickle
from dataclasses import dataclass

from guard.hook.envelope import Context, Envelope, Load, SyncLoads, boot_id

CONTEXT = Context("r1", 0xAA, True, 0x1, 0x2)


def test_an_envelope_survives_the_way_to_another_process() -> None:
    envelope = Envelope((CONTEXT,), (Load("r1", 7, 1, 512, False),), 9)
    sent = pickle.dumps(envelope.plain())
    assert b"guard" not in sent  # a worker on a machine without kvguard reads the step too
    assert Envelope.read(pickle.loads(sent)) == envelope  # noqa: S301
    assert Envelope.read(None) is None
    assert Envelope.read((((("r1", 1),)), (), 0)) is None  # of another version
    wrapped = SyncLoads(None, 9, 1, 2, "boot")
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped  # noqa: S301


@dataclass
class Theirs:
    """A connector's own worker metadata, as strict as LMCache's."""

    value: int

    def aggregate(self, other: object) -> "Theirs":
        assert isinstance(other, Theirs)
        return Theirs(self.value + other.value)


def test_the_slowest_rank_counts_and_the_connectors_own_part_is_merged() -> None:
    fast = SyncLoads(Theirs(1), 9, 100, 150, "boot")
    slow = SyncLoads(Theirs(2), 9, 100, 190, "boot")
    for merged in (fast.aggregate(slow), slow.aggregate(fast)):
        assert (merged.start, merged.end, merged.inner) == (100, 190, Theirs(3))


def test_ranks_on_other_machines_are_compared_by_duration() -> None:
    here = SyncLoads(None, 9, 1000, 1050, "here")
    there = SyncLoads(None, 9, 5, 100, "there")
    assert here.aggregate(there).boot == "there"
    assert there.aggregate(here).boot == "there"


def test_a_rank_without_timing_does_not_break_the_aggregation() -> None:
    wrapped = SyncLoads(Theirs(1), 9, 0, 5, "boot")
    assert wrapped.aggregate(Theirs(2)).inner == Theirs(3)
    assert SyncLoads(None, 9, 0, 5, "boot").aggregate(Theirs(2)).inner == Theirs(2)
    assert wrapped.aggregate(SyncLoads(None, 9, 0, 9, "boot")).inner == Theirs(1)
    assert SyncLoads(None, 9, 0, 5, "boot").aggregate(wrapped).inner == Theirs(1)


def test_the_clock_has_one_name_per_machine() -> None:
    assert boot_id() == boot_id() != ""
