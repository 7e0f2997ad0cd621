"""A model of the store: what every task must be after each call, in a dict and in plain Python.

It knows the rules (who may see, write and end a task, and what each change leaves behind), and nothing of databases,
threads or statements.
"""

from dataclasses import dataclass, field
from datetime import timedelta

from pydantic import JsonValue

from taskstore import AuthContext, EventKind, OnCrash, OwnerKind, ReasonCode, TaskStatus
from taskstore.clock import Clock

RETENTION_MS = 15 * 60_000
LONGEST_TTL_MS = 30 * 24 * 3_600_000
CANCELLED = "The task was cancelled by request."
LIVE = (TaskStatus.WORKING, TaskStatus.INPUT_REQUIRED)

Event = tuple[EventKind, TaskStatus | None, TaskStatus, int, ReasonCode | None]


@dataclass
class Question:
    """A question of a task, under its key on the wire."""

    name: str
    asks_to_run_again: bool = False
    is_open: bool = True
    answer: JsonValue = None


@dataclass
class Expected:
    """A task as it must be; ``holder`` is the process that its row names, whether it is live or finished."""

    task_id: str
    auth: AuthContext | None
    key: str | None
    request: JsonValue
    on_crash: OnCrash
    can_be_asked: bool
    max_attempts: int
    created_at: int
    ttl_ms: int
    holder: object
    owner_kind: OwnerKind
    status: TaskStatus = TaskStatus.WORKING
    message: str | None = None
    progress: float | None = None
    total: float | None = None
    finished_at: int | None = None
    outcome: tuple[str, JsonValue] | None = None
    reason: ReasonCode | None = None
    attempt: int = 1
    crashes: int = 0
    version: int = 1
    questions: dict[str, Question] = field(default_factory=dict)
    events: list[Event] = field(default_factory=lambda: [(EventKind.CREATED, None, TaskStatus.WORKING, 1, None)])
    was_cancelled: bool = False
    deleted: bool = False
    swept: bool = False

    @property
    def expires_at(self) -> int:
        return self.created_at + self.ttl_ms

    @property
    def is_live(self) -> bool:
        return self.status in LIVE

    @property
    def open_keys(self) -> set[str]:
        return {key for key, question in self.questions.items() if question.is_open}


class Model:
    """Every task that was ever created, and the rules."""

    def __init__(self, clock: Clock, *, strict: bool) -> None:
        self.clock, self.strict = clock, strict
        self.tasks: dict[str, Expected] = {}

    # --- what is so

    def is_due(self, task: Expected) -> bool:
        ends = self.strict or task.owner_kind is not OwnerKind.INSTANCE
        return task.is_live and ends and task.expires_at <= self.clock.now()

    def is_expired(self, task: Expected) -> bool:
        return not task.is_live and task.expires_at <= self.clock.now()

    def is_there(self, task: Expected) -> bool:
        return not (task.deleted or self.is_expired(task))

    def is_lost(self, task: Expected, holder: object, attempt: int) -> bool:
        if task.reason is ReasonCode.TTL_EXPIRED:
            return False
        return (task.holder, task.attempt) != (holder, attempt)

    def keyed(self, auth: AuthContext | None, key: str) -> Expected | None:
        found = [task for task in self.tasks.values() if (task.auth, task.key) == (auth, key) and self.is_there(task)]
        assert len(found) <= 1, "a key has two tasks"
        return found[0] if found else None

    def next_queued(self) -> Expected | None:
        queued = [
            task
            for task in self.tasks.values()
            if task.is_live and task.owner_kind is OwnerKind.QUEUED and not self.is_due(task)
        ]
        return min(queued, key=_position, default=None)

    # --- what happens

    def list_page(
        self, auth: AuthContext | None, status: TaskStatus | None, size: int, after: tuple[int, str] | None
    ) -> tuple[list[Expected], bool]:
        """List what an auth context must be shown, newest first, and tell whether there is more.

        To know that, the store looks at one task more than it shows. Those it looks at and finds due are ended.
        """
        while True:
            found = [
                task
                for task in self.tasks.values()
                if auth is not None
                and task.auth == auth
                and self.is_there(task)
                and (after is None or _position(task) < after)
                and (status in (None, task.status) or self.is_due(task))
            ]
            found = sorted(found, key=_position, reverse=True)[: size + 1]
            if not any(self.is_due(task) for task in found):
                return found[:size], len(found) > size
            for task in found:
                self.touch(task)

    def create(
        self,
        task_id: str,
        *,
        auth: AuthContext | None,
        key: str | None,
        request: JsonValue,
        ttl: timedelta | None,
        on_crash: OnCrash,
        can_be_asked: bool,
        max_attempts: int,
        holder: object,
    ) -> Expected:
        is_external = on_crash is OnCrash.EXTERNAL
        task = Expected(
            task_id=task_id,
            auth=auth,
            key=key,
            request=request,
            on_crash=on_crash,
            can_be_asked=can_be_asked,
            max_attempts=max_attempts,
            created_at=self.clock.now(),
            ttl_ms=LONGEST_TTL_MS if ttl is None else ttl // timedelta(milliseconds=1),
            holder=None if is_external else holder,
            owner_kind=OwnerKind.EXTERNAL if is_external else OwnerKind.INSTANCE,
        )
        assert task_id not in self.tasks
        self.tasks[task_id] = task
        return task

    def record(self, task: Expected, kind: EventKind, status: TaskStatus, reason: ReasonCode | None = None) -> None:
        assert task.is_live, "nothing follows the end of a task"
        task.version += 1
        task.events.append((kind, task.status, status, task.attempt, reason))
        task.status = status

    def finish(
        self,
        task: Expected,
        kind: EventKind,
        status: TaskStatus,
        *,
        message: str | None,
        outcome: tuple[str, JsonValue] | None = None,
        reason: ReasonCode | None = None,
    ) -> None:
        self.record(task, kind, status, reason)
        task.finished_at = self.clock.now()
        task.ttl_ms = max(task.ttl_ms, task.finished_at - task.created_at + RETENTION_MS)
        task.message, task.outcome, task.reason = message, outcome, reason

    def end_by_store(self, task: Expected, kind: EventKind, reason: ReasonCode) -> None:
        task.attempt += 1
        self.finish(task, kind, TaskStatus.FAILED, message=f"{reason}: ", reason=reason)

    def touch(self, task: Expected) -> None:
        """End a task that is due, as everybody does who comes across it."""
        if self.is_due(task):
            queued = task.owner_kind is OwnerKind.QUEUED
            self.end_by_store(task, EventKind.EXPIRED, ReasonCode.NO_RUNNER if queued else ReasonCode.TTL_EXPIRED)

    def cancel(self, task: Expected) -> None:
        self.finish(task, EventKind.CANCELLED, TaskStatus.CANCELLED, message=CANCELLED)
        task.was_cancelled = True

    def progress(self, task: Expected, value: float, total: float | None, message: str | None) -> None:
        task.version += 1
        task.progress = value if task.progress is None else max(value, task.progress)
        task.total = task.total if total is None else total
        task.message = task.message if message is None else message

    def ask(self, task: Expected, questions: dict[str, Question]) -> None:
        self.record(task, EventKind.INPUT_REQUIRED, TaskStatus.INPUT_REQUIRED)
        task.questions.update(questions)

    def park(self, task: Expected, questions: dict[str, Question]) -> None:
        self.close_questions(task)
        self.ask(task, questions)
        task.owner_kind, task.holder = OwnerKind.PARKED, None

    def close_questions(self, task: Expected) -> None:
        for question in task.questions.values():
            question.is_open = False

    def answer(self, task: Expected, responses: dict[str, JsonValue]) -> None:
        """Take answers to open questions; all others are ignored."""
        self.touch(task)
        answered = [key for key in responses if task.status is TaskStatus.INPUT_REQUIRED and key in task.open_keys]
        for key in answered:
            task.questions[key].is_open, task.questions[key].answer = False, responses[key]
        if any(task.questions[key].asks_to_run_again and not _agrees(responses[key]) for key in answered):
            self.end_by_store(task, EventKind.RECOVERED, ReasonCode.CRASH_RECOVERY)
        elif answered and not task.open_keys:
            self.record(task, EventKind.RESUMED, TaskStatus.WORKING)
            if task.owner_kind is OwnerKind.PARKED:
                task.owner_kind = OwnerKind.QUEUED
        elif answered:
            task.version += 1

    def claim(self, task: Expected, holder: object) -> None:
        task.attempt += 1
        self.record(task, EventKind.CLAIMED, TaskStatus.WORKING)
        task.owner_kind, task.holder = OwnerKind.INSTANCE, holder
        task.progress = task.total = None

    def held_by(self, holder: object) -> list[Expected]:
        return [
            task
            for task in self.tasks.values()
            if task.is_live and task.owner_kind is OwnerKind.INSTANCE and task.holder is holder
        ]

    def decide(self, task: Expected, reason: ReasonCode) -> None:
        """Decide over a task whose process died or stopped."""
        crashed = reason is ReasonCode.CRASH_RECOVERY
        task.crashes += crashed
        if task.status is TaskStatus.INPUT_REQUIRED:
            self.close_questions(task)
        spent = crashed and task.crashes >= task.max_attempts
        may_go_on = task.on_crash is not OnCrash.FAIL and task.expires_at > self.clock.now() and not spent
        if may_go_on and task.on_crash is OnCrash.RETRY:
            self._let_go(task, EventKind.QUEUED, TaskStatus.WORKING, OwnerKind.QUEUED, reason)
        elif may_go_on and task.can_be_asked:
            key = f"run-again-{task.attempt}"
            self._let_go(task, EventKind.INPUT_REQUIRED, TaskStatus.INPUT_REQUIRED, OwnerKind.PARKED, reason)
            task.questions[key] = Question("taskstore.run_again", asks_to_run_again=True)
        else:
            self.end_by_store(task, EventKind.RECOVERED, reason)

    def _let_go(
        self, task: Expected, kind: EventKind, status: TaskStatus, owner_kind: OwnerKind, reason: ReasonCode
    ) -> None:
        task.attempt += 1
        self.record(task, kind, status, reason)
        task.owner_kind, task.holder, task.message = owner_kind, None, f"{reason}: "

    def sweep(self) -> tuple[int, int]:
        """End what is due and drop what has expired; return how many of each."""
        due = [task for task in self.tasks.values() if self.is_due(task)]
        for task in due:
            self.touch(task)
        expired = [task for task in self.tasks.values() if self.is_expired(task) and not (task.deleted or task.swept)]
        for task in expired:
            task.swept = True
        return len(due), len(expired)


def _position(task: Expected) -> tuple[int, str]:
    return task.created_at, task.task_id


def _agrees(response: JsonValue) -> bool:
    return response == {"action": "accept", "content": {"again": True}}
