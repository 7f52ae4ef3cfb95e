"""How a command that leaves something changed behind ends."""

import signal
from typing import Final

ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


def end_as_ctrl_c() -> None:
    """From here on SIGTERM and SIGHUP raise KeyboardInterrupt: what was changed is put back."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
