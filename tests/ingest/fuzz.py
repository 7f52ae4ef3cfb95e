"""Malformed OTLP bodies without end: decoded, joined and answered; nothing but a clear refusal may come of it.

Good bodies (protobuf and JSON, plain and gzip) are mutated with a seed: bits flipped, bytes cut, doubled, moved and
inserted, bodies spliced, numbers made absurd, lengths made to lie. What can still be read must leave a sound
account; all else must be a WireError. Memory is read at a tenth of the way and at the end.

    python -m tests.ingest.fuzz --bodies 1000000 --seed 1
"""

import argparse
import gzip
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.payload import build_one
from guard.correlate.join import Joiner
from guard.errors import TooLargeError, WireError
from guard.ingest import otlp

NOW_NS = 1_800_000_000 * 10**9
KINDS = (otlp.PROTOBUF, otlp.JSON)
ABSURD = (
    b"-1", b"1e999", b"NaN", b"null", b"18446744073709551616", b"true", b'""', b"[]", b"{}", b"[" * 300, b'{"a":' * 200,
    b'"\\ud800"', b"\xff\xfe", b"\x00", b"0.1e-400", b'"' + b"x" * 2000 + b'"',
)  # fmt: skip
_JSON_VALUE = re.compile(rb':("[^"]*"|-?[0-9.e+-]+)')
LIMITS = otlp.Limits(max_body=1 << 20, max_decompressed=1 << 20)


def seeds() -> dict[str, list[bytes]]:
    """Good bodies by content type, each of one request."""
    found: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
    for number in range(16):
        for kind, body in build_one("in-process" if number % 2 else "lmcache-mp", NOW_NS, number).items():
            found[kind].append(body)
    return found


def mutate(body: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """`body` with one to four things wrong with it."""
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        at, size = rng.randrange(len(data)), min(rng.choice((1, 1, 2, 8, 64)), 64)
        what = rng.randrange(9)
        if what == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x0A, 0x12))
        elif what == 2:
            del data[at : at + size]
        elif what == 3:
            data[at:at] = rng.randbytes(size)
        elif what == 4:
            data[at:at] = data[at : at + size * 4]
        elif what == 5:
            del data[at:]
        elif what == 6:
            other = rng.choice(others)
            data[at:] = other[rng.randrange(len(other)) :]
        elif what == 7:
            data[at : at + size] = rng.choice(ABSURD)
        else:
            data[at : at + 1] = b"\xff" * rng.randrange(1, 11)  # a varint that lies or does not end
    return bytes(data)


def inside(body: bytes, kind: str, others: list[bytes], rng: random.Random) -> bytes:
    """`body` whole as to its frame, with something wrong in a span: what gets furthest."""
    if kind == otlp.JSON:
        values = list(_JSON_VALUE.finditer(body))
        for found in sorted(rng.sample(values, min(len(values), rng.choice((1, 2, 8)))), key=lambda it: -it.start(1)):
            new = rng.choice((b"-1", b"1e999", b"null", b"18446744073709551616", b"true", b'""', b"[]", b"{}", b'"x"'))
            body = body[: found.start(1)] + new + body[found.end(1) :]
        return body
    encoded = b""
    for span in _spans(body):
        wrong = mutate(span, others, rng) if rng.random() < 0.5 else span
        encoded += b"\x12" + _varint(len(wrong)) + wrong
    scope = b"\x12" + _varint(len(encoded)) + encoded
    return b"\x0a" + _varint(len(scope)) + scope


def _spans(body: bytes) -> list[bytes]:
    request = ExportTraceServiceRequest.FromString(body)
    return [span.SerializeToString() for span in request.resource_spans[0].scope_spans[0].spans]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def one(number: int, bodies: dict[str, list[bytes]], rng: random.Random, joiner: Joiner) -> str:
    """Sends one mutated body through; says what came of it.

    Raises:
        AssertionError: the account of the body does not add up.
    """
    kind = KINDS[number & 1]
    good, encoding = rng.choice(bodies[kind]), ""
    body = inside(good, kind, bodies[kind], rng) if rng.random() < 0.5 else mutate(good, bodies[kind], rng)
    if number % 16 == 0:
        body, encoding = gzip.compress(body, 1), "gzip"
        if rng.random() < 0.5:
            body = mutate(body, [body], rng)
    try:
        batch = otlp.decode(body, content_type=kind, content_encoding=encoding, limits=LIMITS, now_ns=NOW_NS)
    except TooLargeError:
        return "too large"
    except WireError as error:
        str(error).encode()
        return "refused"
    assert batch.accepted == sum(len(spans) for _, spans in batch.groups)
    assert min(batch.accepted, batch.rejected, batch.ignored) >= 0
    now_ns = NOW_NS + number * 1_000_000
    for resource, spans in batch.groups:
        joiner.add(resource, spans, now_ns)
    if number % 64 == 0:
        for record in joiner.advance(now_ns):
            assert min(record.prompt_tokens, record.tokens_loaded, record.tokens_computed) >= 0
            assert record.ttft is None or record.ttft >= 0.0
    otlp.encode_response(batch.rejected, batch.message, kind)
    return "partial" if batch.rejected else "taken"


def run(count: int, seed: int) -> tuple[Counter[str], int, int]:
    """What came of so many bodies, and the resident bytes at a tenth of the way and at the end."""
    rng, bodies, joiner = random.Random(seed), seeds(), Joiner(max_pending=2000, max_retained=2000)
    found: Counter[str] = Counter()
    early = 0
    for number in range(count):
        try:
            found[one(number, bodies, rng, joiner)] += 1
        except Exception as error:
            error.add_note(f"body {number} of seed {seed}")
            raise
        if number == count // 10:
            early = resident()
    joiner.advance(NOW_NS + 10**15)
    assert joiner.counts.received == joiner.counts.settled + joiner.waiting
    return found, early, resident()


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    """Prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    found, early, late = run(options.bodies, options.seed)
    print(f"{options.bodies:,} malformed OTLP bodies, seed {options.seed}, {time.monotonic() - began:.0f} s: no crash")
    print("  " + ", ".join(f"{what} {count:,}" for what, count in sorted(found.items())))
    print(f"  memory: {early / 2**20:.1f} MiB after a tenth, {late / 2**20:.1f} MiB at the end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
