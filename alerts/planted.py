"""A small fleet with planted figures, shown through the service's own metrics: what alerts and dashboards are tried on.

Nothing here is measured or learned: RTT, the two points and every fault are set from outside, and what follows from
them (TTFT, verdict, state of the controller) by the formulas of design section 4 with round numbers.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from guard import semconv
from guard.metrics import Telemetry
from guard.metrics.exposition import series
from guard.semconv import Metric
from guard.wire import FetchRecord, RequestRecord

MODEL = "llama-3.1-8b"
CLASSES = ("1k-2k/c0-4", "4k-8k/c5-16")
TOKENS = {"1k-2k/c0-4": 1500, "4k-8k/c5-16": 6000}
BOUND = 0.5
BUDGET = 0.05
TOKEN_BYTES = 131_072
LINK = 3.0e9
TARGETS = {"lmcache-mp/resp": "redis-a:6379", "lmcache/redis": "redis-b:6379"}


@dataclass
class Backend:
    """A remote tier: its RTT in seconds, where TTFT departs and where reading stops paying, and its faults."""

    rtt: float = 0.0003
    departure: float = 0.0012
    break_even: float = 0.006
    source: str = "measured"
    guarded: bool = True
    stalled: float = 0.0  # age of the oldest read, seconds
    probes_failing: float = 0.0  # share

    @property
    def verdict(self) -> str:
        """The state that holds at this RTT."""
        if self.rtt >= self.break_even:
            return "harmful"
        return "departed" if self.rtt >= self.departure else "ok"


@dataclass
class Engine:
    """One engine and what its hook last told."""

    id: str
    backend: str
    age: float = 1.0
    mode: str = semconv.MODE_AUTO
    queue: float = 0.01
    dropped: float = 0.0
    errors: float = 0.0
    dropping: float = 0.0  # per second
    failing: float = 0.0


@dataclass
class Fleet:
    """Engines, backends, and the service's telemetry over them. `now` is Unix seconds and moved by `step`."""

    now: float
    rate: float = 4.0
    seed: int = 1
    engines: list[Engine] = field(default_factory=list)
    backends: dict[str, Backend] = field(
        default_factory=lambda: {
            "lmcache-mp/resp": Backend(), "lmcache/redis": Backend(departure=0.002, break_even=0.009)
        }
    )  # fmt: skip
    ticking: bool = True
    unattainable: bool = False

    def __post_init__(self) -> None:
        """Starts the service anew."""
        self.random = random.Random(self.seed)
        self.last_tick = self.now
        self.vllm: dict[tuple[str, ...], float] = {}
        self.restart()

    def restart(self) -> None:
        """A new process of the service: it has counted nothing yet."""
        self.telemetry = Telemetry(lambda: self.now, self._gauges)
        self.seen: dict[str, str] = {}

    def grow(self, count: int = 4) -> None:
        """Engines come, two per backend in turn."""
        names = list(TARGETS)
        self.engines = [Engine(f"10.0.0.{n + 1}:8000/0", names[n % len(names)]) for n in range(count)]

    def step(self, seconds: float) -> None:
        """Lets time pass: requests, probes, the hooks' totals."""
        self.now += seconds
        if self.ticking:
            self.last_tick = self.now - 0.1
        count = self.telemetry.count
        for engine in self.engines:
            backend = self.backends[engine.backend]
            for _ in range(self._poisson(self.rate * seconds)):
                self._request(engine, backend)
            engine.dropped += engine.dropping * seconds
            engine.errors += engine.failing * seconds
            resource = {semconv.RECORDS_DROPPED: int(engine.dropped), semconv.HOOK_ERRORS: int(engine.errors)}
            self.telemetry.hook_totals(engine.id, ("1",), resource)
            spans = 4 * self.rate * seconds
            count(semconv.INGEST_SPANS, "accepted", by=spans)
            count(semconv.FORWARD_SPANS, "sent", by=spans)
            count(semconv.INGEST_REQUESTS, "200", by=seconds)
            count(semconv.HISTORY_ROWS, "written", by=self.rate * seconds)
        if not self.engines:
            return
        for name in ("rejected", "ignored"):
            count(semconv.INGEST_SPANS, name, by=0)
        count(semconv.INGEST_ORPHANS, "kv.fetch", by=0.02 * seconds)
        count(semconv.INGEST_LOST, "kv.fetch", "overflow", by=0)
        count(semconv.ESTIMATE_LOST, by=0)
        for name, backend in self.backends.items():
            target = TARGETS[name]
            for _ in range(max(1, int(2 * seconds))):
                failed = self.random.random() < backend.probes_failing
                count(semconv.PROBES_TOTAL, "resp", target, "failed" if failed else "ok")
                if not failed:
                    value = backend.rtt * self.random.lognormvariate(0.1, 0.15)
                    self.telemetry.observe_value(semconv.RTT_SECONDS, "resp", target, value=value)
            self._events(name, backend)

    def _poisson(self, mean: float) -> int:
        total, count = self.random.expovariate(1.0), 0
        while total < mean:
            total, count = total + self.random.expovariate(1.0), count + 1
        return count

    def _events(self, name: str, backend: Backend) -> None:
        for kind in semconv.EVENT_KINDS:
            self.telemetry.count(semconv.EVENTS_TOTAL, kind, by=0)
        before, now = self.seen.get(name, "ok"), backend.verdict
        self.seen[name] = now
        if before == now:
            return
        kind = semconv.EVENT_BREAK_EVEN if "harmful" in (before, now) else semconv.EVENT_DEPARTURE
        for one in (kind, semconv.EVENT_RTT, semconv.EVENT_CONTROLLER):
            self.telemetry.count(semconv.EVENTS_TOTAL, one)

    def state(self, engine: Engine) -> str:
        """What the controller does with an engine."""
        backend = self.backends[engine.backend]
        if not backend.guarded or engine.mode != semconv.MODE_AUTO:
            return "open"
        return {"ok": "open", "departed": "limited", "harmful": "bypass"}[backend.verdict]

    def projected(self, backend: Backend, class_: str, choice: str) -> float:
        """Projected TTFT of a class, seconds."""
        tokens = TOKENS[class_]
        prefill = 0.01 + 5e-5 * tokens + 2e-9 * tokens * tokens
        if choice == "recompute":
            return 0.02 + prefill
        trips = 10 + tokens / 256
        return 0.02 + 0.1 * prefill + 2.2 * trips * backend.rtt + tokens * TOKEN_BYTES / LINK

    def _request(self, engine: Engine, backend: Backend) -> None:
        class_ = self.random.choice(CLASSES)
        hit = self.random.random() < 0.6
        state = self.state(engine)
        skipped = engine.mode == semconv.MODE_OFF or (state == "bypass" and self.random.random() > 0.03)
        choice = "remote" if hit and not skipped else "recompute"
        decision, reason = ("skip", "loss") if skipped else ("remote", "pays") if hit else ("none", "miss")
        noise = self.random.lognormvariate(0.0, 0.12)
        ttft = (self.projected(backend, class_, choice) + engine.queue) * noise
        lookup = 0.0 if skipped else (0.001 + 10 * backend.rtt) * noise
        fetch = max(0.0, 0.8 * (ttft - lookup) - 0.02) if choice == "remote" else 0.0
        rest = ttft - lookup - fetch - engine.queue
        trace_id = f"{self.random.getrandbits(128):032x}"
        start = int((self.now - ttft) * 1e9)
        fetches = [
            FetchRecord(
                span_id="1", attempt=1, start_ns=start, seconds=fetch, outcome="ok" if self.random.random() > 0.01 else "failed",
                bytes=TOKENS[class_] * TOKEN_BYTES,
            )
        ] if fetch else []  # fmt: skip
        self.telemetry.observe(
            RequestRecord(
                internal_id="i", request_id="r", trace_id=trace_id, span_id="s", engine_id=engine.id, model=MODEL,
                backend=engine.backend, class_=class_, arrival_ns=start, prompt_tokens=TOKENS[class_], tokens_local=0,
                tokens_matched=0, tokens_loaded=0, tokens_computed=0, ttft=ttft, intake=0.001, queue=engine.queue,
                lookup=lookup, slot=0.0, fetch=fetch, resume=0.0, prefill=rest, residual=0.002 * noise,
                exposed_wait=lookup + fetch, decision=decision, reason=reason, fetches=fetches,
            )
        )  # fmt: skip
        outcome = "missed" if ttft > BOUND else "met"
        for one in ("met", "missed"):
            by = 1.0 if one == outcome else 0.0
            self.telemetry.count(semconv.SLA_REQUESTS, MODEL, engine.id, class_, one, by=by)
        self._vllm(engine, engine.queue + lookup + fetch, ttft, hit and not skipped)

    def _vllm(self, engine: Engine, queued: float, ttft: float, hit: bool) -> None:
        for name, value in (
            ("vllm:request_queue_time_seconds_sum", queued), ("vllm:request_queue_time_seconds_count", 1.0),
            ("vllm:time_to_first_token_seconds_sum", ttft), ("vllm:time_to_first_token_seconds_count", 1.0),
            ("vllm:request_success_total", 1.0), ("vllm:external_prefix_cache_queries_total", 100.0),
            ("vllm:external_prefix_cache_hits_total", 100.0 * hit),
        ):  # fmt: skip
            key = (name, engine.id.rpartition("/")[0])
            self.vllm[key] = self.vllm.get(key, 0.0) + value

    def vllm_lines(self, instance: str | None = None) -> Iterator[str]:
        """Series of vLLM itself, of one instance as that serves them, or of all with the labels that a scrape adds."""
        for (name, where), value in self.vllm.items():
            labels = {"engine": "0", "model_name": MODEL}
            if instance is None:
                labels |= {"instance": where, "job": "vllm"}
            elif where != instance:
                continue
            yield f"{series(name, labels, labels.values())}{value!r}"
        for engine in self.engines:
            where = engine.id.rpartition("/")[0]
            labels = {"engine": "0", "model_name": MODEL}
            if instance is None:
                labels |= {"instance": where, "job": "vllm"}
            elif where != instance:
                continue
            waiting = 1 + int(40 * engine.queue)
            yield f"{series('vllm:num_requests_waiting', labels, labels.values())}{waiting}"
            yield f"{series('vllm:num_requests_running', labels, labels.values())}{3}"

    def _gauges(self) -> Iterator[tuple[Metric, Sequence[str], float]]:
        for engine in self.engines:
            where, _, rank = engine.id.rpartition("/")
            backend = self.backends[engine.backend]
            labels = (MODEL, engine.id, engine.backend)
            state = self.state(engine)
            yield semconv.ENGINE_INFO, (engine.id, where, rank, MODEL), 1.0
            yield semconv.DIRECTIVE_AGE, (engine.id,), engine.age
            yield semconv.OFFLOAD_MODE, (*labels, engine.mode), 1.0
            yield semconv.CONTROLLER_STATE, (*labels, state), 1.0
            yield semconv.KV_FETCH_INFLIGHT, labels, 0.0 if state == "bypass" else 1.0 + round(2000 * backend.rtt)
            yield semconv.KV_FETCH_OLDEST_AGE, labels, backend.stalled or 0.01
            yield semconv.SLA_ATTAINABLE, labels, float(not self.unattainable)
            if state != "open":
                yield semconv.READS_LIMIT, (*labels, "max_inflight"), 0.0 if state == "bypass" else 8.0
                yield semconv.READS_LIMIT, (*labels, "min_tokens"), 1024.0
            for choice in ("remote", "recompute"):
                yield semconv.PROJECTION_ERROR, (*labels, choice), 0.08 if choice == "recompute" else 0.11
                for class_ in CLASSES:
                    value = 1.25 * self.projected(backend, class_, choice)
                    yield semconv.TTFT_PROJECTED, (*labels, class_, choice), value
        for name, backend in self.backends.items() if self.engines else ():
            yield semconv.RTT_IDLE, ("resp", TARGETS[name]), backend.rtt
            for class_ in CLASSES:
                yield from self._points(name, backend, class_)
        if self.engines:
            yield semconv.SLA_TTFT, ("*", "*", "0.95"), BOUND
            yield semconv.SLA_BUDGET, (MODEL, "*"), BUDGET
        yield semconv.JOIN_PENDING, (), self.rate * len(self.engines)
        yield semconv.LOOP_LAST_RUN, (), self.last_tick
        yield semconv.LOOP_LAG, (), 0.004

    def _points(self, name: str, backend: Backend, class_: str) -> Iterator[tuple[Metric, Sequence[str], float]]:
        where = (MODEL, name, class_)
        for kind, value in (("departure", backend.departure), ("break-even", backend.break_even)):
            for bound, factor in (("value", 1.0), ("low", 0.8), ("high", 1.3)):
                yield semconv.INFLECTION_RTT, (*where, kind, bound, backend.source), value * factor
        yield semconv.INFLECTION_RTT, (*where, "now", "value", "measured"), backend.rtt
        yield semconv.INFLECTION_RTT, (*where, "floor", "value", "measured"), 0.0003
        cause = "rtt" if backend.verdict != "ok" else "unknown"
        for dimension, value in (("state", backend.verdict), ("cause", cause), ("shape", "no-knee")):
            yield semconv.VERDICT, (*where, dimension, value), 1.0
