"""What is gathered for the controller: bounded, per process, and safe to look at from a scrape's thread."""

import json

import pytest

from guard.costs import Costs
from guard.service.evidence import READS_KEPT, Flight, Gathered, Gatherer
from guard.wire import FetchRecord
from tests.service.routes.test_request_list import record

KEY = ("h:8000/0", "a/b")
LMCACHE = "lmcache-mp/store"
HOST, OTHER = ("h", "i", "1"), ("h", "i", "2")


def fetch(number: int) -> FetchRecord:
    return FetchRecord(span_id=f"f{number}", attempt=1, start_ns=0, seconds=float(number), outcome="ok")


def told(**backends: list[float]) -> str:
    return json.dumps({name.replace("_", "/"): value for name, value in backends.items()})


def test_reads_of_an_engine_that_nobody_asks_about_are_bounded() -> None:
    gatherer = Gatherer()
    for number in range(READS_KEPT + 10):
        gatherer.take(record(number, fetches=[fetch(number)]), None, 1.0)
    reads = gatherer.of(KEY).taken()
    assert [len(reads), reads[0].seconds, reads[-1].seconds] == [READS_KEPT, 10.0, READS_KEPT + 9.0]
    assert gatherer.of(KEY).taken() == ()


@pytest.mark.parametrize(
    ("polls", "ranks", "waited"),
    [(1, {}, 0.0), (2, {}, 2.4), (3, {0: 0.08, 1: 0.1}, 2.4 + 1.3), (81, {0: 1.4}, 0.06)],
    ids=["answered at once", "asked and heard", "a busy engine", "an idle one"],
)
def test_what_a_read_may_have_waited_for_the_engine(polls: int, ranks: dict[int, float], waited: float) -> None:
    """A lookup is answered in a step, and a load that the workers timed is seen in one."""
    gatherer = Gatherer()
    load = FetchRecord(span_id="f", attempt=1, start_ns=0, seconds=1.4, outcome="ok", ranks=ranks)
    gatherer.take(record(1, fetches=[load], lookup=2.4, lookup_polls=polls), None, 1.0)
    (read,) = gatherer.of(KEY).taken()
    assert read.seconds == pytest.approx(3.8)
    assert read.waited == pytest.approx(waited)


@pytest.mark.parametrize(("backend", "lookup"), [("lmcache-mp/store", 0.31), ("mooncake-store/store", 0.11)])
def test_what_vllm_holds_itself_is_sent_by_the_lookup_and_not_fetched(backend: str, lookup: float) -> None:
    costs = Costs({"seconds": 0.02, "per_byte": 4e-8, "lookup_seconds": 0.01, "lookup_per_byte": 1e-7}, {"b": 1e-4})
    one = FetchRecord(
        span_id="f", attempt=1, start_ns=0, seconds=0.06, outcome="ok", tokens=1000, bytes=1_000_000, inflight=1
    )
    gatherer = Gatherer()
    gatherer.take(
        record(
            1, backend=backend, prompt_tokens=3500, tokens_local=2000, tokens_matched=1000, tokens_loaded=1000,
            lookup=lookup, fetch=0.06, ttft=lookup + 0.06 + 0.05, fetches=[one],
        ),
        costs, 1.0,
    )  # fmt: skip
    assert gatherer.of((KEY[0], backend)).errors["remote"][0] == pytest.approx(0.0, abs=1e-9)


def test_one_client_that_asks_again_and_again_keeps_nobody_waiting() -> None:
    """It wants the GPU four fifths of the time, but never met another request."""
    gatherer = Gatherer()
    for number in range(100):
        gatherer.take(record(number, backend=LMCACHE, ttft=0.4, prefill=0.4, waiting=0), None, number / 2.0)
    assert gatherer.of((KEY[0], LMCACHE)).gpu_seconds > 0.0
    assert gatherer.of((KEY[0], LMCACHE)).waiting(50.0) == 0.0


def test_requests_that_wait_for_the_gpu_are_counted_by_their_time() -> None:
    """Three a second, each 0.4 s without the GPU's answer: 1.2 at a time. What waits for its KV is not among them."""
    gatherer, sync = Gatherer(), "lmcache/store"
    for number in range(600):
        for backend in (LMCACHE, sync):
            one = record(
                2 * number + (backend == sync), backend=backend, ttft=3.0, queue=0.1, resume=0.2, prefill=0.1,
                lookup=1.0, slot=0.6, fetch=1.0, waiting=5,
            )  # fmt: skip
            gatherer.take(one, None, number / 3.0)
    assert gatherer.of((KEY[0], LMCACHE)).waiting(200.0) == pytest.approx(1.2, rel=0.05)
    assert gatherer.of((KEY[0], sync)).waiting(200.0) == 0.0  # its loads hold everybody up
    assert gatherer.of((KEY[0], LMCACHE)).waiting(215.0) == pytest.approx(0.6, rel=0.05)
    assert gatherer.of((KEY[0], LMCACHE)).waiting(300.0) == 0.0


def test_a_backend_that_a_process_tells_of_no_more_has_nothing_in_flight() -> None:
    gatherer = Gatherer()
    gatherer.told(KEY[0], HOST, told(a_b=[2, 100, 0.5], c_d=[1, 10, 0.0]), 1.0)
    gatherer.told(KEY[0], OTHER, told(a_b=[3, 300, 0.1]), 1.0)
    gatherer.told("other/0", HOST, told(a_b=[7, 700, 0.0]), 1.0)
    assert gatherer.of(KEY).flight(1.0) == (5, 400, 0.5)
    gatherer.told(KEY[0], HOST, told(c_d=[1, 10, 0.0]), 2.0)
    assert gatherer.of(KEY).flight(2.0) == (3, 300, 0.1)
    gatherer.told(KEY[0], OTHER, "{}", 2.0)
    assert gatherer.of(KEY).flight(2.0) == (0, 0, 0.0)
    assert gatherer.of((KEY[0], "c/d")).flight(2.0)[0] == 1
    assert gatherer.of(("other/0", "a/b")).flight(2.0)[0] == 7


def test_what_cannot_be_read_changes_nothing() -> None:
    gatherer = Gatherer()
    gatherer.told(KEY[0], HOST, told(a_b=[2, 100, 0.5]), 1.0)
    for text in ("{", "[]", 7, json.dumps({str(number): [1, 1, 1] for number in range(65)})):
        gatherer.told(KEY[0], HOST, text, 1.0)
    gatherer.told(KEY[0], OTHER, told(a_b=[-1, 0, 0]), 1.0)
    assert gatherer.of(KEY).flight(1.0) == (2, 100, 0.5)


def test_a_scrape_may_look_while_a_hook_tells() -> None:
    """The event loop takes exports while a scrape's thread counts; here one comes at the worst moment."""
    held = Gathered()

    class Meanwhile(Flight):
        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            held.flights[("another", name)] = Flight(1.0, 1, 1, 0.0)
            return super().__getattribute__(name)

    held.flights[HOST] = Meanwhile(1.0, 2, 100, 0.5)
    assert held.flight(1.0)[0] == 2
