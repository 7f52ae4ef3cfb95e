"""Answers of a service to a poll, for one engine and backend."""

import json
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
