"""What tables make of texts that others chose."""

import io

from rich.console import Console

from guard.cli.show import table


def test_an_id_cannot_steer_the_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(table(("id",), [("cmpl-\x1b]0;gotcha\x07\x1b[31m[red]x",)]))
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "[red]x" in out.getvalue()
