"""``taskstore demo``: a server is killed in the middle of its work, and nothing that was acknowledged is lost."""

import asyncio
import re
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

from mcp.shared.exceptions import MCPError
from pydantic import JsonValue
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from sqlalchemy import text

from taskstore.cli.demo_client import Poll, User, connect
from taskstore.cli.demo_process import DemoError, ServerProcess
from taskstore.cli.demo_server import Configuration
from taskstore.cli.output import plain
from taskstore.cli.target import Target
from taskstore.clock import Clock
from taskstore.schema import DEFAULT_PREFIX, VERSION_TABLE, metadata
from taskstore.task import ReasonCode, TaskStatus

TIMEOUT = timedelta(seconds=60)

# Of a report that is to be done before the crash, and of one that can't be: at least ten times as long.
_SHORT_REPORTS = {"tides": 8, "comets": 16, "glaciers": 28, "bees": 40}
_LONG_REPORTS = {"rivers": 400, "volcanoes": 400, "orchids": 400, "lighthouses": 400}
_PROGRESS = re.compile(r"\((\d+)/(\d+)\)$")  # how the status message of a poll ends


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCounts:
    """What came of the tasks that had been acknowledged when the server was killed.

    Attributes:
        acknowledged: Calls that were answered with a task id.
        finished_before_crash: Tasks that were finished by then.
        results_intact: Of these, the ones with the same result afterwards, byte for byte.
        recovered: The others that said ``CRASH_RECOVERY`` at the first poll.
        lost: Acknowledged tasks that are neither.
        first_poll_ms: From the kill to the answer of the first poll after it.
        database: URL, without a password.
    """

    acknowledged: int
    finished_before_crash: int
    results_intact: int
    recovered: int
    lost: int
    first_poll_ms: int
    database: str

    def to_json(self) -> dict[str, JsonValue]:
        """Turn the counts into JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} acknowledged: {self.finished_before_crash} finished before the crash, "
            f"{self.results_intact} results intact, {self.recovered} recovered, {self.lost} lost; "
            f"first poll answered {self.first_poll_ms:,} ms after the kill."
        )


class _Fate(StrEnum):
    """What became of an acknowledged task; the values are colours."""

    INTACT = "green"
    RECOVERED = "yellow"
    LOST = "red"


@dataclass(slots=True)
class _Report:
    """A report that Alice asked for; ``result`` is what she received before the crash, if it was finished."""

    topic: str
    pages: int
    task_id: str
    result: bytes | None = None

    def fate(self, poll: Poll) -> _Fate:
        """Compare with the first poll after the crash."""
        if poll.status == TaskStatus.COMPLETED and self.result in (None, poll.result):
            # None: it finished between Alice's last poll and the kill, so there is nothing to compare with.
            return _Fate.INTACT
        is_recovered = poll.status == TaskStatus.FAILED and poll.reason == ReasonCode.CRASH_RECOVERY
        return _Fate.RECOVERED if is_recovered and self.result is None else _Fate.LOST


@dataclass(frozen=True, slots=True)
class _Stage:
    """Where the demo plays: its database, the server's log, and the console that the story is told on."""

    target: Target
    log: Path
    out: Console

    def tell(self, who: str, what: str) -> None:
        self.out.print(f"{who:<10}{plain(what)}", soft_wrap=True)


def play(url: str | None, *, keep: bool, out: Console) -> tuple[DemoCounts, list[str]]:
    """Play the demo, and tell the story on a console.

    Args:
        url: Database; it gets tables of the demo's own, beside whatever is there. None: a SQLite file in a new folder.
        keep: Whether these tables, or this folder, are left behind.

    Returns:
        The counts, and a sentence on each promise that was broken; none when all went well.

    Raises:
        DemoError: The demo could not be played to its end.
        DatabaseUnavailableError: The database cannot be opened or reached.
    """
    with _own_folder(keep=keep and url is None) as folder, _own_tables(url, folder, keep) as target:
        stage = _Stage(target, folder / "server.log", out)
        stage.tell("Database", target.label)
        if keep:
            option = "" if target.prefix == DEFAULT_PREFIX else f" --prefix {target.prefix}"
            stage.tell("", f"It is kept; look at it with: taskstore ls {target.label}{option}")
        try:
            return asyncio.run(_play_in_time(stage))
        except asyncio.CancelledError:
            raise SystemExit(128 + signal.SIGTERM) from None
        except TimeoutError as late:
            raise DemoError(f"The demo was not done within {TIMEOUT.total_seconds():g} s.", stage.log) from late
        except (MCPError, ExceptionGroup) as problem:  # the SDK's client wraps what happens inside it
            raise DemoError(f"The demo broke off: {_innermost(problem)!r}.", stage.log) from problem


async def _play_in_time(stage: _Stage) -> tuple[DemoCounts, list[str]]:
    playing = asyncio.current_task()
    assert playing is not None, "a coroutine runs in a task"
    # As with Ctrl-C, the stack is unwound: the server ends, and the database is cleared away.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    async with asyncio.timeout(TIMEOUT.total_seconds()):
        return await _play(stage)


async def _play(stage: _Stage) -> tuple[DemoCounts, list[str]]:
    clock = Clock()
    alice_token, bob_token = secrets.token_urlsafe(), secrets.token_urlsafe()
    configuration = Configuration(
        database_url=stage.target.url,
        table_prefix=stage.target.prefix,
        port=_free_port(),
        tokens={alice_token: "alice", bob_token: "bob"},
    )

    with ServerProcess(configuration, stage.log) as server:
        await server.wait_until_ready()
        stage.tell("Server", f"process {server.pid} answers at {configuration.url}")
        async with connect(configuration.url, alice_token) as alice:
            reports = await _ask_for_reports(alice)
            stage.tell("Alice", f"asks for {len(reports)} reports, and has a task id for each at once")
            await _watch(alice, reports, stage.out)
            killed_at = clock.monotonic()
            server.kill()
        stage.tell("SIGKILL", f"process {server.pid} is dead, in the middle of its work")

    with ServerProcess(configuration, stage.log) as server:
        await server.wait_until_ready()
        stage.tell("Server", f"process {server.pid} runs on the same database; Alice polls every task once:")
        async with connect(configuration.url, alice_token) as alice, connect(configuration.url, bob_token) as bob:
            polls = [await _poll_or_lose(alice, reports[0])]
            first_poll_ms = round((clock.monotonic() - killed_at) * 1000)
            polls += [await _poll_or_lose(alice, report) for report in reports[1:]]
            stage.out.print(_verdicts(reports, polls))
            broken = await _spy(bob, reports, stage) + await _finish_one_more(alice, stage)

    counts = _count(reports, polls, first_poll_ms, stage.target.label)
    if counts.lost:
        broken.append("What had been acknowledged was lost.")
    return counts, broken


def _count(reports: list[_Report], polls: list[Poll], first_poll_ms: int, database: str) -> DemoCounts:
    fates = [report.fate(poll) for report, poll in zip(reports, polls, strict=True)]
    return DemoCounts(
        acknowledged=len(reports),
        finished_before_crash=sum(
            report.result is not None or fate is _Fate.INTACT for report, fate in zip(reports, fates, strict=True)
        ),
        results_intact=fates.count(_Fate.INTACT),
        recovered=fates.count(_Fate.RECOVERED),
        lost=fates.count(_Fate.LOST),
        first_poll_ms=first_poll_ms,
        database=database,
    )


async def _ask_for_reports(alice: User) -> list[_Report]:
    asked = {**_SHORT_REPORTS, **_LONG_REPORTS}
    return [_Report(topic, pages, await alice.start_report(topic, pages)) for topic, pages in asked.items()]


async def _watch(alice: User, reports: list[_Report], out: Console) -> None:
    """Show how far the reports are, until the short ones are finished and the long ones are under way."""
    status = TextColumn("{task.fields[status]}")
    with Progress(
        TextColumn("  {task.description:<12}"), BarColumn(), MofNCompleteColumn(), status, console=out
    ) as bars:
        rows = [bars.add_task(report.topic, total=report.pages, status="") for report in reports]
        while True:
            polls = [await alice.poll(report.task_id) for report in reports]
            are_due = True
            for report, row, poll in zip(reports, rows, polls, strict=True):
                pages = _pages_written(report, poll)
                bars.update(row, completed=pages, status=plain(poll.status))
                if poll.status == TaskStatus.COMPLETED:
                    report.result = poll.result
                are_due = are_due and (report.result is not None or (report.topic in _LONG_REPORTS and pages > 0))
            if are_due:
                return
            await asyncio.sleep(min(poll.interval_seconds for poll in polls))


def _pages_written(report: _Report, poll: Poll) -> int:
    found = _PROGRESS.search(poll.message)
    return report.pages if poll.status == TaskStatus.COMPLETED else int(found[1]) if found else 0


async def _poll_or_lose(alice: User, report: _Report) -> Poll:
    """Poll once; a refusal is what the demo looks for, and no reason to end it."""
    try:
        return await alice.poll(report.task_id)
    except MCPError as refusal:
        return Poll({"status": "lost", "statusMessage": refusal.error.message})


def _verdicts(reports: list[_Report], polls: list[Poll]) -> Table:
    """Lay out what the first poll of each task after the crash said."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for report, poll in zip(reports, polls, strict=True):
        said = plain(poll.message)
        if report.result is not None and poll.status == TaskStatus.COMPLETED:
            same = "the same as" if report.result == poll.result else "NOT the same as"
            said = f"{len(poll.result):,} bytes, {same} before the crash"
        table.add_row("", report.topic, Text(plain(poll.status), style=report.fate(poll).value), said)
    return table


async def _spy(bob: User, reports: list[_Report], stage: _Stage) -> list[str]:
    """Let another user poll the ids: he must be told what he is told about an id that never was."""
    nothing = await bob.refusal("tsk_" + "0" * 64)
    refusals = [await bob.refusal(report.task_id) for report in reports]
    seen = sum(refusal is None or refusal != nothing for refusal in refusals)
    stage.tell("Bob", f"another user, knows the ids and sees {seen or 'none'} of the tasks: {nothing}")
    return [f"Another user can tell that {seen} of the tasks exist."] if seen else []


async def _finish_one_more(alice: User, stage: _Stage) -> list[str]:
    task_id = await alice.start_report("swifts", pages=4)
    poll = await alice.poll(task_id)
    while poll.status == TaskStatus.WORKING:
        await asyncio.sleep(poll.interval_seconds)
        poll = await alice.poll(task_id)
    stage.tell("Alice", f"asks for one more report: {poll.status}")
    return [] if poll.status == TaskStatus.COMPLETED else [f"A task after the restart ended {poll.status}."]


def _free_port() -> int:
    """Find a port that nobody listens on; the server gets the same one again after its restart."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _innermost(problem: BaseException) -> BaseException:
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem


@contextmanager
def _own_folder(*, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="taskstore-demo-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)


@contextmanager
def _own_tables(url: str | None, folder: Path, keep: bool) -> Iterator[Target]:
    """Say where the demo's tables go, and drop them at the end unless they are kept or their file goes anyway."""
    if url is None:
        yield Target(f"sqlite:///{folder / 'tasks.db'}")
        return
    # Under a prefix of their own, the demo neither migrates the user's tables, nor recovers or sweeps their tasks,
    # nor needs the secret that these are bound under.
    target = Target(url, prefix=f"taskstore_demo_{secrets.token_hex(3)}_")
    is_new_file = target.file is not None and not target.file.exists()
    with target.database(create=True):
        pass  # reachable, or the demo ends here
    try:
        yield target
    finally:
        if not keep:
            with target.database() as database, database.migration() as connection:
                metadata(target.prefix, None).drop_all(connection)
                connection.execute(text(f"DROP TABLE IF EXISTS {target.prefix}{VERSION_TABLE}"))
            if is_new_file and target.file is not None:
                target.file.unlink()
