"""Upkeep: fail the orphaned tasks of dead processes, and delete what has expired.

Both work in batches, each a transaction of its own: an interruption loses nothing, another process doing the same
at the same time does no harm, and a second pass finds nothing left to do.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from taskstore import operations
from taskstore.binding import shorten
from taskstore.cipher import Cipher
from taskstore.clock import Clock
from taskstore.database import Database
from taskstore.instances import Judge, Verdict, read_instances, release
from taskstore.operations import Reader
from taskstore.task import RecoveryReport, RotationReport, SweepReport

logger = logging.getLogger("taskstore")
audit = logging.getLogger("taskstore.audit")

RECOVERY_BATCH = 200
SWEEP_BATCH = 100
ROTATION_BATCH = 50


class Recovery:
    """Recovery of one store.

    Args:
        min_retention: How long an outcome is kept after the finish, however short the task's ttl was.
        on_change: Called with the id of each task that was failed, after COMMIT.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        cipher: Cipher,
        *,
        min_retention: timedelta,
        on_change: Callable[[str], None],
    ) -> None:
        self._database, self._clock, self._cipher, self._on_change = database, clock, cipher, on_change
        self._min_retention = min_retention // timedelta(milliseconds=1)
        self._judge = Judge(clock)
        self._one_at_a_time = threading.Lock()

    def recover(self, writer: str, *, progress: Callable[[int], None] = lambda recovered: None) -> RecoveryReport:
        """Fail the live tasks of every instance that is proven dead, or that has no row.

        Args:
            writer: Instance id that stands in the events.
            progress: Called after each batch with the number of tasks failed so far.

        Raises:
            DatabaseUnavailableError: Run it again; what was done stays done.
        """
        # The timer and the application may both ask for it.
        with self._one_at_a_time:
            return self._recover(writer, progress)

    def _recover(self, writer: str, progress: Callable[[int], None]) -> RecoveryReport:
        rows = self._database.read(read_instances).result()
        verdicts = self._judge.judge(row for row in rows if row["instance_id"] != writer)
        dead = [instance_id for instance_id, verdict in verdicts.items() if verdict is Verdict.DEAD]
        recovered: list[str] = []
        for instance_id in (*dead, None):
            self._fail_orphans(instance_id, writer, recovered, progress)
        for instance_id in dead:
            # Not before its tasks are failed: the row is what proves them orphans to whoever goes on if we die here.
            release(self._database, instance_id)
        if recovered or dead:
            logger.warning("Recovery: %d dead processes, %d orphaned tasks failed.", len(dead), len(recovered))
        return RecoveryReport(recovered=tuple(recovered), dead_instances=len(dead))

    def hand_over(self, instance_id: str) -> None:
        """Fail what this instance still holds and delete its row: it stops, so nobody needs to wait for its lease."""
        left: list[str] = []
        self._fail_orphans(instance_id, instance_id, left, lambda recovered: None, crashed=False)
        release(self._database, instance_id)
        if left:
            logger.warning("The store was closed while %d of its tasks were still live; they are failed.", len(left))

    def sweep(self, *, progress: Callable[[int], None] = lambda deleted: None) -> SweepReport:
        """Delete expired tasks; which ones those are is exact on every read, swept or not."""
        deleted = 0
        while True:
            unit = partial(operations.sweep, now=self._clock.now(), limit=SWEEP_BATCH)
            batch = self._database.write(unit).result()
            deleted += batch
            progress(deleted)
            if batch < SWEEP_BATCH:
                break
        if deleted:
            logger.info("Sweep: %d expired tasks deleted.", deleted)
        return SweepReport(deleted=deleted)

    def rotate_keys(self, *, progress: Callable[[int], None] = lambda seen: None) -> RotationReport:
        """Seal every payload under the first key of the ring; servers may work on meanwhile.

        Args:
            progress: Called after each batch with the number of tasks looked at so far.

        Raises:
            CipherError: A payload cannot be opened; those before it are done, and a second run goes on.
        """
        after, changed, seen = "", 0, 0
        while True:
            unit = partial(operations.reseal, after=after, cipher=self._cipher, limit=ROTATION_BATCH)
            last, batch = self._database.write(unit).result()
            if last is None:
                return RotationReport(resealed=changed)
            after, changed, seen = last, changed + batch, seen + ROTATION_BATCH
            progress(seen)

    def _fail_orphans(
        self,
        dead: str | None,
        writer: str,
        recovered: list[str],
        progress: Callable[[int], None],
        *,
        crashed: bool = True,
    ) -> None:
        while True:
            unit = partial(
                operations.recover_orphans,
                dead=dead,
                reader=Reader(None, self._clock.now(), 0, self._cipher),
                writer=writer,
                min_retention=self._min_retention,
                limit=RECOVERY_BATCH,
                crashed=crashed,
            )
            batch = self._database.write(unit).result()
            for task, auth_key in batch:
                audit.info("recovered %s of %s, held by %s", shorten(task.task_id), auth_key[:12] or "nobody", dead)
                recovered.append(task.task_id)
                self._on_change(task.task_id)
            progress(len(recovered))
            # An empty batch ends it, not a short one: rows that another process has locked are passed over,
            # and are that process's to fail.
            if not batch:
                return
