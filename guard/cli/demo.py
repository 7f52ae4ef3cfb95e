"""`kvguard demo`."""


def run(port: int, duration: float | None) -> None:
    """Runs it."""
