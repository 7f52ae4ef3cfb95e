"""Real Prometheus and Alertmanager as child processes on loopback, a page to scrape and a webhook to be told."""

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

START_SECONDS = 60.0
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
ALERTMANAGER = ("alertmanager", "prometheus-alertmanager")


def program(*names: str) -> str:
    """The first of `names` that is installed: Debian calls Alertmanager otherwise than its makers do."""
    return next((name for name in names if shutil.which(name)), names[0])


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def process(command: list[str], log: Path, ready: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program until the block ends; waits until the URL `ready` answers 200.

    Raises:
        RuntimeError: it ended or did not become ready; names the log.
    """
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            end = time.monotonic() + START_SECONDS
            while ready:
                if child.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-800:]}")
                with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=5) as answer:  # noqa: S310
                    if answer.status == 200:
                        break
                time.sleep(0.1)
            yield child
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class Prometheus:
    """Client of a Prometheus server's HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: Any) -> Any:
        """`data` of an answer.

        Raises:
            ValueError: the server refused the query; with its words.
        """
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error))) from None

    def query(self, expr: str, **more: Any) -> list[dict[str, Any]]:
        """Result of an instant query; a scalar as a series without labels."""
        data = self.get("query", query=expr, **more)
        return [{"metric": {}, "value": data["result"]}] if data["resultType"] == "scalar" else data["result"]

    def alerts(self, state: str) -> set[str]:
        """Names of the alerts that are in `state` now."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == state}

    def ever(self, state: str, window: str) -> set[str]:
        """Names of the alerts that were in `state` at some evaluation of the last `window`."""
        found = self.query(f'count by (alertname) (count_over_time(ALERTS{{alertstate="{state}"}}[{window}]))')
        return {one["metric"]["alertname"] for one in found}


@contextlib.contextmanager
def prometheus(config: Path, data: Path, *flags: str) -> Iterator[tuple[Prometheus, subprocess.Popen[bytes]]]:
    """Prometheus on a free port; exemplars on."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}", "--log.level=warn",
        f"--web.listen-address={url.removeprefix('http://')}", "--enable-feature=exemplar-storage", *flags,
    ]  # fmt: skip
    with process(command, data.with_suffix(".log"), f"{url}/-/ready") as child:
        yield Prometheus(url), child


@contextlib.contextmanager
def alertmanager(config: Path, data: Path) -> Iterator[str]:
    """Alertmanager on a free port; yields host:port."""
    where = f"127.0.0.1:{free_port()}"
    command = [
        program(*ALERTMANAGER[::-1]), f"--config.file={config}", f"--storage.path={data}", "--log.level=warn",
        f"--web.listen-address={where}", "--cluster.listen-address=",
    ]  # fmt: skip
    with process(command, data.with_suffix(".log"), f"http://{where}/-/ready"):
        yield where


class Page:
    """Serves texts by path; a path that is not there is 503. `accept` tells what the client asked for."""

    def __init__(self, texts: Mapping[str, Callable[[bool], str]]) -> None:
        self.texts = texts
        self.up = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                openmetrics = "openmetrics" in self.headers.get("Accept", "")
                make = outer.texts.get(self.path) if outer.up else None
                body = make(openmetrics).encode() if make else b""
                self.send_response(200 if make else 503)
                self.send_header("Content-Type", OPENMETRICS if openmetrics else PLAIN)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Webhook:
    """Takes Alertmanager's notifications: every alert of each, in order."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.alerts += [alert | {"receiver": body["receiver"]} for alert in body["alerts"]]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def told(self, name: str, status: str) -> list[dict[str, Any]]:
        """The notifications about an alert."""
        return [one for one in list(self.alerts) if (one["labels"]["alertname"], one["status"]) == (name, status)]
