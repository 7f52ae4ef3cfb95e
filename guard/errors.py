"""Exceptions of kvguard, for broken set-up and bad input only; a refusal by the guard is a value.

KVGuardError
├── ConfigError        a setting is missing, unknown or out of range; names the key
├── WireError          a message from another process does not have its shape
│   └── TooLargeError  it is larger than the receiver accepts
├── LedgerError        the state directory cannot be read or written
└── SweepError         a sweep cannot go on; says what to check
"""


class KVGuardError(Exception):
    """Base of every exception that kvguard raises on purpose."""


class ConfigError(KVGuardError):
    """A setting is missing, unknown or out of range."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class WireError(KVGuardError):
    """A message from another process cannot be understood."""


class TooLargeError(WireError):
    """A message is larger than the receiver accepts."""


class LedgerError(KVGuardError):
    """The state directory cannot be read or written."""


class SweepError(KVGuardError):
    """A sweep cannot go on."""
