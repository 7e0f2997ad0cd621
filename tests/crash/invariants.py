"""What must hold however processes die: the acknowledgements of all workers against what the store holds."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from taskstore import EventKind, OwnerKind, ReasonCode, Task, TaskEvent, TaskNotFoundError, TaskStatus, TaskStore
from taskstore.operations import milliseconds
from taskstore.task import TaskDetails

from .workload import HEARTBEAT, LEASE, UPKEEP, Character

PAGE = 500
_TERMINAL = {
    EventKind.COMPLETED: TaskStatus.COMPLETED,
    EventKind.FAILED: TaskStatus.FAILED,
    EventKind.RECOVERED: TaskStatus.FAILED,
    EventKind.CANCELLED: TaskStatus.CANCELLED,
}
# How long before its suspension a process may have beaten last, and been seen to.
_EARLY_MS = (HEARTBEAT + UPKEEP).total_seconds() * 1000
NOTICE_MS = 1500  # so long after the loss of its file a store has noticed, and in twice the time it would have gone on
_LEASE_MS = LEASE.total_seconds() * 1000


@dataclass
class Life:
    """One worker process, from its fork to its end. Instants are milliseconds of the system's clock.

    Attributes:
        ended_at: Just before the signal that ended it, or its own note that it reached a deadly fail point.
        gone: Whether its end was heard of.
        is_read: Whether all that it wrote has been read.
        told_to_end: Whether it was asked to close its store and go.
        opened_at: When it opened its store.
        acknowledged_at: When it last heard that something is stored.
        suspensions: From when until when it was stopped, each time; None is until now.
        robbed_at: When the database that it has open was lost, and all that it held.
    """

    number: int
    slot: int
    elsewhere: bool
    log: Path
    pid: int | None = None
    ended_at: int | None = None
    gone: bool = False
    told_to_end: bool = False
    is_read: bool = False
    opened_at: int | None = None
    acknowledged_at: int | None = None
    suspensions: list[tuple[int, int | None]] = field(default_factory=list)
    robbed_at: int | None = None

    @property
    def late_ms(self) -> int:
        """How long after the loss of its database it still heard that something is stored."""
        assert self.robbed_at is not None
        # What it heard before it was suspended it may write down when it goes on.
        noticed_at = self.robbed_at + NOTICE_MS
        resumed = (until for since, until in self.suspensions if until is not None and since <= noticed_at)
        return (self.acknowledged_at or 0) - max(self.robbed_at, *resumed, 0)


@dataclass(eq=False)
class Known:
    """All that was acknowledged of one task name, by any life."""

    name: str
    creators: list[int] = field(default_factory=list)  # lives that began to create it
    holders: dict[int, int] = field(default_factory=dict)  # by attempt, the life that was told that it holds the task
    task_id: str | None = None
    finished: dict[str, Any] | None = None
    deleting: bool = False
    deleted_at: int | None = None
    refused: bool = False


class Checker:
    """Collects what the lives wrote down, and compares it with the store."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.complaints: Counter[str] = Counter()
        self.longest_recovery_ms = 0
        self._known: dict[str, Known] = {}
        self._read: dict[int, int] = defaultdict(int)
        self._settled: dict[str, tuple[str, int]] = {}  # id of a checked finished task: status and version
        self._names: dict[str, str] = {}

    def anew(self) -> "Checker":
        """Begin again with another database; counts and violations stay."""
        checker = Checker()
        checker.violations, checker.counts, checker.complaints = self.violations, self.counts, self.complaints
        checker.longest_recovery_ms, checker._read = self.longest_recovery_ms, self._read
        return checker

    def read_logs(self, lives: Iterable[Life]) -> None:
        """Take in what the lives have written since the last time."""
        for life in lives:
            if life.is_read or not life.log.exists():
                continue
            life.is_read = life.gone  # it writes no more
            with life.log.open("rb") as log:
                log.seek(self._read[life.number])
                written = log.read()
            whole = written[: written.rfind(b"\n") + 1]
            self._read[life.number] += len(whole)
            for line in whole.splitlines():
                self._take(life, json.loads(line))

    def unacknowledged(self, life: Life) -> list[str]:
        """List the keyed tasks of a life that ended before it heard whether they were created."""
        return [
            known.name
            for known in self._known.values()
            if known.creators == [life.number] and known.task_id is None and Character(known.name).is_keyed
        ]

    def _take(self, life: Life, record: dict[str, Any]) -> None:
        did = record["did"]
        if did == "struck":
            self.counts[f"{record['act']} at {record['point']}"] += 1
            if record["act"] == "kill":
                life.ended_at = record["at"]
        elif did == "broke":
            self.violations.append(f"life {life.number} broke: {record['trace']}")
        elif did == "unavailable":
            self.complaints[record["error"].splitlines()[0]] += 1
        elif did == "opened":
            self.counts["opened"] += 1
            life.opened_at = record["at"]
        elif did != "closed":
            if did in ("created", "finished", "deleted"):
                life.acknowledged_at = record["at"]
            if life.robbed_at is None:
                self._take_about_task(life, did, record)

    def _take_about_task(self, life: Life, did: str, record: dict[str, Any]) -> None:
        known = self._known.setdefault(record["name"], Known(record["name"]))
        self.counts[record["status"] if did == "finished" else did] += 1
        match did:
            case "creating":
                known.creators.append(life.number)
            case "created":
                if known.task_id not in (None, record["task"]):
                    self._violated(known, f"was created twice: {known.task_id} and {record['task']}")
                known.task_id = record["task"]
                if not record["existing"]:
                    known.holders[1] = life.number
            case "claimed":
                if known.holders.setdefault(record["attempt"], life.number) != life.number:
                    self._violated(known, f"was claimed twice in attempt {record['attempt']}")
            case "finished":
                if known.finished is not None and known.finished["version"] != record["version"]:
                    self._violated(known, f"was acknowledged as finished twice: {known.finished} and {record}")
                known.finished = record
            case "deleting":
                known.deleting = True
            case "deleted":
                known.deleted_at = record["at"]
            case "refused":
                known.refused = True
            case "wrong":
                self._violated(known, record["what"])

    def _violated(self, known: Known, what: str) -> None:
        self.violations.append(f"task {known.name}: {what}")

    # --- the store

    async def check(self, store: TaskStore, lives: dict[int, Life]) -> None:
        """Compare what was acknowledged until now with what the store holds now."""
        ids = {known: known.task_id or (known.finished and known.finished["task"]) for known in self._known.values()}
        acknowledged = {
            task_id: known for known, task_id in ids.items() if task_id and not Character(known.name).is_brief
        }
        found: set[str] = set()
        cursor: str | None = None
        while True:
            page = await store.operator.list_tasks(limit=PAGE, cursor=cursor)
            for task in page.tasks:
                found.add(task.task_id)
                await self._check_task(store, task, lives)
            cursor = page.next_cursor
            if cursor is None:
                break
        self.read_logs(lives.values())  # what was deleted since they were read last
        for task_id, known in acknowledged.items():
            if task_id not in found and not known.deleting:
                self._violated(known, "its creation was acknowledged, and it is not there")
        self.counts["checks"] += 1

    async def _check_task(self, store: TaskStore, task: Task, lives: dict[int, Life]) -> None:
        settled = self._settled.get(task.task_id)
        if settled is not None:
            if settled != (task.status, task.version):
                self.violations.append(
                    f"task {task.method}: changed after its end: {settled}, now {task.status}, {task.version}"
                )
            return
        known = self._known.get(task.method)
        if known is None:
            # Its life has written down that it creates it, and that is read later.
            return
        if self._names.setdefault(known.name, task.task_id) != task.task_id:
            self._violated(known, "is there twice")
        if known.task_id is not None and known.task_id != task.task_id:
            self._violated(known, f"is {task.task_id}, but {known.task_id} was acknowledged")
        if known.deleted_at is not None:
            self._violated(known, "is there after its deletion was acknowledged")
        if not task.is_finished:
            if known.finished is not None:
                self._violated(known, f"its outcome was acknowledged, and it is {task.status}")
            return
        try:
            details = await store.operator.get_details(task.task_id)
            events = await store.operator.list_events(task.task_id)
        except TaskNotFoundError:
            return  # expired or deleted meanwhile; whether that may be is decided once all tasks are read
        self._check_history(known, details.task, events)
        for event in events:
            if event.reason is not None:
                self._check_verdict(known, event, lives)
        self._check_outcome(known, details, events, lives)
        self._settled[task.task_id] = (details.task.status, details.task.version)

    def _check_history(self, known: Known, task: Task, events: list[TaskEvent]) -> None:
        kinds = [event.kind for event in events]
        if kinds[0] is not EventKind.CREATED or kinds.count(EventKind.CREATED) != 1:
            self._violated(known, f"its history does not begin with its creation: {kinds}")
        if sum(kind in _TERMINAL for kind in kinds) != 1 or kinds[-1] not in _TERMINAL:
            self._violated(known, f"its history has not exactly one end: {kinds}")
        elif _TERMINAL[kinds[-1]] is not task.status:
            self._violated(known, f"its history ends with {kinds[-1]}, but it is {task.status}")
        for before, after in pairwise(events):
            if after.version <= before.version or after.from_status is not before.to_status:
                self._violated(known, f"its history does not join: {before}, {after}")
        if events[-1].version != task.version:
            self._violated(known, f"was written at version {task.version}, after its end at {events[-1].version}")
        if known.finished is not None and (known.finished["status"], known.finished["version"]) != (
            task.status.value,
            task.version,
        ):
            self._violated(known, f"was acknowledged as {known.finished}, and is {task.status}, {task.version}")

    def _check_outcome(
        self, known: Known, details: TaskDetails, events: list[TaskEvent], lives: dict[int, Life]
    ) -> None:
        character, outcome, end = Character(known.name), details.outcome, events[-1]
        assert outcome is not None
        match details.task.status:
            case TaskStatus.COMPLETED:
                right = (character.ends, outcome.result, outcome.error, outcome.is_error) == (
                    "complete",
                    character.result,
                    None,
                    character.is_error,
                )
                if not right:
                    self._violated(known, f"completed with another result: {str(outcome)[:200]}")
                if character.steps and details.task.progress != character.steps:
                    self._violated(known, f"completed at progress {details.task.progress} of {character.steps}")
            case TaskStatus.CANCELLED:
                if (outcome.result, outcome.error) != (None, None):
                    self._violated(known, "was cancelled, and has an outcome")
            case TaskStatus.FAILED if end.reason is None:
                self._check_failure(known, character, end.attempt, outcome.error, lives)
            case TaskStatus.FAILED:
                if outcome.error["data"]["reason"] != end.reason:  # type: ignore[index, call-overload]
                    self._violated(known, f"its event says {end.reason}, its error {outcome.error}")

    def _check_failure(
        self, known: Known, character: Character, attempt: int, error: Any, lives: dict[int, Life]
    ) -> None:
        if character.ends == "fail" and error == character.error:
            return
        self.counts["failed at its exit"] += 1
        told = any(lives[number].told_to_end for number in self._holders(known, attempt))
        stopped = error["message"].endswith("was stopped before it finished") and told
        if not stopped and not (known.refused and error["message"].startswith("Error executing tool")):
            self._violated(known, f"failed with {error}")

    def _holders(self, known: Known, attempt: int) -> list[int]:
        """List the lives that may have held a task in an attempt; none if it was claimed, and nobody heard of it."""
        if attempt in known.holders:
            return [known.holders[attempt]]
        return known.creators if attempt == 1 else []

    def _check_verdict(self, known: Known, event: TaskEvent, lives: dict[int, Life]) -> None:
        """Check what the store itself decided over a task, which takes it from its holder."""
        self.counts[f"{event.kind}: {event.reason}"] += 1
        at, attempt = milliseconds(event.at), event.attempt - 1
        holders = [lives[number] for number in self._holders(known, attempt)]
        told_to_end = not holders or any(life.told_to_end for life in holders)
        if event.reason is ReasonCode.CRASH_RECOVERY:
            dead = [life.ended_at for life in holders if life.ended_at is not None and life.ended_at <= at]
            if dead:
                self.longest_recovery_ms = max(self.longest_recovery_ms, at - min(dead))
            elif attempt not in known.holders and Character(known.name).declines:
                self.counts["declined to run again"] += 1
            elif attempt not in known.holders and told_to_end:
                # Its creation or claim was under way when the store was closed, and nobody heard of it.
                self.counts["unacknowledged beside a close"] += 1
            elif not any(_may_be_taken_for_dead(life, at) for life in holders):
                self._violated(known, f"was taken at {at} from a process that lived ({holders})")
        elif event.reason is ReasonCode.SERVER_STOPPED:
            if not told_to_end:
                self._violated(known, "was handed over by a process that was not told to end")
        elif event.reason is ReasonCode.ABANDONED:
            # Nothing held it: nobody heard of its creation or claim, or its flow was ended, and that was not stored.
            if attempt in known.holders and not told_to_end:
                self._violated(known, "was failed as abandoned, and was held")
        else:
            self._violated(known, f"was decided over as {event.reason}")

    async def stuck(self, store: TaskStore, lives: dict[int, Life]) -> list[str]:
        """List the live tasks of which every process that may hold them is dead."""
        held: list[Task] = []
        for status in (TaskStatus.WORKING, TaskStatus.INPUT_REQUIRED):
            cursor: str | None = None
            while True:
                page = await store.operator.list_tasks(status=status, limit=PAGE, cursor=cursor)
                held += [task for task in page.tasks if task.owner_kind is OwnerKind.INSTANCE]
                cursor = page.next_cursor
                if cursor is None:
                    break
        return [task.method for task in held if self._has_nobody(task, lives)]

    def _has_nobody(self, task: Task, lives: dict[int, Life]) -> bool:
        known = self._known.get(task.method)
        holders = [Character(task.method).life] if known is None else self._holders(known, task.attempt)
        return all(lives[number].gone for number in holders)

    def stuck_longer(self, names: Iterable[str], seconds: float) -> None:
        for name in names:
            self.violations.append(f"task {name}: still live {seconds:.0f} s after the death of its process")


def _may_be_taken_for_dead(life: Life, at: int) -> bool:
    """Tell whether a process was suspended for a whole lease, which nobody on another machine can tell from death."""
    shortest = _LEASE_MS - _EARLY_MS
    return any(
        since + shortest <= at and (until is None or (since + shortest <= until and at <= until + _LEASE_MS))
        for since, until in life.suspensions
    )
