"""`PYTHON guard/probe/rdma_verbs check|measure|serve`: results are JSON, one object a line, on standard output."""

import importlib.util
import sys
from pathlib import Path

NAME = "kvguard_rdma_verbs"


def load() -> None:
    """Makes this directory importable as a package by itself, without putting its parent (or kvguard) on the path."""
    here = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0]).resolve() == here:
        del sys.path[0]
    spec = importlib.util.spec_from_file_location(NAME, here / "__init__.py", submodule_search_locations=[str(here)])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {here}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    load()
    sys.exit(importlib.import_module(NAME + ".program").main(sys.argv[1:]))
