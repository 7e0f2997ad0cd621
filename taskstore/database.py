"""The database: engine, transactions, the writer and the readers, retries, and all that differs between dialects.

Units of work (see ``operations``) are handed over with ``write`` and ``read``, which return futures. The writer may
run several callers' units in one transaction; nobody hears of a unit before its COMMIT. If anything in a batch fails,
the batch is rolled back and its units run again one by one, so that no unit harms its neighbours.
"""

import hashlib
import logging
import math
import os
import queue
import random
import re
import secrets
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import StaticPool
from sqlalchemy.sql.expression import Executable

from taskstore import statements
from taskstore.binding import notice
from taskstore.clock import SYSTEM
from taskstore.errors import DatabaseUnavailableError, SchemaError, TaskStoreError
from taskstore.operations import Params, Row, Transaction
from taskstore.schema import DEFAULT_PREFIX, VERSION_TABLE, check_identifier
from taskstore.statements import FROM_ROW, Change

T = TypeVar("T")
Unit = Callable[[Transaction], T]
Durability = Literal["full", "normal"]

logger = logging.getLogger("taskstore")

_BUSY_TIMEOUT_MS = 10_000
_LARGEST_BATCH = 64
_CONFLICT_RUNS = 10
POLL_SECONDS = 0.05
LISTEN_SECONDS = 0.2
TRUSTED_POLL_SECONDS = 1.0
_LISTEN_PROOF_SECONDS = 2.0
_NOTIFY = "SELECT pg_notify(%s, %s)"
_NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "fuse.sshfs", "ceph"})


class Database:
    """One database of one store: the engine, and the threads that write and read.

    Args:
        url: ``sqlite:///file.db``, ``sqlite://`` (in memory), or ``postgresql+psycopg://user@host/name``.
        durability: ``full`` survives power loss; ``normal`` survives the death of the process.
        prefix: Of the tables.
        schema: PostgreSQL schema of the tables; None is the connection's own.
        observer: Leave the database as it is, down to SQLite's journal mode.

    Raises:
        ValueError: The URL is none, or names a database or a driver that is not supported.
        DatabaseUnavailableError: The database cannot be opened or reached; the message names it and the remedy.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        durability: Durability = "full",
        prefix: str = DEFAULT_PREFIX,
        schema: str | None = None,
        observer: bool = False,
    ) -> None:
        check_identifier(prefix, "table_prefix")
        if schema is not None:
            check_identifier(schema, "schema")
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise ValueError(
                f"{url!r} is no database URL; use sqlite:///file.db or postgresql+psycopg://user@host/name."
            ) from error
        self._dialect = _dialect_of(parsed, durability)
        self.name, self.label, self.shared = self._dialect.name, self._dialect.label, self._dialect.shared
        self.prefix, self.schema = prefix, schema
        self._engine = self._dialect.engine()
        self._compiler = _Compiler(self._engine, prefix, schema)
        try:
            with self._checkout() as connection:
                self._dialect.prepare(connection, observer)
        except BaseException:
            self._engine.dispose()
            raise
        self._closed = False
        self._writer = _Lane("taskstore-writer", self._dialect.writers, self._dialect.batch, self._write_batch)
        self._reader = self._writer
        if self._dialect.readers:
            self._reader = _Lane("taskstore-reader", self._dialect.readers, 1, self._read_batch)

    def write(self, unit: Unit[T]) -> "Future[T]":
        """Hand a unit to the writer; the future has its value after COMMIT."""
        return self._writer.submit(unit, snapshot=False)

    def read(self, unit: Unit[T], *, snapshot: bool = False) -> "Future[T]":
        """Hand a unit that only reads to a reader; it does not wait for writers.

        Args:
            snapshot: Whether all its statements must see one state of the database.
        """
        return self._reader.submit(unit, snapshot=snapshot)

    def write_here(self, unit: Unit[T]) -> T:
        """Run a unit on this thread and a connection of its own, past the writer's queue."""
        return self._run_alone(unit) if self.shared else self.write(unit).result()

    def read_here(self, unit: Unit[T]) -> T:
        """Run a unit that only reads on this thread and a connection of its own."""
        return self._read(unit, snapshot=False) if self.shared else self.read(unit).result()

    @contextmanager
    def change_feed(self) -> Iterator["ChangeFeed"]:
        """Open the cheapest way there is to hear of changes by other processes; for one thread."""
        with self._checkout() as connection:
            feed = self._dialect.change_feed(connection, self._compiler.channel, self._announce)
            try:
                yield feed
            except self._dialect.driver_error as error:
                raise self._dialect.classify(error, connection) from error
            finally:
                with suppress(self._dialect.driver_error):
                    feed.close()

    def _announce(self, notice: str) -> None:
        with self._checkout() as connection:
            connection.execute(_NOTIFY, (self._compiler.channel, notice))

    def revision(self) -> str | None:
        """Read which revision of ours the database is at; None where there is none."""
        name = f"{self.prefix}{VERSION_TABLE}"
        with self._checkout() as connection:
            try:
                if connection.execute(*self._dialect.find_table(name, self.schema)).fetchone()[0] is None:
                    return None
                qualified = name if self.schema is None else f"{self.schema}.{name}"
                row = connection.execute(f"SELECT version_num FROM {qualified}").fetchone()
            except self._dialect.driver_error as error:
                raise self._dialect.classify(error, connection) from error
        return None if row is None else str(row[0])

    @contextmanager
    def migration(self) -> Iterator[Connection]:
        """Open a transaction on a SQLAlchemy connection that holds the migration lock; commits at the end."""
        with self._dialect.migration(self._engine) as connection:
            yield connection

    def close(self) -> None:
        """Finish what was handed over, fold SQLite's WAL into its file, and let go of the database."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._reader.close()
        with suppress(DatabaseUnavailableError), self._checkout() as connection:
            self._dialect.tidy(connection)
        self._engine.dispose()

    # --- batches, retries, ambiguous commits

    def _write_batch(self, batch: "Sequence[_Submission[Any]]") -> None:
        if len(batch) == 1:
            return batch[0].settle(self._run_alone)
        try:
            ran = self._transact([submission.unit for submission in batch])
        except _CommitUnknownError as unknown:
            for submission, first in zip(batch, unknown.ran, strict=True):
                submission.settle(partial(self._run_alone, first=first))
        except _BusyError as busy:
            for submission in batch:
                submission.future.set_exception(busy)
        except Exception:
            logger.debug("A batch of %d units is run again one by one.", len(batch), exc_info=True)
            for submission in batch:
                submission.settle(self._run_alone)
        else:
            for submission, done in zip(batch, ran, strict=True):
                submission.future.set_result(done.value)

    def _read_batch(self, batch: "Sequence[_Submission[Any]]") -> None:
        for submission in batch:
            submission.settle(partial(self._read, snapshot=submission.snapshot))

    def _run_alone(self, unit: Unit[T], first: "_Ran[T] | None" = None) -> T:
        """Run one unit in its own transaction; once more after a lost connection, some times after conflicts.

        Args:
            first: An earlier run whose COMMIT was lost on the way: it stands if the events it wrote are there.
        """
        if first is not None and self._is_stored(first):
            return first.value
        lost = False
        for run in range(1, _CONFLICT_RUNS + 1):
            try:
                ran: _Ran[T] = self._transact([unit])[0]
            except _CommitUnknownError as unknown:
                if first is not None:
                    raise _unknown_outcome(self.label) from unknown
                first = unknown.ran[0]
                if self._is_stored(first):
                    return first.value
            except _LostError:
                if lost:
                    raise
                lost = True
            except _ConflictError:
                # The first run's COMMIT may have arrived late, between the look for its events and this run.
                if first is not None and self._is_stored(first):
                    return first.value
                if run == _CONFLICT_RUNS:
                    raise
                time.sleep(random.uniform(0, 0.005 * run))
            else:
                # It found the work done: by the first run, whose COMMIT arrived late, or by somebody else.
                if first is not None and not ran.events and self._is_stored(first):
                    return first.value
                return ran.value
        raise _unknown_outcome(self.label)

    def _is_stored(self, ran: "_Ran[Any]") -> bool:
        def look(transaction: Transaction) -> bool:
            return all(transaction.row(statements.HAS_EVENT, written) is not None for written in ran.events)

        if not ran.events:
            return False  # nothing to recognise it by; units without events may be run again
        try:
            return self._read(look, snapshot=False)
        except DatabaseUnavailableError as error:
            raise _unknown_outcome(self.label) from error

    def _transact(self, units: Sequence[Unit[Any]]) -> "list[_Ran[Any]]":
        with self._checkout() as connection:
            ran = []
            try:
                connection.execute(self._dialect.begin)
                for unit in units:
                    transaction = _Transaction(connection, self._compiler, self._dialect)
                    ran.append(_Ran(unit(transaction), transaction.events))
            except self._dialect.driver_error as error:
                self._roll_back(connection)
                raise self._dialect.classify(error, connection) from error
            except BaseException:
                self._roll_back(connection)
                raise
            try:
                connection.execute("COMMIT")
            except self._dialect.driver_error as error:
                cause = self._dialect.classify(error, connection)
                if isinstance(cause, _LostError):
                    raise _CommitUnknownError(ran) from error
                self._roll_back(connection)
                raise cause from error
            return ran

    def _roll_back(self, connection: Any) -> None:
        with suppress(self._dialect.driver_error):
            connection.rollback()

    def _read(self, unit: Unit[T], *, snapshot: bool) -> T:
        try:
            return self._read_once(unit, snapshot)
        except _LostError:
            return self._read_once(unit, snapshot)

    def _read_once(self, unit: Unit[T], snapshot: bool) -> T:
        with self._checkout() as connection:
            try:
                if snapshot:
                    connection.execute(self._dialect.begin_snapshot)
                return unit(_Transaction(connection, self._compiler, self._dialect))
            except self._dialect.driver_error as error:
                raise self._dialect.classify(error, connection) from error
            finally:
                if snapshot:
                    self._roll_back(connection)

    @contextmanager
    def _checkout(self) -> Iterator[Any]:
        try:
            pooled = self._engine.raw_connection()
        except (SQLAlchemyError, self._dialect.driver_error) as error:
            raise self._dialect.unreachable(error) from error
        try:
            yield pooled.driver_connection
        except (_LostError, _CommitUnknownError):
            pooled.invalidate()
            raise
        finally:
            pooled.close()


# --- what goes wrong


class _LostError(DatabaseUnavailableError):
    """The connection went away; nothing of the transaction was stored, unless it was in COMMIT."""


class _ConflictError(DatabaseUnavailableError):
    """Another transaction got in the way; running again helps."""


class _BusyError(DatabaseUnavailableError):
    """Another process kept the write lock for longer than the busy timeout."""


class _CommitUnknownError(Exception):
    """The connection went away during COMMIT: the transaction may be stored or not."""

    def __init__(self, ran: "list[_Ran[Any]]") -> None:
        super().__init__("connection lost during COMMIT")
        self.ran = ran


def _unknown_outcome(label: str) -> DatabaseUnavailableError:
    return DatabaseUnavailableError(
        f"The connection to {label} was lost during COMMIT, and the database cannot be asked whether the change was "
        "stored; read the task before you repeat the call."
    )


def _refused_for_good(label: str, error: Exception) -> SchemaError:
    return SchemaError(
        f"{label} refused a statement, and would again: {str(error).strip()}. "
        "Are the tables as taskstore made them, and may this role use them? See: taskstore check URL."
    )


# --- transactions


@dataclass(frozen=True, slots=True)
class _Ran(Generic[T]):
    """A unit that ran: its value, and the events by which to recognise that it was stored."""

    value: T
    events: "list[dict[str, object]]"


class _Transaction:
    """See ``operations.Transaction``; statements run on the driver's connection, compiled once by SQLAlchemy."""

    def __init__(self, connection: Any, compiler: "_Compiler", dialect: "_Dialect") -> None:
        self._connection, self._compiler = connection, compiler
        self._combines, self._lock_sql = dialect.combines, dialect.lock_sql
        self.events: list[dict[str, object]] = []

    def row(self, statement: Executable, params: Params) -> Row | None:
        found = self.rows(statement, params)
        return found[0] if found else None

    def rows(self, statement: Executable, params: Params) -> list[Row]:
        compiled = self._compiler.compiled(statement)
        cursor = self._connection.execute(compiled.sql, compiled.bind(params))
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]

    def execute(self, statement: Executable, params: Params) -> int:
        compiled = self._compiler.compiled(statement)
        return int(self._connection.execute(compiled.sql, compiled.bind(params)).rowcount)

    def lock(self, name: str) -> None:
        # On SQLite every writing transaction has the one write lock from its beginning.
        if self._lock_sql is not None:
            key = int.from_bytes(hashlib.sha256(f"{self._compiler.prefix} {name}".encode()).digest()[:8], signed=True)
            self._connection.execute(self._lock_sql, (key,))

    def notify(self, task_id: str) -> None:
        if self._combines:
            self._connection.execute(_NOTIFY, (self._compiler.channel, notice(task_id)))

    def change(self, change: Change, params: Params) -> Row | None:
        # PostgreSQL writes the task and its event, and notifies, in one statement; SQLite has no data-modifying CTE,
        # and no round trip to save.
        if self._combines:
            heard = {"channel": self._compiler.channel, "notice": notice(str(params["task_id"]))}
            row = self.row(change.combined, {**params, **heard})
        else:
            row = self.row(change.write, params)
        if row is None:
            return None
        written = {
            **{column: row[source] for column, source in FROM_ROW},
            "kind": change.kind,
            "instance_id": params["writer"],
            "reason": change.reason,
        }
        if not self._combines:
            self.execute(change.event, written)
        self.events.append(written)
        return row


@dataclass(frozen=True, slots=True)
class _Compiled:
    sql: str
    order: tuple[str, ...] | None  # of positional parameters; None where they are named
    constants: dict[str, object]

    def bind(self, params: Params) -> object:
        values = {**self.constants, **params} if self.constants else params
        return values if self.order is None else [values[name] for name in self.order]


class _Compiler:
    """SQLAlchemy's statements as SQL text: compiled when first used, then kept."""

    def __init__(self, engine: Engine, prefix: str, schema: str | None) -> None:
        self._dialect, self._known = engine.dialect, dict[Executable, _Compiled]()
        self._named = re.compile(rf"\b{DEFAULT_PREFIX}(?=(?:tasks|events|inputs|instances|meta)\b)")
        self.prefix = prefix if schema is None else f"{schema}.{prefix}"
        self.channel = f"{prefix}changes"

    def compiled(self, statement: Executable) -> _Compiled:
        found = self._known.get(statement)
        if found is None:
            compiled: Any = statement.compile(dialect=self._dialect)  # type: ignore[attr-defined]
            # Statements are built once, for the default prefix. Prefix and schema are plain identifiers, and no
            # statement has the name of a table in a literal, so exchanging names in the text is exact.
            sql = str(compiled)
            if self.prefix != DEFAULT_PREFIX:
                sql = self._named.sub(self.prefix, sql)
            order = tuple(compiled.positiontup) if compiled.positional else None
            constants = {name: value for name, value in compiled.params.items() if value is not None}
            found = self._known[statement] = _Compiled(sql, order, constants)
        return found


# --- threads


class _Submission(Generic[T]):
    def __init__(self, unit: Unit[T], snapshot: bool) -> None:
        self.unit, self.snapshot = unit, snapshot
        self.future: Future[T] = Future()

    def settle(self, run: Callable[[Unit[T]], T]) -> None:
        try:
            value = run(self.unit)
        except BaseException as error:  # noqa: BLE001  whatever it is belongs to the caller; the thread serves the next one
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class _Lane:
    """Threads that serve one queue of submissions, in batches of what has come together."""

    def __init__(
        self, name: str, threads: int, batch: int, serve: "Callable[[Sequence[_Submission[Any]]], None]"
    ) -> None:
        self._queue: queue.SimpleQueue[_Submission[Any] | None] = queue.SimpleQueue()
        self._batch, self._serve = batch, serve
        self._lock, self._open = threading.Lock(), True
        # Daemons: a program that ends without close() must not hang. What was acknowledged is committed.
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, unit: Unit[T], *, snapshot: bool) -> "Future[T]":
        submission = _Submission(unit, snapshot)
        with self._lock:
            if not self._open:
                raise DatabaseUnavailableError("The store is closed; open it again with TaskStore.open().")
            self._queue.put(submission)
        return submission.future

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (submission := self._queue.get()) is not None:
            batch, ends = [submission], False
            while len(batch) < self._batch:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    ends = True
                    break
                batch.append(following)
            # A caller that gave up before its unit began: the unit does not run at all.
            batch = [each for each in batch if each.future.set_running_or_notify_cancel()]
            if batch:
                self._serve(batch)
            if ends:
                return


# --- dialects


class _Dialect(ABC):
    """Everything that differs between SQLite and PostgreSQL."""

    name: str
    label: str  # for messages; no password
    shared: bool = True  # whether other connections, of this process or others, reach the database
    combines: bool  # whether one statement may write a task and its event
    writers: int
    readers: int
    batch: int
    begin: str
    begin_snapshot: str
    lock_sql: str | None = None  # takes a lock on a number until the end of the transaction
    driver_error: type[Exception]

    @abstractmethod
    def engine(self) -> Engine:
        """Make the engine; opens nothing yet."""

    @abstractmethod
    def prepare(self, connection: Any, observer: bool) -> None:
        """Check the database on the first connection, and unless for an observer set it up."""

    @abstractmethod
    def classify(self, error: Exception, connection: Any) -> TaskStoreError:
        """Tell a driver's error by what helps against it."""

    @abstractmethod
    def unreachable(self, error: Exception) -> DatabaseUnavailableError:
        """Word the failure to get a connection, with its remedy."""

    @abstractmethod
    def find_table(self, name: str, schema: str | None) -> tuple[str, Sequence[object]]:
        """Write the query for a table's name: one row, whose value is null where there is no such table."""

    @abstractmethod
    def change_feed(self, connection: Any, channel: str, announce: Callable[[str], None]) -> "ChangeFeed":
        """See ``Database.change_feed``; ``announce`` sends a notice over another connection."""

    @abstractmethod
    def migration(self, engine: Engine) -> AbstractContextManager[Connection]:
        """See ``Database.migration``."""

    @abstractmethod
    def tidy(self, connection: Any) -> None:
        """Leave the database in order; the last thing before the engine goes."""


class _Sqlite(_Dialect):
    name, combines, writers, readers, batch = "sqlite", False, 1, 2, _LARGEST_BATCH
    # A deferred transaction that reads and then writes fails at once with SQLITE_BUSY_SNAPSHOT if another writer
    # committed in between; the busy timeout does not help. Taking the write lock first makes it wait instead.
    begin, begin_snapshot = "BEGIN IMMEDIATE", "BEGIN"
    driver_error = sqlite3.Error

    def __init__(self, url: URL, durability: Durability) -> None:
        if url.query:
            raise ValueError(
                f"A SQLite URL takes no options, but {url} has {sorted(url.query)}; use sqlite:///file.db."
            )
        self._synchronous = "FULL" if durability == "full" else "NORMAL"
        self.shared = url.database not in (None, "", ":memory:")
        # An absolute path: connections are opened later too, perhaps after a change of the working directory.
        self._path = os.path.abspath(url.database or "") if self.shared else ":memory:"
        self.label = f"the SQLite database {self._path}" if self.shared else "the in-memory SQLite database"
        if not self.shared:
            self.readers = 0  # the database lives on the writer's connection

    def engine(self) -> Engine:
        if sqlite3.sqlite_version_info < (3, 35):
            raise DatabaseUnavailableError(
                f"SQLite {sqlite3.sqlite_version} has no RETURNING; 3.35 or newer is needed: use a newer Python build."
            )
        if self.shared:
            self._check_path()
        engine = create_engine(
            URL.create("sqlite", database=self._path),
            poolclass=None if self.shared else StaticPool,
            # Transactions are begun by us, not by the driver.
            connect_args={
                "isolation_level": None,
                "check_same_thread": False,
                "timeout": _BUSY_TIMEOUT_MS / 1000,
                "cached_statements": 512,
            },
        )
        event.listen(engine, "connect", self._set_up_connection)
        return engine

    def _set_up_connection(self, connection: Any, _record: object) -> None:
        connection.execute(f"PRAGMA synchronous={self._synchronous}")
        connection.execute("PRAGMA foreign_keys=ON")
        if self._synchronous == "FULL":
            connection.execute("PRAGMA fullfsync=ON")  # macOS: fsync alone leaves data in the drive's cache

    def _check_path(self) -> None:
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise DatabaseUnavailableError(
                f"The folder {folder} of the SQLite database {self._path} does not exist; create it, or change the URL."
            )
        if os.path.isdir(self._path):
            raise DatabaseUnavailableError(
                f"{self._path} is a folder; the URL must name a file: sqlite:///{self._path}/tasks.db."
            )
        for place in (folder, self._path):
            if os.path.exists(place) and not os.access(
                place, os.W_OK, effective_ids=os.access in os.supports_effective_ids
            ):
                raise DatabaseUnavailableError(
                    f"{place} is read-only for this process, but {self.label} must be written, and its WAL lies "
                    "beside it; make both writable, or put the database elsewhere."
                )
        file_system = file_system_of(self._path)
        if file_system in _NETWORK_FILE_SYSTEMS:
            logger.warning(
                "%s lies on a network file system (%s), where SQLite's locks and WAL cannot be trusted; "
                "put it on a local disk, or use PostgreSQL.",
                self._path,
                file_system,
            )

    def prepare(self, connection: Any, observer: bool) -> None:
        try:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            deadline = SYSTEM.monotonic() + _BUSY_TIMEOUT_MS / 1000
            while self.shared and not observer and mode != "wal":
                # Several processes may open a new file at once. The change of mode takes the lock without waiting.
                try:
                    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                    if mode != "wal":
                        raise DatabaseUnavailableError(
                            f"{self.label} cannot use a write-ahead log (its journal mode stays {mode!r}); "
                            "put it on a local disk, or use PostgreSQL."
                        )
                except sqlite3.OperationalError as error:
                    if not _is_busy(error) or SYSTEM.monotonic() > deadline:
                        raise
                    time.sleep(random.uniform(0.005, 0.02))
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            raise self.unreachable(error) from error

    def classify(self, error: Exception, connection: Any) -> TaskStoreError:
        if isinstance(error, sqlite3.OperationalError) and _is_busy(error):
            return _BusyError(
                f"{self.label} is locked by another process for more than {_BUSY_TIMEOUT_MS // 1000} s; "
                "find the process that keeps a transaction open."
            )
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_ERROR", "SQLITE_CONSTRAINT", "SQLITE_MISMATCH")):
            return _refused_for_good(self.label, error)
        return self.unreachable(error)

    def unreachable(self, error: Exception) -> DatabaseUnavailableError:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        code = getattr(cause, "sqlite_errorname", "")
        remedy = next((text for prefix, text in _SQLITE_REMEDIES.items() if code.startswith(prefix)), None)
        return DatabaseUnavailableError(f"{self.label} cannot be used: {cause}." + (f" {remedy}" if remedy else ""))

    def find_table(self, name: str, schema: str | None) -> tuple[str, Sequence[object]]:
        return "SELECT max(name) FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)

    def change_feed(self, connection: Any, channel: str, announce: Callable[[str], None]) -> "ChangeFeed":
        return _DataVersion(connection)

    @contextmanager
    def migration(self, engine: Engine) -> Iterator[Connection]:
        with engine.connect() as connection, connection.begin():
            connection.exec_driver_sql(self.begin)
            yield connection

    def tidy(self, connection: Any) -> None:
        if self.shared:
            # Never waits: while others are connected, theirs is the last word.
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA busy_timeout=0")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


_SQLITE_REMEDIES = {
    "SQLITE_NOTADB": "The file is no SQLite database, or is encrypted; give another path, or restore a backup.",
    "SQLITE_CORRUPT": "The file is damaged; restore a backup, or rescue what is left with sqlite3's .recover.",
    "SQLITE_CANTOPEN": "Check that the folder exists and that this process may write to it.",
    "SQLITE_READONLY": "Make the file and its folder writable for this process.",
    "SQLITE_FULL": "The disk is full; free some space.",
    "SQLITE_IOERR": "The disk failed or is full, or the file lies on a network file system; check the disk.",
}


def _is_busy(error: sqlite3.Error) -> bool:
    return error.sqlite_errorname.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def file_system_of(path: str, mounts: str = "/proc/self/mounts") -> str | None:
    """Name the type of the file system a path lies on, such as ``ext4`` or ``nfs``; None where it cannot be told."""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as lines:
            table = [line.split()[1:3] for line in lines]
    except OSError:
        return None
    real = os.path.realpath(path)
    best: tuple[str, str | None] = ("", None)
    for escaped, kind in table:
        place = escaped.replace("\\040", " ")
        if (real == place or real.startswith(place.rstrip("/") + "/")) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


class _Postgres(_Dialect):
    name, combines, writers, readers, batch = "postgresql", True, 4, 4, 1
    lock_sql = "SELECT pg_advisory_xact_lock(%s)"

    def __init__(self, url: URL, durability: Durability) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise DatabaseUnavailableError(
                "PostgreSQL needs the driver psycopg: pip install 'taskstore[postgres]'."
            ) from error
        self._psycopg, self.driver_error = psycopg, psycopg.Error
        self._url = url.set(drivername="postgresql+psycopg")
        self.label = f"the PostgreSQL database {self._url.render_as_string(hide_password=True)}"
        # Set for each transaction, since a pooler or a role may have set it otherwise for the session.
        self.begin = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit TO " + (
            "on" if durability == "full" else "off"
        )
        self.begin_snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

    def engine(self) -> Engine:
        return create_engine(
            self._url,
            pool_pre_ping=True,
            pool_size=self.writers + self.readers,
            max_overflow=8,
            # Transactions are begun by us. Nothing is prepared: behind a transaction pooler the next transaction
            # may run on another server connection.
            connect_args={"autocommit": True, "prepare_threshold": None, "connect_timeout": 10},
        )

    def prepare(self, connection: Any, observer: bool) -> None:
        if connection.info.server_version < 120000:
            raise DatabaseUnavailableError(f"{self.label} runs a version before 12; upgrade the server.")
        if connection.execute("SHOW fsync").fetchone()[0] != "on":
            logger.warning("%s has fsync off: a power loss can lose or damage everything; set fsync = on.", self.label)

    def classify(self, error: Exception, connection: Any) -> TaskStoreError:
        state = getattr(error, "sqlstate", None) or ""
        # 08: connection exceptions; 57P: the server shuts down, crashed, or cut the connection.
        if connection.closed or state.startswith(("08", "57P")):
            return _LostError(f"The connection to {self.label} was lost: {str(error).strip()}")
        # Serialization failure, deadlock, or a key that another transaction inserted first.
        if state in ("40001", "40P01", "23505"):
            return _ConflictError(f"{self.label} kept meeting conflicting transactions: {str(error).strip()}")
        # 53: out of memory, disk or connections; 55, 57: not now, such as a statement timeout; 58: the system failed.
        if state.startswith(("53", "55", "57", "58")):
            return DatabaseUnavailableError(f"{self.label} cannot serve now: {str(error).strip()}")
        return _refused_for_good(self.label, error)

    def unreachable(self, error: Exception) -> DatabaseUnavailableError:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        return DatabaseUnavailableError(
            f"{self.label} cannot be reached: {str(cause).strip()}. Check that the server runs, and the URL's host, "
            "port, user, password and database name."
        )

    def find_table(self, name: str, schema: str | None) -> tuple[str, Sequence[object]]:
        return "SELECT to_regclass(%s)", (name if schema is None else f"{schema}.{name}",)

    def change_feed(self, connection: Any, channel: str, announce: Callable[[str], None]) -> "ChangeFeed":
        return _Listen(connection, channel, announce)

    @contextmanager
    def migration(self, engine: Engine) -> Iterator[Connection]:
        # A connection of its own kind: SQLAlchemy and Alembic expect the driver to begin transactions.
        plain = create_engine(self._url, poolclass=NullPool, connect_args={"prepare_threshold": None})
        try:
            with plain.connect() as connection, connection.begin():
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
                yield connection
        except (SQLAlchemyError, self.driver_error) as error:
            raise self.unreachable(error) from error
        finally:
            plain.dispose()

    def tidy(self, connection: Any) -> None:
        """Leave nothing to do: the server keeps its own house."""


# --- hearing of changes by other processes


class ChangeFeed(ABC):
    """Tells when it is worth asking for changes, and of which tasks."""

    @abstractmethod
    def wait(self, stop: threading.Event) -> tuple[bool, frozenset[str]]:
        """Wait a moment for news, or until ``stop`` is set.

        Returns:
            Whether anything at all may have changed, which only a query tells; and the notices that came.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the connection as it was."""


class _DataVersion(ChangeFeed):
    """SQLite: a number that changes whenever another connection, of this process or another, has committed."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._seen = connection, None

    def wait(self, stop: threading.Event) -> tuple[bool, frozenset[str]]:
        stop.wait(POLL_SECONDS)
        version = self._connection.execute("PRAGMA data_version").fetchone()[0]
        news, self._seen = version != self._seen, version
        return news, frozenset()

    def close(self) -> None:
        """Leave nothing to undo."""


class _Listen(ChangeFeed):
    """PostgreSQL: LISTEN, once a notice of our own has come through; until then, and rarely after, a poll.

    Behind a transaction pooler LISTEN succeeds and nothing ever comes. So a connection is trusted only after it
    heard, and even then it is no more than the fast path: what it might miss, the rare poll finds.
    """

    def __init__(self, connection: Any, channel: str, announce: Callable[[str], None]) -> None:
        self._connection, self._channel, self._announce = connection, channel, announce
        self._proof = secrets.token_hex(8)
        self._trusted = False
        self._began = SYSTEM.monotonic()
        self._polled = -math.inf  # what changed before this connection listened, only a poll finds
        self._warned = False
        connection.execute(f"LISTEN {channel}")
        announce(self._proof)

    def wait(self, stop: threading.Event) -> tuple[bool, frozenset[str]]:
        seconds = LISTEN_SECONDS if self._trusted else POLL_SECONDS
        heard = frozenset(notify.payload for notify in self._connection.notifies(timeout=seconds, stop_after=1))
        self._trusted = self._trusted or self._proof in heard
        now = SYSTEM.monotonic()
        if not self._trusted and not self._warned and now - self._began > _LISTEN_PROOF_SECONDS:
            self._warned = True
            logger.warning(
                "LISTEN brings no notifications here (a transaction pooler?); changes by other processes are polled."
            )
        due = not self._trusted or now - self._polled >= TRUSTED_POLL_SECONDS
        if due:
            self._polled = now
        return due, heard

    def close(self) -> None:
        self._connection.execute(f"UNLISTEN {self._channel}")


_MIGRATION_LOCK = int.from_bytes(b"tskmigr8")


def _dialect_of(url: URL, durability: Durability) -> _Dialect:
    match url.drivername:
        case "sqlite" | "sqlite+pysqlite":
            return _Sqlite(url, durability)
        case "postgresql" | "postgresql+psycopg":
            return _Postgres(url, durability)
    raise ValueError(
        f"The driver {url.drivername!r} is not supported; use sqlite:///file.db or postgresql+psycopg://user@host/name."
    )
