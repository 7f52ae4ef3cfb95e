"""Small servers on loopback for the probers, and real Redis."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

Answer = Callable[[bytes], bytes | None]


class Server:
    """Answers each piece that it receives with `answer(piece)`; None closes the connection."""

    def __init__(
        self,
        answer: Answer,
        *,
        family: int = socket.AF_INET,
        tls: ssl.SSLContext | None = None,
        host: str = "",
        port: int = 0,
    ) -> None:
        self.answer = answer
        self.connections = 0
        self._tls = tls
        self._open: list[socket.socket] = []
        host = host or ("::1" if family == socket.AF_INET6 else "127.0.0.1")
        self._listener = socket.create_server((host, port), family=family)  # type: ignore[arg-type]
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """Closes every connection."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            self._open.append(sock)
            with sock:
                while data := sock.recv(65536):
                    answer = self.answer(data)
                    if answer is None:
                        return
                    sock.sendall(answer)


def free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


@contextlib.contextmanager
def redis(directory: Path, *flags: str, port: int, prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A real redis-server that keeps nothing; ready when it is handed out."""
    program = shutil.which("redis-server") or "redis-server"
    command = [*prefix, program, "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(directory),
               "--unixsocket", str(directory / "redis.sock"), *flags]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (directory / "redis.sock").exists():
            assert process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server does not start"
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(10)


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and 127.0.0.1, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
