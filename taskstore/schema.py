"""The tables, their constraints and indexes.

Instants are integer milliseconds UTC, payloads are bytes of canonical JSON, statuses are text with a CHECK.
No CHECK compares two instants: a stepped clock must not refuse a finished result.
"""

import re

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TextClause,
    text,
)
from sqlalchemy.types import TypeEngine

from taskstore.task import FINISHED, OwnerKind, TaskStatus

DEFAULT_PREFIX = "taskstore_"

# The revisions in alembic/versions, oldest first; a test keeps the two equal. A database's meta.oldest_code holds
# how many of them the code must know to run it, so that older code keeps running beside an additive migration.
REVISIONS = ("0001", "0002", "0003")

# The table in which Alembic keeps the revision, beside the host application's own.
VERSION_TABLE = "alembic_version"

_NAMING = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}


def check_identifier(value: str, what: str) -> str:
    """Return an identifier that is safe unquoted in every dialect.

    Raises:
        ValueError: It has other characters than lower-case letters, digits and ``_``, or is too long: PostgreSQL
            cuts names at 63 bytes, and the longest of ours adds 40.
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,22}", value):
        raise ValueError(f"{what} {value!r} must match [a-z_][a-z0-9_]* and have at most 23 characters.")
    return value


def one_of(column: str, values: tuple[str, ...] | type[TaskStatus] | type[OwnerKind]) -> str:
    """Write the SQL condition that a column holds one of some constants."""
    listed = ", ".join(f"'{value}'" for value in values)
    return f"{column} IN ({listed})"


def _id_type() -> TypeEngine[str]:
    # Byte order, as on SQLite: a locale's order costs PostgreSQL speed, and changes with its libc.
    return Text().with_variant(Text(collation="C"), "postgresql")


def metadata(prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> MetaData:
    """Build the whole schema under a prefix, such as ``taskstore_``, optionally in a PostgreSQL schema.

    Raises:
        ValueError: The prefix or the schema is no plain identifier.
    """
    check_identifier(prefix, "table_prefix")
    if schema is not None:
        check_identifier(schema, "schema")
    tables = build_tables(prefix, schema)
    _index_tasks(tables, prefix)
    still_open = text("answered_at IS NULL AND closed_at IS NULL")
    inputs = _table(tables, prefix, "inputs")
    Index(f"ix_{prefix}inputs_open", inputs.c.task_id, sqlite_where=still_open, postgresql_where=still_open)
    Index(f"ix_{prefix}tombstones_age", _table(tables, prefix, "tombstones").c.expired_at)
    return tables


def build_tables(prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> MetaData:
    """Build the tables without their indexes: all that statements need, and cheap to import.

    Naming a dialect's option, as partial indexes must, makes SQLAlchemy load that dialect: 50 ms for PostgreSQL's.
    """
    tables = MetaData(schema=schema, naming_convention=_NAMING)
    _tasks(tables, prefix)
    _events(tables, prefix)
    _inputs(tables, prefix)
    _instances(tables, prefix)
    _tombstones(tables, prefix)
    Table(f"{prefix}meta", tables, Column("name", Text, primary_key=True), Column("value", LargeBinary, nullable=False))
    return tables


def _table(tables: MetaData, prefix: str, name: str) -> Table:
    return tables.tables[f"{prefix}{name}" if tables.schema is None else f"{tables.schema}.{prefix}{name}"]


def _tasks(tables: MetaData, prefix: str) -> None:
    Table(
        f"{prefix}tasks",
        tables,
        Column("task_id", _id_type(), primary_key=True),
        Column("auth_key", _id_type(), nullable=False),  # '' is no auth context
        Column("server", Text, nullable=False),
        Column("method", Text, nullable=False),
        Column("name", Text),
        Column("session_digest", _id_type()),
        Column("idempotency_digest", _id_type()),
        Column("request_digest", _id_type()),
        Column("outcome_digest", _id_type()),
        Column("status", Text, nullable=False),
        # What the event of a change records as "from": UPDATE ... RETURNING shows only the new row.
        Column("previous_status", Text),
        Column("status_message", LargeBinary),
        Column("is_error", Boolean, nullable=False),
        Column("progress", Double),
        Column("progress_total", Double),
        Column("created_at", BigInteger, nullable=False),
        Column("last_updated_at", BigInteger, nullable=False),
        Column("finished_at", BigInteger),
        Column("ttl_ms", BigInteger),
        Column("expires_at", BigInteger),
        Column("poll_interval_ms", BigInteger),
        Column("owner_kind", Text, nullable=False),
        Column("instance_id", _id_type()),
        Column("attempt", Integer, nullable=False),
        Column("crashes", Integer, nullable=False),
        Column("max_attempts", Integer, nullable=False),
        Column("on_crash", Text, nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("cancel_requested_at", BigInteger),
        Column("parent_task_id", _id_type()),
        # The payloads last: a row that is read or rewritten without them stays narrow.
        Column("request", LargeBinary),
        Column("caller", LargeBinary),
        Column("result", LargeBinary),
        Column("error", LargeBinary),
        Column("parked", LargeBinary),  # what a parked tool wants back when it is entered again
        CheckConstraint(one_of("status", TaskStatus), name="status"),
        CheckConstraint(one_of("owner_kind", OwnerKind), name="owner_kind"),
        CheckConstraint(f"({one_of('status', FINISHED)}) = (finished_at IS NOT NULL)", name="finished_at"),
        CheckConstraint("(status = 'failed') = (error IS NOT NULL)", name="error"),
        CheckConstraint("result IS NULL OR status = 'completed'", name="result"),
        CheckConstraint("(owner_kind = 'instance') = (instance_id IS NOT NULL)", name="instance_id"),
    )


def _index_tasks(tables: MetaData, prefix: str) -> None:
    tasks = _table(tables, prefix, "tasks")
    live, finished = text("finished_at IS NULL"), text("finished_at IS NOT NULL")

    def index(purpose: str, *columns: str, where: TextClause | None = None, unique: bool = False) -> None:
        Index(
            f"ix_{prefix}tasks_{purpose}",
            *(tasks.c[name] for name in columns),
            unique=unique,
            sqlite_where=where,
            postgresql_where=where,
        )

    index("list", "auth_key", "created_at", "task_id")
    index("idempotency", "auth_key", "idempotency_digest", unique=True, where=text("idempotency_digest IS NOT NULL"))
    index("expiry", "expires_at", where=finished)
    index("instance", "instance_id", where=live)
    index("queued", "server", "created_at", where=text("owner_kind = 'queued' AND finished_at IS NULL"))
    index("live", "auth_key", where=live)


def _events(tables: MetaData, prefix: str) -> None:
    Table(
        f"{prefix}events",
        tables,
        Column("task_id", _id_type(), _task_of(prefix, tables), primary_key=True),
        Column("version", BigInteger, primary_key=True, autoincrement=False),
        Column("at", BigInteger, nullable=False),
        Column("kind", Text, nullable=False),
        Column("from_status", Text),
        Column("to_status", Text, nullable=False),
        Column("instance_id", _id_type()),  # who wrote it, whoever holds the task
        Column("attempt", Integer, nullable=False),
        Column("reason", Text),
    )


def _inputs(tables: MetaData, prefix: str) -> None:
    Table(
        f"{prefix}inputs",
        tables,
        Column("task_id", _id_type(), _task_of(prefix, tables), primary_key=True),
        Column("key", _id_type(), primary_key=True),  # on the wire; unique for the task's whole life
        Column("name", Text, nullable=False),  # the tool's own key
        Column("attempt", Integer, nullable=False),
        Column("request", LargeBinary, nullable=False),
        Column("response", LargeBinary),
        Column("asked_at", BigInteger, nullable=False),
        Column("answered_at", BigInteger),
        Column("closed_at", BigInteger),
        CheckConstraint("(response IS NULL) = (answered_at IS NULL)", name="response"),
    )


def _instances(tables: MetaData, prefix: str) -> None:
    # No foreign key from tasks: a missing row is itself the proof that a task is an orphan.
    Table(
        f"{prefix}instances",
        tables,
        Column("instance_id", _id_type(), primary_key=True),
        Column("name", Text, nullable=False),
        Column("machine_id", Text, nullable=False),
        Column("pid", BigInteger, nullable=False),
        Column("process_start", BigInteger),  # clock ticks since boot; null where the system does not tell
        Column("started_at", BigInteger, nullable=False),
        Column("beat", BigInteger, nullable=False),
        Column("lease_ms", BigInteger, nullable=False),
    )


def _tombstones(tables: MetaData, prefix: str) -> None:
    # What is left of a bound task that was swept, where the option is on.
    Table(
        f"{prefix}tombstones",
        tables,
        Column("task_id", _id_type(), primary_key=True),
        Column("auth_key", _id_type(), nullable=False),
        Column("expired_at", BigInteger, nullable=False),
    )


def _task_of(prefix: str, tables: MetaData) -> ForeignKey:
    target = f"{prefix}tasks.task_id" if tables.schema is None else f"{tables.schema}.{prefix}tasks.task_id"
    return ForeignKey(target, ondelete="CASCADE")
