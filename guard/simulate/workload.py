"""Who asks what and when: conversations, closed loops, recorded traces. Seeded."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from guard.simulate import traces
from guard.simulate.clock import Schedule
from guard.simulate.job import Job, Prompt
from guard.simulate.scenario import Closed, Conversations, Scenario, Trace

Send = Callable[[float, Prompt], None]
_SPAN = 1 << 24
"""Blocks of one conversation at most: a block's hash is conversation * _SPAN + its place."""


class Workload(Protocol):
    """A source of requests."""

    def begin(self, schedule: Schedule, send: Send) -> None:
        """Schedules the first request."""
        ...

    def finished(self, now: float, job: Job) -> None:
        """A request is over: who waits for its answer may go on."""
        ...

    def known(self) -> Iterator[Sequence[int]]:
        """Prompts that the remote store holds from the start."""
        ...

    def over(self, now: float) -> bool:
        """Whether no request comes any more by itself."""
        ...


def make(scenario: Scenario, rng: random.Random) -> Workload:
    """The workload of a scenario.

    Raises:
        ConfigError: its trace cannot be read.
    """
    chunk, spec = scenario.connector.chunk_tokens, scenario.workload
    if isinstance(spec, Conversations):
        return Users(spec, chunk, scenario.seconds, rng)
    if isinstance(spec, Closed):
        return Sessions(spec, chunk, scenario.engine.count, rng)
    return Recorded(spec, chunk, scenario.seconds, rng)


class Users:
    """Conversations whose turns arrive at random (Poisson); one that has grown too long is replaced by a new one."""

    def __init__(self, spec: Conversations, chunk: int, seconds: float, rng: random.Random) -> None:
        self._spec = spec
        self._chunk = chunk
        self._end = seconds
        self._rng = rng
        self._count = 0
        self._users = [self._new() for _ in range(spec.users)]

    def begin(self, schedule: Schedule, send: Send) -> None:
        """Schedules the first arrival; each schedules the next."""

        def arrive(now: float) -> None:
            if now < self._end:
                send(now, self.turn())
                schedule.at(now + self._rng.expovariate(self._spec.rate), arrive)

        schedule.at(self._rng.expovariate(self._spec.rate), arrive)

    def finished(self, now: float, job: Job) -> None:
        """Nobody waits."""

    def known(self) -> Iterator[Sequence[int]]:
        """Every second conversation under way, so that there are hits and misses from the start."""
        return (_blocks(number, tokens, self._chunk) for number, tokens in self._users[::2])

    def over(self, now: float) -> bool:
        """At the scenario's end."""
        return now >= self._end

    def turn(self) -> Prompt:
        """The next turn of some conversation."""
        rng, spec = self._rng, self._spec
        slot = rng.randrange(len(self._users))
        number, said = self._users[slot]
        tokens = said + rng.randint(max(1, spec.turn_tokens // 5), 2 * spec.turn_tokens)
        output = 1 + min(10 * spec.output_tokens, int(rng.expovariate(1 / spec.output_tokens)))
        if tokens + output > spec.longest or rng.random() < spec.fresh:
            number, tokens = self._new()
        self._users[slot] = (number, tokens + output)
        return Prompt(tokens, output, _blocks(number, tokens, self._chunk), session=number)

    def _new(self) -> tuple[int, int]:
        self._count += 1
        spec = self._spec
        tokens = 0.1 * spec.first_tokens + 0.9 * spec.first_tokens * self._rng.lognormvariate(-0.32, 0.8)  # mean 1
        return self._count, max(1, int(min(0.75 * spec.longest, tokens)))


class Sessions:
    """A closed loop: each session sends its next turn when the last one has its answer; all start at once."""

    def __init__(self, spec: Closed, chunk: int, engines: int, rng: random.Random) -> None:
        self._spec = spec
        self._chunk = chunk
        self._engines = engines
        self._rng = rng
        self._own = int((1.0 - spec.unique) * spec.prompt_tokens) // chunk * chunk
        self._turns = [0] * spec.concurrency
        self._home = [number % engines for number in range(spec.concurrency)]
        self._schedule = Schedule()
        self._send: Send = lambda _now, _prompt: None

    def begin(self, schedule: Schedule, send: Send) -> None:
        """All sessions send their first turn, within 10 ms."""
        self._schedule, self._send = schedule, send
        for number in range(self._spec.concurrency):
            schedule.at(self._rng.uniform(0.0, 0.01), self._turn_of(number))

    def finished(self, now: float, job: Job) -> None:
        """The session goes on."""
        number = job.prompt.session
        if self._turns[number] < self._spec.turns:
            self._schedule.at(now + self._spec.think, self._turn_of(number))

    def known(self) -> Iterator[Sequence[int]]:
        """What is each session's own."""
        return (_blocks(number, self._own, self._chunk) for number in range(self._spec.concurrency))

    def over(self, now: float) -> bool:
        """When every session has had its turns."""
        return min(self._turns) >= self._spec.turns

    def _turn_of(self, number: int) -> Callable[[float], None]:
        return lambda now: self._turn(now, number)

    def _turn(self, now: float, number: int) -> None:
        spec, turn = self._spec, self._turns[number]
        self._turns[number] += 1
        engine = self._home[number]
        if turn and self._engines > 1 and self._rng.random() < spec.moved:
            engine = (engine + self._rng.randrange(1, self._engines)) % self._engines
            self._home[number] = engine
        own = _blocks(number, self._own, self._chunk)
        unique = _blocks(spec.concurrency * (turn + 1) + number, spec.prompt_tokens - self._own, self._chunk)
        self._send(now, Prompt(spec.prompt_tokens, spec.output_tokens, own + unique, engine, session=number))


class Recorded:
    """A trace, replayed at its own times divided by `pace`."""

    def __init__(self, spec: Trace, chunk: int, seconds: float, rng: random.Random) -> None:
        self._arrivals = [
            each for each in traces.read(spec.path, chunk, spec.limit, spec.reuse, rng) if each[0] / spec.pace < seconds
        ]
        self._pace = spec.pace

    def begin(self, schedule: Schedule, send: Send) -> None:
        """Schedules the first arrival; each schedules the next."""
        arrivals = iter(self._arrivals)

        def following() -> None:
            found = next(arrivals, None)
            if found is not None:
                at, prompt = found
                schedule.at(at / self._pace, lambda now: arrive(now, prompt))

        def arrive(now: float, prompt: Prompt) -> None:
            following()
            send(now, prompt)

        following()

    def finished(self, now: float, job: Job) -> None:
        """Nobody waits."""

    def known(self) -> Iterator[Sequence[int]]:
        """The store starts empty."""
        return iter(())

    def over(self, now: float) -> bool:
        """After the last arrival."""
        return not self._arrivals or now > self._arrivals[-1][0] / self._pace


def _blocks(number: int, tokens: int, chunk: int) -> tuple[int, ...]:
    first = number * _SPAN
    return tuple(range(first, first + tokens // chunk))
