"""The invented world of the traffic source: a link, a remote store, caches, conversations. Pure, all time is passed in.

    lookup    u = t0 + k*RTT                          k = 256-token chunks of the prompt
    fetch     f = t0 + k*RTT + wait for the link + B/W
    prefill   p = a + b*c + d*c*(n - c/2)             c = tokens computed of n (design.md section 4)

The numbers are those of no machine: about an 8B model whose KV takes 128 KiB per token, a 25 Gbit/s link, and a round
trip time that swings between a good and a bad value, so that remote reads sometimes pay and sometimes do not.
"""

import math
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

CHUNK_TOKENS: Final = 256
BLOCK_TOKENS: Final = 16
TOKEN_BYTES: Final = 128 * 1024
LOOKUP_SECONDS: Final = 0.0004
FETCH_SECONDS: Final = 0.001
LINK_BYTES_PER_SECOND: Final = 25e9 / 8
RTT_LOW: Final = 0.0002
RTT_HIGH: Final = 0.01
RTT_PERIOD: Final = 180.0
PREFILL: Final = (0.008, 8e-5, 4e-9)
DECODE_SECONDS: Final = 0.012
LONGEST_PROMPT: Final = 8192


def prefill_seconds(prompt: int, computed: int) -> float:
    """Time to compute the last `computed` of `prompt` tokens."""
    a, b, d = PREFILL
    return a + b * computed + d * computed * (prompt - computed / 2)


def rtt_seconds(at: float, engine: int) -> float:
    """Round trip time at `at` seconds: a slow swing on a log scale; every engine is at another point of it."""
    low, high = math.log(RTT_LOW), math.log(RTT_HIGH)
    swing = math.sin(2.0 * math.pi * (at / RTT_PERIOD + 0.37 * engine) - math.pi / 2.0)
    return math.exp((low + high) / 2.0 + swing * (high - low) / 2.0)


class Link:
    """One link to the store, shared by all engines: transfers go one after the other."""

    def __init__(self, bytes_per_second: float = LINK_BYTES_PER_SECOND) -> None:
        self._speed = bytes_per_second
        self._free = 0.0

    def transfer(self, at: float, size: int) -> float:
        """The time at which `size` bytes, ready at `at`, are over. Calls must come in the order of `at`."""
        self._free = max(self._free, at) + size / self._speed
        return self._free


class PrefixCache:
    """How much of each conversation is held, in whole `unit`s of tokens; least recently used out."""

    def __init__(self, tokens: int, unit: int) -> None:
        self._limit = tokens
        self._unit = unit
        self._held: OrderedDict[int, int] = OrderedDict()
        self._total = 0

    def matched(self, conversation: int, prompt: int) -> int:
        """Tokens held of a prompt; never all of it, since the last token must be computed."""
        held = self._held.get(conversation, 0)
        if held:
            self._held.move_to_end(conversation)
        return min(held, (prompt - 1) // self._unit * self._unit)

    def put(self, conversation: int, tokens: int) -> int:
        """Holds the first `tokens` of a conversation; returns how many of them are new."""
        tokens = tokens // self._unit * self._unit
        new = max(0, tokens - self._held.get(conversation, 0))
        if new:
            self._held[conversation] = tokens
            self._held.move_to_end(conversation)
            self._total += new
        while self._total > self._limit:
            self._total -= self._held.popitem(last=False)[1]
        return new


@dataclass(slots=True)
class Prompt:
    """One turn of a conversation: all that was said before and something new."""

    conversation: int
    tokens: int
    output: int


class Conversations:
    """Users who talk to whichever engine is next: first turns miss, later ones hit here, there, or in part."""

    def __init__(self, rng: random.Random, active: int) -> None:
        self._rng = rng
        self._count = 0
        self._active = [self._new() for _ in range(active)]

    def next(self) -> Prompt:
        """The next turn of some conversation; one that has grown too long is replaced by a new one."""
        rng = self._rng
        slot = rng.randrange(len(self._active))
        conversation, length = self._active[slot]
        prompt = length + rng.randint(40, 600)
        output = 1 + min(400, int(rng.expovariate(1 / 60)))
        if prompt + output > LONGEST_PROMPT or rng.random() < 0.1:
            self._active[slot] = conversation, length = self._new()
            prompt = length
        self._active[slot] = (conversation, prompt + output)
        return Prompt(conversation, min(prompt, LONGEST_PROMPT), output)

    def histories(self) -> tuple[tuple[int, int], ...]:
        """The conversations under way: number and tokens said so far."""
        return tuple(self._active)

    def _new(self) -> tuple[int, int]:
        self._count += 1
        return self._count, int(min(6000.0, 200.0 + self._rng.lognormvariate(7.0, 0.8)))
