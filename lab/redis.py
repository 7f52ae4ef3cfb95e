"""Redis as the lab sees it: a small client over its Unix socket, so that asking costs the slowed link nothing."""

import socket
from collections import Counter
from pathlib import Path
from typing import Self


class Redis:
    """Command counts and contents of the lab's Redis. One short connection per call, so it survives restarts."""

    def __init__(self, unix_socket: Path) -> None:
        self._path = str(unix_socket)

    def ask(self, *words: str) -> str:
        """Sends one command; returns the answer's text (simple strings, numbers and bulk strings)."""
        request = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(self._path)
            sock.sendall(request.encode())
            with sock.makefile("rb") as answer:
                line = answer.readline().decode().rstrip()
                return answer.read(int(line[1:])).decode() if line[:1] == "$" and line != "$-1" else line[1:]

    def ping(self) -> bool:
        """Whether the server answers."""
        try:
            return self.ask("PING") == "PONG"
        except OSError:
            return False

    def counts(self) -> Counter[str]:
        """Calls of each command since the server started, by upper-case name (`INFO commandstats`)."""
        counts: Counter[str] = Counter()
        for line in self.ask("INFO", "commandstats").splitlines():
            if line.startswith("cmdstat_"):
                name, _, figures = line.removeprefix("cmdstat_").partition(":")
                counts[name.upper()] = int(figures.split(",", 1)[0].removeprefix("calls="))
        return counts

    def keys(self) -> int:
        """Number of keys in the store."""
        return int(self.ask("DBSIZE"))

    def flush(self) -> None:
        """Empties the store."""
        self.ask("FLUSHALL")

    def counting(self) -> "Counting":
        """A context manager whose `delta` holds the commands that were run inside it."""
        return Counting(self)


class Counting:
    """Difference of `Redis.counts` over a block, commands of the lab's own client left out."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.delta: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._before = self._redis.counts()
        return self

    def __exit__(self, *_: object) -> None:
        self.delta = self._redis.counts() - self._before
        for own in ("INFO", "DBSIZE", "PING"):
            del self.delta[own]
