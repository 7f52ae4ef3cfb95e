"""Bearer tokens with scopes (RFC 6750), read from a file; without a file everybody is allowed everything.

The file has one token a line: `NAME SCOPE[,SCOPE] TOKEN`, `#` starts a comment. TOKEN may be `sha256:HEX`, so that the
file itself lets nobody in. `admin` includes `read` and `ingest`. Hooks need `ingest`: spans and directives.
"""

import hashlib
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from starlette.requests import Request

from guard.errors import ConfigError
from guard.service.limits import REFUSED, Rates
from guard.service.problems import Problem
from guard.settings import is_loopback

Scope = Literal["ingest", "read", "admin"]
SCOPES: Final = ("ingest", "read", "admin")
MIN_TOKEN: Final = 16
"""Shortest token accepted, in characters: a short one can be guessed."""

_CHALLENGE: Final = 'Bearer realm="kvguard"'


@dataclass(frozen=True, slots=True)
class Token:
    """One token: who it is, what it may do, and its SHA-256."""

    name: str
    scopes: frozenset[str]
    digest: bytes


class Tokens:
    """The tokens of the service and how often their bearers may call; `reload` reads the file again (SIGHUP)."""

    def __init__(self, path: Path | None, rates: Rates | None = None, hosts: Iterable[str] = ()) -> None:
        """Reads `path`; None means that no token is asked for. Without `rates` nobody is slowed down.

        `hosts` are names, beside loopback, under which the service may be called without tokens.

        Raises:
            ConfigError: the file cannot be read or a line is not a token; names the line, never the token.
        """
        self._path = path
        self._hosts = frozenset(name.lower() for name in hosts)
        self._rates = rates or Rates(lambda: 0.0, {})
        self._tokens = read_tokens(path) if path else ()

    def reload(self) -> None:
        """Reads the file again.

        Raises:
            ConfigError: it cannot be used; the tokens in force stay.
        """
        if self._path:
            self._tokens = read_tokens(self._path)

    def who(self, request: Request, scope: Scope) -> str:
        """The name of the caller.

        Raises:
            Problem: 401 without a known token, 403 when it lacks `scope`, or there are no tokens and the request is
                for another host, 429 when it calls too often.
        """
        host = request.client.host if request.client else "?"
        if self._path is None:
            self._for_us(request)
            name = f"anonymous@{host}"
        else:
            name = self._bearer(request, scope, host)
        self._slow_down(scope, f"{name} {host}")
        return name

    def _bearer(self, request: Request, scope: Scope, host: str) -> str:
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            self._slow_down(REFUSED, host)
            raise Problem(401, "send a token: Authorization: Bearer TOKEN", headers={"WWW-Authenticate": _CHALLENGE})
        digest = hashlib.sha256(text.strip().encode()).digest()
        found: Token | None = None
        for token in self._tokens:  # all of them, so that the time does not tell which
            if secrets.compare_digest(token.digest, digest):
                found = token
        if found is None:
            self._slow_down(REFUSED, host)
            headers = {"WWW-Authenticate": f'{_CHALLENGE}, error="invalid_token"'}
            raise Problem(401, "the token is not known", headers=headers)
        if scope not in found.scopes:
            headers = {"WWW-Authenticate": f'{_CHALLENGE}, error="insufficient_scope", scope="{scope}"'}
            raise Problem(403, f"token {found.name!r} lacks the scope {scope!r}", headers=headers)
        return found.name

    def _for_us(self, request: Request) -> None:
        """Without tokens only loopback is listened on; a web page whose name leads here must neither read nor write."""
        host = request.headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:  # a bracket without its other half
            name = host
        if name and not is_loopback(name) and name not in self._hosts:
            raise Problem(
                403,
                f"host {name[:80]!r} is not this machine: call 127.0.0.1 or localhost, name it in allowed_hosts, or"
                " configure tokens_file",
                kind="unknown-host",
            )

    def _slow_down(self, kind: str, client: str) -> None:
        late = self._rates.take(kind, client)
        if late > 0.0:
            headers = {"Retry-After": str(math.ceil(late))}
            raise Problem(429, f"too many requests: try again in {late:.1f} s", headers=headers)


def require(scope: Scope) -> Callable[[Request], Awaitable[str]]:
    """A FastAPI dependency: lets only callers with `scope` in and gives the caller's name."""

    async def dependency(request: Request) -> str:
        tokens: Tokens = request.app.state.tokens
        return tokens.who(request, scope)

    return dependency


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Reads a tokens file.

    Raises:
        ConfigError: it cannot be read, holds no token, or a line is wrong; names the line, never the token.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("tokens_file", f"{path}: {error}") from None
    tokens = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            tokens.append(_token(text, f"{path} line {number}"))
    if not tokens:
        raise ConfigError("tokens_file", f"{path}: holds no token")
    return tuple(tokens)


def _token(line: str, where: str) -> Token:
    parts = line.split()
    if len(parts) != 3:
        raise ConfigError("tokens_file", f"{where}: not of the form NAME SCOPE[,SCOPE] TOKEN")
    name, scope_text, secret = parts
    if not name.isprintable():
        raise ConfigError("tokens_file", f"{where}: the name holds control characters")
    scopes = set(scope_text.split(","))
    if not scopes <= set(SCOPES):
        raise ConfigError("tokens_file", f"{where}: scopes are {', '.join(SCOPES)}")
    if "admin" in scopes:
        scopes = set(SCOPES)
    if secret.startswith("sha256:"):
        if not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", secret):
            raise ConfigError("tokens_file", f"{where}: sha256: wants 64 hexadecimal digits")
        return Token(name, frozenset(scopes), bytes.fromhex(secret.removeprefix("sha256:")))
    if len(secret) < MIN_TOKEN:
        raise ConfigError("tokens_file", f"{where}: a token needs at least {MIN_TOKEN} characters")
    return Token(name, frozenset(scopes), hashlib.sha256(secret.encode()).digest())
