"""The idle RTT of a backend at a time."""

import pytest

from guard.probe.history import History, Track, address
from guard.probe.prober import Sample, Target


def sample(*rtts: float) -> Sample:
    return Sample(rtts=rtts, sent=len(rtts))


def test_the_least_of_the_rounds_around_a_time():
    track = Track(Target(target="h:1", prober="resp"))
    for at in range(100, 120):
        track.add(float(at), sample(1e-3 + at * 1e-6, 5e-3))
    assert track.idle(110.2) == pytest.approx(1e-3 + 108e-6)  # 111 is one ahead; 110, 109 and 108 before
    assert track.idle(119.0) == pytest.approx(1e-3 + 116e-6)
    assert track.idle(90.0) is None
    assert track.idle(140.0) is None


def test_our_own_bytes_do_not_count_as_idle():
    track = Track(Target(target="h:1", prober="resp"))
    for at, rtt in ((1.0, 2e-4), (2.0, 9e-3), (3.0, 8e-3)):
        track.add(at, sample(rtt, 2 * rtt))
    assert track.idle(3.0) == 2e-4


def test_a_step_is_over_after_three_rounds():
    track = Track(Target(target="h:1", prober="resp"))
    for at in range(40):
        track.add(float(at), sample(1e-4 if at < 20 else 9e-4))
    assert track.idle(18.0) == 1e-4
    assert track.idle(24.0) == 9e-4
    assert track.shift is not None
    assert (track.shift.since, track.shifted_at) == (20.0, 23.0)


def test_lost_rounds_are_counted_and_told():
    track = Track(Target(target="h:1", prober="resp", count=4))
    assert track.problem(5.0) == "not probed yet"
    track.add(1.0, Sample(rtts=(1e-3,), sent=2, problem="probe: no answer in time"))
    assert (track.ok, track.failed, track.problem(1.5)) == (1, 1, "")
    track.add(2.0, Sample(sent=1, problem="connect: Connection refused"))
    assert track.problem(2.5) == "connect: Connection refused"
    assert "no result for 100 s" in track.problem(102.0)
    assert (track.summary(3.0).n, track.summary(3.0).loss) == (1, pytest.approx(2 / 3))


def test_backends_by_label_by_address_and_by_trust():
    order = ("rdma", "resp", "tcpinfo")
    targets = [
        Target(target="10.0.0.1:6379", prober="tcpinfo", backend="a"),
        Target(target="redis://u@10.0.0.1:6379/0", prober="resp", backend="a"),
        Target(target="10.0.0.2:6379", prober="resp", backend="a"),
        Target(target="10.0.0.3:6379", prober="resp"),
    ]
    history = History(targets, order)
    for target, rtt in zip(targets, (9e-3, 1e-3, 3e-3, 5e-3), strict=True):
        history.tracks[target.key].add(10.0, sample(rtt))
    none: frozenset[str] = frozenset()
    assert history.idle("a", none, 10.0) == (2e-3, "resp")  # the median of two nodes; tcpinfo is believed last
    assert history.idle("a", frozenset({"10.0.0.1:6379"}), 10.0) == (1e-3, "resp")
    assert history.idle("other", frozenset({"10.0.0.3:6379"}), 10.0) == (5e-3, "resp")
    assert history.idle("other", none, 10.0) is None
    assert history.idle("", none, 10.0) is None


@pytest.mark.parametrize(
    ("target", "wanted"),
    [("h:1", "h:1"), ("redis://u@h:1/0", "h:1"), ("https://[::1]:8/x", "[::1]:8"), ("/mnt/x", "/mnt/x")],
)
def test_address(target, wanted):
    assert address(target) == wanted


def test_memory_is_bounded():
    track = Track(Target(target="h:1", prober="resp"))
    for at in range(5000):
        track.add(float(at), sample(1e-3))
    assert len(track.rounds) == 900


def test_a_scrape_may_ask_while_rounds_come_in():
    """The event loop adds rounds while a scrape's thread reads them; here one comes at the worst moment."""
    track = Track(Target(target="h:1", prober="resp"))

    class Meanwhile:
        sent = 1

        @property
        def rtts(self):
            track.rounds.append((3.0, sample(5e-3)))
            return (1e-3,)

    track.rounds.extend(((1.5, sample(2e-3)), (2.0, Meanwhile())))
    assert track.idle(2.5) == 1e-3
