"""The SQLite file: how it is opened, who it is shared with, and what is said when it cannot be used."""

import asyncio
import logging
import os
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, text

from taskstore import AuthContext, DatabaseUnavailableError, StoreOptions, TaskStatus, TaskStore, dialects
from taskstore.database import Database
from taskstore.dialects import Durability, Journal, file_system_of
from taskstore.migrate import upgrade
from taskstore.operations import Transaction
from tests.unit.outside import connect, process, query, run_at_once, run_python, value

ALICE = AuthContext(subject="alice")

# Runs as a user who may write to nothing of root's, whoever runs the tests.
OPEN_AS_NOBODY = """
import os, sys
from taskstore.database import Database
from taskstore.errors import DatabaseUnavailableError
if os.geteuid() == 0:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
try:
    Database(sys.argv[1]).close()
except DatabaseUnavailableError as error:
    print(error)
"""

OPEN_AND_STORE = """
import asyncio, sys
from taskstore import AuthContext, TaskStore
async def main():
    async with TaskStore.open(sys.argv[1]) as store:
        task = await store.create_task(auth=AuthContext(subject="alice"))
        await store.handle(task).complete("done")
print("ready", flush=True)
input()
asyncio.run(main())
"""

STORE_BEFORE_AND_AFTER = """
import asyncio, sys
from taskstore import AuthContext, TaskStore
async def main():
    async with TaskStore.open(sys.argv[1]) as store:
        for _ in range(2):
            task = await store.create_task(auth=AuthContext(subject="alice"))
            await store.handle(task).complete("done")
            print("stored", flush=True)
            await asyncio.to_thread(input)
asyncio.run(main())
"""


def pragma(opened: Database, name: str) -> list[Any]:
    """Ask a pragma on a connection of the readers and on the writer's."""

    def ask(transaction: Transaction) -> Any:
        row = transaction.row(text(f"PRAGMA {name}"), {})
        assert row is not None
        return next(iter(row.values()))

    return [opened.read(ask).result(), opened.write(ask).result()]


def count_notes(transaction: Transaction) -> int:
    """Unit: count what ``add_note`` wrote."""
    row = transaction.row(text("SELECT count(*) AS count FROM notes"), {})
    assert row is not None
    return int(row["count"])


def add_note(transaction: Transaction) -> int:
    """Unit: write a row, and count the rows there are then."""
    transaction.execute(text("INSERT INTO notes VALUES ('ours')"), {})
    return count_notes(transaction)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with one empty table, made by another tool."""
    made = tmp_path / "notes.db"
    with closing(connect(f"sqlite:///{made}")) as connection:
        connection.execute("CREATE TABLE notes (note TEXT)")
    return made


@pytest.fixture
def opened(path: Path) -> Iterator[Database]:
    """That file, opened."""
    with closing(Database(f"sqlite:///{path}")) as database_:
        yield database_


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="taskstore-") as folder:
        made = Path(folder)
        made.chmod(0o777)
        yield made
        made.chmod(0o777)


@contextmanager
def busy_writer(opened: Database) -> Iterator[None]:
    """Keep the writer in a unit while inside."""
    entered, release = threading.Event(), threading.Event()

    def hold(transaction: Transaction) -> None:
        entered.set()
        release.wait()

    held = opened.write(hold)
    entered.wait()
    try:
        yield
    finally:
        release.set()
        held.result()


# --- settings


@pytest.mark.parametrize(("durability", "synchronous"), [("full", 2), ("normal", 1)])
def test_every_connection_is_as_durable_as_asked_for(path: Path, durability: Durability, synchronous: int) -> None:
    """SQLite's own default depends on how it was compiled, and holds for one connection only."""
    with closing(Database(f"sqlite:///{path}", durability=durability)) as opened:
        found = pragma(opened, "synchronous")

    assert found == [synchronous, synchronous]


def test_full_durability_is_the_default(opened: Database) -> None:
    """Nothing that was acknowledged may be lost by a power cut, unless somebody chose that."""
    assert pragma(opened, "synchronous") == [2, 2]


def test_full_durability_reaches_the_disk_on_macos_too(opened: Database) -> None:
    """There fsync alone leaves the data in the drive's cache; elsewhere the setting does nothing."""
    assert pragma(opened, "fullfsync") == [1, 1]


def test_the_write_ahead_log_is_on(opened: Database) -> None:
    """With a rollback journal every poll would wait for the writer, and the writer for every poll."""
    assert pragma(opened, "journal_mode") == ["wal", "wal"]


def test_foreign_keys_are_enforced(opened: Database) -> None:
    """SQLite enforces none by default, so events would outlive their task."""
    assert pragma(opened, "foreign_keys") == [1, 1]


def test_a_locked_database_is_waited_for(opened: Database) -> None:
    """Python's default is five seconds, SQLite's is none at all."""
    assert pragma(opened, "busy_timeout") == [10_000, 10_000]


# --- what cannot be opened says why, and what to do


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A typing error in a path must not end in SQLite's "unable to open database file".

    Case 45, Sonarr/Sonarr#1886, David-Crty/databasement#344: a database on a network share, or where it could not be
    written, ended in "disk I/O error".
    """
    folder = tmp_path / "no" / "such"

    with pytest.raises(DatabaseUnavailableError, match="does not exist; create it") as refused:
        Database(f"sqlite:///{folder}/tasks.db")

    assert str(folder) in str(refused.value)


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    """Whoever gives a data folder hears which URL was meant."""
    with pytest.raises(DatabaseUnavailableError) as refused:
        Database(f"sqlite:///{tmp_path}")

    assert f"{tmp_path} is a folder" in str(refused.value)
    assert f"sqlite:///{tmp_path}/tasks.db" in str(refused.value)


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_a_read_only_folder_is_named(place: Path, exists: bool) -> None:
    """Even reading needs to write there: the write-ahead log lies beside the file.

    Case 45, Sonarr/Sonarr#1886, David-Crty/databasement#344: a database on a network share, or where it could not be
    written, ended in "disk I/O error".
    """
    if exists:
        (place / "tasks.db").touch()
        (place / "tasks.db").chmod(0o666)
    place.chmod(0o555)

    said = run_python(OPEN_AS_NOBODY, f"sqlite:///{place}/tasks.db")

    assert said.stderr == ""
    assert f"{place} is read-only for this process" in said.stdout
    assert "make both writable" in said.stdout


def test_a_read_only_file_is_named(place: Path) -> None:
    """SQLite would open it, and fail at the first task that somebody creates."""
    (place / "tasks.db").touch()
    (place / "tasks.db").chmod(0o444)

    said = run_python(OPEN_AS_NOBODY, f"sqlite:///{place}/tasks.db")

    assert said.stderr == ""
    assert f"{place}/tasks.db is read-only for this process" in said.stdout
    assert "make both writable" in said.stdout


def test_a_file_that_is_no_database_is_left_as_it_is(tmp_path: Path) -> None:
    """The path may be right and the file somebody's letter."""
    letter = tmp_path / "letter.db"
    letter.write_bytes(b"Dear Bob, " * 1000)

    with pytest.raises(DatabaseUnavailableError, match=r"no SQLite database.*give another path") as refused:
        Database(f"sqlite:///{letter}")

    assert str(letter) in str(refused.value)
    assert letter.read_bytes() == b"Dear Bob, " * 1000


async def test_a_damaged_file_is_named_with_the_way_to_rescue_it(sqlite_url: str, tmp_path: Path) -> None:
    """The header alone looks well; the damage shows once a table is read."""
    damaged = tmp_path / "tasks.db"
    pages = damaged.read_bytes()
    damaged.write_bytes(pages[:4096] + b"\xff" * (len(pages) - 4096))

    with pytest.raises(DatabaseUnavailableError, match=r"damaged; restore a backup.*\.recover") as refused:
        async with TaskStore.open(sqlite_url):
            pass

    assert str(damaged) in str(refused.value)


def test_a_url_with_options_is_refused(tmp_path: Path) -> None:
    """They would be dropped without a word, and mode=ro or nolock=1 change what may be relied on."""
    with pytest.raises(ValueError, match=r"takes no options.*mode.*sqlite:///file\.db"):
        Database(f"sqlite:///{tmp_path}/tasks.db?mode=ro")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite:///tasks.db",
        "postgresql+asyncpg://me@host/name",
        "postgresql+psycopg2://me@host/name",
        "mysql://me@host/name",
    ],
)
def test_another_driver_is_refused_with_the_ones_there_are(url: str) -> None:
    """An async driver looks natural beside an async API; it would be several times slower."""
    with pytest.raises(ValueError, match=r"is not supported; use sqlite:///file\.db or postgresql\+psycopg://"):
        Database(url)


@pytest.mark.parametrize("url", ["tasks.db", "/var/lib/tasks.db", ""])
def test_a_path_in_place_of_a_url_is_refused_with_what_a_url_looks_like(url: str) -> None:
    """The first thing that many try; SQLAlchemy's own error names neither taskstore nor the way out."""
    with pytest.raises(ValueError, match=r"sqlite:///"):
        Database(url)


# --- network file systems


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    """A table of mounts with a network share on a local disk, under a name with a blank."""
    table = tmp_path / "mounts"
    table.write_text(
        "/dev/sda1 / ext4 rw 0 0\n"
        "server:/export /srv/shared\\040data nfs4 rw,vers=4.2 0 0\n"
        "/dev/sdb1 /srv/shared\\040data/local xfs rw 0 0\n"
    )
    return table


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/tasks.db", "ext4"),
        ("/srv/shared data/tasks.db", "nfs4"),
        ("/srv/shared data/local/tasks.db", "xfs"),
        ("/srv/shared data too/tasks.db", "ext4"),
    ],
)
def test_the_innermost_mount_tells_the_file_system(mounts: Path, path: str, kind: str) -> None:
    """A local disk below a share is safe, a share below a local disk is not."""
    assert file_system_of(path, str(mounts)) == kind


def test_a_system_without_a_table_of_mounts_has_no_known_file_system(tmp_path: Path) -> None:
    """Nobody is warned where nothing is known, and nothing fails for it."""
    assert file_system_of("/srv/tasks.db", str(tmp_path / "missing")) is None


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Seen elsewhere: databases on NFS and SMB shares lost their locks, and later their rows.

    Case 45, Sonarr/Sonarr#1886, David-Crty/databasement#344: a database on a network share, or where it could not be
    written, ended in "disk I/O error".
    """
    table = tmp_path / "mounts"
    table.write_text(f"server:/export {tmp_path.resolve()} {kind} rw 0 0\n")
    monkeypatch.setattr(dialects, "file_system_of", partial(file_system_of, mounts=str(table)))

    with caplog.at_level(logging.WARNING, "taskstore"):
        Database(f"sqlite:///{tmp_path}/tasks.db").close()

    (warning,) = caplog.messages
    assert f"{tmp_path}/tasks.db lies on a network file system ({kind})" in warning
    assert "put it on a local disk, or use PostgreSQL" in warning


def test_a_local_file_system_is_not_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mounts: Path
) -> None:
    """A warning that is wrong teaches people not to read them."""
    monkeypatch.setattr(dialects, "file_system_of", partial(file_system_of, mounts=str(mounts)))

    with caplog.at_level(logging.WARNING, "taskstore"):
        Database(f"sqlite:///{tmp_path}/tasks.db").close()

    assert caplog.messages == []


class _NoSharedMemory(sqlite3.Connection):
    """A connection to a file system without shared memory: SQLite keeps its old journal there, without an error."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return super().execute("PRAGMA journal_mode" if sql == "PRAGMA journal_mode=wal" else sql, *args)


def test_a_file_system_that_refuses_the_write_ahead_log_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on without it would look well, and be slow and lock every reader out.

    Case 45, Sonarr/Sonarr#1886, David-Crty/databasement#344: a database on a network share, or where it could not be
    written, ended in "disk I/O error".
    """
    monkeypatch.setattr(sqlite3.dbapi2, "connect", partial(sqlite3.connect, factory=_NoSharedMemory))

    with pytest.raises(DatabaseUnavailableError, match="put it on a local disk, or use PostgreSQL") as refused:
        Database(f"sqlite:///{tmp_path}/tasks.db")

    assert f"{tmp_path}/tasks.db cannot use a write-ahead log" in str(refused.value)


async def test_a_rollback_journal_serves_where_there_is_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shares of containers cannot hold a write-ahead log at all; whoever says so gets a store that works there.

    Case 45, Sonarr/Sonarr#1886, David-Crty/databasement#344: a database on a network share, or where it could not be
    written, ended in "disk I/O error".
    """
    monkeypatch.setattr(sqlite3.dbapi2, "connect", partial(sqlite3.connect, factory=_NoSharedMemory))
    url, options = f"sqlite:///{tmp_path}/tasks.db", StoreOptions(journal="rollback")

    async with TaskStore.open(url, options=options) as store, TaskStore.open(url, options=options) as peer:
        tasks = [await store.create_task(auth=ALICE) for _ in range(20)]
        waiters = [asyncio.create_task(peer.wait_for_task(task.task_id, auth=ALICE)) for task in tasks]
        await asyncio.gather(*(store.handle(task).complete({"id": task.task_id}) for task in tasks))
        seen = await asyncio.wait_for(asyncio.gather(*waiters), 30)
        mode = value(url, "PRAGMA journal_mode")
        files = {Path(name).suffix for name in os.listdir(tmp_path)}

    assert {task.status for task in seen} == {TaskStatus.COMPLETED}
    assert mode == "delete"
    assert files <= {".db", ".db-journal", ".lock"}


def test_a_file_is_brought_to_the_journal_that_is_asked_for_and_a_migration_leaves_it(path: Path) -> None:
    """The log of one process and the journal of another would not know of each other."""
    url = f"sqlite:///{path}"
    modes = []
    journals: list[Journal] = ["rollback", "wal", "rollback"]
    for journal in journals:
        Database(url, journal=journal).close()
        upgrade(url)
        modes.append(value(url, "PRAGMA journal_mode"))

    with closing(Database(url)) as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialects, "_BUSY_TIMEOUT_MS", 20)
        opened.read(lambda transaction: None).result()
        with pytest.raises(DatabaseUnavailableError, match=r"from 'wal' to 'delete' while others have it open; stop"):
            Database(url, journal="rollback")

    assert modes == ["delete", "wal", "delete"]


# --- in memory


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
async def test_an_in_memory_store_works_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """For tests and demonstrations; it lives as long as it is open."""
    monkeypatch.chdir(tmp_path)

    async with TaskStore.open(url) as store:
        task = await store.create_task(auth=ALICE)
        await store.handle(task).complete("done")
        outcome = await store.get_outcome(task.task_id, auth=ALICE)

    assert outcome.result == "done"
    assert os.listdir(tmp_path) == []


async def test_two_in_memory_stores_are_two_databases() -> None:
    """Two tests in one process must not see each other's tasks."""
    async with TaskStore.open("sqlite://") as one, TaskStore.open("sqlite://") as other:
        await one.create_task(auth=ALICE)

        page = await other.list_tasks(auth=ALICE)

    assert page.tasks == ()


# --- opening, closing, sharing


def test_a_relative_path_is_meant_from_where_the_store_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that changes its working directory must not go on in another, empty file."""
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    with closing(Database("sqlite:///notes.db")) as opened:
        opened.write(lambda transaction: transaction.execute(text("CREATE TABLE notes (note TEXT)"), {})).result()
        monkeypatch.chdir(elsewhere)
        with busy_writer(opened):  # so that the read opens another connection
            count = opened.read(count_notes).result()

    assert count == 0
    assert list(elsewhere.iterdir()) == []


def test_the_last_one_to_close_leaves_one_file(path: Path) -> None:
    """Whoever copies the file of a stopped server must have everything in it."""
    opened = Database(f"sqlite:///{path}")
    opened.write(add_note).result()

    opened.close()

    assert [each.name for each in path.parent.iterdir()] == ["notes.db"]


def test_the_file_is_for_its_owner_as_the_umask_says(path: Path) -> None:
    """The write-ahead log holds the same secrets as the file, and SQLite gives it the same mode."""
    path.chmod(0o600)

    with closing(Database(f"sqlite:///{path}")) as opened:
        opened.write(add_note).result()
        modes = {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}

    assert modes == {0o600}


def test_closing_twice_is_closing_once(path: Path) -> None:
    """Clean-up code runs in more than one place."""
    opened = Database(f"sqlite:///{path}")
    opened.close()

    opened.close()

    assert [each.name for each in path.parent.iterdir()] == ["notes.db"]


def test_what_was_handed_over_before_the_close_is_stored(path: Path) -> None:
    """Closing waits for what others were promised an answer to."""
    opened = Database(f"sqlite:///{path}")
    with busy_writer(opened):
        futures = [opened.write(add_note) for _ in range(100)]
    opened.close()

    assert [future.result(timeout=0) for future in futures] == list(range(1, 101))
    assert value(f"sqlite:///{path}", "SELECT count(*) FROM notes") == 100


def test_a_closed_database_says_so(path: Path) -> None:
    """Otherwise a call after the end would wait for a thread that is gone."""
    opened = Database(f"sqlite:///{path}")
    opened.close()

    for call in (opened.write, opened.read):
        with pytest.raises(DatabaseUnavailableError, match=r"closed; open it again with TaskStore\.open"):
            call(count_notes)


async def test_a_closed_store_says_so(sqlite_url: str) -> None:
    """A request that comes after the shutdown gets an answer that tells what is wrong."""
    async with TaskStore.open(sqlite_url) as store:
        task = await store.create_task(auth=ALICE)

    with pytest.raises(DatabaseUnavailableError, match="closed"):
        await store.get_task(task.task_id, auth=ALICE)
    with pytest.raises(DatabaseUnavailableError, match="closed"):
        await store.create_task(auth=ALICE)


async def test_another_process_goes_on_when_this_one_closes(sqlite_url: str) -> None:
    """Seen elsewhere: a close in one process dropped the locks of another, and later commits vanished."""
    with process(STORE_BEFORE_AND_AFTER, sqlite_url) as other:
        other.says()
        async with TaskStore.open(sqlite_url) as store:
            await store.handle(await store.create_task(auth=ALICE)).complete("done")
        other.go_on()
        other.says()
        other.go_on()
        ended = other.end()

    assert ended == (0, "", "")
    assert value(sqlite_url, "SELECT count(*) FROM taskstore_tasks WHERE status = 'completed'") == 3
    assert value(sqlite_url, "PRAGMA integrity_check") == "ok"


def test_eight_processes_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    """A server with several workers starts that way, and the change to WAL does not wait for locks by itself."""
    url = f"sqlite:///{tmp_path / 'new.db'}"

    ended = run_at_once(OPEN_AND_STORE, url, processes=8)

    assert ended == [(0, "", "")] * 8
    assert value(url, "SELECT count(*) FROM taskstore_tasks WHERE status = 'completed'") == 8


# --- the file is deleted or replaced under an open store


def unlink(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def replace(path: Path) -> None:
    """Put another, valid database in its place, as a restored backup would be."""
    other = path.with_name("backup.db")
    Database(f"sqlite:///{other}").close()
    unlink(path)
    other.replace(path)


@pytest.mark.parametrize("lose", [unlink, replace])
async def test_nothing_is_acknowledged_in_a_file_that_was_deleted_or_replaced(
    sqlite_url: str, lose: Callable[[Path], None]
) -> None:
    """SQLite goes on writing to a file without a name; all that it was told is gone with the process."""
    path = Path(make_url(sqlite_url).database or "")
    async with TaskStore.open(sqlite_url) as store:
        task = await store.create_task(auth=ALICE)
        await store.get_task(task.task_id, auth=ALICE)
        lose(path)
        left = {each.name for each in path.parent.iterdir()}

        for call in (
            store.create_task(auth=ALICE),
            store.handle(task).complete("done"),
            store.get_task(task.task_id, auth=ALICE),
            store.list_tasks(auth=ALICE),
            store.recover(),
        ):
            with pytest.raises(DatabaseUnavailableError, match="deleted or replaced"):
                await call

    assert {each.name for each in path.parent.iterdir()} == left


async def test_what_was_being_written_while_the_file_was_deleted_is_not_acknowledged(sqlite_url: str) -> None:
    """The file was there when the transaction began, and COMMIT succeeds."""
    path = Path(make_url(sqlite_url).database or "")
    with closing(Database(sqlite_url)) as opened, pytest.raises(DatabaseUnavailableError, match="deleted or replaced"):
        opened.write(lambda transaction: unlink(path)).result()


async def test_a_store_that_lost_its_file_leaves_the_new_one_alone_when_it_closes(sqlite_url: str) -> None:
    """Closing folds a write-ahead log into its database; the one under that name belongs to another now."""
    path = Path(make_url(sqlite_url).database or "")
    async with AsyncExitStack() as old:
        await old.enter_async_context(TaskStore.open(sqlite_url))
        unlink(path)
        async with TaskStore.open(sqlite_url) as new:
            task = await new.create_task(auth=ALICE)
            await old.aclose()
            await new.handle(task).complete("done")

    assert value(sqlite_url, "SELECT count(*) FROM taskstore_tasks WHERE status = 'completed'") == 1
    assert value(sqlite_url, "PRAGMA integrity_check") == "ok"


# --- locks of others


def test_writes_wait_for_another_tool_that_holds_the_lock(opened: Database, path: Path) -> None:
    """Seen elsewhere: despite WAL and a busy timeout, transactions that read and then write failed at once."""
    with closing(connect(f"sqlite:///{path}")) as tool:
        tool.execute("BEGIN IMMEDIATE")
        tool.execute("INSERT INTO notes VALUES ('of the tool')")
        futures = [opened.write(add_note) for _ in range(5)]
        seen_meanwhile = opened.read(count_notes).result()
        done_meanwhile = [future.done() for future in futures]
        tool.execute("COMMIT")

    assert [future.result() for future in futures] == [2, 3, 4, 5, 6]
    assert (seen_meanwhile, any(done_meanwhile)) == (0, False)


def test_a_lock_that_is_never_released_is_an_error_that_names_the_database(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for ever would look like a hang of the server; the remedy is to find the process that holds it."""
    monkeypatch.setattr(dialects, "_BUSY_TIMEOUT_MS", 20)

    with closing(Database(f"sqlite:///{path}")) as opened, closing(connect(f"sqlite:///{path}")) as tool:
        tool.execute("BEGIN IMMEDIATE")
        alone, *together = [opened.write(add_note) for _ in range(5)]
        for future in (alone, *together):
            with pytest.raises(DatabaseUnavailableError, match=r"locked by.*find the process") as locked:
                future.result()
            assert str(path) in str(locked.value)
        tool.execute("ROLLBACK")
        after = opened.write(add_note).result()

    assert after == 1


def test_a_migration_that_finds_the_lock_taken_names_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start of a new version meets the old one's transaction; the error is ours, not the driver's."""
    monkeypatch.setattr(dialects, "_BUSY_TIMEOUT_MS", 20)
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    with closing(Database(url)) as opened, closing(connect(url)) as tool:
        tool.execute("BEGIN IMMEDIATE")

        with pytest.raises(DatabaseUnavailableError, match="locked by another process") as locked, opened.migration():
            pass

    assert str(tmp_path) in str(locked.value)


def test_reads_do_not_wait_for_another_tool_that_writes(opened: Database, path: Path) -> None:
    """A backup or a long import beside the server must not stop its clients from polling."""
    with closing(connect(f"sqlite:///{path}")) as tool:
        tool.execute("BEGIN IMMEDIATE")

        count = opened.read(count_notes).result()
        snapshot = opened.read(count_notes, snapshot=True).result()

    assert (count, snapshot) == (0, 0)


def test_reads_do_not_wait_for_the_writer(opened: Database) -> None:
    """A megabyte that is being stored must not delay everybody's poll."""
    with busy_writer(opened):
        count = opened.read(count_notes).result()

    assert count == 0


def test_a_snapshot_sees_one_state_although_others_commit(opened: Database, path: Path) -> None:
    """A poll that shows a status of one moment beside a result of another would show what never was."""

    def look_twice(transaction: Transaction) -> tuple[int, int]:
        first = count_notes(transaction)
        query(f"sqlite:///{path}", "INSERT INTO notes VALUES ('in between')")
        return first, count_notes(transaction)

    seen = opened.read(look_twice, snapshot=True).result()

    assert seen == (0, 0)
    assert opened.read(count_notes).result() == 1


def test_the_look_for_changes_is_not_queued_behind_the_callers(opened: Database) -> None:
    """``read_here`` takes a connection of its own, so that a long queue of reads does not delay those who wait."""
    release = threading.Event()
    reads = [opened.read(lambda transaction: release.wait()) for _ in range(10)]

    count = opened.read_here(count_notes)

    assert (count, any(future.done() for future in reads)) == (0, False)
    release.set()


def test_an_sqlite_without_returning_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every change asks for the row it made; before 3.35 that is a syntax error somewhere in the middle."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")

    with pytest.raises(DatabaseUnavailableError, match=r"3\.34\.1 has no RETURNING; 3\.35 or newer is needed"):
        Database(f"sqlite:///{tmp_path}/tasks.db")


@pytest.mark.parametrize("durability", ["FULL", "off", None])
def test_a_durability_that_does_not_exist_is_refused(durability: Any) -> None:
    """A misspelt word must not quietly mean less than was asked for."""
    with pytest.raises(ValueError, match="durability must be 'full' or 'normal'"):
        StoreOptions(durability=durability)


def test_nothing_but_sqlite_opens_the_file(sqlite_url: str) -> None:
    """Opening and closing it in any other way drops this process's locks on it, by the rules of POSIX.

    Its log and its shared memory are as delicate; the files by which instances show that they live are files of ours.
    """
    script = """
import asyncio, os, sys
seen = []
files = {sys.argv[2] + suffix for suffix in ("", "-wal", "-shm", "-journal")}
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)) and os.fsdecode(args[0]) in files:
        seen.append(args[0])
from taskstore import AuthContext, TaskStore
sys.addaudithook(hook)
async def main():
    async with TaskStore.open(sys.argv[1]) as store:
        task = await store.create_task(auth=AuthContext(subject="alice"))
        await store.handle(task).complete("done")
asyncio.run(main())
print(seen)
"""

    said = run_python(script, sqlite_url, sqlite_url.removeprefix("sqlite:///"))

    assert (said.returncode, said.stderr, said.stdout) == (0, "", "[]\n")
