"""The command ``python -m tests.crash``."""

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .laboratory import MACHINE_LOST, Laboratory, Plan
from .machine import can_have_another
from .outages import LOSSES, Ground, can_mount, postgres_ground, sqlite_ground
from .report import Report, line, table, to_json

DISK_FULL = "disk-full"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the laboratory, print what it did, and return the exit status: 1 if anything was violated."""
    asked = _parser().parse_args(arguments)
    seed = secrets.randbelow(10**9) if asked.seed is None else asked.seed
    folder = Path(tempfile.mkdtemp(prefix="taskstore-crash-", dir=asked.folder))
    small_disk = DISK_FULL in asked.outages
    if small_disk and not can_mount():
        sys.exit("A disk that gets full takes a file system to mount, and only root may do that.")
    print(f"seed {seed}, files in {folder}", file=sys.stderr, flush=True)
    with _ground(asked.url, folder, small_disk=small_disk) as ground:
        allowed = {*ground.outages, *(LOSSES if ground.path else ()), *([MACHINE_LOST] if can_have_another() else ())}
        outages = sorted(allowed) if "all" in asked.outages else asked.outages
        unknown = set(outages) - allowed
        if unknown:
            sys.exit(f"Not possible here: {', '.join(sorted(unknown))}. Possible: {', '.join(sorted(allowed))}.")
        plan = Plan(
            seed=seed,
            processes=asked.processes,
            seconds=asked.minutes * 60,
            kill_every_seconds=asked.every,
            round_seconds=asked.round,
            outages=outages,
            kills=asked.kills,
        )
        with _progress(plan) as progress:
            report = asyncio.run(Laboratory(ground, plan, folder, progress=progress).run())
    print(to_json(report) if asked.json else table(report))
    if not report.violations:
        shutil.rmtree(folder)
    return 1 if report.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.crash",
        description="Keep processes at work on one store, kill and suspend them, break their database, and check "
        "that nothing acknowledged is lost or wrong.",
    )
    add = parser.add_argument
    add("--url", default="sqlite", help="sqlite (a new file), postgres (a new server), or the URL of an empty database")
    add("--minutes", type=float, default=1.0, help="how long (default: 1)")
    add("--kills", type=int, metavar="N", help="end earlier, after so many kills")
    add("--processes", type=int, default=8, metavar="N", help="at work at once (default: 8)")
    add("--every", type=float, default=0.5, metavar="SECONDS", help="mean time between disturbances (default: 0.5)")
    add("--round", type=float, default=30.0, metavar="SECONDS", help="time between two checks (default: 30)")
    add("--seed", type=int, help="repeat the disturbances of an earlier run")
    add(
        "--outages",
        nargs="*",
        default=["all"],
        metavar="NAME",
        help=f"what happens to the database, one a round (default: all but {DISK_FULL}, which takes root)",
    )
    add("--folder", default=tempfile.gettempdir(), help="where the databases are made (default: %(default)s)")
    add("--json", action="store_true", help="print for programs")
    return parser


def _ground(url: str, folder: Path, *, small_disk: bool) -> AbstractContextManager[Ground]:
    match url:
        case "sqlite":
            return sqlite_ground(folder, small_disk=small_disk)
        case "postgres":
            return postgres_ground(folder, small_disk=small_disk)
    return _foreign_ground(url)


@contextmanager
def _foreign_ground(url: str) -> Iterator[Ground]:
    yield Ground(url, url)


@contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[Report], None]]:
    """Show how far the run is, on stderr: a bar on a terminal where rich is installed, else a line now and then."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            pass
        else:
            columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("starting", total=plan.seconds)
                yield lambda report: bar.update(task, completed=report.seconds, description=line(report))
            return
    said = -1

    def say(report: Report) -> None:
        nonlocal said
        if int(report.seconds) // 10 != said:
            said = int(report.seconds) // 10
            print(f"{report.seconds:.0f} s: {line(report)}", file=sys.stderr, flush=True)

    yield say


if __name__ == "__main__":
    sys.exit(main())
