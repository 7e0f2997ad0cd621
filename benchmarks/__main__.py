"""The command ``python -m benchmarks``."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import benchmarks
from benchmarks.backends import BACKENDS
from benchmarks.environments import ROOT, PeerUnavailableError, python_of
from benchmarks.machine import describe
from benchmarks.report import details, document, notes, summarize, table, verdict
from benchmarks.session import Plan, measure
from benchmarks.work import SCENARIOS
from taskstore.dialects import file_system_of

Say = Callable[[str], None]

_MATPLOTLIB = ("matplotlib==3.11.2",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit status: 1 if a backend could not run to the end."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    asked.backend = asked.backend or (["url"] if asked.url else ["sqlite", "raw-sqlite"])
    asked.backend += [each for each in (asked.url and "url", asked.baseline) if each and each not in asked.backend]
    if "url" in asked.backend and not asked.url:
        parser.error("the backend url needs the option --url")
    painter = _painter(parser, install=not asked.no_install) if asked.plot else ""
    # The PostgreSQL server puts its data there too: both databases on the same disk.
    tempfile.tempdir = asked.folder = str(Path(asked.folder).resolve())
    plan = Plan(
        scenarios=asked.scenario,
        sizes=asked.sizes,
        clients=asked.clients,
        rounds=asked.repeat,
        operations=asked.flows,
        seconds=None if asked.flows else asked.seconds,
        calm_seconds=asked.calm,
    )
    file_system = file_system_of(asked.folder)
    backends = [BACKENDS[name] for name in asked.backend]
    with _progress(sum(plan.runs_of(backend) for backend in backends)) as (say, step):
        if file_system in ("tmpfs", "ramfs"):
            say(f"{asked.folder} is in memory: nothing survives a power loss there; give --folder on a disk.")
        session = measure(
            plan,
            backends,
            folder=asked.folder,
            url=asked.url,
            install=not asked.no_install,
            say=say,
            step=step,
        )
    machine = describe(asked.folder, file_system, session.flushes_us)
    summaries = summarize(session.runs, asked.baseline)
    parts = (table(summaries, asked.baseline), details(summaries), verdict(summaries, machine), notes(session, machine))
    sys.stdout.write("\n\n".join(filter(None, parts)) + "\n")
    # A URL may hold a password; what it names stands among the backends.
    settings = {name: value for name, value in vars(asked).items() if name not in ("url", "json", "plot")}
    settings["at"] = datetime.now(UTC).isoformat(timespec="seconds")
    written = json.dumps(document(session, summaries, machine=machine, settings=settings), indent=1) + "\n"
    if asked.json:
        asked.json.write_text(written, encoding="utf-8")
    if painter and summaries:
        command = [painter, "-m", "benchmarks.plot", str(asked.plot.resolve())]
        subprocess.run(command, cwd=ROOT, input=written, text=True, check=True)
    return 1 if session.unavailable else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=benchmarks.__doc__,
        epilog="backends:\n"
        + "\n".join(f"  {each.name:14} {each.what}; survives {each.survives}" for each in BACKENDS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--scenario", nargs="+", choices=list(SCENARIOS), default=["flow"], help="what to measure (default: flow)")
    add(
        "--backend",
        nargs="+",
        choices=list(BACKENDS),
        metavar="NAME",
        help="default: sqlite raw-sqlite, or url where --url is given",
    )
    add("--url", default="", help="a database of your own, without a store in it, for the backend url")
    add(
        "--sizes",
        nargs="+",
        type=_count,
        metavar="N",
        help="tasks that are there before, for the scenarios to which it matters (default: each has its own: "
        + ", ".join(f"{name} {' '.join(map(str, each.sizes))}" for name, each in SCENARIOS.items() if any(each.sizes))
        + ")",
    )
    add("--clients", nargs="+", type=_count, default=[1], metavar="N", help="concurrent callers (default: 1)")
    add("--repeat", type=_count, default=5, metavar="N", help="rounds (default: 5)")
    add("--seconds", type=float, default=2.0, help="length of a run (default: 2)")
    add("--flows", type=_count, metavar="N", help="operations of a run, in place of --seconds")
    add("--baseline", choices=list(BACKENDS), metavar="NAME", help="compare with this backend, which runs too")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--plot", type=Path, metavar="FILE", help="draw it, as PNG, SVG or PDF; installs matplotlib if it is missing")
    add("--folder", default=tempfile.gettempdir(), help="where the databases are made (default: %(default)s)")
    add(
        "--calm",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="how long to wait before a run for others to leave the machine alone (default: 15)",
    )
    add("--no-install", action="store_true", help="never install a peer")
    return parser


def _painter(parser: argparse.ArgumentParser, *, install: bool) -> str:
    """Return the interpreter that draws; without one the command ends before it has measured for nothing."""
    try:
        return python_of("plot", () if find_spec("matplotlib") else _MATPLOTLIB, install=install, say=_say)
    except PeerUnavailableError as error:
        parser.error(f"--plot needs matplotlib: {error}")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


@contextmanager
def _progress(runs: int) -> Iterator[tuple[Say, Say]]:
    """Show how far the session is, on stderr: a bar on a terminal where rich is installed, else a line for each run."""
    if find_spec("rich") is None or not sys.stderr.isatty():
        numbers = count(1)
        yield _say, lambda name: _say(f"{next(numbers)}/{runs} {name}")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=runs)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=name)
            begun += 1

        yield lambda text: bar.console.print(text, markup=False, highlight=False, soft_wrap=True), step


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
