"""pyverbs in both layouts, and every way in which it can be missing or broken: a result, never a traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guard.probe.rdma_program import Program

Launch = Callable[..., Program]


def said(program: Program) -> dict[str, Any]:
    answer = program.receive(60)
    assert answer is not None
    return answer


@pytest.mark.parametrize("layout", ["44", "59"])
def test_both_layouts_load(pyverbs: Callable[[str], Path], launch: Launch, layout: str) -> None:
    answer = said(launch(pyverbs(layout), "check"))
    assert (answer["ok"], answer["layout"], answer["devices"]) == (True, layout, ["fake0"])


def test_absent(launch: Launch, tmp_path: Path) -> None:
    answer = said(launch(tmp_path, "check"))
    assert answer["code"] == "pyverbs-absent"
    assert "python3-pyverbs" in answer["hint"]
    assert "/usr/bin/python3" in answer["hint"]


BROKEN = {
    "ImportError: /usr/lib/libibverbs.so.1: version `IBVERBS_PRIVATE_59' not found": "wrong-abi",
    "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory": "wrong-abi",
    "ImportError: device.so: undefined symbol: ibv_query_gid_type": "wrong-abi",
    "ImportError: cannot import name PyverbsCM": "pyverbs-broken",
    "KeyError: '__reduce_cython__'": "pyverbs-broken",
    "SystemError: initialization of device raised unreported exception": "pyverbs-broken",
}


@pytest.mark.parametrize("failure", BROKEN)
def test_import_that_fails(pyverbs: Callable[[str], Path], launch: Launch, failure: str) -> None:
    path = pyverbs("44")
    kind, _, text = failure.partition(": ")
    (path / "pyverbs/device.py").write_text(f"raise {kind}({text!r})\n")
    answer = said(launch(path, "check"))
    assert answer["code"] == BROKEN[failure]
    assert text.strip("'") in answer["message"]
    assert "python3-pyverbs" in answer["hint"]


def test_extensions_of_another_interpreter(pyverbs: Callable[[str], Path], launch: Launch) -> None:
    path = pyverbs("44")
    (path / "pyverbs/device.py").rename(path / "pyverbs/device.cpython-30-x86_64-linux-gnu.so")
    answer = said(launch(path, "check"))
    assert answer["code"] == "wrong-abi"
    assert "no part pyverbs.device" in answer["message"]


def test_a_constant_that_is_not_there(pyverbs: Callable[[str], Path], launch: Launch) -> None:
    path = pyverbs("44")
    (path / "pyverbs/enums.py").write_text("IBV_QPT_RC = 2\n")
    answer = said(launch(path, "serve", "--device", "fake0", "--bind", "127.0.0.1", "--port", "0"))
    assert answer["code"] == "pyverbs-broken"
    assert "IBV_ACCESS_LOCAL_WRITE" in answer["message"]


@pytest.mark.parametrize("devices", ["", "error"])
def test_no_device(pyverbs: Callable[[str], Path], launch: Launch, devices: str) -> None:
    """The list is empty with InfiniBand in the kernel, an error without."""
    answer = said(launch(pyverbs("44"), "serve", "--device", "fake0", FAKE_DEVICES=devices))
    assert answer["code"] == "no-device"
    assert "rdma link" in answer["hint"]


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"FAKE_STATE": "1"}, "port-down"),
        ({"FAKE_GIDS": ""}, "no-gid"),
        ({"FAKE_GIDS": "0:fe80:0000:0000:0000:0000:0000:0000:0001:1"}, "no-gid"),
        ({"FAKE_DEVICES": "other0,other1"}, "no-device"),
    ],
)
def test_a_target_that_cannot_serve_says_so_at_once(
    pyverbs: Callable[[str], Path], launch: Launch, changed: dict[str, str], code: str
) -> None:
    answer = said(launch(pyverbs("59"), "serve", "--device", "fake0", "--bind", "127.0.0.1", "--port", "0", **changed))
    assert answer["code"] == code
