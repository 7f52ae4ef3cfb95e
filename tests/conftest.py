"""What all tests share: hypothesis without deadlines (a busy machine is no bug), the same examples each run."""

import os
import shutil
from collections.abc import Callable

import pytest
from hypothesis import settings

settings.register_profile("kvguard", deadline=None, derandomize=True)
settings.load_profile("kvguard")


@pytest.fixture(scope="session")
def needs() -> Callable[..., None]:
    """`needs("redis-server", "fio", root=True)` skips the test where one is missing, and fails it in CI.

    `.ci/run` sets KVGUARD_CI=1: there everything is installed, so a skip would hide a test that nobody runs. `problem`
    is any other reason not to run; empty means there is none.
    """

    def check(*programs: str, root: bool = False, problem: str = "") -> None:
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        missing = [program for program in programs if shutil.which(program, path=path) is None]
        reasons = [f"{program} is not installed" for program in missing]
        if root and os.geteuid() != 0:
            reasons.append("not root")
        if problem:
            reasons.append(problem)
        if not reasons:
            return
        if os.environ.get("KVGUARD_CI") == "1":
            pytest.fail("cannot be skipped in CI: " + "; ".join(reasons))
        pytest.skip("; ".join(reasons))

    return check
