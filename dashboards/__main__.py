"""Writes dashboards/*.json: `python -m dashboards` (or `--check`); `--sheets DIR` draws them with planted data."""

import argparse
import json
import sys
from pathlib import Path

from dashboards import control, inflection, overview, transport

ROOT = Path(__file__).parent
DASHBOARDS = (overview.DASHBOARD, inflection.DASHBOARD, control.DASHBOARD, transport.DASHBOARD)


def files() -> dict[str, str]:
    """File name -> content."""
    return {f"{one.uid}.json": json.dumps(one.json(), indent=2, ensure_ascii=False) + "\n" for one in DASHBOARDS}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file is stale")
    parser.add_argument("--sheets", type=Path, help="draw a contact sheet of each into this folder; needs Prometheus")
    args = parser.parse_args()
    stale = [name for name, text in files().items() if not (path := ROOT / name).exists() or path.read_text() != text]
    if args.check:
        sys.exit(f"stale: {', '.join(stale)}; run `make generate`" if stale else 0)
    for name in stale:
        (ROOT / name).write_text(files()[name])
    if args.sheets:
        from dashboards.sheets import draw_all

        draw_all(args.sheets)


if __name__ == "__main__":
    main()
