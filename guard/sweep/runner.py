"""Carries out a plan against a live engine, and puts the road and the switch back whatever happens."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from guard.errors import SweepError
from guard.sweep.engine import Engine, Prompts
from guard.sweep.injector import Injector
from guard.sweep.plan import Cell, Plan, Road
from guard.sweep.results import Measured, Results, Sample
from guard.sweep.service import Service

HELD: Final = 0.5
"""A request took the remote (local) road when that tier gave at least this share of its prompt."""

STORE_SECONDS: Final = 120.0
_MODES: Final = {"remote": "on", "recompute": "off", "local": "on"}


class Sweep:
    """One run. `rtt` measures the idle round-trip time to the store now, seconds; `told` is called after each step."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        service: Service,
        injector: Injector,
        results: Results,
        *,
        rtt: Callable[[], float | None] = lambda: None,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._plan, self._engine, self._service = plan, engine, service
        self._injector, self._results, self._rtt, self._told = injector, results, rtt, told
        self._prompts: list[str] = []

    def run(self) -> None:
        """Measures every cell that is not in the results yet.

        Raises:
            SweepError: something does not work as it must; the road and the switch are put back first.
        """
        missing = [cell for cell in self._plan.cells() if cell.key not in self._results.cells]
        if not missing:
            return
        self._service.refuse_override()
        try:
            self._injector.set(0.0)
            self._prepare()
            for cell in missing:
                self._results.add(self._measure(cell))
                self._told(cell.key)
        finally:
            self._restore()

    def _restore(self) -> None:
        problems = []
        for restore in (self._injector.restore, self._service.restore):
            try:
                restore()
            except SweepError as error:
                problems.append(str(error))
        if problems:
            raise SweepError("NOT put back, do it by hand: " + "; ".join(problems))

    def _prepare(self) -> None:
        """Fills the remote tier with the prompts, proves that they come from there, and warms up."""
        self._service.switch("on")
        prompts = Prompts(self._engine, self._plan.prompt_tokens, self._plan.seed)
        self._prompts = [prompts.make(number) for number in range(self._plan.prompts)]
        self._told("filling the remote tier")
        self._send(self._prompts, 1)
        end = time.monotonic() + STORE_SECONDS
        while True:
            self._engine.forget()
            samples = self._send(self._prompts, 1)
            held = sum(_took(sample, "remote") for sample in samples)
            if held == len(self._prompts):
                break
            if time.monotonic() > end:
                raise SweepError(_why_not(held, samples))
            self._told(f"{held} of {len(self._prompts)} prompts are in the remote tier")
            time.sleep(1.0)

    def _measure(self, cell: Cell) -> Measured:
        self._injector.set(cell.rtt)
        self._service.switch(_MODES[cell.road])
        if cell.road != "local":  # that one finds what the cell before left in the engine
            self._engine.forget()
        rtt = self._rtt()
        samples = self._send(self._prompts[: self._plan.size(cell)], cell.concurrency)
        wanted = tuple(sample for sample in samples if _took(sample, cell.road))
        if not wanted and cell.road != "local":
            raise SweepError(f"{cell.key}: " + _why_not(0, samples))
        return Measured(cell=cell, samples=wanted, strays=len(samples) - len(wanted), rtt=rtt, at=time.time())

    def _send(self, prompts: list[str], clients: int) -> list[Sample]:
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda text: self._engine.complete(text, self._plan.output_tokens), prompts))
        return [_sample(answer.ttft, self._service.record(answer.request_id)) for answer in answers]


def _sample(ttft: float, record: dict[str, Any]) -> Sample:
    parts = {part["part"]: part["seconds"] for part in record["timeline"]}
    tokens = record["tokens"]
    trips = [record["lookup"]["round_trips"], *(fetch["round_trips"] for fetch in record["fetches"])]
    known = [count for count in trips if count is not None]
    return Sample(
        ttft=ttft,
        hook_ttft=record["ttft_seconds"] or ttft,
        prompt=tokens["prompt"],
        local=tokens["local"],
        loaded=tokens["remote_loaded"],
        lookup=parts["lookup"],
        slot=parts["slot"],
        fetch=parts["fetch"],
        prefill=parts["prefill"],
        round_trips=sum(known) if known else None,
        decision=record["decision"],
    )


def _took(sample: Sample, road: Road) -> bool:
    if road == "remote":
        return sample.loaded >= HELD * sample.prompt
    if road == "local":
        return sample.local >= HELD * sample.prompt
    return sample.loaded == 0 and sample.local < HELD * sample.prompt


def _why_not(held: int, samples: list[Sample]) -> str:
    local = sum(sample.local >= HELD * sample.prompt for sample in samples)
    text = f"{held} of {len(samples)} requests took the road that was asked for"
    with contextlib.suppress(IndexError):
        one = samples[0]
        text += (
            f" (the first: decision {one.decision}, {one.prompt} prompt tokens, {one.local} local, {one.loaded} loaded)"
        )
    if local:
        return f"{text}; {local} were answered from the engine's own cache: name with --reset what empties it"
    return f"{text}: is the remote tier writable, and are the prompts longer than one chunk of it?"
