"""What a task is: statuses, the transition table, and the records that callers get.

Source: MCP 2025-11-25, tasks, "Task Status Lifecycle"; extension io.modelcontextprotocol/tasks of 2026-07-28.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, JsonValue

__all__ = ["JsonValue"]  # re-exported for annotations elsewhere in the package


class TaskStatus(StrEnum):
    """The five statuses of the specification, in its words."""

    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_finished(self) -> bool:
        """Tell whether no transition leads out of this status."""
        return not TRANSITIONS[self]


# The one place that says what may become what; WHERE clauses, the CHECK and the README's diagram derive from it.
TRANSITIONS: Mapping[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.WORKING: frozenset(
        {TaskStatus.INPUT_REQUIRED, TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED}
    ),
    TaskStatus.INPUT_REQUIRED: frozenset(
        {TaskStatus.WORKING, TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED}
    ),
    TaskStatus.COMPLETED: frozenset(),
    TaskStatus.FAILED: frozenset(),
    TaskStatus.CANCELLED: frozenset(),
}

FINISHED = tuple(status for status in TaskStatus if not TRANSITIONS[status])
LIVE = tuple(status for status in TaskStatus if TRANSITIONS[status])


def statuses_before(status: TaskStatus) -> tuple[TaskStatus, ...]:
    """List the statuses from which a task may become ``status``."""
    return tuple(source for source in TaskStatus if status in TRANSITIONS[source])


class OwnerKind(StrEnum):
    """Who holds a live task."""

    INSTANCE = "instance"  # a process; its death orphans the task
    PARKED = "parked"  # nobody: re-entered when its questions are answered
    QUEUED = "queued"  # nobody: waits for a runner
    EXTERNAL = "external"  # work elsewhere, reported through the operator's API


class OnCrash(StrEnum):
    """What becomes of a task whose process died, or stopped before the task was finished."""

    FAIL = "fail"  # it fails, and says why
    RETRY = "retry"  # it is queued, and a runner that knows its tool runs it again
    ASK = "ask"  # its requestor is asked whether to run it again, if its client can show a question; else it fails
    EXTERNAL = "external"  # nothing: the work is elsewhere, and no process of ours holds it


class EventKind(StrEnum):
    """What an event row records."""

    CREATED = "created"
    INPUT_REQUIRED = "input_required"
    RESUMED = "resumed"
    QUEUED = "queued"  # its process died or stopped, and a runner may run it again
    CLAIMED = "claimed"  # a runner took it
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RECOVERED = "recovered"
    EXPIRED = "expired"
    IMPORTED = "imported"  # it was kept elsewhere until then


class ReasonCode(StrEnum):
    """Why the store itself ended a task; stands in the error's ``data.reason`` and in the event."""

    CRASH_RECOVERY = "CRASH_RECOVERY"  # its process died
    SERVER_STOPPED = "SERVER_STOPPED"  # its process stopped in good order, and did not finish it
    TTL_EXPIRED = "TTL_EXPIRED"  # its ttl passed, and nothing kept it
    NO_RUNNER = "NO_RUNNER"  # its ttl passed while it waited for a runner
    ABANDONED = "ABANDONED"  # its process lives, but nothing in it holds the task
    UNSTORABLE_RESULT = "UNSTORABLE_RESULT"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Task(_Record):
    """One task as its requestor may see it, without any payload.

    Attributes:
        status_message: What the tool last said, or why the task ended.
        ttl: Lifetime from ``created_at``; None is unlimited. A live task never expires: past its ttl this grows.
        expires_at: When a finished task stops being found; None is never.
        is_error: True when the tool finished but reported an error (MCP ``isError``).
        attempt: The fence: raised whenever another holder takes the task, or recovery decides over it.
        crashes: How many processes died holding the task.
        version: Raised by every write of the row; ``wait_for_task(since_version=...)`` compares it.
        existing: True when a create found the task instead of making it.
    """

    task_id: str
    status: TaskStatus
    status_message: str | None
    progress: float | None
    progress_total: float | None
    is_error: bool
    created_at: datetime
    last_updated_at: datetime
    finished_at: datetime | None
    ttl: timedelta | None
    expires_at: datetime | None
    poll_interval: timedelta | None
    method: str
    name: str | None
    server: str
    attempt: int
    crashes: int
    version: int
    owner_kind: OwnerKind
    cancel_requested: bool
    existing: bool = False

    @property
    def is_finished(self) -> bool:
        """Tell whether the task is completed, failed or cancelled."""
        return self.status.is_finished


class Outcome(_Record):
    """What a finished task came to: ``result`` or ``error`` (a JSON-RPC error object), or neither when cancelled."""

    result: JsonValue = None
    error: JsonValue = None
    is_error: bool = False


class TaskDetails(_Record):
    """A task with everything a poll may show, read in one snapshot."""

    task: Task
    outcome: Outcome | None
    input_requests: Mapping[str, JsonValue]


class TaskPage(_Record):
    """One page of a listing, newest first; ``next_cursor`` is None on the last page."""

    tasks: tuple[Task, ...]
    next_cursor: str | None


class TaskEvent(_Record):
    """One state change. ``version`` is the task's version after it; versions ascend, with gaps for progress."""

    task_id: str
    version: int
    at: datetime
    kind: EventKind
    from_status: TaskStatus | None
    to_status: TaskStatus
    attempt: int
    reason: ReasonCode | None


class Claim(_Record):
    """A queued task in the hands of the runner that took it, with all that another run needs.

    Attributes:
        request: As it was given to ``create_task()``.
        caller: As it was given to ``create_task()``.
        state: As it was given to ``TaskHandle.park()``, if the task was parked by its tool.
        answers: What the requestor answered to the questions of that ``park()``, under the tool's own keys.
    """

    task: Task
    request: JsonValue
    caller: JsonValue
    state: JsonValue
    answers: Mapping[str, JsonValue]


class RecoveryReport(_Record):
    """What one recovery pass did.

    Attributes:
        recovered: Every task that it decided over.
        queued: Those of them that wait for a runner to run them again.
        asked: Those of them whose requestor is asked whether to run them again.
        dead_instances: Processes that were proven dead.
    """

    recovered: tuple[str, ...] = ()
    queued: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    dead_instances: int = 0


class SweepReport(_Record):
    """What one sweep did: expired tasks that are gone, and live ones that ended at their ttl."""

    deleted: int = 0
    ended: int = 0


class RotationReport(_Record):
    """What one rotation of the keys did: tasks of which anything was sealed again."""

    resealed: int = 0


class FailingJob(_Record):
    """A job of this process's upkeep that did not finish the last time; it is run again at its next turn.

    Attributes:
        name: ``recover``, ``sweep`` or ``abandoned``.
        failures: How often in a row.
        since: When the first of them was.
        error: What the last one said.
    """

    name: str
    failures: int
    since: datetime
    error: str


class Health(_Record):
    """The store at a glance, for a readiness probe; counts of tasks by status, and orphans that wait for recovery.

    Attributes:
        failing: Upkeep of this process that keeps failing; what other processes fail at shows in theirs alone.
    """

    database: str
    revision: str
    live: int
    finished: int
    expired: int
    orphans: int
    instances: int
    failing: tuple[FailingJob, ...] = ()
