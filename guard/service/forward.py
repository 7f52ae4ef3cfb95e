"""Copies traces to the user's own OTLP/HTTP endpoint, without ever making ingest wait.

A body is passed on as it came. The queue is bounded in bytes and drops its oldest; what is lost is counted. With a
ratio below 1 only the traces whose id falls under it go on, whole traces, the same ones that OpenTelemetry's
TraceIdRatioBased sampler keeps. Spans of a trace that its caller does not sample (`kvguard.sampled` false) stay here.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import structlog

from guard import __version__
from guard.errors import ConfigError, WireError
from guard.service import sampling

if TYPE_CHECKING:
    import httpx2

FORWARDED: Final = "kvguard-forwarded"
"""Request header of what was forwarded; a service that receives it does not forward again, so no loop can form."""

ATTEMPTS: Final = 3
_RETRY: Final = frozenset({429, 502, 503, 504})
_BACKOFF: Final = (0.5, 2.0)
_LONGEST_WAIT: Final = 10.0

log = structlog.get_logger("guard.service.forward")


class Export(NamedTuple):
    """One OTLP request as it came in; `spans` is how many it holds, once that is known."""

    body: bytes
    content_type: str
    content_encoding: str
    spans: int = 0


class Sink(Protocol):
    """Told how many spans were `sent`, `dropped` or `failed`."""

    def __call__(self, outcome: str, spans: int, /) -> None:
        """Counts."""


class Forwarder:
    """Sends queued requests one after the other; `run` is its task."""

    def __init__(
        self,
        client: "httpx2.AsyncClient",
        endpoint: str,
        *,
        count: Sink,
        headers: Mapping[str, str] | None = None,
        ratio: float = 1.0,
        queue_bytes: int = 32 << 20,
        sleep: Callable[[float], "asyncio.Future[None]"] | None = None,
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._count = count
        self._headers = {**(headers or {}), "user-agent": f"kvguard/{__version__}", FORWARDED: "1"}
        self._ratio = ratio
        self._room = queue_bytes
        self._sleep = sleep or asyncio.sleep
        self._queue: deque[Export] = deque()
        self._filled = asyncio.Event()
        self._complained = False

    def offer(self, export: Export) -> None:
        """Queues a request; when there is no room the oldest go. Never waits."""
        self._queue.append(export)
        self._room -= len(export.body)
        while self._room < 0 and self._queue:
            self._count("dropped", self._take().spans)
        self._filled.set()

    async def run(self) -> None:
        """Sends until cancelled; what is in the queue or on its way then counts as dropped."""
        try:
            while True:
                await self._filled.wait()
                if not self._queue:
                    self._filled.clear()
                    continue
                await self._settle(self._take())
        finally:
            while self._queue:
                self._count("dropped", self._take().spans)

    def _take(self) -> Export:
        export = self._queue.popleft()
        self._room += len(export.body)
        return export

    async def _settle(self, export: Export) -> None:
        outcome = "dropped"
        try:
            sampled = await asyncio.to_thread(_sample, export, self._ratio)
            if sampled is None:
                outcome = ""
                return
            export = sampled
            outcome = "sent" if await self._send(export) else "failed"
        except WireError:
            outcome = "failed"
        finally:
            if outcome:
                self._count(outcome, export.spans)

    async def _send(self, export: Export) -> bool:
        from httpx2 import HTTPError  # loaded with the client; a service that forwards nothing needs none

        headers = {**self._headers, "content-type": export.content_type}
        if export.content_encoding:
            headers["content-encoding"] = export.content_encoding
        problem = ""
        for attempt in range(ATTEMPTS):
            wait = _BACKOFF[min(attempt, len(_BACKOFF) - 1)]
            try:
                response = await self._client.post(self._endpoint, content=export.body, headers=headers)
            except HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    self._complained = False
                    return True
                problem = f"answered {response.status_code}"
                if response.status_code not in _RETRY:
                    break
                wait = _retry_after(response, wait)
            if attempt + 1 < ATTEMPTS:
                await self._sleep(wait)
        if not self._complained:  # once per outage
            self._complained = True
            log.warning("forward_failed", endpoint=self._endpoint, problem=problem)
        return False


def read_headers(path: Path) -> dict[str, str]:
    """Reads a file of headers, `NAME: VALUE` a line.

    Raises:
        ConfigError: it cannot be read or a line is not a header; names the line, never the value.
    """
    try:
        lines = path.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("forward_headers_file", f"{path}: {error}") from None
    headers = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not value.strip().isprintable():
            raise ConfigError("forward_headers_file", f"{path} line {number}: not of the form NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    return headers


def _sample(export: Export, ratio: float) -> Export | None:
    if sampling.keeps_all(export.body, export.content_encoding, ratio):
        return export
    kept = sampling.sample(export.body, export.content_type, export.content_encoding, ratio)
    return None if kept is None else Export(kept[0], export.content_type, "", kept[1])


def _retry_after(response: "httpx2.Response", default: float) -> float:
    try:
        return min(max(0.0, float(response.headers.get("retry-after", default))), _LONGEST_WAIT)
    except ValueError:
        return default
