"""The lab's own network namespace: everything but the store lives in it, so that no lab traffic touches a real network.

The namespace has no name. It belongs to the lab's processes and is gone when they are: nothing to clean up.
"""

import os
import subprocess
import sys

INSIDE = "KVGUARD_LAB_NETNS"
"""Set in the environment of a process that runs inside the namespace."""


def inside() -> bool:
    """Whether this process runs in the lab's namespace, where TUN devices may be made."""
    return os.environ.get(INSIDE) == "1"


def enter(arguments: list[str]) -> str:
    """Starts this very command again inside a fresh namespace; does not return when that works.

    Returns:
        Why it is not possible here; the caller goes on without, on loopback and with the TCP proxy as injector.
    """
    prefix = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    trial = "ip link set lo up && ip tuntap add mode tun name trial0"
    try:
        done = subprocess.run([*prefix, "sh", "-c", trial], capture_output=True, text=True, check=False, timeout=20)
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        os.environ[INSIDE] = "1"
        again = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-m", "lab", *arguments]
        os.execvp(prefix[0], [*prefix, *again])  # noqa: S606 - replaces this process on purpose
    return done.stderr.strip() or "unshare --net failed"
