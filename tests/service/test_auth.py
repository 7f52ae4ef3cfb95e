"""Tokens: who may do what, and files that are wrong."""

import hashlib
from pathlib import Path

import pytest
from starlette.requests import Request

from guard.errors import ConfigError
from guard.service.auth import Scope, Tokens, read_tokens
from guard.service.problems import Problem

SECRETS = {"hook": "hook-secret-0123456789", "dash": "dash-secret-0123456789", "boss": "boss-secret-0123456789"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    digest = hashlib.sha256(SECRETS["dash"].encode()).hexdigest()
    file.write_text(
        f"# who may what\nhook ingest {SECRETS['hook']}\n\ndash read sha256:{digest}\nboss admin {SECRETS['boss']}\n"
    )
    return file


def request(header: str | None, host: str | None = None) -> Request:
    headers = [] if header is None else [(b"authorization", header.encode())]
    if host is not None:
        headers.append((b"host", host.encode()))
    return Request({"type": "http", "headers": headers, "client": ("127.0.0.1", 1)})


@pytest.mark.parametrize(
    ("name", "scopes"), [("hook", {"ingest"}), ("dash", {"read"}), ("boss", {"ingest", "read", "admin"})]
)
def test_a_token_opens_its_scopes_and_no_others(path: Path, name: str, scopes: set[str]) -> None:
    tokens = Tokens(path)
    for scope in ("ingest", "read", "admin"):
        if scope in scopes:
            assert tokens.who(request(f"Bearer {SECRETS[name]}"), scope) == name  # type: ignore[arg-type]
        else:
            with pytest.raises(Problem) as caught:
                tokens.who(request(f"bearer {SECRETS[name]}"), scope)  # type: ignore[arg-type]
            assert caught.value.status == 403
            assert caught.value.headers == {
                "WWW-Authenticate": f'Bearer realm="kvguard", error="insufficient_scope", scope="{scope}"'
            }


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic x", "Bearer wrong", "Bearer " + "é" * 20])
def test_without_a_known_token_it_is_401(path: Path, header: str | None) -> None:
    with pytest.raises(Problem) as caught:
        Tokens(path).who(request(header), "read")
    assert caught.value.status == 401
    assert caught.value.headers
    assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")


def test_the_digest_in_the_file_is_not_a_token(path: Path) -> None:
    digest = hashlib.sha256(SECRETS["dash"].encode()).hexdigest()
    with pytest.raises(Problem):
        Tokens(path).who(request(f"Bearer sha256:{digest}"), "read")


def test_without_a_file_everybody_may(tmp_path: Path) -> None:
    assert Tokens(None).who(request(None), "admin") == "anonymous@127.0.0.1"


def test_reload_takes_the_new_and_a_broken_file_changes_nothing(path: Path) -> None:
    tokens = Tokens(path)
    path.write_text("next read next-secret-0123456789\n")
    tokens.reload()
    assert tokens.who(request("Bearer next-secret-0123456789"), "read") == "next"
    with pytest.raises(Problem):
        tokens.who(request(f"Bearer {SECRETS['boss']}"), "read")
    path.write_text("broken\n")
    with pytest.raises(ConfigError):
        tokens.reload()
    assert tokens.who(request("Bearer next-secret-0123456789"), "read") == "next"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no token"),
        ("# only a comment", "holds no token"),
        ("a read", "line 1: not of the form"),
        ("a read s3cret-0123456789 x", "line 1: not of the form"),
        ("\na write s3cret-0123456789", "line 2: scopes are ingest, read, admin"),
        ("a\x1b[31m read s3cret-0123456789", "line 1: the name holds control characters"),
        ("a read short", "line 1: a token needs at least 16"),
        ("a read sha256:xyz", "line 1: sha256: wants 64"),
    ],
)
def test_a_broken_file_names_the_line_and_never_the_secret(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_tokens(file)
    assert caught.value.key == "tokens_file"
    assert "s3cret" not in str(caught.value)


SCOPES = ("ingest", "read", "admin")


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("host", ["127.0.0.1:8420", "localhost:8420", "LOCALHOST", "[::1]:8420", "", None])
def test_without_tokens_this_machine_may_all(host: str | None, scope: Scope) -> None:
    assert Tokens(None).who(request(None, host), scope) == "anonymous@127.0.0.1"


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:8420", "10.0.0.7:8420", "127.0.0.1.example", "["])
def test_without_tokens_a_web_page_under_another_name_may_nothing(host: str, scope: Scope) -> None:
    with pytest.raises(Problem, match=r"is not this machine: .*allowed_hosts.*tokens_file") as caught:
        Tokens(None, hosts=("kvguard.internal",)).who(request(None, host), scope)
    assert (caught.value.status, caught.value.kind) == (403, "unknown-host")


def test_a_name_that_is_allowed_may_without_tokens() -> None:
    tokens = Tokens(None, hosts=("KVguard.internal",))
    assert tokens.who(request(None, "kvguard.INTERNAL:8420"), "admin") == "anonymous@127.0.0.1"


@pytest.mark.parametrize("host", ["kvguard:8420", "kvguard.monitoring.svc.cluster.local:8420", "10.0.0.7:8420"])
def test_with_tokens_any_name_will_do(path: Path, host: str) -> None:
    assert Tokens(path).who(request(f"Bearer {SECRETS['dash']}", host), "read") == "dash"
