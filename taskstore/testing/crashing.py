"""The death of a process, as all others see it, without one."""

import subprocess
import sys
from functools import cache

from sqlalchemy import BigInteger, bindparam, update

from taskstore.statements import instances
from taskstore.store import TaskStore
from taskstore.sync import SyncTaskStore

_DIED = (
    update(instances)
    .where(instances.c.instance_id == bindparam("this"))
    .values(pid=bindparam("dead_pid", type_=BigInteger), process_start=1)
)


def crash(store: TaskStore | SyncTaskStore) -> None:
    """Make a store's process look dead to all others, while its own code runs on.

    What comes after is what a real crash leaves: the next ``recover()`` of another store gives its live tasks their
    verdict, and whatever its handles still say is refused.

    Raises:
        ValueError: The store is no instance: it was opened as an observer, or crashed and was recovered already.
    """
    parts = store._store._parts if isinstance(store, SyncTaskStore) else store._parts
    died = {"this": parts.writer, "dead_pid": _dead_pid()}
    if not parts.database.write(lambda transaction: transaction.execute(_DIED, died)).result():
        raise ValueError("This store is no instance (any more), so nobody can take its process for dead.")


@cache
def _dead_pid() -> int:
    """Give the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
