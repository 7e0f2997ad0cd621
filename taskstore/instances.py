"""Who is alive: the row of an open store, its heartbeat, and the proof that another one is dead.

An instance on this machine is judged by the process table, and never by age. One on another machine is dead only
when this judge has itself watched its beat stay unchanged for that instance's whole lease, by the judge's own
monotonic clock. So no clock is compared with another one, and an outage of the database kills nobody.

In between is the other container on this machine: under the same kernel, but with a process table that is not ours to
read. On SQLite each instance holds a lock on a file of its own beside the database. The kernel gives the lock up when
the process ends, however it ends, and not before; so who gets it has proof of death.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache, partial

from taskstore import statements
from taskstore.binding import new_instance_id
from taskstore.clock import Clock
from taskstore.database import Database
from taskstore.operations import Row, Transaction

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("taskstore")


class Verdict(Enum):
    """What a judge knows of an instance."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"  # on another machine, not watched for long enough yet


@cache
def machine_id() -> str | None:
    """Identify this boot of this kernel and this pid namespace; None where the system does not tell.

    Two processes with equal machine ids see each other under the same pids.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None where that cannot be read."""
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def _stat(pid: int) -> list[str] | None:
    """Read the fields of /proc/<pid>/stat from the third on, the state; None where they cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as lines:
            # The second field is the command in parentheses, and may itself hold blanks and parentheses.
            fields = lines.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > 19 else None


def is_proven_dead(pid: int, start: int | None) -> bool:
    """Tell whether a process of this machine is gone.

    The proofs are: no such pid; a pid that belongs to a process started at another time; a process that has ended
    down to its last thread, and only waits for its parent to take note, which some containers' first process never
    does.
    """
    if sys.platform == "win32":
        return False  # os.kill(pid, 0) would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists, under another user
    stat = _stat(pid)
    if stat is None:
        return False
    state, threads, started = stat[0], int(stat[17]), int(stat[19])
    return (state in "ZX" and threads <= 1) or (start is not None and started != start)


def hold_lock(path: str) -> int | None:
    """Make an instance's file and lock it; return what holds the lock, or None where that is not possible."""
    if sys.platform == "win32":
        return None
    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None  # the proof is missing then, and the lease decides
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


def is_lock_free(path: str) -> bool:
    """Tell whether an instance's file is there, and nobody holds its lock."""
    if sys.platform == "win32":
        return False
    try:
        # Never made here: a file that is missing proves nothing.
        tried = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(tried, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(tried)
    return True


@dataclass(slots=True)
class _Watch:
    beat: int
    seen_at: float
    still_for: float = 0.0


class Judge:
    """Decides over instances, from one look at their rows to the next.

    Args:
        lock_path: Names the file whose lock an instance holds, or None where there are none.
    """

    def __init__(self, clock: Clock, lock_path: Callable[[str], str | None]) -> None:
        self._clock, self._lock_path = clock, lock_path
        self._watched: dict[str, _Watch] = {}

    def judge(self, rows: Iterable[Row]) -> dict[str, Verdict]:
        """Give the verdict over each instance; call it repeatedly, with all rows, to watch those elsewhere."""
        verdicts = {}
        for row in rows:
            if self._is_proven_dead(row):
                verdicts[row["instance_id"]] = Verdict.DEAD
            elif not is_elsewhere(row):
                verdicts[row["instance_id"]] = Verdict.ALIVE
            else:
                verdicts[row["instance_id"]] = self._watch(row)
        self._watched = {key: watch for key, watch in self._watched.items() if key in verdicts}
        return verdicts

    def forget(self) -> None:
        """Watch everybody elsewhere afresh from the next look on: until now nobody could beat."""
        self._watched.clear()

    def is_silent_or_dead(self, row: Row) -> bool:
        """Tell whether one instance is proven dead, or has not beaten for its lease, wherever it is; as ``judge``."""
        return self._watch(row) is Verdict.DEAD or self._is_proven_dead(row)

    def _is_proven_dead(self, row: Row) -> bool:
        """Look for a proof, which needs no waiting: in the process table, or by the lock of a neighbour container."""
        if not is_elsewhere(row):
            return is_proven_dead(row["pid"], row["process_start"])
        here, path = machine_id(), self._lock_path(row["instance_id"])
        # The first part of a machine id is the boot of its kernel; a lock is known to one kernel alone.
        same_kernel = here is not None and row["machine_id"].partition("/")[0] == here.partition("/")[0]
        return same_kernel and path is not None and is_lock_free(path)

    def _watch(self, row: Row) -> Verdict:
        now, lease = self._clock.monotonic(), row["lease_ms"] / 1000
        watch = self._watched.get(row["instance_id"])
        if watch is None:
            self._watched[row["instance_id"]] = _Watch(row["beat"], now)
            return Verdict.UNKNOWN
        if watch.beat != row["beat"]:
            self._watched[row["instance_id"]] = _Watch(row["beat"], now)
            return Verdict.ALIVE
        # However long this judge did not look (it was suspended, or the database was away and nobody could
        # beat), one look counts for a third of the lease at most: the instance gets its chance to beat.
        watch.still_for += min(now - watch.seen_at, lease / 3)
        watch.seen_at = now
        return Verdict.DEAD if watch.still_for >= lease else Verdict.UNKNOWN


def is_elsewhere(row: Row) -> bool:
    """Tell whether an instance is on another machine, as far as can be told: only its beat shows that it lives."""
    here = machine_id()
    return here is None or bool(row["machine_id"] != here)


class Instance:
    """The row of this open store: registered before its first task, beating from a thread of its own.

    Args:
        on_evicted: Called on the heartbeat's thread when the row is gone: others took this process for dead. By then
            the instance is registered anew, under another id.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        name: str,
        lease: timedelta,
        heartbeat: timedelta,
        on_evicted: Callable[[str], None],
    ) -> None:
        self._database, self._clock, self._name = database, clock, name
        self._lease_ms = lease // timedelta(milliseconds=1)
        self._heartbeat = heartbeat
        self._on_evicted = on_evicted
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: int | None = None
        self._beating = threading.Lock()
        self._beaten_at = clock.monotonic()
        self.instance_id = ""

    def start(self) -> None:
        """Register, and beat from now on."""
        self._register()
        # A thread, not the event loop: a tool that blocks the loop must not look dead. An in-memory database has
        # no one else to see a beat.
        if self._database.shared:
            self._thread = threading.Thread(target=self._beat, name="taskstore-heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop beating; the row stays until ``release``."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def unlock(self) -> None:
        """Give up the lock that shows that this instance lives; the last thing, since others then decide over it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _register(self) -> None:
        instance_id, pid = new_instance_id(), os.getpid()
        # Before the row, which others judge by it.
        path = self._database.lock_path(instance_id)
        self.unlock()
        self._lock = None if path is None else hold_lock(path)
        row = {
            "instance_id": instance_id,
            "name": self._name,
            "machine_id": machine_id() or instance_id,  # unlike every other one's, where the system does not tell
            "pid": pid,
            "process_start": process_start(pid),
            "started_at": self._clock.now(),
            "beat": 0,
            "lease_ms": self._lease_ms,
        }
        began = self._clock.monotonic()
        self._database.write_here(lambda transaction: transaction.execute(statements.REGISTER, row))
        self._beaten_at = began
        # fail point: registered
        self.instance_id = instance_id

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat.total_seconds()):
            try:
                self.beat()
            except Exception as error:  # noqa: BLE001  whatever it is, a heart that stops kills live work
                # Nothing to do but beat again: nobody is declared dead while nobody can reach the database.
                logger.warning("Heartbeat of instance %s failed, trying again: %s", self.instance_id, error)

    @property
    def is_late(self) -> bool:
        """Whether the last beat is so old that others may be about to take this process for dead, or have done so."""
        late = self._clock.monotonic() - self._beaten_at > self._lease_ms / 2000
        return late and self._thread is not None

    def beat(self) -> None:
        """Beat once; if the row is gone, register anew and tell."""
        # fail point: before-beat
        with self._beating:  # the heartbeat's thread, and who takes a task when the beat is late
            began = self._clock.monotonic()
            if self._database.write_here(partial(beat, instance_id=self.instance_id)):
                self._beaten_at = began
                return
            evicted = self.instance_id
            self._register()
            logger.error(
                "Instance %s was declared dead by another process; its tasks are lost to it. Registered as %s.",
                evicted,
                self.instance_id,
            )
            self._on_evicted(evicted)


def read_instances(transaction: Transaction) -> list[Row]:
    """Unit: read every instance row."""
    return transaction.rows(statements.INSTANCES, {})


def beat(transaction: Transaction, instance_id: str) -> bool:
    """Unit: beat once; tell whether the instance has a row."""
    return transaction.row(statements.BEAT, {"instance_id": instance_id}) is not None


def release(database: Database, instance_id: str, last_beat: int | None = None) -> bool:
    """Delete an instance's row unless a live task names it, or it has beaten again; tell whether it is gone."""
    # fail point: before-release
    unit = partial(_release, instance_id=instance_id, last_beat=last_beat)
    released = database.write(unit).result()
    path = database.lock_path(instance_id)
    if released and path is not None:
        with suppress(OSError):
            os.unlink(path)
    return released


def _release(transaction: Transaction, instance_id: str, last_beat: int | None) -> bool:
    return transaction.row(statements.RELEASE, {"instance_id": instance_id, "last_beat": last_beat}) is not None
