"""Runs every benchmark, or those named: `python -m benchmarks ingest`. Options come after the names."""

import importlib
import itertools
import pkgutil
import sys

import benchmarks


def main() -> int:
    """Runs the benchmarks in the order of their names and says at the end which of them missed a goal."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]
    wanted = list(itertools.takewhile(lambda word: not word.startswith("--"), sys.argv[1:])) or names
    unknown = set(wanted) - set(names)
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    missed = []
    for name in wanted:
        run = getattr(importlib.import_module(f"benchmarks.{name}"), "main", None)
        if run is not None and run():
            missed.append(name)
    print(f"goals missed in: {', '.join(missed)}" if missed else "all goals met")
    return 0  # a number is a result, not an error


if __name__ == "__main__":
    sys.exit(main())
