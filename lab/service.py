"""kvguard's HTTP API as the lab uses it."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from lab.errors import LabError


class Service:
    """Client of a running `kvguard serve` without tokens (loopback only)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, method: str, path: str, body: Any = None, *, timeout: float = 10.0) -> tuple[int, Any]:
        """One call; returns the status and the JSON answer (None when empty), error statuses included."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read()
        return status, json.loads(text) if text else None

    def get(self, path: str) -> Any:
        """Answer to a GET.

        Raises:
            LabError: the status is not 200.
        """
        status, answer = self.call("GET", path)
        if status != 200:
            raise LabError(f"GET {path}: {status} {answer}")
        return answer

    def switch(self, mode: str, *, scope: str = "fleet", wait: float = 0.0, **fields: Any) -> Any:
        """Sets a mode for a scope and waits up to `wait` seconds until every hook applied it.

        The answer says which did (`acknowledged`) and which did not (`pending`). More fields: stores, ttl_seconds,
        on_lease_expiry, reason.
        """
        path = "/v1/offload/" + urllib.parse.quote(scope, safe="/:") + f"?wait={wait:g}"
        status, answer = self.call("PUT", path, {"mode": mode, **fields}, timeout=wait + 10.0)
        if status not in (200, 201):
            raise LabError(f"PUT {path}: {status} {answer}")
        return answer

    def clear(self, scope: str = "fleet") -> None:
        """Removes the override of a scope."""
        path = "/v1/offload/" + urllib.parse.quote(scope, safe="/:")
        status, answer = self.call("DELETE", path)
        if status not in (200, 204):
            raise LabError(f"DELETE {path}: {status} {answer}")

    def request(self, request_id: str, timeout: float = 15.0) -> dict[str, Any]:
        """The joined record of one request with one choice, by vLLM's external id; waits until the service has it.

        Raises:
            LabError: it has not come after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        path = "/v1/requests/" + urllib.parse.quote(request_id, safe="")
        while True:
            status, answer = self.call("GET", path)
            if status == 200:
                return answer["requests"][0]
            if time.monotonic() > deadline:
                raise LabError(f"the service has no record of {request_id} after {timeout:g} s ({status} {answer})")
            time.sleep(0.1)
