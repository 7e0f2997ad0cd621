"""Units of work: plain functions of a transaction. The rules of the store live here, once.

The contract of a unit: it does nothing but SQL, takes the present as an argument, and may be run again, beside other
callers' units in one transaction. It returns its value, or ``Refused`` before its first write; it never raises a
domain error. The caller hears of it only after COMMIT.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from pydantic import JsonValue
from sqlalchemy.sql.expression import Executable

from taskstore import payload, statements
from taskstore.binding import shorten
from taskstore.cipher import Cipher
from taskstore.errors import (
    CipherError,
    IdempotencyConflictError,
    IllegalTransitionError,
    LeaseLostError,
    LimitExceededError,
    NotFinishedError,
    TaskExistsError,
    TaskExpiredError,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStoreError,
)
from taskstore.statements import Change
from taskstore.task import (
    Claim,
    EventKind,
    OnCrash,
    Outcome,
    OwnerKind,
    ReasonCode,
    Task,
    TaskDetails,
    TaskEvent,
    TaskStatus,
)

Row = dict[str, Any]
Params = Mapping[str, object]


class Transaction(Protocol):
    """What a unit of work may do; ``database.py`` decides how it is done."""

    def row(self, statement: Executable, params: Params) -> Row | None:
        """Run a statement and return its first row, or None."""

    def rows(self, statement: Executable, params: Params) -> list[Row]:
        """Run a statement and return its rows, in its order."""

    def execute(self, statement: Executable, params: Params) -> int:
        """Run a statement and return how many rows it touched."""

    def notify(self, task_id: str) -> None:
        """Tell other processes, at COMMIT, that a task has news; where that is not possible they poll."""

    def lock(self, name: str) -> None:
        """Make other transactions that lock the same name wait for the end of this one."""

    def change(self, change: Change, params: Params) -> Row | None:
        """Write a task and its event; return the new row without payloads, or None when the WHERE refused."""

    def change_all(self, change: Change, rows: Sequence[Row]) -> None:
        """Write many tasks and their events, whose rows this transaction has read and locked.

        Args:
            rows: The rows as they were read, with the parameters of the change beside their columns; all must meet
                the WHERE.
        """


@dataclass(frozen=True, slots=True)
class Refused:
    """A unit's answer instead of a value; the store raises ``error`` after COMMIT."""

    error: TaskStoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one auth context may have and ask; None is no limit. All callers without one count as one.

    Attributes:
        live_tasks: Tasks that are not finished.
        stored_tasks: Tasks that are kept, finished ones included.
        payload_bytes: Size of one request, result, error, message, question or answer, as JSON.
        page_size: Tasks a page of a listing.
        reads_per_minute: Calls of ``get_task``, ``get_details``, ``get_outcome`` and ``list_tasks``; counted in each
            process for itself.
    """

    live_tasks: int | None = None
    stored_tasks: int | None = None
    payload_bytes: int | None = 16 * 1024 * 1024
    page_size: int = 1000
    reads_per_minute: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value < 1:
                raise ValueError(f"Limits.{limit.name} must be at least 1, or None for no limit, not {value}.")


@dataclass(frozen=True, slots=True)
class Fence:
    """What a handle must still be for its writes to count: the holder, in this attempt."""

    task_id: str
    instance_id: str
    attempt: int

    @property
    def params(self) -> dict[str, object]:
        """The parameters of a fenced statement."""
        return {
            "task_id": self.task_id,
            "instance_id": self.instance_id,
            "attempt": self.attempt,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a store's settings say to every unit of work.

    Attributes:
        lease_ms: What a live task past its ttl is shown to have left.
        min_retention_ms: How long an outcome is kept after the finish, however short the task's ttl was.
        strict: Whether tasks end at their ttl even while a process works on them.
        tombstones: Whether the owner of an expired task is told that it was one.
        repair: Whether payloads that no database holds are repaired rather than refused.
        limits: What one auth context may have and ask.
        cipher: Seals payloads, and opens them.
    """

    lease_ms: int
    min_retention_ms: int
    strict: bool
    tombstones: bool
    repair: bool
    limits: Limits
    cipher: Cipher

    def encode(self, value: JsonValue | Mapping[str, JsonValue], what: str) -> bytes:
        """Encode a payload; see ``payload.encode``.

        Raises:
            PayloadError: It cannot be stored, or is too large.
        """
        return payload.encode(value, what=what, limit=self.limits.payload_bytes, repair=self.repair)


@dataclass(frozen=True, slots=True)
class Call:
    """Who calls, when, and under which rules.

    Attributes:
        auth_key: Whose tasks are meant; None is the operator, who means everybody's.
        now: Present instant, milliseconds UTC.
        writer: Instance id that stands in the events; '' is an observer.
        rules: The store's.
    """

    auth_key: str | None
    now: int
    writer: str
    rules: Rules

    @property
    def params(self) -> dict[str, object]:
        """The parameters that statements take of a call."""
        return {
            "auth_key": self.auth_key,
            "now": self.now,
            "writer": self.writer,
            "min_retention": self.rules.min_retention_ms,
            "strict": self.rules.strict,
        }

    def about(self, task_id: str) -> dict[str, object]:
        """Return the parameters of a statement about one task."""
        return {**self.params, "task_id": task_id}

    def held(self, fence: Fence) -> dict[str, object]:
        """Return the parameters of a statement about a task in its holder's hands."""
        return {**self.params, **fence.params, "writer": fence.instance_id}


@dataclass(frozen=True, slots=True)
class Progress:
    """What a handle has to say beside its write; None leaves a column alone."""

    progress: float | None = None
    progress_total: float | None = None
    status_message: bytes | None = None

    @property
    def params(self) -> dict[str, object]:
        """The parameters that every write of a handle takes beside its own."""
        return {
            "progress": self.progress,
            "progress_total": self.progress_total,
            "status_message": self.status_message,
        }


# --- rows to records


_EPOCH, _MILLISECOND = datetime.fromtimestamp(0, UTC), timedelta(milliseconds=1)


def instant(ms: int) -> datetime:
    """Turn milliseconds UTC into an aware datetime."""
    return _EPOCH + ms * _MILLISECOND


def milliseconds(at: datetime) -> int:
    """Turn an aware datetime into milliseconds UTC."""
    return (at - _EPOCH) // _MILLISECOND


def _optional_instant(ms: int | None) -> datetime | None:
    return None if ms is None else instant(ms)


def _optional_span(ms: int | None) -> timedelta | None:
    return None if ms is None else ms * _MILLISECOND


def ends_at_ttl(owner_kind: OwnerKind, rules: Rules) -> bool:
    """Tell whether a live task ends at its ttl: when no process holds it, and under strict rules always."""
    return rules.strict or owner_kind is not OwnerKind.INSTANCE


def is_due(task: Task, call: Call) -> bool:
    """Tell whether a task must end now, because its ttl has passed and nothing keeps it."""
    return seconds_to_ttl(task, call) == 0


def seconds_to_ttl(task: Task, call: Call) -> float | None:
    """Count the time until a live task ends at its ttl; None when it does not."""
    if task.expires_at is None or task.is_finished or not ends_at_ttl(task.owner_kind, call.rules):
        return None
    return max(milliseconds(task.expires_at) - call.now, 0) / 1000


def task_of(row: Row, call: Call, *, existing: bool = False) -> Task:
    """Build the record of a row.

    A live task that a process holds does not expire: past its ttl it is shown with what has passed and one lease,
    and nothing is written for it.
    """
    ttl_ms, created_at, owner_kind = row["ttl_ms"], row["created_at"], OwnerKind(row["owner_kind"])
    if ttl_ms is not None and row["finished_at"] is None and not ends_at_ttl(owner_kind, call.rules):
        passed = call.now - created_at
        ttl_ms = passed + call.rules.lease_ms if passed >= ttl_ms else ttl_ms
    message = row["status_message"]
    return Task(
        task_id=row["task_id"],
        status=TaskStatus(row["status"]),
        status_message=None if message is None else str(_opened(call, message, "status_message", row["task_id"])),
        progress=row["progress"],
        progress_total=row["progress_total"],
        is_error=bool(row["is_error"]),
        created_at=instant(created_at),
        last_updated_at=instant(row["last_updated_at"]),
        finished_at=_optional_instant(row["finished_at"]),
        ttl=_optional_span(ttl_ms),
        expires_at=None if ttl_ms is None else instant(created_at + ttl_ms),
        poll_interval=_optional_span(row["poll_interval_ms"]),
        method=row["method"],
        name=row["name"],
        server=row["server"],
        attempt=row["attempt"],
        crashes=row["crashes"],
        version=row["version"],
        owner_kind=owner_kind,
        cancel_requested=row["cancel_requested_at"] is not None,
        existing=existing,
    )


def _opened(call: Call, stored: bytes, column: str, task_id: str) -> JsonValue:
    return payload.decode(call.rules.cipher.open(stored, "tasks", column, task_id))


def _input(call: Call, stored: bytes, column: str, task_id: str, key: str) -> JsonValue:
    return payload.decode(call.rules.cipher.open(stored, "inputs", column, task_id, key))


def _outcome_of(row: Row, call: Call) -> Outcome:
    result, error, task_id = row["result"], row["error"], row["task_id"]
    return Outcome(
        result=None if result is None else _opened(call, result, "result", task_id),
        error=None if error is None else _opened(call, error, "error", task_id),
        is_error=bool(row["is_error"]),
    )


# --- what a requestor may do


def create_task(transaction: Transaction, values: Params, *, call: Call) -> Task | Refused:
    """Insert a task in status ``working``, held by the instance that asks; or find the one that its key made before.

    Args:
        values: Every column of the new row.
    """
    limits, keyed = call.rules.limits, values["idempotency_digest"] is not None
    params = {**call.params, **values}
    if keyed or limits.live_tasks is not None or limits.stored_tasks is not None:
        # What is read here decides over the INSERT, so creates of one auth context go one after the other.
        transaction.lock(f"create {call.auth_key}")
    if keyed:
        known = transaction.row(statements.IDEMPOTENT, params)
        if known is not None and is_due(task_of(known, call), call):
            end_if_due(transaction, known["task_id"], call=call)
            known = transaction.row(statements.IDEMPOTENT, params)  # none, where nothing is retained after the finish
        if known is not None and known["request_digest"] == values["request_digest"]:
            return task_of(known, call, existing=True)
        if known is not None:
            return Refused(IdempotencyConflictError(known["task_id"]))
    over = _over_limit(transaction, call)
    if over is not None:
        return Refused(over)
    if keyed:
        transaction.execute(statements.FREE_KEY, params)
    row = transaction.change(statements.CREATE, params)
    assert row is not None, "an INSERT returns its row or fails"
    return task_of(row, call)


def _over_limit(transaction: Transaction, call: Call) -> LimitExceededError | None:
    limits = call.rules.limits
    for name, allowed, statement, remedy in (
        ("live_tasks", limits.live_tasks, statements.COUNT_LIVE, "wait for one of its tasks to finish, or cancel one"),
        ("stored_tasks", limits.stored_tasks, statements.COUNT_STORED, "delete a finished task, or wait for one to go"),
    ):
        if allowed is not None:
            row = transaction.row(statement, call.params)
            if row is not None and row["count"] >= allowed:
                return LimitExceededError(name, allowed, remedy)
    return None


def is_bound_formerly(transaction: Transaction, former_auth_key: str) -> bool:
    """Tell whether an auth context has tasks that are bound under an earlier secret."""
    return transaction.row(statements.IS_BOUND_FORMERLY, {"former_auth_key": former_auth_key}) is not None


def rebind(transaction: Transaction, former_auth_key: str, *, call: Call) -> None:
    """Bind the tasks of the auth context that calls under the present secret."""
    transaction.execute(statements.REBIND, {**call.params, "former_auth_key": former_auth_key})


def rebind_key(transaction: Transaction, digests: Params, *, call: Call) -> None:
    """Digest an idempotency key that was used under an earlier secret by the present one."""
    transaction.execute(statements.REBIND_KEY, {**call.params, **digests})


def get_task(transaction: Transaction, task_id: str, *, call: Call) -> Task | Refused:
    """Read a task without payloads."""
    row = _read(transaction, task_id, call, statements.GET, statements.OPERATOR_GET)
    return _not_found(transaction, task_id, call) if row is None else task_of(row, call)


def get_details(transaction: Transaction, task_id: str, *, call: Call) -> TaskDetails | Refused:
    """Read a task, its outcome when it is finished, its open questions when it waits for input: in one snapshot."""
    row = _read(transaction, task_id, call, statements.GET_WITH_OUTCOME, statements.OPERATOR_GET_WITH_OUTCOME)
    if row is None:
        return _not_found(transaction, task_id, call)
    task = task_of(row, call)
    asked: list[Row] = []
    if task.status is TaskStatus.INPUT_REQUIRED:
        asked = transaction.rows(statements.OPEN_INPUTS, {"task_id": task_id})
    return TaskDetails(
        task=task,
        outcome=_outcome_of(row, call) if task.is_finished else None,
        input_requests={
            question["key"]: _input(call, question["request"], "request", task_id, question["key"])
            for question in asked
        },
    )


def list_tasks(
    transaction: Transaction, *, call: Call, filters: Params, before: tuple[int, str] | None, limit: int
) -> list[Task]:
    """Read tasks newest first: one auth context's, or the whole store's for the operator.

    Args:
        filters: ``status`` and ``session_digest``, for the operator ``owner`` (an auth key), ``name`` and ``server``
            too; None is any.
        before: Creation instant and id of the last task of the page before.
        limit: Most tasks to return.
    """
    before_at, before_id = before or (2**62, "~")
    params = {**call.params, **filters, "before_at": before_at, "before_id": before_id, "limit": limit}
    found = transaction.rows(statements.OPERATOR_LIST if call.auth_key is None else statements.LIST, params)
    return [task_of(row, call) for row in found]


def list_events(transaction: Transaction, task_id: str, *, call: Call, after: int) -> list[TaskEvent] | Refused:
    """Read a task's state changes after a version, oldest first."""
    if _read(transaction, task_id, call, statements.GET, statements.OPERATOR_GET) is None:
        return _not_found(transaction, task_id, call)
    found = transaction.rows(statements.EVENTS, {"task_id": task_id, "after": after})
    return [
        TaskEvent(
            task_id=task_id,
            version=row["version"],
            at=instant(row["at"]),
            kind=EventKind(row["kind"]),
            from_status=None if row["from_status"] is None else TaskStatus(row["from_status"]),
            to_status=TaskStatus(row["to_status"]),
            attempt=row["attempt"],
            reason=None if row["reason"] is None else ReasonCode(row["reason"]),
        )
        for row in found
    ]


def cancel_task(transaction: Transaction, task_id: str, *, call: Call, message: bytes) -> Task | Refused:
    """Cancel a live task; a finished one is refused with the record that stands."""
    row = transaction.change(
        statements.OPERATOR_CANCEL if call.auth_key is None else statements.CANCEL,
        {**call.about(task_id), "status_message": message},
    )
    if row is not None:
        return task_of(row, call)
    end_if_due(transaction, task_id, call=call)
    task = get_task(transaction, task_id, call=call)
    return task if isinstance(task, Refused) else Refused(TaskFinishedError(task, TaskStatus.CANCELLED))


def delete_task(transaction: Transaction, task_id: str, *, call: Call) -> Refused | None:
    """Delete a finished task, its events and its inputs."""
    task = get_task(transaction, task_id, call=call)
    if isinstance(task, Refused):
        return task
    if is_due(task, call):
        end_if_due(transaction, task_id, call=call)
    if transaction.row(statements.DELETE, call.about(task_id)) is not None:
        return None
    # Somebody else may have deleted it since it was read.
    task = get_task(transaction, task_id, call=call)
    return task if isinstance(task, Refused) else Refused(NotFinishedError(task))


def answer_inputs(
    transaction: Transaction, task_id: str, responses: Mapping[str, bytes], *, call: Call
) -> Task | Refused:
    """Store answers to open questions; the last one sets the task to ``working``, or queues it if it was parked.

    Keys that are not open are ignored: never asked, answered already, or closed.
    """
    # Two answers may arrive on two connections; each must see the other's, so that one of them resumes the task.
    row = transaction.row(statements.LOCK_OWN, call.about(task_id))
    if row is None:
        return _not_found(transaction, task_id, call)
    if is_due(task_of(row, call), call):
        end_if_due(transaction, task_id, call=call)
        return get_task(transaction, task_id, call=call)
    if row["finished_at"] is not None:
        return task_of(row, call)
    answered = {}
    for key in sorted(responses):
        answer = transaction.row(statements.ANSWER, {**call.about(task_id), "key": key, "response": responses[key]})
        if answer is not None:
            answered[key] = answer["name"]
    if any(
        name == RUN_AGAIN and not _agrees(_input(call, responses[key], "response", task_id, key))
        for key, name in answered.items()
    ):
        why = "the server process that ran this task is gone, and its requestor did not want it run again"
        verdict = _verdict(row, call, ReasonCode.CRASH_RECOVERY, why)
        transaction.change(statements.DECLINE, {**call.about(task_id), **verdict, "crashed": 0})
    elif answered and transaction.change(statements.RESUME, call.about(task_id)) is None:
        transaction.execute(statements.TOUCH, call.about(task_id))
        transaction.notify(task_id)
    return get_task(transaction, task_id, call=call)


def end_if_due(transaction: Transaction, task_id: str, *, call: Call) -> None:
    """Fail a live task whose ttl has passed, if it is one that ends at its ttl; whoever finds it due does so first.

    What the caller then hears of it, a refusal included, is said of the task as it is after that.
    """
    for change, reason, why in (
        (statements.END_DUE, ReasonCode.TTL_EXPIRED, "its time to live passed before it finished"),
        (statements.END_UNCLAIMED, ReasonCode.NO_RUNNER, "its time to live passed before a server ran it again"),
    ):
        verdict = _verdict({"task_id": task_id}, call, reason, why)
        if transaction.change(change, {**call.about(task_id), **verdict, "crashed": 0}) is not None:
            return


def _read(transaction: Transaction, task_id: str, call: Call, own: Executable, operators: Executable) -> Row | None:
    return transaction.row(operators if call.auth_key is None else own, call.about(task_id))


def _not_found(transaction: Transaction, task_id: str, call: Call) -> Refused:
    """Refuse; only the owner of a bound task, and only with tombstones, learns that it was there and expired."""
    if call.rules.tombstones and call.auth_key and transaction.row(statements.EXPIRED, call.about(task_id)):
        return Refused(TaskExpiredError(task_id))
    return Refused(TaskNotFoundError(task_id))


# --- what a handle may do


def report_progress(transaction: Transaction, fence: Fence, said: Progress, *, call: Call) -> Refused | None:
    """Store progress; it never goes down within an attempt."""
    if not transaction.execute(statements.PROGRESS, {**call.held(fence), **said.params}):
        return _refusal(transaction, fence, call, TaskStatus.WORKING)
    transaction.notify(fence.task_id)
    return None


def complete(
    transaction: Transaction,
    fence: Fence,
    said: Progress,
    *,
    result: bytes,
    is_error: bool,
    outcome_digest: str,
    call: Call,
) -> Task | Refused:
    """Store the result and status ``completed`` in one write; the same write again is answered the same."""
    params = {"result": result, "is_error": is_error, "outcome_digest": outcome_digest}
    return _change_held(transaction, statements.COMPLETE, fence, {**said.params, **params}, call, TaskStatus.COMPLETED)


def fail(
    transaction: Transaction, fence: Fence, said: Progress, *, error: bytes, outcome_digest: str, call: Call
) -> Task | Refused:
    """Store a JSON-RPC error and status ``failed`` in one write; the same write again is answered the same."""
    params = {"error": error, "outcome_digest": outcome_digest}
    return _change_held(transaction, statements.FAIL, fence, {**said.params, **params}, call, TaskStatus.FAILED)


def ask(transaction: Transaction, fence: Fence, questions: Sequence[Params], *, call: Call) -> Task | Refused:
    """Store questions and status ``input_required`` in one transaction.

    Args:
        questions: Per question the ``key`` on the wire, the tool's own ``name``, and the ``request``.
    """
    task = _change_held(transaction, statements.ASK, fence, {}, call, TaskStatus.INPUT_REQUIRED)
    if not isinstance(task, Refused):
        _add_inputs(transaction, fence.task_id, fence.attempt, questions, call)
    return task


def park(
    transaction: Transaction, fence: Fence, said: Progress, questions: Sequence[Params], parked: bytes, *, call: Call
) -> Task | Refused:
    """Store questions and let go of the task, in one transaction; the last answer queues it for a runner.

    Args:
        parked: Sealed: what the tool wants back, and the keys of the questions.
    """
    params = {**said.params, "parked": parked}
    task = _change_held(transaction, statements.PARK, fence, params, call, TaskStatus.INPUT_REQUIRED)
    if not isinstance(task, Refused):
        # What an earlier ask() of this attempt left open has nobody who waits for it.
        transaction.execute(statements.CLOSE_INPUTS, call.about(fence.task_id))
        _add_inputs(transaction, fence.task_id, fence.attempt, questions, call)
    return task


def _add_inputs(transaction: Transaction, task_id: str, attempt: int, questions: Sequence[Params], call: Call) -> None:
    for question in questions:
        asked = {"task_id": task_id, "attempt": attempt, "asked_at": call.now}
        transaction.execute(statements.ADD_INPUT, {**asked, **question})


def withdraw(transaction: Transaction, fence: Fence, keys: Iterable[str], *, call: Call) -> Task | Refused:
    """Close questions of a tool that waits for their answers no longer; the task goes on when no other is open."""
    if transaction.row(statements.LOCK_HELD, call.held(fence)) is None:
        return _refusal(transaction, fence, call, TaskStatus.WORKING)
    for key in sorted(keys):
        transaction.execute(statements.CLOSE_INPUT, {**call.about(fence.task_id), "key": key})
    if transaction.change(statements.WITHDRAW, call.held(fence)) is None:
        transaction.execute(statements.TOUCH, call.about(fence.task_id))
        transaction.notify(fence.task_id)
    return check_fence(transaction, fence, call=call)


def read_answers(
    transaction: Transaction, fence: Fence, keys: Iterable[str], *, call: Call
) -> tuple[Task, dict[str, JsonValue]] | Refused:
    """Read a held task, and the answers to some of its questions by the tool's own names; open ones are left out."""
    task = check_fence(transaction, fence, call=call)
    if isinstance(task, Refused):
        return task
    return task, _answers(transaction, fence.task_id, keys, call)


def _answers(transaction: Transaction, task_id: str, keys: Iterable[str], call: Call) -> dict[str, JsonValue]:
    asked = set(keys)
    return {
        row["name"]: _input(call, row["response"], "response", task_id, row["key"])
        for row in transaction.rows(statements.ANSWERS, {"task_id": task_id})
        if row["key"] in asked
    }


def check_fence(transaction: Transaction, fence: Fence, *, call: Call) -> Task | Refused:
    """Read the task a handle holds; refused when the handle lost it."""
    row = transaction.row(statements.OPERATOR_GET, call.about(fence.task_id))
    if row is None:
        return Refused(TaskNotFoundError(fence.task_id))
    return Refused(LeaseLostError(fence.task_id)) if _is_lost(row, fence) else task_of(row, call)


def _is_lost(row: Row, fence: Fence) -> bool:
    """Tell whether a handle's task is another's now.

    Ending a task at its ttl takes it from its holder too, who should hear of the ttl rather than of a lost lease.
    """
    if str(row["outcome_digest"]).startswith(ReasonCode.TTL_EXPIRED):
        return False
    return (row["instance_id"] or "", row["attempt"]) != (fence.instance_id, fence.attempt)


def _change_held(
    transaction: Transaction, change: Change, fence: Fence, params: Params, call: Call, requested: TaskStatus
) -> Task | Refused:
    row = transaction.change(change, {**call.held(fence), **params})
    if row is not None:
        return task_of(row, call)
    stands = _standing(transaction, fence, call)
    if isinstance(stands, Refused):
        return stands
    if "outcome_digest" in params and stands["outcome_digest"] == params["outcome_digest"]:
        return task_of(stands, call)
    return _refused_by(stands, call, requested)


def _refusal(transaction: Transaction, fence: Fence, call: Call, requested: TaskStatus) -> Refused:
    """Find out why a handle's write touched no row: not found, then lease lost, then finished."""
    stands = _standing(transaction, fence, call)
    return stands if isinstance(stands, Refused) else _refused_by(stands, call, requested)


def _standing(transaction: Transaction, fence: Fence, call: Call) -> Row | Refused:
    end_if_due(transaction, fence.task_id, call=call)
    row = transaction.row(statements.OPERATOR_GET, call.about(fence.task_id))
    if row is None:
        return Refused(TaskNotFoundError(fence.task_id))
    return Refused(LeaseLostError(fence.task_id)) if _is_lost(row, fence) else row


def _refused_by(row: Row, call: Call, requested: TaskStatus) -> Refused:
    task = task_of(row, call)
    error = TaskFinishedError if task.is_finished else IllegalTransitionError
    return Refused(error(task, requested))


# --- what the operator may do besides


def import_task(transaction: Transaction, values: Params, outcome: Outcome | None, *, call: Call) -> Task | Refused:
    """Insert a task as it was kept elsewhere, or find it.

    A live one fails with CRASH_RECOVERY: no process runs it, and what another run would need is not there.

    Args:
        values: Every column of the new row.
        outcome: What a finished task came to; None for a live one.
    """
    task_id = values["task_id"]
    transaction.lock(f"import {task_id}")  # who comes second must find it, not fail on the primary key
    known = transaction.row(statements.ANYBODYS, {"task_id": task_id})
    if known is not None:
        same = all(known[name] == values[name] for name in ("auth_key", "created_at"))
        if outcome is not None and same:
            same = known["status"] == values["status"] and _outcome_of(known, call) == outcome
        return task_of(known, call, existing=True) if same else Refused(TaskExistsError(str(task_id)))
    change = statements.IMPORT
    if outcome is None:
        change, values = statements.IMPORT_ORPHAN, {**values, **_orphaned(dict(values), call)}
    row = transaction.change(change, {**call.params, **values})
    assert row is not None, "an INSERT returns its row or fails"
    return task_of(row, call)


def _orphaned(values: Row, call: Call) -> Row:
    """Change the columns of a live task that no process runs as recovery changes them in its place."""
    counted = {"attempt": values["attempt"] + 1, "crashes": values["crashes"] + 1, "version": values["version"] + 1}
    why = "it was live where it was imported from, and no process runs it any more"
    changed: Row = _verdict(values | counted, call, ReasonCode.CRASH_RECOVERY, why)
    changed |= {"previous_status": values["status"], "status": TaskStatus.FAILED.value, **counted}
    changed |= {"last_updated_at": call.now, "finished_at": call.now}
    if values["ttl_ms"] is not None:
        retained = call.now - values["created_at"] + call.rules.min_retention_ms
        changed["ttl_ms"] = max(values["ttl_ms"], retained)
        changed["expires_at"] = values["created_at"] + changed["ttl_ms"]
    return changed


# --- upkeep


@dataclass(frozen=True, slots=True)
class Decided:
    """What recovery did with one task; ``owner_kind`` is who holds it now: nobody who runs it."""

    task_id: str
    auth_key: str
    owner_kind: OwnerKind


def recover_orphans(
    transaction: Transaction,
    dead: str | None,
    *,
    call: Call,
    limit: int,
    reason: ReasonCode,
    last_beat: int | None = None,
) -> list[Decided]:
    """Decide over up to ``limit`` live tasks of an instance, each by its own policy.

    Args:
        dead: The instance, or None for tasks whose instance has no row.
        reason: CRASH_RECOVERY when it died, which counts as a crash of the task; SERVER_STOPPED when it stopped in
            good order.
        last_beat: Spare them if the instance has beaten since that beat; None is whether or not.

    Returns:
        What became of them: failed, queued, or parked with a question.
    """
    still = {"instance_id": dead, "last_beat": last_beat}
    if last_beat is not None and transaction.row(statements.STILL_AT_BEAT, still) is None:
        return []
    statement = statements.ORPHANS_OF_NOBODY if dead is None else statements.ORPHANS_OF
    orphans = transaction.rows(statement, {"instance_id": dead, "limit": limit})
    return _decide_over(transaction, sorted(orphans, key=_by_task_id), call, reason)


def _by_task_id(row: Row) -> str:
    return str(row["task_id"])


def hand_over(transaction: Transaction, fence: Fence, *, call: Call) -> Task | Refused:
    """Decide over a task whose process stops in good order before it is finished."""
    row = transaction.row(statements.LOCK_HELD, call.held(fence))
    if row is None:
        return _refusal(transaction, fence, call, TaskStatus.FAILED)
    _decide_over(transaction, [row], call, ReasonCode.SERVER_STOPPED)
    return get_task(transaction, fence.task_id, call=call)


def _decide_over(transaction: Transaction, orphans: Iterable[Row], call: Call, reason: ReasonCode) -> list[Decided]:
    """Apply to each task its policy; the rows are locked by this transaction, so all that was read still holds."""
    crashed = int(reason is ReasonCode.CRASH_RECOVERY)
    params = {**call.params, "crashed": crashed}
    changes: dict[Change, list[Row]] = {}
    decided = []
    for orphan in orphans:
        fate, why, question = _fate(transaction, orphan, call, reason)
        verdict = _verdict(orphan, call, reason, why, crashed)
        task_id = str(orphan["task_id"])
        if orphan["status"] == TaskStatus.INPUT_REQUIRED:
            # Nobody waits for the answers to what the former attempt asked.
            transaction.execute(statements.CLOSE_INPUTS, call.about(task_id))
        if question is not None:
            key = f"run-again-{orphan['attempt']}"  # an attempt ends once
            sealed = call.rules.cipher.seal(payload.encode_own(question), "inputs", "request", task_id, key)
            asked = {"key": key, "name": RUN_AGAIN, "request": sealed}
            _add_inputs(transaction, task_id, orphan["attempt"] + 1, [asked], call)
        change = statements.FOR_ORPHANS[reason, fate]
        changes.setdefault(change, []).append({**params, **orphan, **verdict})
        decided.append(Decided(task_id, orphan["auth_key"], fate))
    for change, rows in changes.items():
        transaction.change_all(change, rows)
    return decided


def _fate(
    transaction: Transaction, orphan: Row, call: Call, reason: ReasonCode
) -> tuple[OwnerKind, str, JsonValue | None]:
    """Choose who holds an orphan next, and say why; with the question to its requestor if that is who decides."""
    policy, crashed = OnCrash(orphan["on_crash"]), reason is ReasonCode.CRASH_RECOVERY
    crashes = orphan["crashes"] + crashed
    why = f"the server process that ran this task {'died' if crashed else 'stopped'} before it finished"
    if policy is OnCrash.FAIL or (orphan["expires_at"] is not None and orphan["expires_at"] <= call.now):
        return OwnerKind.INSTANCE, why, None
    if crashed and crashes >= orphan["max_attempts"]:
        before = f"; so did {crashes - 1} before it, and it is not run again" if crashes > 1 else ""
        return OwnerKind.INSTANCE, why + before, None
    if policy is OnCrash.RETRY:
        return OwnerKind.QUEUED, f"{why}; it waits to be run again", None
    if _can_be_asked(transaction, orphan["task_id"], call):
        return OwnerKind.PARKED, f"{why}; it waits to hear whether to run again", _run_again_question(orphan)
    return OwnerKind.INSTANCE, why, None


# The name of the question that on_crash="ask" puts to a requestor; the dot keeps it apart from names of tools' own.
RUN_AGAIN = "taskstore.run_again"


def _can_be_asked(transaction: Transaction, task_id: str, call: Call) -> bool:
    """Tell whether the client that created a task can show its user a question."""
    row = transaction.row(statements.FOR_ANOTHER_RUN, {"task_id": task_id})
    if row is None or row["caller"] is None:
        return False
    try:
        caller = _opened(call, row["caller"], "caller", task_id)
    except CipherError:  # sealed under a key that this process does not have
        return False
    capabilities = caller.get("capabilities") if isinstance(caller, dict) else None
    return isinstance(capabilities, dict) and capabilities.get("elicitation") is not None


def _run_again_question(orphan: Row) -> JsonValue:
    progress, total = orphan["progress"], orphan["progress_total"]
    reached = f"at {progress / total:.0%} of" if progress is not None and total else "during"
    return {
        "method": "elicitation/create",
        "params": {
            "mode": "form",
            "message": f"The server stopped {reached} {orphan['name'] or orphan['method']}. Run it again?",
            "requestedSchema": {
                "type": "object",
                "properties": {"again": {"type": "boolean", "title": "Run it again", "default": True}},
                "required": ["again"],
            },
        },
    }


def _agrees(response: JsonValue) -> bool:
    if not isinstance(response, dict) or response.get("action") != "accept":
        return False
    content = response.get("content")
    return isinstance(content, dict) and content.get("again") is True


# --- runners


@dataclass(frozen=True, slots=True)
class Queued:
    """A task that waits for a runner, and what tells whether a runner knows it."""

    task_id: str
    name: str
    created_at: int


def list_queued(transaction: Transaction, *, server: str, after: Queued | None, limit: int, call: Call) -> list[Queued]:
    """Read which tasks of a server wait for a runner, the oldest first."""
    position = {"after_at": after.created_at if after else 0, "after_id": after.task_id if after else ""}
    rows = transaction.rows(statements.QUEUED, {**call.params, **position, "server": server, "limit": limit})
    return [Queued(row["task_id"], row["name"] or row["method"], row["created_at"]) for row in rows]


def claim_task(transaction: Transaction, task_id: str, *, instance_id: str, call: Call) -> Claim | None:
    """Take a queued task in hand; None when it is not queued any more."""
    row = transaction.change(statements.CLAIM, {**call.about(task_id), "instance_id": instance_id})
    stored = transaction.row(statements.FOR_ANOTHER_RUN, {"task_id": task_id})
    if row is None or stored is None:
        return None
    request, caller, parked = (
        None if stored[column] is None else _opened(call, stored[column], column, task_id)
        for column in ("request", "caller", "parked")
    )
    state, asked = (parked["state"], parked["asked"]) if isinstance(parked, dict) else (None, None)
    keys = [str(key) for key in asked] if isinstance(asked, list) else []
    answers = _answers(transaction, task_id, keys, call)
    return Claim(task=task_of(row, call), request=request, caller=caller, state=state, answers=answers)


def unclaim(transaction: Transaction, fence: Fence, *, call: Call) -> None:
    """Queue a claimed task again, since nothing has run it."""
    why = "the server stopped before it ran this task again"
    verdict = _verdict({"task_id": fence.task_id}, call, ReasonCode.SERVER_STOPPED, why)
    change = statements.FOR_ORPHANS[ReasonCode.SERVER_STOPPED, OwnerKind.QUEUED]
    transaction.change(change, {**call.held(fence), **verdict, "crashed": 0})


def read_held(transaction: Transaction, instance_id: str) -> set[Fence]:
    """Read which live tasks an instance owns."""
    rows = transaction.rows(statements.HELD_LIVE, {"instance_id": instance_id})
    return {Fence(row["task_id"], instance_id, row["attempt"]) for row in rows}


def fail_abandoned(transaction: Transaction, fences: Iterable[Fence], *, call: Call) -> list[str]:
    """Fail tasks that their own process holds no more; return the ids of those that were still live."""
    failed = []
    for fence in sorted(fences, key=lambda fence: fence.task_id):
        why = "the server lost hold of this task"
        verdict = _verdict({"task_id": fence.task_id}, call, ReasonCode.ABANDONED, why)
        if transaction.change(statements.ABANDON, {**call.params, **fence.params, **verdict, "crashed": 0}) is not None:
            failed.append(fence.task_id)
    return failed


def _verdict(task: Row, call: Call, reason: ReasonCode, why: str, crashed: int = 0) -> Row:
    """Write the error, the status message and the outcome digest of a task that the store itself decides over.

    The requestor learns how far the task had come and in which attempt; process and host are for the log alone.

    Args:
        crashed: How many crashes the verdict adds to those in the row.
    """
    message = f"{reason}: {why}."
    data: dict[str, JsonValue] = {"reason": reason.value}
    if "attempt" in task:
        data.update(
            progress=task["progress"],
            total=task["progress_total"],
            attempt=task["attempt"],
            crashes=task["crashes"] + crashed,
            # Whether a second run does harm only the tool can say; it did if it may be run again by itself.
            retrySafe=task["on_crash"] == OnCrash.RETRY,
        )
    task_id, cipher = task["task_id"], call.rules.cipher
    error: JsonValue = {"code": -32603, "message": message, "data": data}
    return {
        "error": cipher.seal(payload.encode_own(error), "tasks", "error", task_id),
        "status_message": cipher.seal(payload.encode_own(message), "tasks", "status_message", task_id),
        "outcome_digest": f"{reason}:{shorten(task_id)}",
    }


@dataclass(frozen=True, slots=True)
class Swept:
    """The ids that one batch of the sweep ended and deleted, and how large the deleted requests and results were."""

    ended: list[str]
    deleted: list[str]
    deleted_bytes: int = 0


def sweep(transaction: Transaction, *, call: Call, limit: int, ending: bool = True) -> Swept:
    """End up to ``limit`` tasks that are due, and delete up to ``limit`` expired ones, the longest expired first.

    Args:
        ending: Whether to look for tasks that are due, which takes a look at every live one.
    """
    found = transaction.rows(statements.DUE, {**call.params, "limit": limit}) if ending else []
    due = [str(row["task_id"]) for row in found]
    for task_id in sorted(due):
        end_if_due(transaction, task_id, call=call)
    swept = transaction.rows(statements.SWEEP, {**call.params, "limit": limit})
    if call.rules.tombstones:
        for row in swept:
            if row["auth_key"]:
                transaction.execute(statements.BURY, row)
    return Swept(due, [str(row["task_id"]) for row in swept], sum(row["bytes"] for row in swept))


UPKEEP_HOLDER = "upkeep_holder"  # the name in meta of the instance that does the upkeep for all


def read_upkeep_holder(transaction: Transaction) -> str | None:
    """Read which instance does the upkeep."""
    row = transaction.row(statements.META, {"name": UPKEEP_HOLDER})
    return None if row is None else bytes(row["value"]).decode()


def take_upkeep(transaction: Transaction, *, former: str | None, instance_id: str) -> bool:
    """Do the upkeep in place of another instance, or of none; False when somebody else was first."""
    params = {"name": UPKEEP_HOLDER, "value": instance_id.encode()}
    if former is None:
        transaction.execute(statements.SET_META_ONCE, params)
    else:
        transaction.execute(statements.CHANGE_META, {**params, "known": former.encode()})
    return read_upkeep_holder(transaction) == instance_id


def leave_upkeep(transaction: Transaction, *, instance_id: str) -> None:
    """Let another instance do the upkeep from now on, if this one did."""
    transaction.execute(statements.DELETE_META, {"name": UPKEEP_HOLDER, "known": instance_id.encode()})


def prune_tombstones(transaction: Transaction, *, before: int, keep: int) -> int:
    """Delete tombstones that are older than an instant, or beyond a number; return how many."""
    return transaction.execute(statements.PRUNE_TOMBSTONES, {"before": before, "keep": keep})


def reseal(transaction: Transaction, after: str, *, cipher: Cipher, limit: int) -> tuple[str | None, int]:
    """Seal again, under the first key, what is sealed under another one or not at all.

    Args:
        after: Id of the last task of the batch before; tasks are taken in the order of their ids.

    Returns:
        The id of the last task of this batch, or None when there was none; and how many tasks were changed.
    """
    rows = transaction.rows(statements.SEALED_TASKS, {"after": after, "limit": limit})
    changed = 0
    for row in rows:
        task_id = row["task_id"]
        renewed = _renewed(row, statements.SEALED_COLUMNS, cipher, "tasks", task_id)
        if renewed:
            transaction.execute(statements.RESEAL_TASK, {**row, **renewed})
        answered = 0
        for question in transaction.rows(statements.SEALED_INPUTS, {"task_id": task_id}):
            again = _renewed(question, ("request", "response"), cipher, "inputs", task_id, question["key"])
            if again:
                answered += transaction.execute(statements.RESEAL_INPUT, {**question, **again})
        changed += bool(renewed or answered)
    return (rows[-1]["task_id"] if rows else None), changed


def _renewed(
    row: Row, columns: Iterable[str], cipher: Cipher, table: str, task_id: str, key: str = ""
) -> dict[str, bytes]:
    return {
        column: cipher.seal(cipher.open(row[column], table, column, task_id, key), table, column, task_id, key)
        for column in columns
        if row[column] is not None and not cipher.is_current(row[column])
    }
