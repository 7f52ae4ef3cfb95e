"""kvguard's own API as a sweep uses it: switches reads off for the road that recomputes, and asks what happened."""

import ssl
import time
from typing import Any, Final, Self
from urllib.parse import quote

import httpx2

from guard.errors import SweepError

APPLY_SECONDS: Final = 10.0
RECORD_SECONDS: Final = 30.0
SWITCH_TTL: Final = 900.0
"""A sweep that is killed leaves its switch behind for this long at most, seconds."""


class Service:
    """Client of `kvguard serve` at `url`; `scope` is what the sweep switches (the engine, by default the fleet).

    `verify` is what httpx2 trusts: True, or a context with other authorities.
    """

    def __init__(
        self, url: str, *, token: str = "", scope: str = "fleet", verify: ssl.SSLContext | bool = True
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx2.Client(
            base_url=url, headers=headers, timeout=APPLY_SECONDS + 5.0, verify=verify, trust_env=False
        )
        self._path = f"/v1/offload/{quote(scope)}"
        self._etag = ""  # of the switch that the sweep has put, empty where there is none

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def switch(self, mode: str) -> None:
        """Puts `mode` in force and waits until the hooks have applied it; no stores while reads are off.

        Raises:
            SweepError: no hook is there, or one does not follow; or somebody else has switched, which stands.
        """
        body = {
            "mode": mode, "stores": mode != "off", "ttl_seconds": SWITCH_TTL, "on_lease_expiry": "open",
            "reason": "kvguard sweep",
        }  # fmt: skip
        over = {"If-Match": self._etag} if self._etag else {"If-None-Match": "*"}
        response = self._send("PUT", f"{self._path}?wait={APPLY_SECONDS:g}", json=body, headers=over)
        if response.status_code == 412:
            self._etag = ""
            raise SweepError("the sweep's switch is in force no more: somebody else has switched, or it ran out")
        answer = _body(response, "PUT", self._path)
        self._etag = answer["override"]["etag"]
        if not answer["acknowledged"] or answer["pending"]:
            late = ", ".join(answer["pending"]) or "no engine polls kvguard"
            raise SweepError(f"the hook did not apply {mode!r} within {APPLY_SECONDS:g} s: {late}")

    def restore(self) -> None:
        """Takes the sweep's switch away, unless it ran out or somebody else has switched meanwhile."""
        if not self._etag:
            return
        response = self._send("DELETE", f"{self._path}?reason=kvguard+sweep+ended", headers={"If-Match": self._etag})
        if response.status_code not in (404, 412):
            _body(response, "DELETE", self._path)
        self._etag = ""

    def refuse_override(self) -> None:
        """Refuses to start where an operator's switch is in force for the scope: it would be lost.

        Raises:
            SweepError: there is one, or kvguard does not answer.
        """
        response = self._send("GET", self._path)
        if response.is_success:
            there = response.json()
            raise SweepError(f"a switch is in force for {there['scope']}: {there['mode']}; clear it first")
        if response.status_code != 404:
            raise SweepError(f"kvguard answered {response.status_code}: {response.text[:300]}")

    def record(self, request_id: str) -> dict[str, Any]:
        """What kvguard knows of a request; waits until it has it.

        Raises:
            SweepError: it never came.
        """
        end = time.monotonic() + RECORD_SECONDS
        while True:
            response = self._send("GET", f"/v1/requests/{quote(request_id, safe='')}")
            if response.is_success:
                found: dict[str, Any] = response.json()["requests"][0]
                return found
            if response.status_code != 404 or time.monotonic() > end:
                raise SweepError(
                    f"kvguard has no record of {request_id} ({response.status_code}): is the hook on in this vLLM, and"
                    " are request ids (KVGUARD_REQUEST_IDS) on?"
                )
            time.sleep(0.1)

    def inflection(self) -> dict[str, Any] | None:
        """What the service estimates from the same traffic, or None where it does not answer."""
        response = self._send("GET", "/v1/inflection")
        return dict(response.json()) if response.is_success else None

    def _send(self, method: str, path: str, **more: Any) -> httpx2.Response:
        try:
            return self._http.request(method, path, **more)
        except httpx2.HTTPError as error:
            raise SweepError(f"kvguard does not answer: {error or type(error).__name__}") from None


def _body(response: httpx2.Response, method: str, path: str) -> Any:
    if not response.is_success:
        raise SweepError(f"kvguard answered {response.status_code} to {method} {path}: {response.text[:300]}")
    return response.json()
