"""A transport without network, for the exporter and for the poller of directives."""

from collections.abc import Mapping
from typing import NamedTuple

from guard.hook.transport import Reply


class Asked(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None
    timeout: float
    limit: int


class FakeTransport:
    """Answers with what is next in `answers`, used up with the last one again; an exception among them is raised."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[Asked] = []
        self._answer: Reply | Exception = Reply(200, b"{}")

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float, limit: int
    ) -> Reply:
        self.asked.append(Asked(method, path, headers, body, timeout, limit))
        if self.answers:
            self._answer = self.answers.pop(0)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def failover(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    @property
    def bodies(self) -> list[bytes]:
        """What was sent, one per request."""
        return [one.body or b"" for one in self.asked]

    @property
    def tags(self) -> list[str | None]:
        """What each request acknowledged."""
        return [one.headers.get("If-None-Match") for one in self.asked]
