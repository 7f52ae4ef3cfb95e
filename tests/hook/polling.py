"""Answers of a service to a poll, for one engine and backend."""

import json
from collections.abc import Mapping
from typing import Any

from guard.hook.transport import Reply
from guard.wire import Directive, DirectiveSet

ENGINE = "10.0.0.1:8000/0"

BACKEND = "lmcache-mp/resp"


def directive(mode: str = "off", **more: Any) -> Directive:
    return Directive(**{"id": "d-1", "engine_id": ENGINE, "backend": BACKEND, "mode": mode, **more})


def answer(*items: Directive, etag: str = '"e1"', **changed: Any) -> Reply:
    data = DirectiveSet(engine_id=ENGINE, etag=etag, directives=items).to_json()
    return Reply(200, json.dumps({**data, **changed}).encode())


RENEWED = Reply(304, b"")


class Service:
    """A transport whose answers are given; an exception among them is raised."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.paths: list[str] = []
        self.tags: list[str | None] = []

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        self.paths.append(path)
        self.tags.append(headers.get("If-None-Match"))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def failover(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...
