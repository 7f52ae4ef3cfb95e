"""Ways to lengthen the road to the store for the time of a sweep. Whatever ends the sweep, the road is put back."""

import shlex
import shutil
import subprocess
from typing import Final, Protocol

from guard.errors import ConfigError, SweepError
from guard.sweep.proxy import DelayProxy

COMMAND_SECONDS: Final = 30.0
FORMS: Final = "none, proxy:LISTEN_HOST:PORT=STORE_HOST:PORT, netem:DEVICE, command:PROGRAM ... {us}"


class Injector(Protocol):
    """Adds round-trip time between the reader and the store."""

    def set(self, rtt_seconds: float) -> None:
        """Adds so much and no more.

        Raises:
            SweepError: it could not be done.
        """
        ...

    def restore(self) -> None:
        """Takes everything away that was added."""
        ...


class NoInjector:
    """For a single tier: measures the road as it is."""

    def set(self, rtt_seconds: float) -> None:
        """Accepts 0 only."""
        if rtt_seconds:
            raise SweepError(f"nothing adds round-trip time: give --injector, one of {FORMS}")

    def restore(self) -> None:
        """Nothing to do."""


class ProxyInjector:
    """A delaying TCP proxy in front of the store; the reader must be configured to connect to it."""

    def __init__(self, listen: tuple[str, int], store: tuple[str, int]) -> None:
        try:
            self.proxy = DelayProxy(listen, store)
        except OSError as error:
            raise SweepError(f"cannot listen on {listen[0]}:{listen[1]}: {error.strerror or error}") from None

    def set(self, rtt_seconds: float) -> None:
        """Delays both directions by half of it each, from the next byte on."""
        self.proxy.rtt_seconds = rtt_seconds

    def restore(self) -> None:
        """Ends the delay; the proxy goes on until `close`, since connections lead through it."""
        self.proxy.rtt_seconds = 0.0


class CommandInjector:
    """Runs a command of the operator's; `{us}` and `{ms}` in it stand for the round-trip time to add."""

    def __init__(self, template: str) -> None:
        if "{us}" not in template and "{ms}" not in template:
            raise ConfigError("injector", f"command {template!r} holds neither {{us}} nor {{ms}}")
        self._words = shlex.split(template)

    def set(self, rtt_seconds: float) -> None:
        """Runs the command; it must exit with 0."""
        figures = {"{us}": f"{rtt_seconds * 1e6:.0f}", "{ms}": f"{rtt_seconds * 1e3:g}"}
        _run([_fill(word, figures) for word in self._words])

    def restore(self) -> None:
        """Runs the command with 0."""
        self.set(0.0)


class NetemInjector:
    """`tc netem` on a device of this host: delays what leaves by it, so the whole round trip at once."""

    def __init__(self, device: str) -> None:
        if not shutil.which("tc"):
            raise SweepError("tc is not installed: install iproute2, or use another --injector")
        if "netem" in _run(["tc", "qdisc", "show", "dev", device]):
            raise SweepError(f"{device} has a netem qdisc already, which would be lost: remove it first")
        self._device = device
        self._added = False

    def set(self, rtt_seconds: float) -> None:
        """Puts a netem qdisc in the place of the device's root qdisc."""
        delay = f"{rtt_seconds * 1e6:.0f}us"
        _run(["tc", "qdisc", "replace", "dev", self._device, "root", "netem", "delay", delay, "limit", "100000"])
        self._added = True

    def restore(self) -> None:
        """Takes the netem qdisc away; the kernel puts the default one back."""
        if self._added:
            _run(["tc", "qdisc", "del", "dev", self._device, "root"])
            self._added = False


def parse(text: str) -> Injector:
    """The injector that `text` asks for.

    Raises:
        ConfigError: it has none of the known forms.
        SweepError: it cannot work here.
    """
    kind, _, rest = text.partition(":")
    if text == "none":
        return NoInjector()
    if kind == "proxy" and "=" in rest:
        listen, _, store = rest.partition("=")
        return ProxyInjector(address(listen), address(store))
    if kind == "netem" and rest:
        return NetemInjector(rest)
    if kind == "command" and rest:
        return CommandInjector(rest)
    raise ConfigError("injector", f"{text!r} is none of {FORMS}")


def address(text: str) -> tuple[str, int]:
    """HOST:PORT or [IPV6]:PORT.

    Raises:
        ConfigError: it is neither.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("injector", f"{text!r} is not HOST:PORT")
    return host, int(port)


def _fill(word: str, figures: dict[str, str]) -> str:
    for name, value in figures.items():
        word = word.replace(name, value)
    return word


def _run(command: list[str]) -> str:
    shown = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SweepError(f"{shown}: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SweepError(f"{shown}: exit code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return done.stdout
