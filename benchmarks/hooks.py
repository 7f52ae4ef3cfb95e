"""Hooks as they poll, without their vLLM: keep one connection, apply what comes, acknowledge with the next poll."""

import asyncio
import json
import time
from urllib.parse import urlsplit


class Hook:
    """One poller; `applied` holds, by mode, when it had each directive (monotonic seconds)."""

    def __init__(self, url: str, number: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.engine = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000/0"
        self.applied: dict[str, float] = {}
        self.polls = 0

    async def run(self) -> None:
        """Polls until cancelled; a lost connection is opened again."""
        tag = ""
        while True:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
            except OSError:
                await asyncio.sleep(0.2)
                continue
            try:
                while True:
                    tag = await self._poll(reader, writer, tag)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

    async def _poll(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tag: str) -> str:
        header = f'If-None-Match: "{tag}"\r\n' if tag else ""
        query = "wait=5&schema=1&backend=a/b&model=m&hook=0.1.0"
        writer.write(f"GET /v1/directives/{self.engine}?{query} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        self.polls += 1
        if b" 200 " not in head[:20]:
            return tag
        body = await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        data = json.loads(body)
        self.applied[data["directives"][0]["mode"]] = time.monotonic()
        return str(data["etag"])
