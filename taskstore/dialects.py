"""All that differs between SQLite and PostgreSQL: connecting, locking, telling errors apart, hearing of changes."""

import logging
import math
import os
import random
import secrets
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal

from sqlalchemy import URL, Engine, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from taskstore.clock import SYSTEM
from taskstore.errors import DatabaseUnavailableError, SchemaError, TaskStoreError

Durability = Literal["full", "normal"]
Journal = Literal["wal", "rollback"]

logger = logging.getLogger("taskstore")

LARGEST_BATCH = 64
INLINE_TIMEOUT_MS = 5
POLL_SECONDS = 0.05
LISTEN_SECONDS = 0.2
TRUSTED_POLL_SECONDS = 1.0
NOTIFY = "SELECT pg_notify(%s, notice) FROM unnest(%s::text[]) AS notice"
_BUSY_TIMEOUT_MS = 10_000
_LISTEN_PROOF_SECONDS = 2.0
_NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "fuse.sshfs", "ceph"})


class LostError(DatabaseUnavailableError):
    """The connection went away; nothing of the transaction was stored, unless it was in COMMIT."""


class ConflictError(DatabaseUnavailableError):
    """Another transaction got in the way; running again helps."""


class BusyError(DatabaseUnavailableError):
    """Another process kept the write lock for longer than the busy timeout."""


class Dialect(ABC):
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
    lock_migrations: str
    lock_sql: str | None = None  # takes a lock on a number until the end of the transaction
    threads_keep_connections: bool = False
    reads_inline: bool = False  # whether a short read is sure not to wait for anybody
    driver_error: type[Exception]

    @abstractmethod
    def engine(self) -> Engine:
        """Make the engine; opens nothing yet."""

    @abstractmethod
    def prepare(self, connection: Any, observer: bool) -> None:
        """Check the database on the first connection, and unless for an observer set it up."""

    def lock_path(self, instance_id: str) -> str | None:
        """Name the file whose lock shows that an instance lives, where files are shared by all that can see it."""
        return None

    @abstractmethod
    def check_place(self) -> None:
        """Refuse to go on when the database is not where it was opened any more."""

    @abstractmethod
    def transaction_id(self, connection: Any) -> int | None:
        """Ask for the id of the open transaction; None if it wrote nothing, or if its COMMIT cannot get lost."""

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
    def migration_engine(self, engine: Engine) -> AbstractContextManager[Engine]:
        """Give the engine on whose connections Alembic can work."""

    @abstractmethod
    def tidy(self, connection: Any) -> None:
        """Leave the database in order; the last thing before the engine goes."""


class Sqlite(Dialect):
    """SQLite in a file, in WAL mode unless told otherwise; or in memory, on one connection."""

    name, combines, writers, readers, batch = "sqlite", False, 1, 2, LARGEST_BATCH
    # A deferred transaction that reads and then writes fails at once with SQLITE_BUSY_SNAPSHOT if another writer
    # committed in between; the busy timeout does not help. Taking the write lock first makes it wait instead.
    begin, begin_snapshot, lock_migrations = "BEGIN IMMEDIATE", "BEGIN", "BEGIN IMMEDIATE"
    driver_error = sqlite3.Error

    def __init__(self, url: URL, durability: Durability, journal: Journal) -> None:
        if url.query:
            raise ValueError(
                f"A SQLite URL takes no options, but {url} has {sorted(url.query)}; use sqlite:///file.db."
            )
        self._synchronous = "FULL" if durability == "full" else "NORMAL"
        self.shared = url.database not in (None, "", ":memory:")
        # An absolute path: connections are opened later too, perhaps after a change of the working directory.
        self._path = os.path.abspath(url.database or "") if self.shared else ":memory:"
        self.label = f"the SQLite database {self._path}" if self.shared else "the in-memory SQLite database"
        self.threads_keep_connections = self.shared
        self._mode = "wal" if journal == "wal" else "delete"
        self.reads_inline = self.shared and journal == "wal"  # with a rollback journal a reader waits for the writer
        self._opened: tuple[int, int] | None = None  # which file it is; None until there is one
        self._is_remote = False
        if not self.shared:
            self.readers = 0  # the database lives on the writer's connection

    def engine(self) -> Engine:
        if sqlite3.sqlite_version_info < (3, 35):
            raise DatabaseUnavailableError(
                f"SQLite {sqlite3.sqlite_version} has no RETURNING; 3.35 or newer is needed: use a newer Python build."
            )
        if self.shared:
            self._check_path()
            self._opened = self._identify()
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
        self._is_remote = file_system in _NETWORK_FILE_SYSTEMS
        if self._is_remote:
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
            while self.shared and not observer and mode != self._mode:
                # Several processes may open a new file at once. The change of mode takes the lock without waiting.
                try:
                    mode = connection.execute(f"PRAGMA journal_mode={self._mode}").fetchone()[0]
                    if mode != self._mode:
                        raise DatabaseUnavailableError(
                            f"{self.label} cannot use a write-ahead log (its journal mode stays {mode!r}); put it on a "
                            "local disk, or use PostgreSQL, or open it with StoreOptions(journal='rollback')."
                        )
                except sqlite3.OperationalError as error:
                    if not _is_busy(error):
                        raise
                    if SYSTEM.monotonic() > deadline:
                        raise BusyError(
                            f"{self.label} cannot change its journal from {mode!r} to {self._mode!r} while others have "
                            "it open; stop them, and have all open it with the same StoreOptions(journal=...)."
                        ) from error
                    time.sleep(random.uniform(0.005, 0.02))
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            raise self.unreachable(error) from error
        if self.shared and self._opened is None:
            self._opened = self._identify()  # it is new

    def lock_path(self, instance_id: str) -> str | None:
        # On a network file system the lock may be known to one machine alone, or to none.
        if not self.shared or self._is_remote:
            return None
        return f"{self._path}-{instance_id}.lock"

    def check_place(self) -> None:
        # SQLite goes on in a file that has no name any more, and all of it is gone when the last process closes it.
        # Connections that are opened later would meet another file under the same name.
        if self._opened is not None and self._identify() != self._opened:
            raise DatabaseUnavailableError(
                f"{self.label} was deleted or replaced while it was open; nothing is stored in what is left of it. "
                "Close the store, and open it again."
            )

    def _identify(self) -> tuple[int, int] | None:
        # By its name alone: to open the file and close it again would drop SQLite's own locks.
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def transaction_id(self, connection: Any) -> int | None:
        return None

    def classify(self, error: Exception, connection: Any) -> TaskStoreError:
        if isinstance(error, sqlite3.OperationalError) and _is_busy(error):
            return BusyError(
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
        return DataVersion(connection)

    def migration_engine(self, engine: Engine) -> AbstractContextManager[Engine]:
        return nullcontext(engine)  # an in-memory database is on this engine's connection alone

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
    # Errors that Python's module raises by itself have no name.
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


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


class Postgres(Dialect):
    """PostgreSQL, by psycopg 3; everything is transaction-level, so that a transaction pooler may stand between."""

    name, combines, writers, readers, batch = "postgresql", True, 4, 4, 1
    lock_sql = "SELECT pg_advisory_xact_lock(%s)"
    lock_migrations = f"SELECT pg_advisory_xact_lock({int.from_bytes(b'tskmigr8')})"

    def __init__(self, url: URL, durability: Durability) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise DatabaseUnavailableError(
                "PostgreSQL needs the driver psycopg: pip install 'taskstore[postgres]'."
            ) from error
        self._psycopg, self.driver_error = psycopg, psycopg.Error
        self._url = url.set(drivername="postgresql+psycopg")
        self._warned = False
        self.label = f"the PostgreSQL database {self._url.render_as_string(hide_password=True)}"
        # Set for each transaction, since a pooler or a role may have set it otherwise for the session.
        self.begin = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit TO " + (
            "on" if durability == "full" else "off"
        )
        # A peer that stands still in the middle of a transaction must not stop every writer here for ever.
        self.begin += f"; SET LOCAL lock_timeout TO {_BUSY_TIMEOUT_MS}"
        self.begin += f"; SET LOCAL idle_in_transaction_session_timeout TO {3 * _BUSY_TIMEOUT_MS}"
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
        try:
            fsync = connection.execute("SHOW fsync").fetchone()[0]
        except self.driver_error as error:
            raise self.classify(error, connection) from error
        if fsync != "on":
            logger.warning("%s has fsync off: a power loss can lose or damage everything; set fsync = on.", self.label)

    def check_place(self) -> None:
        """Leave it to the server, which is asked anew with each connection."""

    def transaction_id(self, connection: Any) -> int | None:
        found: int | None = connection.execute("SELECT txid_current_if_assigned()").fetchone()[0]
        return found

    def classify(self, error: Exception, connection: Any) -> TaskStoreError:
        state = getattr(error, "sqlstate", None) or ""
        # 08: connection exceptions; 57P: the server shuts down, crashed, or cut the connection. Without a code it is
        # no answer of the server's but trouble on the way, as that of a pipeline that was cut while it was busy.
        on_the_way = not state and isinstance(error, self._psycopg.OperationalError)
        if (connection is not None and connection.closed) or on_the_way or state.startswith(("08", "57P")):
            return LostError(f"The connection to {self.label} was lost: {str(error).strip()}")
        # Serialization failure, deadlock, or a key that another transaction inserted first.
        if state in ("40001", "40P01", "23505"):
            return ConflictError(f"{self.label} kept meeting conflicting transactions: {str(error).strip()}")
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
        return Listen(connection, channel, announce, self._warn_of_silence)

    def _warn_of_silence(self) -> None:
        # Once: a feed is opened anew whenever somebody waits again.
        if not self._warned:
            self._warned = True
            logger.warning(
                "LISTEN brings no notifications here (a transaction pooler?); changes by other processes are polled."
            )

    @contextmanager
    def migration_engine(self, engine: Engine) -> Iterator[Engine]:
        # Connections of another kind: SQLAlchemy and Alembic expect the driver to begin transactions.
        plain = create_engine(self._url, poolclass=NullPool, connect_args={"prepare_threshold": None})
        try:
            yield plain
        finally:
            plain.dispose()

    def tidy(self, connection: Any) -> None:
        """Leave nothing to do: the server keeps its own house."""


def _refused_for_good(label: str, error: Exception) -> SchemaError:
    return SchemaError(
        f"{label} refused a statement, and would again: {str(error).strip()}. "
        "Are the tables as taskstore made them, and may this role use them? See: taskstore check URL."
    )


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


class DataVersion(ChangeFeed):
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


class Listen(ChangeFeed):
    """PostgreSQL: LISTEN, once a notice of our own has come through; until then, and rarely after, a poll.

    Behind a transaction pooler LISTEN succeeds and nothing ever comes. So a connection is trusted only after it
    heard, and even then it is no more than the fast path: what it might miss, the rare poll finds.
    """

    def __init__(
        self, connection: Any, channel: str, announce: Callable[[str], None], on_silence: Callable[[], None]
    ) -> None:
        self._connection, self._channel, self._on_silence = connection, channel, on_silence
        self._proof = secrets.token_hex(8)
        self._trusted = False
        self._began = SYSTEM.monotonic()
        self._polled = -math.inf  # what changed before this connection listened, only a poll finds
        connection.execute(f"LISTEN {channel}")
        announce(self._proof)

    def wait(self, stop: threading.Event) -> tuple[bool, frozenset[str]]:
        seconds = LISTEN_SECONDS if self._trusted else POLL_SECONDS
        heard = frozenset(notify.payload for notify in self._connection.notifies(timeout=seconds, stop_after=1))
        self._trusted = self._trusted or self._proof in heard
        now = SYSTEM.monotonic()
        if not self._trusted and now - self._began > _LISTEN_PROOF_SECONDS:
            self._on_silence()
        due = not self._trusted or now - self._polled >= TRUSTED_POLL_SECONDS
        if due:
            self._polled = now
        return due, heard

    def close(self) -> None:
        self._connection.execute(f"UNLISTEN {self._channel}")


def dialect_of(url: URL, durability: Durability, journal: Journal) -> Dialect:
    """Choose by the URL's driver.

    Raises:
        ValueError: It is none of ours.
        DatabaseUnavailableError: The driver is not installed.
    """
    match url.drivername:
        case "sqlite" | "sqlite+pysqlite":
            return Sqlite(url, durability, journal)
        case "postgresql" | "postgresql+psycopg":
            return Postgres(url, durability)
    raise ValueError(
        f"The driver {url.drivername!r} is not supported; use sqlite:///file.db or postgresql+psycopg://user@host/name."
    )
