"""pyverbs in the layouts of rdma-core 44 (flat constants) and 59 (enum classes only), behind one set of names."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from .trouble import NO_DEVICE, PYVERBS_ABSENT, PYVERBS_BROKEN, WRONG_ABI, Trouble

MODULES = ("device", "pd", "mr", "cq", "qp", "addr", "wr", "cmid")
FLAT, CLASSES = "44", "59"
TRANSPORT_IWARP = 1  # enum ibv_transport_type


class Constants:
    """`constants.IBV_X` as an integer, whether it is an attribute of a module or a member of one of its enums."""

    def __init__(self, *modules: Any) -> None:
        self._modules = modules

    def __getattr__(self, name: str) -> int:
        for module in self._modules:
            found = getattr(module, name, None)
            if found is None:
                for value in vars(module).values():
                    members = getattr(value, "__members__", None) or {}
                    if name in members:
                        found = members[name]
                        break
            if found is not None:
                setattr(self, name, int(found))
                return int(found)
        raise Trouble(PYVERBS_BROKEN, f"this pyverbs has no constant {name}")


@dataclass(frozen=True)
class Verbs:
    """The parts of pyverbs that the probe uses."""

    layout: str
    e: Constants
    device: Any
    pd: Any
    mr: Any
    cq: Any
    qp: Any
    addr: Any
    wr: Any
    cmid: Any
    error: type[Exception]

    def devices(self) -> list[Any]:
        """The RDMA devices of this host; raises `Trouble` where there is none."""
        try:
            found = list(self.device.get_device_list())
        except self.error as error:  # a kernel without InfiniBand support; with it the list is empty
            raise Trouble(NO_DEVICE, f"this host has no RDMA device ({error})") from None
        if not found:
            raise Trouble(NO_DEVICE, "this host has no RDMA device")
        return found


def name_of(device: Any) -> str:
    """A device's name; pyverbs gives bytes."""
    name = device.name
    return name.decode() if isinstance(name, bytes) else str(name)


def load() -> Verbs:
    """Imports pyverbs.

    Raises:
        Trouble: it is absent, of another ABI than libibverbs or this interpreter, or broken in any other way.
    """
    python = f"{sys.executable} (Python {sys.version_info.major}.{sys.version_info.minor})"
    try:
        importlib.import_module("pyverbs")
        parts = {name: importlib.import_module("pyverbs." + name) for name in MODULES}
        error = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
        try:
            enums = [importlib.import_module("pyverbs.libibverbs_enums")]
            layout, cm_name = CLASSES, "pyverbs.librdmacm_enums"
        except ModuleNotFoundError:
            enums = [importlib.import_module("pyverbs.enums")]
            layout, cm_name = FLAT, "pyverbs.cm_enums"
        enums.append(importlib.import_module(cm_name))
        return Verbs(layout=layout, e=Constants(*enums), error=error, **parts)
    except ModuleNotFoundError as error:
        if error.name == "pyverbs":
            raise Trouble(PYVERBS_ABSENT, f"{python} has no pyverbs") from None
        raise Trouble(WRONG_ABI, f"pyverbs has no part {error.name} for {python}: it was built for another") from None
    except ImportError as error:
        code = WRONG_ABI if _is_abi(str(error)) else PYVERBS_BROKEN
        raise Trouble(code, f"pyverbs does not load under {python}: {error}") from None
    except Trouble:
        raise
    except Exception as error:  # noqa: BLE001 - a half-initialised Cython module raises KeyError and more
        text = f"{type(error).__name__}: {error}"
        raise Trouble(PYVERBS_BROKEN, f"pyverbs does not load under {python}: {text}") from None


def _is_abi(text: str) -> bool:
    signs = ("version `", "IBVERBS_PRIVATE", "undefined symbol", "cannot open shared object", "ELF", "binary incompat")
    return any(sign in text for sign in signs)
