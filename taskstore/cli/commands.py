"""The commands. Each one opens the database, does one thing, prints it, and says by its exit code how it went."""

import inspect
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

import typer
from pydantic import JsonValue

from taskstore import __version__, migrate, operations, statements
from taskstore.cli import EXIT_USAGE, output
from taskstore.cli.target import KEYS_VARIABLE, SECRET_VARIABLE, Target
from taskstore.clock import SYSTEM
from taskstore.database import Database
from taskstore.errors import (
    BindingError,
    CipherError,
    DatabaseUnavailableError,
    SchemaError,
    TaskNotFoundError,
    TaskStoreError,
)
from taskstore.instances import Judge, Verdict, read_instances
from taskstore.operations import Call, Row, Transaction
from taskstore.recovery import Recovery
from taskstore.schema import DEFAULT_PREFIX, REVISIONS
from taskstore.store import TaskStore
from taskstore.task import Health, Task, TaskDetails, TaskEvent, TaskStatus

EXIT_NO = 1
EXIT_UNAVAILABLE = 3

_PAGE = 1000

CommandT = TypeVar("CommandT", bound=Callable[..., None])

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

_HELP = f"""Look after the durable tasks of MCP servers, beside the servers that run them.

[bold]Examples[/bold]
taskstore demo
taskstore ls sqlite:///tasks.db --status failed
taskstore migrate postgresql+psycopg://user@host/name

[bold]Exit codes[/bold]
0  done
1  the answer is no: no such task, a schema that this version cannot run, a demo that lost something
2  wrong usage: options, URL, a missing extra, the binding secret, the keys
3  the database is missing, or cannot be opened or reached

[bold]Environment[/bold]
{SECRET_VARIABLE}  the servers' binding_secret in hexadecimal digits, if they have one
{KEYS_VARIABLE}  the servers' keys in hexadecimal digits, the newest first, with commas between them, if they seal
"""

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="sqlite:///tasks.db, or postgresql+psycopg://user@host/name; a password is better kept in ~/.pgpass.",
        show_default=False,
    ),
]
Prefix = Annotated[str, typer.Option(help="Prefix of the tables (StoreOptions.table_prefix).")]
Schema = Annotated[
    str | None, typer.Option(help="PostgreSQL schema of the tables (StoreOptions.schema).", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]


def run() -> None:
    """Run the command line and exit: the one place that turns the store's errors into messages and codes."""
    # What recovery did is what the command prints; a warning that says it again would only puzzle.
    logging.getLogger("taskstore").addFilter(lambda record: record.module != "recovery")
    try:
        app(prog_name="taskstore")
    except TaskStoreError as error:
        hint, code = "", EXIT_NO
        if isinstance(error, DatabaseUnavailableError):
            code = EXIT_UNAVAILABLE
        elif isinstance(error, BindingError):
            hint, code = f" Give it in {SECRET_VARIABLE}, as hexadecimal digits.", EXIT_USAGE
        elif isinstance(error, CipherError):
            hint, code = f" Here that is {KEYS_VARIABLE}: hexadecimal digits, with commas between keys.", EXIT_USAGE
        sys.stderr.write(f"{output.error_text(str(error))}{hint}\n")
        sys.exit(code)


def command(name: str, *examples: str, of: typer.Typer = app) -> Callable[[CommandT], CommandT]:
    """Register a command; its help is its docstring, followed by examples."""

    def register(function: CommandT) -> CommandT:
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
        return of.command(name, help="\n".join((text, "", "[bold]Examples[/bold]", *examples)))(function)

    return register


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"taskstore {__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def _taskstore(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look after the durable tasks of MCP servers, beside the servers that run them."""


@command(
    "migrate",
    "taskstore migrate sqlite:///tasks.db",
    "taskstore migrate postgresql+psycopg://user@host/name --schema mcp",
    "taskstore migrate postgresql+psycopg://user@host/name --sql | psql name",
)
def migrate_command(
    url: Url,
    sql: Annotated[
        bool,
        typer.Option("--sql", help="Print the SQL for an empty database instead; the database is not connected to."),
    ] = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
    schema: Schema = None,
) -> None:
    """Create the tables, or bring them up to date: in one transaction, beside running servers, any number of times."""
    target = Target(url, prefix, schema)
    if sql:
        dialect = target.parsed.get_backend_name()
        if dialect not in ("sqlite", "postgresql"):
            raise typer.BadParameter(f"there is no SQL for {dialect}; use a SQLite or PostgreSQL URL.")
        typer.echo(migrate.offline_sql(dialect, table_prefix=prefix, schema=schema), nl=False)
        return
    with target.database(create=True) as database:
        before = database.revision()
        if migrate.needs_upgrade(database):
            migrate.upgrade_database(database)
        migrate.check(database)
        after = database.revision()
    if as_json:
        output.print_json({"database": target.label, "from_revision": before, "revision": after})
    elif before == after:
        typer.echo(f"{target.label} is up to date: revision {after}.")
    else:
        typer.echo(f"{target.label} is now at revision {after}; it {_was_at(before)}.")


@command("check", "taskstore check sqlite:///tasks.db", "taskstore check URL --json | jq .orphans")
def check_command(url: Url, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX, schema: Schema = None) -> None:
    """Tell whether this version can run the database's schema, and count what is in it; exits 1 if it cannot.

    Orphans and expired tasks that stay there are a server's whose upkeep fails: its log and its health() say why.
    """
    target = Target(url, prefix, schema)
    with target.database() as database:
        revision = database.revision()
        try:
            migrate.check(database)
        except SchemaError as problem:
            if as_json:
                output.print_json(
                    {"database": target.label, "current": False, "revision": revision, "problem": str(problem)}
                )
            raise
    health = target.ask(_health)
    counts: dict[str, JsonValue] = health.model_dump(mode="json", exclude={"database", "revision", "failing"})
    if as_json:
        output.print_json({"database": target.label, "current": True, "revision": revision, **counts})
        return
    facts = [("database", target.label), ("schema", f"current, revision {revision}")]
    out = output.console()
    out.print(output.sheet([*facts, *((name, f"{counts[name]:,}") for name in counts)]))
    if health.orphans:
        out.print(
            f"The processes of {health.orphans:,} live tasks are dead. Decide over them now: taskstore recover {url}"
        )


@command("recover", "taskstore recover sqlite:///tasks.db", "taskstore recover URL --json")
def recover_command(url: Url, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX, schema: Schema = None) -> None:
    """Decide over the live tasks of dead processes by their policy, as every server does when it starts.

    They fail with CRASH_RECOVERY, or wait to be run again, or for their requestor to say whether to. Tasks of living
    processes are left alone. A process on another machine cannot be judged at a glance: a running server does it, by
    watching its heartbeat for a whole lease.
    """
    err = output.console(stderr=True)
    target = Target(url, prefix, schema)
    with target.current() as database, output.progress_bar("Recovering", err) as bar:
        orphans, unjudged = _look_for_orphans(database)
        task = bar.add_task("", total=orphans)
        report = recovery_of(database, target).recover("", progress=lambda done: bar.update(task, completed=done))
    if as_json:
        output.print_json(
            {
                "recovered": len(report.recovered),
                "queued": len(report.queued),
                "asked": len(report.asked),
                "task_ids": list(report.recovered),
                "dead_processes": report.dead_instances,
                "unjudged_processes": unjudged,
            }
        )
        return
    typer.echo(
        f"{output.count(len(report.recovered), 'task', 'tasks')} recovered, "
        f"{output.count(report.dead_instances, 'dead process', 'dead processes')}."
    )
    if report.queued or report.asked:
        typer.echo(
            f"{len(report.queued):,} of them wait to be run again, {len(report.asked):,} for their requestor's answer."
        )
    if unjudged:
        processes = output.count(unjudged, "process", "processes")
        err.print(f"{processes} on other machines cannot be judged from here; running servers watch them.")


@command("sweep", "taskstore sweep sqlite:///tasks.db", "taskstore sweep URL --json")
def sweep_command(url: Url, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX, schema: Schema = None) -> None:
    """Delete expired tasks, to free their space; nobody can find them any more, swept or not."""
    err = output.console(stderr=True)
    target = Target(url, prefix, schema)
    with target.current() as database, output.progress_bar("Sweeping", err) as bar:
        task = bar.add_task("", total=count_tasks(database, expired=True))
        report = recovery_of(database, target).sweep(progress=lambda done: bar.update(task, completed=done))
    if as_json:
        output.print_json({"deleted": report.deleted})
    else:
        typer.echo(f"{output.count(report.deleted, 'expired task', 'expired tasks')} deleted.")


@command(
    "ls",
    "taskstore ls sqlite:///tasks.db",
    "taskstore ls sqlite:///tasks.db --status failed --tool generate_report",
    "taskstore ls sqlite:///tasks.db --all --json | jq -r '.tasks[].task_id'",
)
def ls_command(
    url: Url,
    status: Annotated[TaskStatus | None, typer.Option(help="Only tasks in this status.", show_default=False)] = None,
    tool: Annotated[str | None, typer.Option(help="Only tasks of this tool.", show_default=False)] = None,
    server: Annotated[str | None, typer.Option(help="Only tasks of this server.", show_default=False)] = None,
    session: Annotated[
        str | None, typer.Option(help="Only tasks of this MCP session, by its id.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most so many.")] = 100,
    everything: Annotated[bool, typer.Option("--all", help="List them all.")] = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
    schema: Schema = None,
) -> None:
    """List tasks, newest first, whoever's they are; expired ones are gone.

    The table shortens ids, since an id may be all that protects a task; "show" takes them so. --json has them whole.
    """

    async def read(store: TaskStore) -> tuple[list[Task], bool]:
        found: list[Task] = []
        cursor = None
        while everything or len(found) < limit:
            page = await store.operator.list_tasks(
                status=status,
                name=tool,
                server=server,
                session_id=session,
                cursor=cursor,
                limit=_PAGE if everything else min(_PAGE, limit - len(found)),
            )
            found += page.tasks
            cursor = page.next_cursor
            if cursor is None:
                return found, False
        return found, True

    tasks, more = Target(url, prefix, schema).ask(read)
    if as_json:
        output.print_json({"tasks": [output.task_json(task) for task in tasks], "more": more})
        return
    if tasks:
        output.console().print(output.task_table(tasks, operations.instant(SYSTEM.now())))
    else:
        output.console(stderr=True).print("No tasks.")
    if more:
        output.console(stderr=True).print(f"There are more than {limit:,}: --limit, --all, or a filter.")


@command(
    "show",
    "taskstore show sqlite:///tasks.db tsk_06dg8l5mko4qhu",
    "taskstore show sqlite:///tasks.db tsk_06dg8l5mko4qhu --json | jq .outcome",
)
def show_command(
    url: Url,
    task_id: Annotated[
        str, typer.Argument(metavar="TASK", help="The task's id, or a beginning that only it has.", show_default=False)
    ],
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
    schema: Schema = None,
) -> None:
    """Show a task, its history, and its outcome or its open questions; exits 1 if there is no such task."""
    target = Target(url, prefix, schema)
    with target.current() as database:
        whole_id = _complete(database, target, task_id.rstrip("…."))

    async def read(store: TaskStore) -> tuple[TaskDetails, list[TaskEvent]]:
        return await store.operator.get_details(whole_id), await store.operator.list_events(whole_id)

    details, events = target.ask(read)
    if as_json:
        output.print_json(output.details_json(details, events))
        return
    out = output.console()
    out.print(output.task_sheet(details.task), "", output.event_table(events), sep="\n")
    if details.outcome is not None:
        out.print("", *output.outcome_lines(details.outcome), sep="\n", soft_wrap=True)
    for key, request in details.input_requests.items():
        out.print("", *output.question_lines(key, request), sep="\n", soft_wrap=True)


@command("demo", "taskstore demo", "taskstore demo --url postgresql+psycopg://user@host/name --json")
def demo_command(
    url: Annotated[
        str | None,
        typer.Option(
            help="Play it in this database, in tables of the demo's own; otherwise in a SQLite file of its own.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the demo's file, or its tables, for a look.")] = False,
    as_json: AsJson = False,
) -> None:
    """See it work: a server is killed in the middle of its tasks and started again; exits 1 if anything was lost.

    Starts a real MCP server over HTTP, and a client that asks for reports. The server is ended by SIGKILL while some
    are finished and others are being written, and started again on the same database. Finished results are
    compared byte for byte, unfinished tasks must say CRASH_RECOVERY at the first poll, and another user must see
    nothing.
    """
    try:
        from taskstore.cli import demo
    except ImportError as missing:
        sys.stderr.write(f"taskstore demo needs the MCP SDK 2: pip install 'taskstore[cli,mcp]' ({missing})\n")
        raise typer.Exit(EXIT_USAGE) from missing
    out = output.console(stderr=as_json)
    counts, broken = demo.play(url, keep=keep, out=out)
    for promise in broken:
        output.console(stderr=True).print(promise)
    if as_json:
        output.print_json(counts.to_json())
    else:
        out.print(str(counts), soft_wrap=True)
    if broken:
        raise typer.Exit(EXIT_NO)


async def _health(store: TaskStore) -> Health:
    return await store.operator.health()


def _was_at(revision: str | None) -> str:
    return "had no tables" if revision is None else f"was at {revision}, this version knows {', '.join(REVISIONS)}"


def recovery_of(database: Database, target: Target) -> Recovery:
    """Compose the upkeep of a database, as its servers have it."""
    return Recovery(database, target.options(), on_change=lambda _task_id: None)  # nobody waits in this process


def _look_for_orphans(database: Database) -> tuple[int, int]:
    """Count the tasks that recovery is going to decide over, and the processes that cannot be judged from here."""

    def look(transaction: Transaction) -> tuple[list[Row], list[Row]]:
        return read_instances(transaction), transaction.rows(statements.HELD_BY, {})

    instances, held_by = database.read(look, snapshot=True).result()
    verdicts = Judge(SYSTEM, database.lock_path).judge(instances)
    orphans = sum(row["held"] for row in held_by if verdicts.get(row["instance_id"], Verdict.DEAD) is Verdict.DEAD)
    return orphans, sum(verdict is Verdict.UNKNOWN for verdict in verdicts.values())


def count_tasks(database: Database, *, expired: bool = False) -> int:
    """Count the tasks that are kept, or only the expired ones."""

    def look(transaction: Transaction) -> int:
        row = transaction.row(statements.COUNTS, {"now": SYSTEM.now()})
        assert row is not None, "an aggregate without GROUP BY has one row"
        return int(row["expired"] if expired else sum(row.values()))

    return database.read(look).result()


def _complete(database: Database, target: Target, beginning: str) -> str:
    """Find the one task whose id begins so.

    Raises:
        TaskNotFoundError: There is none; expired ones do not count.
        AmbiguousIdError: There are several.
    """
    # Ids sort by the primary key, and "~" sorts behind every character of an id: the newest that begins so comes
    # first, and if it is not the only one, the other comes next.
    unit = partial(
        operations.list_tasks,
        call=Call(None, SYSTEM.now(), "", target.options().rules()),
        filters=dict.fromkeys(("status", "owner", "name", "server", "session_digest")),
        before=(0, beginning + "~"),
        limit=2,
    )
    found = [task.task_id for task in database.read(unit).result() if task.task_id.startswith(beginning)]
    if not found:
        raise TaskNotFoundError(beginning)
    if len(found) > 1:
        raise AmbiguousIdError(beginning, found)
    return found[0]


class AmbiguousIdError(TaskStoreError):
    """Several tasks have ids that begin so."""

    def __init__(self, beginning: str, found: list[str]) -> None:
        super().__init__(f"Several tasks begin with {beginning}, such as {' and '.join(found)}; give more of the id.")
