"""A READ's round-trip time is the bare one plus what netem adds; the guest's clock counts instructions."""

import statistics
from collections.abc import Iterator

import pytest

from guard.probe.crossing import Detector
from guard.probe.prober import Prober
from tests.rdma.guest.conftest import FAR, FAR6, IWARP_FAR, IWARP_NEAR, NEAR, NEAR6, measured, netem, probing, serving

READS = 50
EXACT = 5e-6


@pytest.fixture(scope="module")
def roce_prober(roce: int) -> Iterator[Prober]:
    with probing(FAR, roce, device="rxe0", source=NEAR) as prober:
        yield prober


@pytest.fixture(scope="module")
def iwarp_prober(iwarp: int) -> Iterator[Prober]:
    with probing(IWARP_FAR, iwarp, device="siw0", source=IWARP_NEAR) as prober:
        yield prober


def rtts(prober: Prober, count: int = READS) -> list[float]:
    sample = measured(prober, count)
    assert sample.problem == ""
    assert len(sample.rtts) == sample.sent == count
    return sorted(sample.rtts)


@pytest.fixture(scope="module")
def roce_base(roce_prober: Prober) -> float:
    return statistics.median(rtts(roce_prober, 2 * READS))


@pytest.fixture(scope="module")
def iwarp_base(iwarp_prober: Prober) -> list[float]:
    return rtts(iwarp_prober, 2 * READS)


@pytest.mark.parametrize("delay", [0, 100, 200, 500, 1000, 2000])
def test_roce_read_is_base_plus_delay(roce_prober: Prober, roce_base: float, delay: int) -> None:
    with netem("delay", f"{delay}us"):
        p50 = statistics.median(rtts(roce_prober))
    print(f"roce-v2: base {roce_base * 1e6:.1f} us, netem {delay} us, READ p50 {p50 * 1e6:.1f} us")
    assert p50 == pytest.approx(roce_base + delay * 1e-6, abs=EXACT)


@pytest.mark.parametrize("delay", [0, 200, 1000])
def test_iwarp_read_is_base_plus_delay(iwarp_prober: Prober, iwarp_base: list[float], delay: int) -> None:
    base = statistics.median(iwarp_base)
    mad = statistics.median(abs(rtt - base) for rtt in iwarp_base)
    with netem("delay", f"{delay}us"):
        p50 = statistics.median(rtts(iwarp_prober))
    print(f"iwarp: base {base * 1e6:.1f} us, MAD {mad * 1e6:.2f} us, netem {delay} us, READ p50 {p50 * 1e6:.1f} us")
    assert p50 == pytest.approx(base + delay * 1e-6, abs=max(EXACT, 3 * mad))


def test_waiting_for_the_event_sees_the_delay_and_its_own_wake_up(roce: int, roce_base: float) -> None:
    with probing(FAR, roce, device="rxe0", source=NEAR, completion="event") as prober, netem("delay", "500us"):
        found = rtts(prober)
    print(f"roce-v2, event: READ min {found[0] * 1e6:.1f} us, p50 {statistics.median(found) * 1e6:.1f} us")
    assert roce_base + 500e-6 - EXACT < found[0] < roce_base + 800e-6


def test_ipv6_gid_and_control_connection(devices: None, ports: Iterator[int], roce_base: float) -> None:
    port = next(ports)
    with serving("rxe1", FAR6, port), probing(f"[{FAR6}]", port, device="rxe0", source=NEAR6) as prober:
        with netem("delay", "200us"):
            slow = statistics.median(rtts(prober))
        base = statistics.median(rtts(prober))
    print(f"roce-v2 over IPv6: base {base * 1e6:.1f} us, netem 200 us, READ p50 {slow * 1e6:.1f} us")
    assert slow == pytest.approx(base + 200e-6, abs=EXACT)


@pytest.mark.parametrize("transport", ["roce", "iwarp"])
def test_the_device_that_has_the_address_is_found(request: pytest.FixtureRequest, transport: str) -> None:
    """Four devices, none named: the address says which."""
    port = request.getfixturevalue(transport)
    far, near = (FAR, NEAR) if transport == "roce" else (IWARP_FAR, IWARP_NEAR)
    with probing(far, port, source=near) as prober:
        sample = measured(prober, 4)
    assert sample.problem == ""
    assert len(sample.rtts) == 4


def test_a_step_raises_the_crossing_event_and_noise_does_not(roce_prober: Prober) -> None:
    """100 to 300 us: rounds of four READs, a second apart as by default; the detector is given that time."""
    detector, shifts = Detector(), []
    for second, delay in enumerate([100] * 20 + [300] * 10):
        with netem("delay", f"{delay}us"):
            sample = measured(roce_prober, 4)
        assert sample.problem == ""
        shift = detector.add(float(second), min(sample.rtts))
        if shift:
            shifts.append((second, shift))
    print(f"shifts: {shifts}")
    [(second, shift)] = shifts
    assert 20 <= second < 25  # within five seconds of the step
    assert shift.since >= 20.0
    assert shift.after - shift.before == pytest.approx(200e-6, abs=2 * EXACT)
