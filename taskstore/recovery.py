"""Upkeep: decide over the orphaned tasks of dead processes, and delete what has expired.

Both work in batches, each a transaction of its own: an interruption loses nothing, another process doing the same
at the same time does no harm, and a second pass finds nothing left to do.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from taskstore import operations
from taskstore.binding import shorten
from taskstore.clock import Clock
from taskstore.database import Database
from taskstore.instances import Judge, Verdict, beat, is_elsewhere, read_instances, release
from taskstore.operations import Call, Decided, Refused, Row, Transaction
from taskstore.options import StoreOptions
from taskstore.task import OwnerKind, ReasonCode, RecoveryReport, RotationReport, SweepReport, Task

logger = logging.getLogger("taskstore")
audit = logging.getLogger("taskstore.audit")

RECOVERY_BATCH = 500
SWEEP_BATCH = 100
SWEEP_BATCH_BYTES = 2 * 1024 * 1024
ROTATION_BATCH = 50


class UpkeepTurn:
    """Whose turn the upkeep is: one instance does it for all that share a database, and the others scan nothing.

    The holder needs no clock and no write to keep its turn: its heartbeat shows that it is there. It loses the turn
    when it stops, when it is proven dead, or when its beat stands still for its whole lease, as that of a suspended
    process does, which the process table shows as alive. Two that hold it for a moment do no harm.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._judge = database, Judge(clock, database.lock_path)

    def is_mine(self, instance_id: str) -> bool:
        """Tell whether it is this instance's turn; take the turn when its holder is gone."""
        if not self._database.shared:
            return True
        holder, rows = self._database.read(_look).result()
        if holder == instance_id:
            return True
        held_by = [row for row in rows if row["instance_id"] == holder]
        if held_by and not self._judge.is_silent_or_dead(held_by[0]):
            return False
        unit = partial(operations.take_upkeep, former=holder, instance_id=instance_id)
        return self._database.write(unit).result()

    def leave(self, instance_id: str) -> None:
        """Let another instance take the turn at once."""
        if self._database.shared:
            self._database.write(partial(operations.leave_upkeep, instance_id=instance_id)).result()


def _look(transaction: Transaction) -> tuple[str | None, list[Row]]:
    return operations.read_upkeep_holder(transaction), read_instances(transaction)


class Recovery:
    """Upkeep of one store.

    Args:
        on_change: Called with the id of each task that was changed, after COMMIT.
    """

    def __init__(self, database: Database, options: StoreOptions, *, on_change: Callable[[str], None]) -> None:
        self._database, self._options, self._on_change = database, options, on_change
        self._clock, self._rules = options.clock, options.rules()
        self._judge = Judge(options.clock, database.lock_path)
        self._one_at_a_time = threading.Lock()
        self._sweep_batch = SWEEP_BATCH
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Have a pass that runs end with its batch: a server that stops has no time for the rest, others have."""
        self._stopping.set()

    def recover(self, writer: str, *, progress: Callable[[int], None] = lambda recovered: None) -> RecoveryReport:
        """Decide over the live tasks of every instance that is proven dead, or that has no row.

        Args:
            writer: Instance id that stands in the events.
            progress: Called after each batch with the number of tasks decided over so far.

        Raises:
            DatabaseUnavailableError: Run it again; what was done stays done.
        """
        recovered: list[str] = []
        queued: list[str] = []
        asked: list[str] = []

        def keep(batch: Sequence[Decided]) -> None:
            recovered.extend(each.task_id for each in batch)
            queued.extend(each.task_id for each in batch if each.owner_kind is OwnerKind.QUEUED)
            asked.extend(each.task_id for each in batch if each.owner_kind is OwnerKind.PARKED)
            progress(len(recovered))

        dead = self.recover_in_batches(writer, keep)
        return RecoveryReport(recovered=tuple(recovered), queued=tuple(queued), asked=tuple(asked), dead_instances=dead)

    def recover_in_batches(self, writer: str, on_batch: Callable[[Sequence[Decided]], None]) -> int:
        """Recover as ``recover`` does, and keep nothing: memory does not grow with the orphans.

        Args:
            on_batch: Called after each batch with what it decided.

        Returns:
            How many processes were proven dead.
        """
        # The timer and the application may both ask for it.
        with self._one_at_a_time:
            return self._recover(writer, on_batch)

    def _recover(self, writer: str, on_batch: Callable[[Sequence[Decided]], None]) -> int:
        rows = self._others(writer)
        if any(map(is_elsewhere, rows)):
            self._make_sure_that_all_can_beat(writer)
            rows = self._others(writer)
        verdicts = self._judge.judge(rows)
        # An instance elsewhere that beats once more, after this look and before the verdict is written, is spared.
        dead = {
            row["instance_id"]: row["beat"] if is_elsewhere(row) else None
            for row in rows
            if verdicts[row["instance_id"]] is Verdict.DEAD
        }
        owners = Counter[OwnerKind]()
        try:
            for instance_id, last_beat in (*dead.items(), (None, None)):
                self._decide_over(instance_id, writer, ReasonCode.CRASH_RECOVERY, owners, on_batch, last_beat)
            for instance_id, last_beat in dead.items():
                # Not before its tasks are decided over: the row proves them orphans to whoever goes on if we die here.
                release(self._database, instance_id, last_beat)
        finally:  # what was done stays done, and is told, when the database goes away in the middle
            if owners or dead:
                logger.warning("Recovery: %d dead processes, %s.", len(dead), _counts(owners))
        return len(dead)

    def _others(self, writer: str) -> list[Row]:
        return [row for row in self._database.read(read_instances).result() if row["instance_id"] != writer]

    def _make_sure_that_all_can_beat(self, writer: str) -> None:
        """Let those elsewhere be watched afresh unless this judge itself could beat, and at once.

        A full disk, or a lock that somebody keeps, lets everybody read and nobody beat; when it is over, who has not
        beaten yet has had no chance to. A judge without a row has no beat to tell by.
        """
        began, beaten = self._clock.monotonic(), False
        try:
            beaten = self._database.write(partial(beat, instance_id=writer)).result()
        finally:
            if not beaten or self._clock.monotonic() - began > self._options.lease.total_seconds() / 3:
                self._judge.forget()

    def hand_over(self, instance_id: str) -> None:
        """Decide over what this instance still holds and delete its row: it stops, so nobody waits for its lease."""
        left = Counter[OwnerKind]()
        self._decide_over(instance_id, instance_id, ReasonCode.SERVER_STOPPED, left)
        release(self._database, instance_id)
        if left:
            logger.warning("The store was closed while tasks of it were still live: %s.", _counts(left))

    def sweep(self, *, progress: Callable[[int], None] = lambda done: None) -> SweepReport:
        """Delete expired tasks, and end live ones that are due; every read decides both for itself, swept or not.

        Args:
            progress: Called after each batch with the number of tasks swept so far.
        """
        ended = deleted = 0
        ending = True
        try:
            while not self._stopping.is_set():
                limit = self._sweep_batch
                unit = partial(operations.sweep, call=self._call(), limit=limit, ending=ending)
                batch = self._database.write(unit).result()
                ending = len(batch.ended) == limit
                for task_id in batch.ended:
                    self._on_change(task_id)
                ended, deleted = ended + len(batch.ended), deleted + len(batch.deleted)
                progress(ended + deleted)
                # fail point: sweep-batch-done
                if batch.deleted_bytes:
                    # Every other write waits for a batch, and what it takes depends on the payloads that it deletes.
                    # Not measured in time: where others keep the disk or the processor busy, smaller batches free
                    # neither, and cost more commits.
                    fitting = SWEEP_BATCH_BYTES * len(batch.deleted) // batch.deleted_bytes
                    self._sweep_batch = min(max(fitting, 1), SWEEP_BATCH)
                if max(len(batch.ended), len(batch.deleted)) < limit:
                    break
            self._prune_tombstones()
        finally:
            if ended or deleted:
                logger.info("Sweep: %d expired tasks deleted, %d live ones ended at their ttl.", deleted, ended)
        return SweepReport(deleted=deleted, ended=ended)

    def _prune_tombstones(self) -> None:
        age = self._options.tombstones
        if age is not None:
            before, keep = self._clock.now() - age // timedelta(milliseconds=1), self._options.tombstone_limit
            self._database.write(partial(operations.prune_tombstones, before=before, keep=keep)).result()

    def _call(self, writer: str = "") -> Call:
        return Call(None, self._clock.now(), writer, self._rules)

    def rotate_keys(self, *, progress: Callable[[int], None] = lambda seen: None) -> RotationReport:
        """Seal every payload under the first key of the ring; servers may work on meanwhile.

        Args:
            progress: Called after each batch with the number of tasks looked at so far.

        Raises:
            CipherError: A payload cannot be opened; those before it are done, and a second run goes on.
        """
        after, changed, seen = "", 0, 0
        while True:
            unit = partial(operations.reseal, after=after, cipher=self._rules.cipher, limit=ROTATION_BATCH)
            last, batch = self._database.write(unit).result()
            if last is None:
                return RotationReport(resealed=changed)
            after, changed, seen = last, changed + batch, seen + ROTATION_BATCH
            progress(seen)

    def _decide_over(
        self,
        dead: str | None,
        writer: str,
        reason: ReasonCode,
        owners: Counter[OwnerKind],
        on_batch: Callable[[Sequence[Decided]], None] = lambda batch: None,
        last_beat: int | None = None,
    ) -> None:
        """Decide over the tasks of one instance; count in ``owners`` who holds them now."""
        while True:
            unit = partial(
                operations.recover_orphans,
                dead=dead,
                call=self._call(writer),
                limit=RECOVERY_BATCH,
                reason=reason,
                last_beat=last_beat,
            )
            batch = self._database.write(unit).result()
            for each in batch:
                if audit.isEnabledFor(logging.INFO):
                    whose = each.auth_key[:12] or "no auth context"
                    audit.info("recovered %s of %s, held by %s", shorten(each.task_id), whose, dead or "nobody known")
                self._on_change(each.task_id)
            owners.update(each.owner_kind for each in batch)
            self._tell(batch)
            on_batch(batch)
            # fail point: recovery-batch-done
            # An empty batch ends it, not a short one: rows that another process has locked are passed over,
            # and are that process's to fail.
            if not batch or (self._stopping.is_set() and reason is ReasonCode.CRASH_RECOVERY):
                return

    def _tell(self, batch: Sequence[Decided]) -> None:
        hook = self._options.on_recovered
        if hook is None or not batch:
            return

        def read(transaction: Transaction) -> list[Task | Refused]:
            call = self._call()
            return [operations.get_task(transaction, each.task_id, call=call) for each in batch]

        found = self._database.read(read).result()
        try:
            hook([task for task in found if isinstance(task, Task)])
        except Exception:  # foreign code: what it raises is no reason to leave the other orphans
            logger.exception("The hook on_recovered failed; recovery goes on.")


def _counts(owners: Counter[OwnerKind]) -> str:
    queued, asked = owners[OwnerKind.QUEUED], owners[OwnerKind.PARKED]
    failed = owners.total() - queued - asked
    return f"{failed} tasks failed, {queued} wait to be run again, {asked} wait for their requestor's word"
