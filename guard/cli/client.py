"""Talks to a running service, and says plainly what to do when it cannot."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx2

from guard.cli.errors import FAILED, USAGE, ChangedError, fail

TIMEOUT = 10.0
_ASKED_WRONGLY = (400, 422)


class Client:
    """The HTTP API as Python objects; ends the command with a message when something is wrong."""

    def __init__(self, endpoint: str, token_file: Path | None = None, ca_file: Path | None = None) -> None:
        first = endpoint.partition(",")[0].strip().rstrip("/")
        if not first.startswith(("http://", "https://")):
            fail(f"{endpoint!r} is not a URL", "give --endpoint http://HOST:PORT or set KVGUARD_ENDPOINT", code=USAGE)
        self.endpoint = first
        headers = {"Authorization": f"Bearer {read_token(token_file)}"} if token_file else {}
        # No proxies: the service is near, and its name means nothing to them.
        self._http = httpx2.Client(
            base_url=first, headers=headers, timeout=TIMEOUT, verify=trusted(ca_file), trust_env=False
        )

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """`GET path`."""
        return self.call("GET", path, params=params)

    def call(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, body: Any = None, wait: float = 0.0,
        etag: str = "",
    ) -> Any:  # fmt: skip
        """Calls and returns the JSON answer; `wait` is how long the service may take on top.

        Raises:
            ChangedError: `etag` is given, and what it names is no longer there.
        """
        headers = {"If-Match": etag} if etag else None
        try:
            response = self._http.request(
                method, path, params=params, json=body, headers=headers, timeout=TIMEOUT + wait
            )
        except httpx2.TimeoutException:
            fail(f"{self.endpoint} did not answer in time", "is the service stuck? see its log and /livez?verbose")
        except httpx2.HTTPError as error:
            fail(
                f"cannot reach the service at {self.endpoint}: {error}",
                "start it with: kvguard serve; or name another with --endpoint or KVGUARD_ENDPOINT",
            )
        if response.status_code == 412 and etag:
            raise ChangedError(_problem(response)[0])
        if not response.is_success:
            fail(*_problem(response), code=USAGE if response.status_code in _ASKED_WRONGLY else FAILED)
        try:
            return response.json()
        except ValueError:
            fail(f"{self.endpoint} does not answer like kvguard", "check --endpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _problem(response: httpx2.Response) -> tuple[str, str]:
    try:
        data = response.json()
        text = f"{data['detail']} ({data['status']} {data['title']})"
    except (ValueError, KeyError, TypeError):
        text = f"the service answered {response.status_code}"
    hints = {
        401: "give the token with --token-file or KVGUARD_TOKEN_FILE",
        403: "use a token with the scope that is named",
        412: "look again with: kvguard status",
    }
    if "unknown-host" in response.text:
        return text, ""  # it says itself what to do, and a token is not it
    return text, hints.get(response.status_code, "")


def segment(name: str) -> str:
    """A name as the rest of a URL's path; its slashes stay, unless dots between them would climb to another name."""
    return quote(name, safe="" if {".", ".."} & set(name.split("/")) else "/")


def trusted(ca_file: Path | None) -> ssl.SSLContext | bool:
    """The authorities to trust, as httpx2 takes them; ends the command where the file holds none."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        fail(f"certificate file {ca_file}: {error.strerror or error}", code=USAGE)


def read_token(path: Path) -> str:
    """The token or key that a file holds; ends the command where it holds none."""
    try:
        token = path.read_text("ascii").strip()
    except OSError as error:
        fail(f"token file {path}: {error.strerror or error}", code=USAGE)
    except UnicodeDecodeError:
        fail(f"token file {path}: holds no usable token", code=USAGE)
    if not token or not token.isprintable() or " " in token:
        fail(f"token file {path}: holds no usable token", code=USAGE)
    return token
