"""Options that several commands share."""

import re
from pathlib import Path
from typing import Annotated

import typer

from guard.semconv import DEFAULT_PORT

DEFAULT_ENDPOINT = f"http://127.0.0.1:{DEFAULT_PORT}"

Endpoint = Annotated[
    str, typer.Option(envvar="KVGUARD_ENDPOINT", help="URL of the service.", show_default=DEFAULT_ENDPOINT)
]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="KVGUARD_TOKEN_FILE", help="File with the bearer token.", show_default=False)
]
CaFile = Annotated[
    Path | None, typer.Option(envvar="KVGUARD_CA_FILE", help="PEM file with authorities to trust.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="JSON with the API's field names.")]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def duration(text: str) -> float:
    """Seconds of `90`, `90s`, `10m`, `2h` or `1d`.

    Raises:
        typer.BadParameter: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|)", text.strip())
    if not match or float(match[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is not a time: 90, 90s, 10m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2]]
