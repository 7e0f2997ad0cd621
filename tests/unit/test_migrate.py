"""The schema's revisions: what they make, beside what, as whom, from how many processes at once, and after a crash."""

import asyncio
import logging
import re
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from pydantic import JsonValue
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, make_url

from taskstore import AuthContext, DatabaseUnavailableError, SchemaError, StoreOptions, TaskStore, migrate
from taskstore.database import Database
from taskstore.migrate import check, downgrade, offline_sql, scripts, upgrade
from taskstore.schema import REVISIONS, metadata
from taskstore.testing import ManualClock, PostgresServer
from tests.unit.outside import connect, query, run_at_once, run_python, value

ALICE = AuthContext(subject="alice")
QUESTION: JsonValue = {"method": "elicitation/create", "params": {"message": "Which?"}}
README = Path(__file__).parents[2] / "README.md"

UPGRADE = """
import sys
from taskstore.migrate import upgrade
print("ready", flush=True)
input()
upgrade(sys.argv[1])
"""

OPEN = """
import asyncio, sys
from taskstore import StoreOptions, TaskStore
async def main():
    async with TaskStore.open(sys.argv[1], options=StoreOptions(migrate=True)):
        pass
print("ready", flush=True)
input()
asyncio.run(main())
"""

# Dies where everything was created and nothing is committed.
DIE_BEFORE_THE_COMMIT = """
import os, signal, sys
from contextlib import contextmanager
from taskstore.database import Database
from taskstore.migrate import upgrade

migration = Database.migration

@contextmanager
def deadly(self):
    with migration(self) as connection:
        yield connection
        assert connection.exec_driver_sql("SELECT count(*) FROM taskstore_meta").scalar() == 1
        os.kill(os.getpid(), signal.SIGKILL)

Database.migration = deadly
upgrade(sys.argv[1])
"""


def is_sqlite(url: str) -> bool:
    """Tell which backend a URL names."""
    return url.startswith("sqlite")


def table_names(url: str) -> set[str]:
    """List the tables of a database, in every schema but the server's own."""
    if is_sqlite(url):
        return {name for (name,) in query(url, "SELECT name FROM sqlite_master WHERE type = 'table'")}
    found = "SELECT tablename FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    return {name for (name,) in query(url, found)}


OURS = {*metadata().tables, "taskstore_alembic_version"}


# --- what the revisions make


def sqlite_catalog(url: str) -> dict[str, object]:
    """Describe every table and index; CHECK constraints only stand in the text of CREATE TABLE."""
    catalog: dict[str, object] = {}
    for kind, name, sql in query(url, "SELECT type, name, sql FROM sqlite_master"):
        if "alembic_version" in name:
            continue
        if kind == "index":
            catalog[name] = sql
            continue
        lines = [line.strip().rstrip(",") for line in sql.splitlines()]
        catalog[name] = {
            "columns": query(url, f"PRAGMA table_xinfo({name})"),
            "foreign keys": sorted(row[2:] for row in query(url, f"PRAGMA foreign_key_list({name})")),
            "indexes": sorted(row[1:] for row in query(url, f"PRAGMA index_list({name})")),
            "constraints": sorted(line for line in lines if line.startswith("CONSTRAINT")),
        }
    return catalog


def postgres_catalog(url: str) -> dict[str, object]:
    """Describe every column, constraint and index, as the server words them."""
    return {
        "columns": query(
            url,
            "SELECT attrelid::regclass::text, attnum, attname, format_type(atttypid, atttypmod), attnotnull, collname, "
            "pg_get_expr(adbin, adrelid), attidentity FROM pg_attribute "
            "LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum "
            "LEFT JOIN pg_collation ON pg_collation.oid = attcollation "
            "WHERE attrelid::regclass::text LIKE 'taskstore%' AND attrelid::regclass::text NOT LIKE '%alembic%' "
            "AND attrelid IN (SELECT oid FROM pg_class WHERE relkind = 'r') AND attnum > 0 ORDER BY 1, 2",
        ),
        "constraints": query(
            url,
            "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE conrelid::regclass::text LIKE 'taskstore%' AND conrelid::regclass::text NOT LIKE '%alembic%' "
            "ORDER BY 1, 2",
        ),
        "indexes": query(
            url,
            "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE tablename LIKE 'taskstore%' "
            "AND tablename NOT LIKE '%alembic%' ORDER BY 1, 2",
        ),
    }


def catalog_of(url: str) -> dict[str, object]:
    """Describe the schema of a database, Alembic's table left out."""
    return sqlite_catalog(url) if is_sqlite(url) else postgres_catalog(url)


def test_the_revisions_make_what_the_code_describes(empty_database_url: str) -> None:
    """A column, constraint or index that only one of the two knows would be missing in production or in review."""
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        metadata().create_all(connection)
    described = catalog_of(empty_database_url)
    with engine.begin() as connection:
        metadata().drop_all(connection)
    engine.dispose()

    upgrade(empty_database_url)

    made = catalog_of(empty_database_url)
    assert made == described
    assert "ck_taskstore_tasks_finished_at" in repr(made)
    assert "ON DELETE CASCADE" in repr(made)
    assert "idempotency_digest IS NOT NULL" in repr(made)


def test_the_code_knows_the_revisions_there_are_and_their_order() -> None:
    """Opening compares with this list, so that it need not import Alembic."""
    config = Config()
    config.set_main_option("script_location", str(scripts()))

    found = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]

    assert tuple(reversed(found)) == REVISIONS


def test_each_revision_tells_older_code_whether_it_can_go_on(database_url: str) -> None:
    """``oldest_code`` counts the revisions a version must know; it can name no more than there are."""
    oldest = int(value(database_url, "SELECT value FROM taskstore_meta WHERE name = 'oldest_code'"))

    assert 1 <= oldest <= len(REVISIONS)


async def test_down_to_the_base_drops_what_is_ours_and_up_again_works(database_url: str) -> None:
    """Going down is for trying out; what a host keeps in the same database is not ours to drop."""
    query(database_url, "CREATE TABLE tasks (id INTEGER NOT NULL PRIMARY KEY)")
    async with TaskStore.open(database_url) as store:
        await store.handle(await store.create_task(auth=ALICE)).complete("done")

    downgrade(database_url, "base")
    left = table_names(database_url)
    upgrade(database_url)

    assert left - {"taskstore_alembic_version"} == {"tasks"}
    assert table_names(database_url) == OURS | {"tasks"}
    async with TaskStore.open(database_url) as store:
        assert (await store.list_tasks(auth=ALICE)).tasks == ()


def test_an_upgrade_of_what_is_up_to_date_changes_nothing(database_url: str) -> None:
    """Every deployment runs it, and most have nothing new."""
    before = catalog_of(database_url)
    query(database_url, "UPDATE taskstore_meta SET value = value")

    upgrade(database_url)

    assert catalog_of(database_url) == before
    assert query(database_url, "SELECT version_num FROM taskstore_alembic_version") == [(REVISIONS[-1],)]


# --- beside a host application


@pytest.fixture
def host_url(empty_database_url: str) -> str:
    """A database of an application that uses Alembic too, and has a table by a name of ours."""
    query(empty_database_url, "CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
    query(empty_database_url, "INSERT INTO alembic_version VALUES ('abc')")
    query(empty_database_url, "CREATE TABLE tasks (id INTEGER NOT NULL PRIMARY KEY)")
    query(empty_database_url, "INSERT INTO tasks VALUES (7)")
    return empty_database_url


def test_a_hosts_tables_and_its_revision_are_left_alone(host_url: str) -> None:
    """Seen elsewhere: a library wrote its own revision into the version table of the application around it.

    Case 13, mlflow/mlflow#3374, sqlalchemy/alembic#596: a library overwrote its host's Alembic revision, and the host's
    next one dropped the library's tables.
    """
    upgrade(host_url)

    assert query(host_url, "SELECT version_num FROM alembic_version") == [("abc",)]
    assert query(host_url, "SELECT id FROM tasks") == [(7,)]
    assert table_names(host_url) == OURS | {"tasks", "alembic_version"}


def autogenerated(url: str, **options: Any) -> list[Any]:
    """Let the host compare its own tables with the database, as ``alembic revision --autogenerate`` does."""
    host = MetaData()
    Table("tasks", host, Column("id", Integer, primary_key=True))
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return list(compare_metadata(MigrationContext.configure(connection, opts=options), host))
    finally:
        engine.dispose()


def test_a_hosts_autogenerate_passes_our_tables_over_with_the_documented_filter(host_url: str) -> None:
    """Seen elsewhere: the application's next revision dropped the library's tables.

    Case 13, mlflow/mlflow#3374, sqlalchemy/alembic#596: a library overwrote its host's Alembic revision, and the host's
    next one dropped the library's tables.
    """
    documented = re.search(r"include_name=(lambda .*)\)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert documented is not None
    upgrade(host_url)

    difference = autogenerated(host_url, include_name=eval(documented[1]))

    assert difference == []
    assert len(autogenerated(host_url)) >= len(OURS)  # without it, the host would drop them all


def logging_state() -> dict[str, tuple[object, ...]]:
    """Describe how every logger there is is configured."""
    names = [None, *logging.root.manager.loggerDict]
    loggers = {str(name): logging.getLogger(name) for name in names}
    return {
        name: (logger.level, logger.disabled, logger.propagate, list(logger.handlers), list(logger.filters))
        for name, logger in loggers.items()
    }


def test_a_hosts_logging_is_left_as_it_was(empty_database_url: str) -> None:
    """Alembic's own template configures logging, and so disables every logger that exists."""
    mine = logging.getLogger(f"host.{secrets.token_hex(4)}")
    mine.setLevel(logging.DEBUG)
    mine.addHandler(handler := logging.NullHandler())
    upgrade(empty_database_url)
    before = logging_state()
    downgrade(empty_database_url, "base")

    upgrade(empty_database_url)

    after = logging_state()
    assert {name: after[name] for name in before} == before
    assert (mine.level, mine.handlers, mine.disabled) == (logging.DEBUG, [handler], False)


def test_an_upgrade_prints_nothing(empty_database_url: str) -> None:
    """On stdio, stdout is the protocol."""
    said = run_python("import sys; from taskstore.migrate import upgrade; upgrade(sys.argv[1])", empty_database_url)

    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


async def test_an_upgrade_works_inside_a_running_event_loop(empty_database_url: str) -> None:
    """Applications call it where they start, which may be in a coroutine."""
    upgrade(empty_database_url)

    assert table_names(empty_database_url) == OURS


# --- offline


def run_sql(url: str, sql: str) -> None:
    """Run a script as an administrator's tool does."""
    with closing(connect(url)) as connection:
        if isinstance(connection, sqlite3.Connection):
            connection.executescript(sql)
        else:
            connection.execute(sql)


async def test_the_offline_script_makes_the_same_schema(empty_database_url: str) -> None:
    """Seen elsewhere: where applications have no right to create tables, an administrator runs the SQL by hand.

    Case 71, dbos-inc/dbos-transact-py PR#422, PR#467: a role without the right to create tables could not run, nor a
    schema be chosen.
    """
    dialect = make_url(empty_database_url).get_backend_name()

    run_sql(empty_database_url, offline_sql(dialect))

    by_hand = catalog_of(empty_database_url)
    with closing(Database(empty_database_url)) as database:
        check(database)
    async with TaskStore.open(empty_database_url) as store:
        await store.handle(await store.create_task(auth=ALICE)).complete("done")
    downgrade(empty_database_url, "base")
    upgrade(empty_database_url)
    assert catalog_of(empty_database_url) == by_hand


def test_the_offline_script_is_one_transaction() -> None:
    """A script that stops half-way must leave nothing, or the second attempt fails at what the first one made."""
    for dialect in ("sqlite", "postgresql"):
        lines = [line for line in offline_sql(dialect).splitlines() if line]

        assert (lines[0], lines[-1]) == ("BEGIN;", "COMMIT;")


def test_an_offline_script_for_another_database_is_refused() -> None:
    """Alembic would write one for any dialect it knows, which nobody here has tried."""
    with pytest.raises(ValueError, match=r"mysql.*sqlite.*postgresql"):
        offline_sql("mysql")


# --- prefix and schema


@pytest.fixture(params=["sqlite", "postgres", "postgres-schema"])
def own_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, StoreOptions]]:
    """A place of the tables that is not the default: a prefix on each backend, and a schema on PostgreSQL."""
    clock = ManualClock()
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'tasks.db'}", StoreOptions(table_prefix="x_", clock=clock, upkeep=False)
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    url = server.create_database()
    schema = "mcp" if request.param == "postgres-schema" else None
    query(url, "CREATE SCHEMA mcp")
    yield url, StoreOptions(table_prefix="x_", schema=schema, clock=clock, upkeep=False, migrate=True)
    server.drop_database(url)


async def test_a_whole_store_works_under_another_prefix_and_in_another_schema(
    own_place: tuple[str, StoreOptions],
) -> None:
    """Every statement must name the tables where they are; one that does not is found by the first user who runs it.

    Case 71, dbos-inc/dbos-transact-py PR#422, PR#467: a role without the right to create tables could not run, nor a
    schema be chosen.
    """
    url, options = own_place
    clock = options.clock
    assert isinstance(clock, ManualClock)
    qualified = f"{options.schema}.x_" if options.schema else "x_"

    async with TaskStore.open(url, options=options) as store, TaskStore.open(url, options=options) as peer:
        asked, cancelled, completed, failed = [await store.create_task(auth=ALICE) for _ in range(4)]
        asking = await question(store, peer, asked)
        await store.handle(completed).progress(1, 2, "half")
        await store.handle(completed).complete("done")
        await store.handle(failed).fail("no paper")
        await peer.cancel_task(cancelled.task_id, auth=ALICE)
        orphan = await store.create_task(auth=ALICE)
        query(url, f"DELETE FROM {qualified}instances WHERE instance_id IN (SELECT instance_id FROM {qualified}tasks)")
        report = await peer.recover()
        page = await peer.list_tasks(auth=ALICE)
        events = await peer.list_events(asked.task_id, auth=ALICE)
        operators = await peer.operator.list_tasks(status=page.tasks[0].status)
        health = await peer.operator.health()
        await peer.delete_task(failed.task_id, auth=ALICE)
        clock.advance(timedelta(days=40))
        swept = await peer.sweep()

    assert asking == {"which": "this"}
    assert set(report.recovered) == {asked.task_id, orphan.task_id}
    assert len(page.tasks) == 5
    assert [event.kind for event in events] == ["created", "input_required", "resumed", "recovered"]
    assert operators.tasks
    assert (health.live, health.finished, health.revision) == (0, 5, REVISIONS[-1])
    assert swept.deleted == 4
    assert not [name for name in table_names(url) if not name.startswith("x_")]


async def question(store: TaskStore, peer: TaskStore, task: Any) -> Any:
    """Ask in one store and answer in the other."""
    asking = asyncio.create_task(store.handle(task).ask({"which": QUESTION}))
    await peer.wait_for_task(task.task_id, auth=ALICE, since_version=1)
    keys = (await peer.get_details(task.task_id, auth=ALICE)).input_requests
    await peer.answer_inputs(task.task_id, dict.fromkeys(keys, "this"), auth=ALICE)
    return await asking


async def test_two_stores_under_two_prefixes_share_a_database_and_nothing_else(empty_database_url: str) -> None:
    """Two servers of one site may use one database without seeing each other's tasks."""
    one, other = (StoreOptions(table_prefix=prefix, migrate=True) for prefix in ("one_", "other_"))

    async with (
        TaskStore.open(empty_database_url, options=one) as first,
        TaskStore.open(empty_database_url, options=other) as second,
    ):
        task = await first.create_task(auth=ALICE)
        await first.handle(task).complete("done")
        seen = await second.operator.list_tasks()

    assert seen.tasks == ()
    assert len(table_names(empty_database_url)) == 2 * len(OURS)


def test_the_offline_script_is_for_the_prefix_and_the_schema_asked_for(postgres_empty_url: str) -> None:
    """An administrator must not have to edit it."""
    query(postgres_empty_url, "CREATE SCHEMA mcp")

    run_sql(postgres_empty_url, offline_sql("postgresql", table_prefix="x_", schema="mcp"))

    with closing(Database(postgres_empty_url, prefix="x_", schema="mcp")) as database:
        check(database)
    schemas = query(postgres_empty_url, "SELECT DISTINCT schemaname FROM pg_tables WHERE tablename LIKE 'x\\_%'")
    assert schemas == [("mcp",)]


def test_a_schema_that_does_not_exist_is_named_with_the_remedy(postgres_empty_url: str) -> None:
    """Creating it is for the administrator to decide; the server was reached, and the message must not doubt it."""
    with pytest.raises(SchemaError, match=r'"?mcp"? does not exist'):
        upgrade(postgres_empty_url, schema="mcp")


@pytest.fixture
def postgres_empty_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A PostgreSQL database without any table."""
    url = postgres_server.create_database()
    yield url
    postgres_server.drop_database(url)


# --- the schema that is there, and this code


async def test_a_sqlite_file_is_migrated_by_opening_it(tmp_path: Path) -> None:
    """It is the default, and must need no step of its own."""
    url = f"sqlite:///{tmp_path / 'tasks.db'}"

    async with TaskStore.open(url) as store:
        await store.handle(await store.create_task(auth=ALICE)).complete("done")

    assert table_names(url) == OURS


async def test_a_file_is_not_migrated_where_that_is_switched_off(tmp_path: Path) -> None:
    """Whoever deploys the revision by hand does not want a server to be first."""
    url = f"sqlite:///{tmp_path / 'tasks.db'}"

    with pytest.raises(SchemaError, match="has no taskstore tables; create them with: taskstore migrate"):
        async with TaskStore.open(url, options=StoreOptions(migrate=False)):
            pass

    assert table_names(url) == set()


async def test_postgres_is_not_migrated_by_opening(postgres_empty_url: str) -> None:
    """A server that may create tables in a shared database is a decision, not a default."""
    with pytest.raises(SchemaError, match="has no taskstore tables; create them with: taskstore migrate"):
        async with TaskStore.open(postgres_empty_url):
            pass

    assert table_names(postgres_empty_url) == set()


async def test_postgres_is_migrated_by_opening_where_that_is_asked_for(postgres_empty_url: str) -> None:
    """One step less, where the server's role may create tables."""
    async with TaskStore.open(postgres_empty_url, options=StoreOptions(migrate=True)) as store:
        await store.handle(await store.create_task(auth=ALICE)).complete("done")

    assert table_names(postgres_empty_url) == OURS


async def test_a_schema_behind_the_code_is_named_with_the_remedy(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was upgraded before its database must not run statements that name missing columns."""
    monkeypatch.setattr(migrate, "REVISIONS", (*REVISIONS, "9998"))

    with pytest.raises(SchemaError, match=rf"is at revision {REVISIONS[-1]}, this code needs 9998.*taskstore migrate"):
        async with TaskStore.open(database_url, options=StoreOptions(migrate=False)):
            pass


def set_revision(url: str, revision: str, oldest_code: int) -> None:
    """Make a database look as a later version of the package left it."""
    query(url, f"UPDATE taskstore_alembic_version SET version_num = '{revision}'")
    number = f"x'{str(oldest_code).encode().hex()}'" if is_sqlite(url) else f"'{oldest_code}'"
    query(url, f"UPDATE taskstore_meta SET value = {number} WHERE name = 'oldest_code'")


async def test_older_code_runs_beside_a_migration_that_only_added(database_url: str) -> None:
    """The replicas of a site are upgraded one after the other, and the database first."""
    set_revision(database_url, "9999", oldest_code=len(REVISIONS))

    async with TaskStore.open(database_url) as store:
        await store.handle(await store.create_task(auth=ALICE)).complete("done")

    assert value(database_url, "SELECT version_num FROM taskstore_alembic_version") == "9999"


async def test_a_schema_that_this_code_cannot_run_is_named_with_the_remedy(database_url: str) -> None:
    """Running on would write what later code misreads."""
    set_revision(database_url, "9999", oldest_code=len(REVISIONS) + 1)

    with pytest.raises(SchemaError, match=r"is at revision 9999, which this version.*cannot run; upgrade the package"):
        async with TaskStore.open(database_url):
            pass


def test_an_upgrade_by_older_code_is_refused_and_changes_nothing(database_url: str) -> None:
    """A rolled-back deployment runs its upgrade on a newer database; Alembic says that it can't locate something."""
    set_revision(database_url, "9999", oldest_code=len(REVISIONS) + 1)

    with pytest.raises(SchemaError, match="9999"):
        upgrade(database_url)

    assert value(database_url, "SELECT version_num FROM taskstore_alembic_version") == "9999"


def test_an_upgrade_by_older_code_that_can_go_on_does_nothing(database_url: str) -> None:
    """The replicas that still run the version before start again while the others are upgraded."""
    set_revision(database_url, "9999", oldest_code=len(REVISIONS))

    upgrade(database_url)

    assert value(database_url, "SELECT version_num FROM taskstore_alembic_version") == "9999"


def test_an_interrupted_first_open_is_told_from_a_damaged_database(database_url: str) -> None:
    """A version table without a row is what a downgrade to the base leaves."""
    downgrade(database_url, "base")

    with closing(Database(database_url)) as database, pytest.raises(SchemaError, match="has no taskstore tables"):
        check(database)


# --- rights


@pytest.fixture
def server_role(postgres_url: str) -> Iterator[Callable[[str], str]]:
    """Make a role that may read and write the tables and nothing else; returns the URL it connects with."""
    name, password = f"server_{secrets.token_hex(4)}", secrets.token_hex(8)
    query(postgres_url, f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
    query(postgres_url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")

    def granted(url: str) -> str:
        query(url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {name}")
        return make_url(url).set(username=name, password=password).render_as_string(hide_password=False)

    yield granted
    query(postgres_url, f"DROP OWNED BY {name}")
    query(postgres_url, f"DROP ROLE {name}")


@pytest.mark.parametrize("may_migrate", [None, True], ids=["default", "migrate"])
async def test_a_role_without_the_right_to_create_tables_can_run_a_server(
    postgres_url: str, server_role: Callable[[str], str], may_migrate: bool | None
) -> None:
    """Seen elsewhere: a library tried CREATE TABLE at every start, and failed where it had nothing to create.

    Case 71, dbos-inc/dbos-transact-py PR#422, PR#467: a role without the right to create tables could not run, nor a
    schema be chosen.
    """
    url = server_role(postgres_url)

    options = StoreOptions(migrate=may_migrate)
    async with TaskStore.open(url, options=options) as store, TaskStore.open(url, options=options) as peer:
        task = await store.create_task(auth=ALICE)
        answers = await question(store, peer, task)
        await store.handle(task).complete(answers)
        await store.recover()
        await store.sweep()
        outcome = await peer.get_outcome(task.task_id, auth=ALICE)

    assert outcome.result == {"which": "this"}


def test_a_migration_without_the_right_to_it_says_what_was_refused(
    postgres_url: str, server_role: Callable[[str], str]
) -> None:
    """The server can be reached and the password is right; what is missing is a right."""
    downgrade(postgres_url, "base")
    query(postgres_url, "DROP TABLE taskstore_alembic_version")

    with pytest.raises(SchemaError, match="permission denied for schema public"):
        upgrade(server_role(postgres_url))


# --- many at once, and crashes


@pytest.mark.parametrize("script", [UPGRADE, OPEN], ids=["upgrade", "open"])
def test_eight_processes_may_migrate_at_once(empty_database_url: str, script: str) -> None:
    """Every replica of a deployment runs the migration as it starts."""
    ended = run_at_once(script, empty_database_url, processes=8)

    assert ended == [(0, "", "")] * 8
    assert table_names(empty_database_url) == OURS
    assert query(empty_database_url, "SELECT version_num FROM taskstore_alembic_version") == [(REVISIONS[-1],)]


def test_a_migration_that_was_killed_has_changed_nothing_and_can_be_run_again(empty_database_url: str) -> None:
    """Seen elsewhere: what a killed migration had left in a SQLite file blocked every later attempt.

    Case 43, IBM/mcp-context-forge#3420: a table left over by a failed SQLite migration blocked every later attempt.
    """
    killed = run_python(DIE_BEFORE_THE_COMMIT, empty_database_url)
    left = table_names(empty_database_url)

    upgrade(empty_database_url)

    assert (killed.returncode, killed.stderr) == (-9, "")
    assert left == set()
    assert table_names(empty_database_url) == OURS


A_FINISHED_TASK = """
INSERT INTO taskstore_tasks (task_id, auth_key, server, method, status, is_error, created_at, last_updated_at,
    finished_at, owner_kind, instance_id, attempt, crashes, max_attempts, on_crash, version, result)
VALUES ('tsk_1', 'alice', '', 'tools/call', 'completed', FALSE, 1, 2, 2, 'instance', 'ins_1', 1, 0, 1, 'fail', 2, 'x')
"""


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_upgrade_from_any_revision_survives_a_kill_and_keeps_every_row(
    empty_database_url: str, revision: str
) -> None:
    """Users skip versions, and deployments are stopped half-way; the rows of years are in those tables.

    Case 43, IBM/mcp-context-forge#3420: a table left over by a failed SQLite migration blocked every later attempt.
    """
    upgrade(empty_database_url, revision=revision)
    query(empty_database_url, A_FINISHED_TASK.replace("'x'", "x'22'" if is_sqlite(empty_database_url) else "'x'"))
    before = catalog_of(empty_database_url)

    killed = run_python(DIE_BEFORE_THE_COMMIT, empty_database_url)
    left = catalog_of(empty_database_url)
    upgrade(empty_database_url)

    assert killed.returncode == -9
    assert left == before
    assert query(empty_database_url, "SELECT task_id, status, version FROM taskstore_tasks") == [
        ("tsk_1", "completed", 2)
    ]
    with closing(Database(empty_database_url)) as database:
        check(database)


def test_a_killed_downgrade_keeps_every_row(database_url: str) -> None:
    """The same in the other direction, where there is more to lose."""
    query(database_url, "INSERT INTO taskstore_meta SELECT 'kept', value FROM taskstore_meta")
    script = DIE_BEFORE_THE_COMMIT.replace("upgrade(sys.argv[1])", "downgrade(sys.argv[1], 'base')")
    script = script.replace("import upgrade", "import downgrade").replace(
        'assert connection.exec_driver_sql("SELECT count(*) FROM taskstore_meta").scalar() == 1', "pass"
    )

    killed = run_python(script, database_url)

    assert (killed.returncode, killed.stderr) == (-9, "")
    assert value(database_url, "SELECT count(*) FROM taskstore_meta") == 2
    assert table_names(database_url) == OURS


def test_a_database_that_is_away_during_a_migration_is_named() -> None:
    """The step of a deployment that fails most often for reasons of the network."""
    with pytest.raises(
        DatabaseUnavailableError, match=r"(?s)127\.0\.0\.1:1/.*cannot be reached.*Check that the server"
    ):
        upgrade("postgresql+psycopg://nobody@127.0.0.1:1/nowhere")
