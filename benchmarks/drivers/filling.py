"""Fills a database with copies of one task: a million creates would take longer than what is measured on them."""

import os
from collections.abc import Mapping

from sqlalchemy import Engine, create_engine, text

from taskstore.statements import events, tasks

_ID_DIGITS = 8
_CHUNK = 20_000  # copies in a transaction; SQLite's log grows with it
_NUMBERS = (
    "WITH RECURSIVE numbers(i) AS (SELECT CAST(:first AS BIGINT) UNION ALL SELECT i + 1 FROM numbers WHERE i < :last)"
)
# The ids of copies are in the order of their creation, as ids are.
_ID = f"substr(task_id, 1, length(task_id) - {_ID_DIGITS}) || substr(CAST({10**_ID_DIGITS} + i AS TEXT), 2)"


def id_of_copy(task_id: str, number: int) -> str:
    """Give the id of a task's copy; they are numbered from 1."""
    return f"{task_id[:-_ID_DIGITS]}{number:0{_ID_DIGITS}}"


def copy_task(url: str, task_id: str, copies: int, changes: Mapping[str, str]) -> None:
    """Copy a task and its events, under other ids, each a millisecond older than the next.

    Args:
        copies: How many; 0 is none.
        changes: What else differs: columns, and SQL expressions over the task's own columns and ``i``, which counts
            from 1 to the number of copies. The same SQL runs on SQLite and PostgreSQL.
    """
    engine = create_engine(url)
    changed = {"task_id": _ID, "created_at": f"created_at - {copies} + i", **changes}
    with engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA synchronous=OFF")
        for first in range(1, copies + 1, _CHUNK):
            span = {"first": first, "last": min(first + _CHUNK - 1, copies), "task_id": task_id}
            for table, renewed in ((tasks, changed), (events, {"task_id": _ID})):
                names = [column.name for column in table.c]
                values = ", ".join(renewed.get(name, name) for name in names)
                copied = f"SELECT {values} FROM {table.name}, numbers WHERE task_id = :task_id"
                connection.execute(text(f"{_NUMBERS} INSERT INTO {table.name} ({', '.join(names)}) {copied}"), span)
            connection.commit()
    _settle(engine)


def _settle(engine: Engine) -> None:
    """Do what the database itself would have done by the time that so many tasks have come together."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            connection.exec_driver_sql("VACUUM (ANALYZE)")
            connection.exec_driver_sql("CHECKPOINT")
    engine.dispose()


def size_mib(url: str) -> float:
    """Read how much a database takes on the disk; of SQLite's the log is part."""
    engine = create_engine(url)
    try:
        if engine.url.database is not None and engine.dialect.name == "sqlite":
            files = (engine.url.database, f"{engine.url.database}-wal")
            return sum(os.stat(file).st_size for file in files if os.path.exists(file)) / 2**20
        with engine.connect() as connection:
            size: int = connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one()
            return size / 2**20
    finally:
        engine.dispose()
