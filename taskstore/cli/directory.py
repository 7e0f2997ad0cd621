"""The commands that move tasks between a database and a directory with one JSON file a task."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from pydantic import AliasChoices, AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError
from rich.progress import Progress

from taskstore.binding import AuthContext
from taskstore.cli import output
from taskstore.cli.commands import EXIT_NO, AsJson, Prefix, Schema, Url, command
from taskstore.cli.target import Target
from taskstore.clock import SYSTEM
from taskstore.errors import PayloadError, TaskExistsError, TaskNotFoundError, TaskStoreError
from taskstore.operations import instant
from taskstore.rows import LONGEST_SPAN_MS
from taskstore.schema import DEFAULT_PREFIX
from taskstore.store import TaskStore
from taskstore.task import Outcome, OwnerKind, ReasonCode, Task, TaskDetails, TaskStatus

_PAGE = 1000
_MILLISECOND = timedelta(milliseconds=1)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory with a file <id>.json for each task.", show_default=False)
]
Issuer = Annotated[str | None, typer.Option(help="Whose the tasks are: the issuer of the tokens.", show_default=False)]
Subject = Annotated[str | None, typer.Option(help="Whose the tasks are: the user.", show_default=False)]
ClientId = Annotated[str | None, typer.Option(help="Whose the tasks are: the client.", show_default=False)]
Tenant = Annotated[str | None, typer.Option(help="Whose the tasks are: the tenant.", show_default=False)]
Unbound = Annotated[
    bool, typer.Option("--unbound", help="The tasks have no auth context: whoever knows an id may have its task.")
]


class TaskFile(BaseModel):
    """One task as a JSON file has it; a file may leave out what has a default here.

    Attributes:
        total_ms: How long the work was expected to take, in files that other programs wrote; read, and not kept.
        created_at: ISO 8601 with a time zone, or seconds since 1970; so are the other times.
        error: A JSON-RPC error; or its message alone, which may be a reason code.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    state: TaskStatus
    status_message: str | None = None
    progress: float | None = Field(default=None, allow_inf_nan=False)
    progress_total: float | None = Field(default=None, allow_inf_nan=False)
    total_ms: JsonValue = None
    ttl_ms: int | None = Field(ge=0, le=LONGEST_SPAN_MS, validation_alias=AliasChoices("ttl_ms", "ttl"))
    poll_interval_ms: int | None = Field(default=None, ge=0, le=LONGEST_SPAN_MS)
    created_at: AwareDatetime
    last_updated_at: AwareDatetime | None = None
    finished_at: AwareDatetime | None = None
    result: JsonValue = None
    error: JsonValue = None
    is_error: bool | None = None
    method: str = "tools/call"
    name: str | None = None
    server: str = ""
    owner_kind: OwnerKind = OwnerKind.INSTANCE
    attempt: int = Field(default=1, ge=1, lt=2**31 - 1)
    crashes: int = Field(default=0, ge=0, lt=2**31 - 1)
    version: int = Field(default=1, ge=1, lt=2**62)
    cancel_requested: bool = False

    @classmethod
    def of(cls, details: TaskDetails) -> "TaskFile":
        """Write down a task."""
        task, outcome = details.task, details.outcome or Outcome()
        kept = task.model_dump(exclude={"task_id", "status", "ttl", "expires_at", "poll_interval", "existing"})
        return cls(
            id=task.task_id,
            state=task.status,
            ttl_ms=None if task.ttl is None else task.ttl // _MILLISECOND,
            poll_interval_ms=None if task.poll_interval is None else task.poll_interval // _MILLISECOND,
            result=outcome.result,
            error=outcome.error,
            **kept,
        )

    def details(self, written_at: datetime) -> TaskDetails:
        """Read the task.

        Args:
            written_at: When it changed for the last time, if the file itself does not say so.
        """
        error, message = self.error, self.status_message
        if isinstance(error, str):
            message = error if message is None else message
            reason = error.partition(":")[0]
            data: dict[str, JsonValue] = {"data": {"reason": reason}} if reason in set(ReasonCode) else {}
            error = {"code": -32603, "message": error, **data}
        is_error = self.is_error
        if is_error is None:
            is_error = isinstance(self.result, dict) and self.result.get("isError") is True
        updated_at = self.last_updated_at or max(written_at, self.created_at)
        ttl = None if self.ttl_ms is None else self.ttl_ms * _MILLISECOND
        task = Task(
            task_id=self.id,
            status=self.state,
            status_message=message,
            is_error=is_error,
            last_updated_at=updated_at,
            finished_at=self.finished_at or (updated_at if self.state.is_finished else None),
            ttl=ttl,
            expires_at=None if ttl is None else self.created_at + ttl,
            poll_interval=None if self.poll_interval_ms is None else self.poll_interval_ms * _MILLISECOND,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        )
        outcome = None
        if self.state.is_finished or self.result is not None or error is not None:
            outcome = Outcome(result=self.result, error=error, is_error=is_error)
        return TaskDetails(task=task, outcome=outcome, input_requests={})


_AS_THEY_ARE = (
    *("progress", "progress_total", "created_at", "method", "name", "server", "owner_kind"),
    *("attempt", "crashes", "version", "cancel_requested"),
)


@dataclass
class _Imported:
    """What became of the files."""

    imported: int = 0
    recovered: int = 0
    known: int = 0
    expired: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


@command(
    "import-dir",
    "taskstore import-dir sqlite:///tasks.db lesson-13-tasks --subject alice",
    "taskstore import-dir sqlite:///tasks.db lesson-13-tasks --issuer local --subject $USER",
    "taskstore import-dir sqlite:///tasks.db lesson-13-tasks --unbound --json",
)
def import_command(
    url: Url,
    directory: Directory,
    issuer: Issuer = None,
    subject: Subject = None,
    client_id: ClientId = None,
    tenant: Tenant = None,
    unbound: Unbound = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
    schema: Schema = None,
) -> None:
    """Take over the tasks of a directory, with their ids, times, states, results and errors; exits 1 if any is refused.

    A task that is still live there has lost its process, and fails with CRASH_RECOVERY. One that is expired is left
    behind. What is in the database already stays as it is, so that this can be repeated. The tasks of servers on
    stdio are those of issuer "local" and the operating-system user.
    """
    owner = _owner(issuer, subject, client_id, tenant, unbound=unbound)
    files = sorted(_files(directory))
    with output.progress_bar("Importing", output.console(stderr=True)) as bar:
        done = Target(url, prefix, schema).ask(lambda store: _import(store, files, owner, bar), binds=True)
    if as_json:
        refused: list[JsonValue] = [{"file": name, "problem": problem} for name, problem in done.refused.items()]
        counts = {"imported": done.imported, "recovered": done.recovered, "known": done.known}
        output.print_json({**counts, "expired": list(done.expired), "refused": refused})
    else:
        typer.echo(
            f"{output.count(done.imported, 'task', 'tasks')} imported, {done.recovered:,} of them failed with "
            f"CRASH_RECOVERY; {done.known:,} were there already."
        )
    for name in done.expired:
        typer.echo(output.plain(f"{name}: expired, and not imported."), err=True)
    for name, problem in done.refused.items():
        typer.echo(output.plain(f"{name}: {problem}"), err=True)
    if done.refused:
        raise typer.Exit(EXIT_NO)


@command(
    "export-dir",
    "taskstore export-dir sqlite:///tasks.db backup --subject alice",
    "taskstore export-dir sqlite:///tasks.db backup --unbound --json",
)
def export_command(
    url: Url,
    directory: Directory,
    issuer: Issuer = None,
    subject: Subject = None,
    client_id: ClientId = None,
    tenant: Tenant = None,
    unbound: Unbound = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
    schema: Schema = None,
) -> None:
    """Write the tasks of one owner to a directory, each to a file <id>.json, in the clear and for you alone to read.

    A file replaces one of the same name at once or not at all. Requests, open questions and histories stay behind.
    """
    owner = _owner(issuer, subject, client_id, tenant, unbound=unbound)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with output.progress_bar("Exporting", output.console(stderr=True)) as bar:
            written = Target(url, prefix, schema).ask(lambda store: _export(store, directory, owner, bar))
    except OSError as problem:
        raise typer.BadParameter(f"{problem.filename or directory} cannot be written: {problem.strerror}.") from problem
    if as_json:
        output.print_json({"exported": written, "directory": str(directory)})
    else:
        typer.echo(f"{output.count(written, 'task', 'tasks')} exported to {directory}.")


def _owner(
    issuer: str | None, subject: str | None, client_id: str | None, tenant: str | None, *, unbound: bool
) -> AuthContext | None:
    if unbound != (not any((issuer, subject, client_id, tenant))):
        raise typer.BadParameter(
            "say whose the tasks are: --subject, --issuer, --client-id, --tenant, as the server binds them; "
            "or --unbound alone."
        )
    if unbound:
        return None
    try:
        return AuthContext(issuer=issuer, subject=subject, client_id=client_id, tenant=tenant)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem


def _files(directory: Path) -> Iterator[Path]:
    try:
        # Names that begin with a dot are not tasks: an export that was cut off may have left some.
        yield from (path for path in directory.iterdir() if path.suffix == ".json" and path.name[0] != ".")
    except OSError as problem:
        raise typer.BadParameter(f"{directory} cannot be read: {problem.strerror}.") from problem


async def _import(store: TaskStore, files: list[Path], owner: AuthContext | None, bar: Progress) -> _Imported:
    done, step = _Imported(), bar.add_task("", total=len(files))
    for path in files:
        try:
            details = _read(path)
            expires_at = details.task.expires_at
            if details.task.is_finished and expires_at is not None and expires_at <= instant(SYSTEM.now()):
                done.expired.append(path.name)
                continue
            task = await store.operator.import_task(details, owner=owner)
            done.known += task.existing
            done.imported += not task.existing
            done.recovered += not (task.existing or details.task.is_finished)
        except (ValueError, OverflowError, PayloadError, TaskExistsError) as problem:
            done.refused[path.name] = str(problem)
        except OSError as problem:
            done.refused[path.name] = f"{problem.strerror}."
        finally:
            bar.advance(step)
    return done


def _read(path: Path) -> TaskDetails:
    """Read one file.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no task; the message says why.
    """
    with path.open("rb") as file:
        body, written_at = file.read(), datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, UTC)
    try:
        task_file = TaskFile.model_validate(json.loads(body))
    except ValidationError as problem:
        found = [".".join(map(str, error["loc"])) + f": {error['msg']}" for error in problem.errors()]
        raise ValueError("; ".join(found)) from problem
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"this is no JSON: {problem}") from problem
    if path.name != f"{task_file.id}.json":
        raise ValueError("id: It is not the name of the file.")
    return task_file.details(written_at)


async def _export(store: TaskStore, directory: Path, owner: AuthContext | None, bar: Progress) -> int:
    written, step, cursor = 0, bar.add_task("", total=None), None
    while True:
        page = await store.operator.list_tasks(owner=owner, cursor=cursor, limit=min(_PAGE, store.limits.page_size))
        for task in page.tasks:
            try:
                details = await store.operator.get_details(task.task_id)
            except TaskNotFoundError:  # it has expired, or was deleted, since it was listed
                continue
            _write(directory, TaskFile.of(details))
            written += 1
            bar.advance(step)
        cursor = page.next_cursor
        if cursor is None:
            _sync(directory)
            return written


def _write(directory: Path, task_file: TaskFile) -> None:
    if Path(task_file.id).name != task_file.id:
        raise TaskStoreError(f"The id {task_file.id} cannot be the name of a file.")
    body = json.dumps(task_file.model_dump(mode="json", exclude={"total_ms"}), indent=2)
    beside = directory / f".{task_file.id}.json"
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.write(body + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(directory / f"{task_file.id}.json")


def _sync(directory: Path) -> None:
    """Make the names of the files durable too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
