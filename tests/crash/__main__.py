"""The command ``python -m tests.crash``."""

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

from .laboratory import Laboratory, Plan, Report, to_json
from .outages import postgres_ground, sqlite_ground


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    asked = parser.parse_args()
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    plan = Plan(seed=seed, processes=asked.processes, seconds=asked.minutes * 60)
    folder = Path(tempfile.mkdtemp(prefix="taskstore-crash-", dir=asked.folder))
    print(folder)
    with sqlite_ground(folder) if asked.database == "sqlite" else postgres_ground() as ground:
        report = asyncio.run(Laboratory(ground, plan, folder, progress=_say).run())
    print(to_json(report))
    return 1 if report.violations else 0


def _say(report: Report) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
