"""Runs the service on a socket: bounded headers, a quick and clean stop, JSON logs on stderr."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import structlog
import uvicorn

from guard.errors import ConfigError
from guard.history.ledger import Ledger
from guard.service.app import create_app
from guard.service.auth import Tokens
from guard.service.connections import Connections
from guard.service.directives import Clock
from guard.service.forward import read_headers
from guard.service.limits import Rates
from guard.service.runtime import Runtime
from guard.settings import Settings

STOP_SECONDS: Final = 2.0
"""How long requests under way may take once the service stops."""

BACKLOG: Final = 4096
RESERVED_FILES: Final = 128
"""Open files that are no connections: the ledger, the history, probes, forwarding."""

KEEP_ALIVE_SECONDS: Final = 75
"""How long a connection may wait for its next request: longer than scrapes and exports are apart, so that few clients
send one into a connection that is being closed."""

STALLED_SECONDS: Final = 30.0
"""A client that takes nothing of its answer for so long is cut off, by the kernel."""

GC_THRESHOLDS: Final = (20_000, 20, 100)
"""The window holds millions of objects without cycles; a full collection stops the event loop for as long as it looks
at all of them, so there is one per tens of millions of allocations only."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

log = structlog.get_logger("guard.service")


class Server(uvicorn.Server):
    """uvicorn that lets long polls go when it stops, and leaves with status 0 on SIGTERM."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, tokens: Tokens, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._tokens = tokens
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen and tells where."""
        await super().startup(sockets)
        gc.freeze()  # what start-up made lives for ever: the collector need not look at it
        gc.set_threshold(*GC_THRESHOLDS)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
            log.info("listening", url=url, state_dir=str(self._runtime.settings.state_dir))
            self._ready(url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, ends the long polls, and waits a moment for what is under way."""
        log.info("stopping")
        self._runtime.end_waits()
        await super().shutdown(sockets)
        log.info("stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the service, SIGHUP reads the tokens again. uvicorn's would kill us at the end."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for number in (*_SIGNALS, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _reload(self) -> None:
        try:
            self._tokens.reload()
        except ConfigError as error:
            log.warning("reload_failed", problem=str(error))
        else:
            log.info("reloaded", key="tokens_file")


def serve(settings: Settings, ready: Callable[[str], None] = lambda _: None) -> None:
    """Serves until SIGTERM or SIGINT; `ready` is told the URL.

    Raises:
        ConfigError: the address cannot be listened on, or a file of the settings cannot be used.
        LedgerError: the state directory cannot be used.
    """
    configure_logging(settings.log_level)
    files = allow_open_files()
    if settings.forward_headers_file:
        read_headers(settings.forward_headers_file)  # refused here, in words, and not by a traceback once it serves
    tokens = Tokens(settings.tokens_file, Rates.of(settings, time.monotonic), settings.allowed_hosts)
    sock = _listen(settings)
    try:
        ledger = Ledger(settings.state_dir)
    except BaseException:
        sock.close()
        raise
    runtime = Runtime(settings, ledger, Clock(time.time, time.monotonic))
    connections = Connections(
        limit=min(settings.max_connections, max(files - RESERVED_FILES, 1)),
        header_bytes=settings.max_header_bytes,
        header_seconds=settings.header_timeout_seconds,
    )
    config = uvicorn.Config(
        create_app(runtime, tokens),
        http=connections.protocol(),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(STOP_SECONDS),
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
    )
    Server(config, runtime, tokens, ready).run([sock])


def allow_open_files() -> int:
    """Raises the soft limit of open files to the hard one: every hook process keeps connections open. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("open_files", limit=soft, problem=str(error))
        return soft
    return hard


def _listen(settings: Settings) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError("host", f"{settings.host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALLED_SECONDS * 1000))
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError("port", f"{settings.host}:{settings.port}: {error.strerror or error}") from None
    return sock


def configure_logging(level: str) -> None:
    """JSON lines on stderr, for structlog and for the standard library's loggers (uvicorn, asyncio)."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer(),
            ],
            foreign_pre_chain=shared,
        )
    )  # fmt: skip
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
