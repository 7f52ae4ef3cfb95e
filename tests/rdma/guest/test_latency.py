"""A READ's round-trip time is the bare one plus what netem adds; the guest's clock counts instructions."""

import statistics
from collections.abc import Iterator

import pytest

from guard.probe.prober import Prober
from tests.rdma.guest.conftest import FAR, FAR6, NEAR, NEAR6, measured, netem, probing, serving

READS = 50
EXACT = 5e-6


@pytest.fixture(scope="module")
def roce_prober(roce: int) -> Iterator[Prober]:
    with probing(FAR, roce, device="rxe0", source=NEAR) as prober:
        yield prober


@pytest.fixture(scope="module")
def iwarp_prober(iwarp: int) -> Iterator[Prober]:
    with probing(FAR, iwarp, device="siw0", source=NEAR) as prober:
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
def test_roce_read_is_base_plus_delay(roce_prober: Prober, roce_base: float, delay: int, record_property) -> None:
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


def test_the_device_that_has_the_address_is_found(roce: int) -> None:
    """Four devices, none named: source says which."""
    with probing(FAR, roce, source=NEAR) as prober:
        sample = measured(prober, 4)
    assert sample.problem == "" or "iWARP and RoCE do not mix" in sample.problem
    assert sample.problem or len(sample.rtts) == 4
