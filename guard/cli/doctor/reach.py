"""Asks the service and a running vLLM: reachable, allowed, in step, and in touch with each other."""

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from guard import __version__
from guard.cli.doctor.findings import Finding, note, ok, problem, warning

TIMEOUT: Final = 5.0
SKEW_WARNS: Final = 2.0
"""Clock differences from here on, in seconds, put requests at the wrong place of the window."""

_LIMIT: Final = 8 << 20  # of an answer; /metrics of a large fleet is some megabytes


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the service is and how to speak to it."""

    endpoint: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @property
    def urls(self) -> list[str]:
        """The endpoints one by one."""
        return [part.strip().rstrip("/") for part in self.endpoint.split(",") if part.strip()]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; status 0: nothing, and `text` says why."""

    status: int
    text: str
    date: str = ""
    seconds: float = 0.0


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: its status is the answer."""

    def redirect_request(self, *_: Any) -> None:
        """Never."""


def ask(url: str, reach: Reach | None = None, *, body: bytes | None = None) -> Answer:
    """GET, or POST with a JSON body. Redirects are not followed (a token would go along), proxies not used."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    began = time.monotonic()
    try:
        if reach and reach.token_file:
            headers["Authorization"] = f"Bearer {reach.token_file.read_text('ascii').strip()}"
        context = ssl.create_default_context(cafile=str(reach.ca_file) if reach and reach.ca_file else None)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _Stay()
        )
        with opener.open(urllib.request.Request(url, body, headers), timeout=TIMEOUT) as response:  # noqa: S310
            text = response.read(_LIMIT).decode("utf-8", "replace")
            return Answer(response.status, text, response.headers.get("Date", ""), time.monotonic() - began)
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(_LIMIT).decode("utf-8", "replace"), error.headers.get("Date", ""))
    except (OSError, ValueError) as error:  # URLError is an OSError
        return Answer(0, str(getattr(error, "reason", error)))


def check_service(reach: Reach) -> Iterator[Finding]:
    """Every endpoint: alive, clock, version, ready, and whether the token may send spans."""
    for url in reach.urls:
        if urlsplit(url).scheme not in ("http", "https"):
            yield problem("service", f"{url!r} is not a URL", "http://HOST:PORT")
            continue
        alive = ask(f"{url}/livez", reach)
        if alive.status != 200:
            why = alive.text if not alive.status else f"it answered {alive.status}"
            yield problem(
                "service", f"{url} cannot be used: {why}", "start it with kvguard serve; vLLM goes on without"
            )
            continue
        yield ok("service", f"{url} answers in {alive.seconds * 1e3:.0f} ms")
        yield from _skew(alive)
        yield from _version(url, reach)
        ready = ask(f"{url}/readyz?verbose", reach)
        bad = [line for line in ready.text.splitlines() if line.startswith(("[-]", "[!]"))]
        yield warning("service", f"{url}: {'; '.join(bad)}") if bad else ok("service", f"{url} is ready")
        # An empty export: whoever may send it may send spans and poll, and nothing is recorded.
        sent = ask(f"{url}/v1/traces", reach, body=b'{"resourceSpans": []}')
        if sent.status == 200:
            yield ok("token", "the hook may send spans and poll")
        elif "unknown-host" in sent.text:
            yield problem("name", f"{url}: {_detail(sent)}", "without tokens a hook on this machine calls 127.0.0.1")
        elif sent.status in (401, 403):
            yield problem("token", f"{url} refuses it: {_detail(sent)}", "KVGUARD_TOKEN_FILE needs one of scope ingest")
        else:
            yield warning("token", f"{url}/v1/traces answered {sent.status}: {_detail(sent)}")


def _skew(answer: Answer) -> Iterator[Finding]:
    try:
        there = parsedate_to_datetime(answer.date).timestamp()
    except (TypeError, ValueError):
        return
    # `Date` is cut to whole seconds: its middle, against the middle of the exchange.
    skew = there + 0.5 - (time.time() - answer.seconds / 2)
    if abs(skew) > SKEW_WARNS:
        ahead = "ahead of" if skew > 0 else "behind"
        yield warning("clock", f"the service's clock is {abs(skew):.0f} s {ahead} this one's", "run NTP on both")
    else:
        yield ok("clock", "in step with the service, within the second that its Date header tells")


def _version(url: str, reach: Reach) -> Iterator[Finding]:
    try:
        version = json.loads(ask(f"{url}/openapi.json", reach).text)["info"]["version"]
    except (ValueError, KeyError, TypeError):
        yield problem("service", f"{url} does not answer like kvguard", "check KVGUARD_ENDPOINT")
        return
    if version != __version__:
        yield note("service", f"kvguard {version} there, {__version__} here: either order of upgrades works")


def check_engine(engine: str, reach: Reach) -> Iterator[Finding]:
    """A running vLLM: its version, whether it has a connector, and whether its hook is in touch with the service."""
    url = engine.rstrip("/") if "://" in engine else f"http://{engine.rstrip('/')}"
    version = ask(f"{url}/version")
    if version.status != 200:
        why = version.text if not version.status else f"/version answered {version.status}"
        yield problem("engine", f"{url} cannot be asked: {why}", "give vLLM's own address: http://HOST:8000")
        return
    yield ok("engine", f"{url} runs vLLM {_key(version.text, 'version')}")
    metrics = ask(f"{url}/metrics").text
    if "vllm:" not in metrics:
        yield warning("engine", f"{url}/metrics has no series of vLLM")
    elif "external_prefix_cache" not in metrics:
        yield note("engine", "its metrics tell of no external prefix cache: no connector, or no request yet")
    for service in reach.urls[:1]:
        yield from _in_touch(url, service, reach)


def _in_touch(url: str, service: str, reach: Reach) -> Iterator[Finding]:
    answer = ask(f"{service}/v1/offload", reach)
    try:
        rows: list[dict[str, Any]] = json.loads(answer.text)["engines"]
    except (ValueError, KeyError, TypeError):
        yield note("hook", f"{service} does not tell its engines: {_detail(answer)}", "a token of scope read would do")
        return
    place = urlsplit(url).netloc
    port = f":{urlsplit(url).port or 80}"
    exact = [row for row in rows if place in (row["instance"], row["engine_id"].rpartition("/")[0])]
    # vLLM knows itself by another name than the one that it was asked under here.
    found = exact or [row for row in rows if row["engine_id"].rpartition("/")[0].endswith(port)]
    if not found:
        yield problem(
            "hook", f"no engine {place} polls {service}; it knows {len({row['engine_id'] for row in rows})} others",
            "is there a line `kvguard … guards` in vLLM's log? else check its environment: kvguard doctor --pid PID",
        )  # fmt: skip
    for row in found:
        age = f"last poll {row['last_poll_age_seconds']:.1f} s ago"
        text = f"{row['engine_id']} {row['backend']}: mode {row['mode']}, {age}"
        yield problem("hook", f"{text}: silent") if row["silent"] else ok("hook", text)


def _key(text: str, name: str) -> str:
    try:
        return str(json.loads(text)[name])
    except (ValueError, KeyError, TypeError):
        return "of an unknown version"


def _detail(answer: Answer) -> str:
    try:
        return str(json.loads(answer.text)["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or f"status {answer.status}"
