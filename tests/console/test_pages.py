"""The page, its files and its policy, over HTTP."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import httpx2
import pytest

from guard import __version__
from guard.service.browsers import CONTENT_SECURITY_POLICY as POLICY
from guard.service.console.pages import ASSETS


@pytest.fixture(scope="module")
def http(start: Callable[..., Any]) -> Any:
    with httpx2.Client(base_url=start().url) as client:
        yield client


class Links(HTMLParser):
    """Everything that the page loads or links, and whatever a strict policy would refuse."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and value and not value.startswith("#"):
                self.found.add(value)
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")


def test_the_page_and_all_it_needs(http: httpx2.Client) -> None:
    answer = http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert __version__ in answer.text
    links = Links(answer.text)
    assert links.inline == []
    assert {"assets/main.js", "assets/console.css", "openapi.json", "metrics", "v1/offload/history"} <= links.found
    for link in links.found:
        assert http.get(f"/{link}").status_code == 200, link
    for name, asset in ASSETS.items():
        if name.endswith(".js"):
            for module in re.findall(r'from "\./([^"]+)"', asset.content.decode()):
                assert module in ASSETS, f"{name} imports {module}"


def test_files_name_no_other_origin() -> None:
    for name, asset in ASSETS.items():
        found = re.findall(r"""(?:https?:)?//[a-z0-9-]+\.[a-z0-9.-]+[^"'\s)]*""", asset.content.decode())
        assert found in ([], ["http://www.w3.org/2000/svg"]), name  # a namespace, never fetched


def test_the_policy_lets_nothing_inline_run(http: httpx2.Client) -> None:
    for path in ("/", "/assets/main.js"):
        headers = http.get(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-cache"
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    assert "frame-ancestors 'none'" in POLICY


def test_files_are_kept_and_asked_for_by_their_tag(http: httpx2.Client) -> None:
    first = http.get("/assets/main.js")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = http.get("/assets/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/assets/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2fpages.py", "%2e%2e/pages.py", "index.html", "..%5cpages.py"])
def test_no_other_file_can_be_had(http: httpx2.Client, name: str) -> None:
    answer = http.get(f"/assets/{name}")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
