"""The database: transactions, the writer and the readers, retries, the ambiguous COMMIT.

Units of work (see ``operations``) are handed over with ``write`` and ``read``, which return futures. The writer may
run several callers' units in one transaction; nobody hears of a unit before its COMMIT. If anything in a batch fails,
the batch is rolled back and its units run again one by one, so that no unit harms its neighbours.
"""

import asyncio
import hashlib
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from sqlalchemy import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.sql.expression import Executable

from taskstore import statements
from taskstore.binding import notice
from taskstore.dialects import (
    INLINE_TIMEOUT_MS,
    NOTIFY,
    BusyError,
    ChangeFeed,
    ConflictError,
    Dialect,
    Durability,
    Journal,
    LostError,
    dialect_of,
)
from taskstore.errors import DatabaseUnavailableError, TaskStoreError
from taskstore.lanes import Lane, Submission, Unit, closed_error
from taskstore.operations import Params, Row, Transaction
from taskstore.schema import DEFAULT_PREFIX, VERSION_TABLE, check_identifier
from taskstore.statements import FROM_ROW, Change

T = TypeVar("T")

logger = logging.getLogger("taskstore")

_CONFLICT_RUNS = 10


class Database:
    """One database of one store: the engine, and the threads that write and read.

    Args:
        url: ``sqlite:///file.db``, ``sqlite://`` (in memory), or ``postgresql+psycopg://user@host/name``.
        durability: ``full`` survives power loss; ``normal`` survives the death of the process.
        journal: Of SQLite; see ``StoreOptions``.
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
        journal: Journal = "wal",
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
        self._dialect = dialect_of(parsed, durability, journal)
        self.name, self.label, self.shared = self._dialect.name, self._dialect.label, self._dialect.shared
        self.prefix, self.schema = prefix, schema
        self._engine = self._dialect.engine()
        self._kept = threading.local()
        self._pid = os.getpid()
        self._disposed = False
        self._compiler = _Compiler(self._engine, prefix, schema)
        try:
            with self._checkout() as connection:
                self._dialect.prepare(connection, observer)
        except BaseException:
            self._engine.dispose()
            raise
        self._closed = False
        dialect = self._dialect
        self._writer = Lane("taskstore-writer", dialect.writers, dialect.batch, self._write_batch, self._keeping)
        self._reader = self._writer
        if dialect.readers:
            self._reader = Lane("taskstore-reader", dialect.readers, 1, self._read_batch, self._keeping)
        self._inline = threading.Lock()
        self._inline_connection: Any = None

    def lock_path(self, instance_id: str) -> str | None:
        """Name the file whose lock shows that an instance lives; None where no file is shared."""
        return self._dialect.lock_path(instance_id)

    def write(self, unit: Unit[T]) -> "Future[T]":
        """Hand a unit to the writer; the future has its value after COMMIT."""
        self._check_process()
        return self._writer.submit(unit, snapshot=False)

    def read(self, unit: Unit[T], *, snapshot: bool = False) -> "Future[T]":
        """Hand a unit that only reads to a reader; it does not wait for writers.

        Args:
            snapshot: Whether all its statements must see one state of the database.
        """
        self._check_process()
        return self._reader.submit(unit, snapshot=snapshot)

    def write_soon(self, unit: Unit[T], *, undo: Callable[[T], None] | None = None) -> "asyncio.Future[T]":
        """Hand a unit to the writer, for a coroutine to await; what one turn of its loop submits travels together.

        Args:
            undo: Called on the loop with the unit's value if its caller gives up too late to stop it.
        """
        self._check_process()
        return self._writer.submit_soon(unit, snapshot=False, undo=undo)

    def read_soon(self, unit: Unit[T], *, snapshot: bool = False) -> "asyncio.Future[T]":
        """Hand a unit that only reads to a reader, for a coroutine to await; arguments as of ``read``."""
        self._check_process()
        return self._reader.submit_soon(unit, snapshot=snapshot)

    def read_inline(self, unit: Unit[T], *, snapshot: bool = False) -> T:
        """Read a row or two at once, on the calling thread.

        Under SQLite's WAL a reader waits for nobody, and the read costs less than handing it to a thread. For event
        loops; what takes long belongs to a reader.

        Raises:
            WouldBlockError: It cannot be done without waiting; hand it to a reader.
        """
        if not self._dialect.reads_inline or not self._inline.acquire(blocking=False):
            raise WouldBlockError
        try:
            if self._closed or self.is_foreign:
                raise closed_error()
            self._dialect.check_place()
            if self._inline_connection is None:
                self._inline_connection = self._engine.raw_connection()
                self._inline_connection.driver_connection.execute(f"PRAGMA busy_timeout={INLINE_TIMEOUT_MS}")
            return self._run_reading(self._inline_connection.driver_connection, unit, snapshot)
        except (DatabaseUnavailableError, SQLAlchemyError, self._dialect.driver_error) as error:
            raise WouldBlockError from error  # the reader finds out whether it is more than that
        finally:
            self._inline.release()

    @property
    def is_foreign(self) -> bool:
        """Whether a fork brought it here: neither its threads nor its locks and connections belong to this process."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if self.is_foreign:
            raise DatabaseUnavailableError(
                "The store was opened before a fork and belongs to the parent process; open another one after the fork."
            )

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
            feed = None
            try:
                feed = self._dialect.change_feed(connection, self._compiler.channel, self._announce)
                yield feed
            except self._dialect.driver_error as error:
                raise self._dialect.classify(error, connection) from error
            finally:
                if feed is not None:
                    with suppress(self._dialect.driver_error):
                        feed.close()

    def _announce(self, notice: str) -> None:
        with self._checkout() as connection:
            try:
                connection.execute(NOTIFY, (self._compiler.channel, [notice]))
            except self._dialect.driver_error as error:
                raise self._dialect.classify(error, connection) from error

    def revision(self) -> str | None:
        """Read which revision of ours the database is at; None where there is none."""
        return self.read_here(self.read_revision)

    def read_revision(self, transaction: Transaction) -> str | None:
        """Unit: read the revision; see ``revision``."""
        assert isinstance(transaction, _Transaction)
        name = f"{self.prefix}{VERSION_TABLE}"
        if transaction.driver.execute(*self._dialect.find_table(name, self.schema)).fetchone()[0] is None:
            return None
        qualified = name if self.schema is None else f"{self.schema}.{name}"
        row = transaction.driver.execute(f"SELECT version_num FROM {qualified}").fetchone()
        return None if row is None else str(row[0])

    @contextmanager
    def migration(self) -> Iterator[Connection]:
        """Open a transaction on a SQLAlchemy connection that holds the migration lock; commits at the end."""
        with self._dialect.migration_engine(self._engine) as engine, _connected(engine, self._dialect) as connection:
            driver = connection.connection.driver_connection
            try:
                with connection.begin():
                    connection.exec_driver_sql(self._dialect.lock_migrations)
                    yield connection
            except DBAPIError as error:
                raise self._dialect.classify(
                    error.orig if isinstance(error.orig, Exception) else error, driver
                ) from error

    def close(self) -> None:
        """Finish what was handed over, fold SQLite's WAL into its file, and let go of the database."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._reader.close()
        with self._inline:
            if self._inline_connection is not None:
                self._inline_connection.invalidate()  # its busy timeout is unlike that of all others
        with suppress(DatabaseUnavailableError), self._checkout() as connection:
            self._dialect.tidy(connection)
        self._disposed = True
        self._engine.dispose()

    # --- batches, retries, ambiguous commits

    def _write_batch(self, batch: Sequence["Submission[Any]"]) -> None:
        if len(batch) == 1:
            return batch[0].settle(self._run_alone)
        try:
            ran = self._transact([submission.unit for submission in batch])
        except _CommitUnknownError as unknown:
            for submission, first in zip(batch, unknown.ran, strict=True):
                submission.settle(partial(self._run_alone, first=first))
        except BusyError as busy:
            for submission in batch:
                submission.error = busy
        except BaseException:
            logger.debug("A batch of %d units is run again one by one.", len(batch), exc_info=True)
            for submission in batch:
                submission.settle(self._run_alone)
        else:
            for submission, done in zip(batch, ran, strict=True):
                submission.value = done.value

    def _read_batch(self, batch: Sequence["Submission[Any]"]) -> None:
        for submission in batch:
            submission.settle(partial(self._read, snapshot=submission.snapshot))

    def _run_alone(self, unit: Unit[T], first: "_Ran[T] | None" = None) -> T:
        """Run one unit in its own transaction; once more after a lost connection, some times after conflicts.

        Args:
            first: An earlier run whose COMMIT was lost on the way: it counts if it is found to be stored.
        """
        if first is not None and self._is_stored(first):
            return first.value
        lost = False
        for run in range(1, _CONFLICT_RUNS + 1):
            try:
                ran: _Ran[T] = self._transact([unit])[0]
            except _CommitUnknownError as unknown:
                if first is None or unknown.ran[0].wrote:
                    first = unknown.ran[0]
                if self._is_stored(first):
                    return first.value
            except LostError:
                if lost:
                    raise
                lost = True
            except ConflictError:
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
            if ran.events:
                return all(transaction.row(statements.HAS_EVENT, written) is not None for written in ran.events)
            return transaction.row(statements.IS_COMMITTED, {"transaction_id": ran.transaction_id}) is not None

        if not ran.wrote:
            return False
        try:
            return self._read(look, snapshot=False)
        except TaskStoreError as error:
            raise _unknown_outcome(self.label) from error

    def _transact(self, units: Sequence[Unit[Any]]) -> "list[_Ran[Any]]":
        with self._checkout() as connection:
            ran = []
            try:
                connection.execute(self._dialect.begin)
                # fail point: transaction-begun
                for unit in units:
                    transaction = _Transaction(connection, self._compiler, self._dialect)
                    value = unit(transaction)
                    transaction_id = None if transaction.events else self._dialect.transaction_id(connection)
                    ran.append(_Ran(value, transaction.events, transaction_id))
            except self._dialect.driver_error as error:
                self._roll_back(connection)
                raise self._dialect.classify(error, connection) from error
            except BaseException:
                self._roll_back(connection)
                raise
            try:
                # fail point: before-commit
                connection.execute("COMMIT")
                # fail point: after-commit
            except self._dialect.driver_error as error:
                cause = self._dialect.classify(error, connection)
                if isinstance(cause, LostError):
                    raise _CommitUnknownError(ran) from error
                self._roll_back(connection)
                raise cause from error
            self._dialect.check_place()  # what went into a file without a name is not stored
            return ran

    def _roll_back(self, connection: Any) -> None:
        with suppress(self._dialect.driver_error):
            connection.rollback()

    def _read(self, unit: Unit[T], *, snapshot: bool) -> T:
        try:
            return self._read_once(unit, snapshot)
        except LostError:
            return self._read_once(unit, snapshot)

    def _read_once(self, unit: Unit[T], snapshot: bool) -> T:
        with self._checkout() as connection:
            return self._run_reading(connection, unit, snapshot)

    def _run_reading(self, connection: Any, unit: Unit[T], snapshot: bool) -> T:
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
        """Borrow a connection of the pool's; a lane's thread keeps the one it has."""
        self._check_process()
        if self._disposed:
            raise closed_error()
        self._dialect.check_place()
        keeps = getattr(self._kept, "keeps", False)
        pooled = self._kept.pooled if keeps else None
        if pooled is None:
            try:
                pooled = self._engine.raw_connection()
            except (SQLAlchemyError, self._dialect.driver_error) as error:
                raise self._dialect.unreachable(error) from error
            if keeps:
                self._kept.pooled = pooled
        try:
            yield pooled.driver_connection
        except BaseException as error:
            # Whatever else went wrong: a connection that is gone cannot be reset for the next one.
            lost = isinstance(error, LostError | _CommitUnknownError)
            if lost or getattr(pooled.driver_connection, "closed", False):
                if keeps:
                    self._kept.pooled = None
                pooled.invalidate()
            raise
        finally:
            if not keeps:
                pooled.close()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        # Getting a SQLite connection from the pool costs as much as a short transaction. Those of PostgreSQL are given
        # back, so that a store that does little holds few of them, and are looked at before they are used again.
        self._kept.keeps, self._kept.pooled = self._dialect.threads_keep_connections, None
        try:
            yield
        finally:
            if self._kept.pooled is not None:
                self._kept.pooled.close()


class WouldBlockError(Exception):
    """A read cannot be done at once on this thread."""


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


@contextmanager
def _connected(engine: Engine, dialect: "Dialect") -> Iterator[Connection]:
    try:
        connection = engine.connect()
    except (SQLAlchemyError, dialect.driver_error) as error:
        raise dialect.unreachable(error) from error
    with connection:
        yield connection


# --- transactions


@dataclass(frozen=True, slots=True)
class _Ran(Generic[T]):
    """A unit that ran: its value, and by what to recognise that it was stored.

    Attributes:
        transaction_id: Of a unit without events only: after a failover that lost it, another transaction may have it.
    """

    value: T
    events: "list[dict[str, object]]"
    transaction_id: int | None

    @property
    def wrote(self) -> bool:
        """Whether there is anything that may be stored."""
        return bool(self.events) or self.transaction_id is not None


class _Transaction:
    """See ``operations.Transaction``; statements run on the driver's connection, compiled once by SQLAlchemy."""

    def __init__(self, connection: Any, compiler: "_Compiler", dialect: "Dialect") -> None:
        self.driver, self._compiler = connection, compiler
        self._combines, self._lock_sql = dialect.combines, dialect.lock_sql
        self.events: list[dict[str, object]] = []

    def row(self, statement: Executable, params: Params) -> Row | None:
        found = self.rows(statement, params)
        return found[0] if found else None

    def rows(self, statement: Executable, params: Params) -> list[Row]:
        compiled = self._compiler.compiled(statement)
        cursor = self.driver.execute(compiled.sql, compiled.bind(params))
        if compiled.names is None:
            compiled.names = [column[0] for column in cursor.description]
        return [dict(zip(compiled.names, values, strict=True)) for values in cursor.fetchall()]

    def execute(self, statement: Executable, params: Params) -> int:
        compiled = self._compiler.compiled(statement)
        return int(self.driver.execute(compiled.sql, compiled.bind(params)).rowcount)

    def lock(self, name: str) -> None:
        # On SQLite every writing transaction has the one write lock from its beginning.
        if self._lock_sql is not None:
            key = int.from_bytes(hashlib.sha256(f"{self._compiler.prefix} {name}".encode()).digest()[:8], signed=True)
            self.driver.execute(self._lock_sql, (key,))

    def notify(self, task_id: str) -> None:
        if self._combines:
            self.driver.execute(NOTIFY, (self._compiler.channel, [notice(task_id)]))

    def change(self, change: Change, params: Params) -> Row | None:
        # PostgreSQL writes the task and its event, and notifies, in one statement; SQLite has no data-modifying CTE,
        # and no round trip to save.
        if self._combines:
            heard = {"channel": self._compiler.channel, "notice": notice(str(params["task_id"]))}
            row = self.row(change.combined, {**params, **heard})
        elif change.inserts:
            self.execute(change.bare, params)
            row = {**params}  # it is stored as it was given: nothing has to come back
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
            self.execute(statements.EVENT, written)
        self.events.append(written)
        return row

    def change_all(self, change: Change, rows: Sequence[Row]) -> None:
        touched = self._execute_all(change.bare, rows)
        assert touched == len(rows), "rows that are read and locked cannot change before they are written"
        ids, first = [str(row["task_id"]) for row in rows], rows[0]
        self.execute(change.record, {"changed": json.dumps(dict.fromkeys(ids)), "writer": first["writer"]})
        if self._combines:
            self.driver.execute(NOTIFY, (self._compiler.channel, list(map(notice, ids))))
        # One is proof of all: they are stored together or not at all.
        self.events.append(
            {
                "task_id": first["task_id"],
                "version": first["version"] + 1,
                "at": first["now"],
                "kind": change.kind,
                "instance_id": first["writer"],
            }
        )

    def _execute_all(self, statement: Executable, params: Sequence[Params]) -> int:
        compiled = self._compiler.compiled(statement)
        with closing(self.driver.cursor()) as cursor:
            cursor.executemany(compiled.sql, [compiled.bind(each) for each in params])
            return int(cursor.rowcount)


@dataclass(slots=True)
class _Compiled:
    sql: str
    order: tuple[str, ...] | None  # of positional parameters; None where they are named
    constants: dict[str, object]
    names: list[str] | None = None  # of the columns that come back, once one has

    def bind(self, params: Params) -> object:
        values = {**self.constants, **params} if self.constants else params
        return values if self.order is None else [values[name] for name in self.order]


class _Compiler:
    """SQLAlchemy's statements as SQL text: compiled when first used, then kept."""

    def __init__(self, engine: Engine, prefix: str, schema: str | None) -> None:
        self._dialect, self._known = engine.dialect, dict[Executable, _Compiled]()
        self._named = re.compile(rf"\b{DEFAULT_PREFIX}(?=(?:tasks|events|inputs|instances|tombstones|meta)\b)")
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
