"""A fake pyverbs in both layouts. tests/rdma/guest runs inside the guest of `make rdma-test` and nowhere else."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from guard.probe.rdma_program import Program

collect_ignore = ["guest"]

HERE = Path(__file__).parent
VERBS = HERE.parents[1] / "guard/probe/rdma_verbs"
NAMES = ("IBV_ACCESS_LOCAL_WRITE", "IBV_ACCESS_REMOTE_READ", "IBV_QPT_RC", "IBV_WR_RDMA_READ", "IBV_SEND_SIGNALED")
ERROR = """
class PyverbsError(Exception):
    pass


class PyverbsRDMAError(PyverbsError):
    def __init__(self, message, code=-1):
        super().__init__(message)
"""


@pytest.fixture
def pyverbs(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a fake pyverbs of rdma-core `44` or `59` and returns the directory that goes on the path."""

    def write(layout: str) -> Path:
        package = tmp_path / f"layout{layout}" / "pyverbs"
        package.mkdir(parents=True)
        shutil.copy(HERE / "fake_pyverbs.py", package / "_fake.py")
        for name in ("device", "pd", "mr", "cq", "qp", "addr", "wr", "cmid"):
            (package / f"{name}.py").write_text("from pyverbs._fake import *\n")
        (package / "__init__.py").touch()
        (package / "pyverbs_error.py").write_text(ERROR)
        if layout == "44":
            (package / "enums.py").write_text("".join(f"{name} = {1 << n}\n" for n, name in enumerate(NAMES)))
            (package / "cm_enums.py").write_text("RDMA_PS_TCP = 0x106\n")
        else:
            members = "".join(f"    {name} = {1 << n}\n" for n, name in enumerate(NAMES))
            (package / "libibverbs_enums.py").write_text(f"import enum\n\nclass ibv_any(enum.IntFlag):\n{members}")
            (package / "librdmacm_enums.py").write_text("RDMA_PS_TCP = 0x106\n")
        return package.parent

    return write


@pytest.fixture
def launch() -> Iterator[Callable[..., Program]]:
    """Starts the verbs program under this interpreter with a pyverbs of the test's; ends it with the test."""
    running: list[Program] = []

    def start(path: Path | None, *words: str, **environment: str) -> Program:
        base = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        extra = {"PYTHONPATH": str(path)} if path else {}
        program = Program([sys.executable, "-u", str(VERBS), *words], {**base, **extra, **environment})
        running.append(program)
        return program

    yield start
    for program in running:
        program.end()
