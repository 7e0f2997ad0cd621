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
    IdempotencyConflictError,
    IllegalTransitionError,
    LeaseLostError,
    LimitExceededError,
    NotFinishedError,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStoreError,
)
from taskstore.statements import Change
from taskstore.task import (
    EventKind,
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
        payload_bytes: Size of one request, result, error, question or answer, as JSON.
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
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"Limits.{field.name} must be at least 1, or None for no limit, not {value}.")


@dataclass(frozen=True, slots=True)
class Fence:
    """What a handle must still be for its writes to count: the holder, in this attempt."""

    task_id: str
    instance_id: str
    attempt: int

    @property
    def params(self) -> dict[str, object]:
        """The parameters of a fenced statement and of its event."""
        return {
            "task_id": self.task_id,
            "instance_id": self.instance_id,
            "attempt": self.attempt,
            "writer": self.instance_id,
        }


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads, and when: an auth key, or None for the operator, who sees every task.

    Attributes:
        now: Present instant, milliseconds UTC.
        lease_ms: What a live task past its ttl is shown to have left.
        cipher: Opens what is sealed.
    """

    auth_key: str | None
    now: int
    lease_ms: int
    cipher: Cipher

    def params(self, task_id: str) -> dict[str, object]:
        """Return the parameters of a statement about one task."""
        return {"task_id": task_id, "auth_key": self.auth_key, "now": self.now}


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


def instant(ms: int) -> datetime:
    """Turn milliseconds UTC into an aware datetime."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


def milliseconds(at: datetime) -> int:
    """Turn an aware datetime into milliseconds UTC."""
    return (at - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)


def _optional_instant(ms: int | None) -> datetime | None:
    return None if ms is None else instant(ms)


def _optional_span(ms: int | None) -> timedelta | None:
    return None if ms is None else timedelta(milliseconds=ms)


def task_of(row: Row, reader: Reader, *, existing: bool = False) -> Task:
    """Build the record of a row.

    A live task does not expire: past its ttl it is shown with what has passed and one lease, and nothing is
    written for it.
    """
    ttl_ms, created_at = row["ttl_ms"], row["created_at"]
    if ttl_ms is not None and row["finished_at"] is None:
        passed = reader.now - created_at
        ttl_ms = passed + reader.lease_ms if passed >= ttl_ms else ttl_ms
    message = row["status_message"]
    return Task(
        task_id=row["task_id"],
        status=TaskStatus(row["status"]),
        status_message=None if message is None else str(_opened(reader, message, "status_message", row["task_id"])),
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
        owner_kind=OwnerKind(row["owner_kind"]),
        cancel_requested=row["cancel_requested_at"] is not None,
        existing=existing,
    )


def _opened(reader: Reader, stored: bytes, column: str, task_id: str) -> JsonValue:
    return payload.decode(reader.cipher.open(stored, "tasks", column, task_id))


def _outcome_of(row: Row, reader: Reader) -> Outcome:
    result, error, task_id = row["result"], row["error"], row["task_id"]
    return Outcome(
        result=None if result is None else _opened(reader, result, "result", task_id),
        error=None if error is None else _opened(reader, error, "error", task_id),
        is_error=bool(row["is_error"]),
    )


# --- what a requestor may do


def create_task(
    transaction: Transaction, values: Params, *, reader: Reader, writer: str, limits: Limits
) -> Task | Refused:
    """Insert a task in status ``working``, held by the instance that asks; or find the one that its key made before.

    Args:
        values: Every column of the new row.
        writer: Instance id that stands in the event.
    """
    keyed = values["idempotency_digest"] is not None
    if keyed or limits.live_tasks is not None or limits.stored_tasks is not None:
        # What is read here decides over the INSERT, so creates of one auth context go one after the other.
        transaction.lock(f"create {reader.auth_key}")
    if keyed:
        known = transaction.row(statements.IDEMPOTENT, {**values, "now": reader.now})
        if known is not None and known["request_digest"] == values["request_digest"]:
            return task_of(known, reader, existing=True)
        if known is not None:
            return Refused(IdempotencyConflictError(known["task_id"]))
    over = _over_limit(transaction, reader, limits)
    if over is not None:
        return Refused(over)
    if keyed:
        transaction.execute(statements.FREE_KEY, {**values, "now": reader.now})
    row = transaction.change(statements.CREATE, {**values, "writer": writer})
    assert row is not None, "an INSERT returns its row or fails"
    return task_of(row, reader)


def _over_limit(transaction: Transaction, reader: Reader, limits: Limits) -> LimitExceededError | None:
    for name, allowed, statement, remedy in (
        ("live_tasks", limits.live_tasks, statements.COUNT_LIVE, "wait for one of its tasks to finish, or cancel one"),
        (
            "stored_tasks",
            limits.stored_tasks,
            statements.COUNT_STORED,
            "delete a finished task, or wait for one to expire",
        ),
    ):
        if allowed is not None:
            row = transaction.row(statement, {"auth_key": reader.auth_key, "now": reader.now})
            if row is not None and row["count"] >= allowed:
                return LimitExceededError(name, allowed, remedy)
    return None


def get_task(transaction: Transaction, task_id: str, *, reader: Reader) -> Task | Refused:
    """Read a task without payloads."""
    row = _read(transaction, task_id, reader, statements.GET, statements.OPERATOR_GET)
    return Refused(TaskNotFoundError(task_id)) if row is None else task_of(row, reader)


def get_details(transaction: Transaction, task_id: str, *, reader: Reader) -> TaskDetails | Refused:
    """Read a task, its outcome when it is finished, its open questions when it waits for input: in one snapshot."""
    row = _read(transaction, task_id, reader, statements.GET_WITH_OUTCOME, statements.OPERATOR_GET_WITH_OUTCOME)
    if row is None:
        return Refused(TaskNotFoundError(task_id))
    task = task_of(row, reader)
    asked: list[Row] = []
    if task.status is TaskStatus.INPUT_REQUIRED:
        asked = transaction.rows(statements.OPEN_INPUTS, {"task_id": task_id})
    return TaskDetails(
        task=task,
        outcome=_outcome_of(row, reader) if task.is_finished else None,
        input_requests={
            question["key"]: _input(reader, question["request"], "request", task_id, question["key"])
            for question in asked
        },
    )


def _input(reader: Reader, stored: bytes, column: str, task_id: str, key: str) -> JsonValue:
    return payload.decode(reader.cipher.open(stored, "inputs", column, task_id, key))


def get_outcome(transaction: Transaction, task_id: str, *, reader: Reader) -> Outcome | Refused:
    """Read what a finished task came to."""
    details = get_details(transaction, task_id, reader=reader)
    if isinstance(details, Refused):
        return details
    return Refused(NotFinishedError(details.task)) if details.outcome is None else details.outcome


def list_tasks(
    transaction: Transaction,
    *,
    reader: Reader,
    filters: Params,
    before: tuple[int, str] | None,
    limit: int,
) -> list[Task]:
    """Read tasks newest first: one auth context's, or the whole store's for the operator.

    Args:
        filters: ``status`` and ``session_digest``, for the operator ``name`` and ``server`` too; None is any.
        before: Creation instant and id of the last task of the page before.
        limit: Most tasks to return.
    """
    before_at, before_id = before or (2**62, "~")
    params = {**filters, "before_at": before_at, "before_id": before_id, "limit": limit, "now": reader.now}
    if reader.auth_key is None:
        found = transaction.rows(statements.OPERATOR_LIST, params)
    else:
        found = transaction.rows(statements.LIST, {**params, "auth_key": reader.auth_key})
    return [task_of(row, reader) for row in found]


def list_events(transaction: Transaction, task_id: str, *, reader: Reader, after: int) -> list[TaskEvent] | Refused:
    """Read a task's state changes after a version, oldest first."""
    if _read(transaction, task_id, reader, statements.GET, statements.OPERATOR_GET) is None:
        return Refused(TaskNotFoundError(task_id))
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


def cancel_task(
    transaction: Transaction, task_id: str, *, reader: Reader, writer: str, message: bytes, min_retention: int
) -> Task | Refused:
    """Cancel a live task; a finished one is refused with the record that stands."""
    own = reader.auth_key is not None
    row = transaction.change(
        statements.CANCEL if own else statements.OPERATOR_CANCEL,
        {**reader.params(task_id), "writer": writer, "status_message": message, "min_retention": min_retention},
    )
    if row is not None:
        return task_of(row, reader)
    task = get_task(transaction, task_id, reader=reader)
    if isinstance(task, Refused):
        return task
    return Refused(TaskFinishedError(task, TaskStatus.CANCELLED))


def delete_task(transaction: Transaction, task_id: str, *, reader: Reader) -> Refused | None:
    """Delete a finished task, its events and its inputs."""
    if transaction.row(statements.DELETE, reader.params(task_id)) is not None:
        return None
    task = get_task(transaction, task_id, reader=reader)
    return task if isinstance(task, Refused) else Refused(NotFinishedError(task))


def answer_inputs(
    transaction: Transaction,
    task_id: str,
    responses: Mapping[str, bytes],
    *,
    reader: Reader,
    writer: str,
) -> Task | Refused:
    """Store answers to open questions; the last one sets the task to ``working``.

    Keys that are not open are ignored: never asked, answered already, or closed.
    """
    # Two answers may arrive on two connections; each must see the other's, so that one of them resumes the task.
    if transaction.row(statements.LOCK_OWN, reader.params(task_id)) is None:
        return Refused(TaskNotFoundError(task_id))
    answered = [
        key
        for key in sorted(responses)
        if transaction.row(
            statements.ANSWER, {"task_id": task_id, "key": key, "response": responses[key], "now": reader.now}
        )
    ]
    if answered:
        transaction.change(statements.RESUME, {**reader.params(task_id), "writer": writer})
    return get_task(transaction, task_id, reader=reader)


# --- what a handle may do


def report_progress(transaction: Transaction, fence: Fence, said: Progress, *, reader: Reader) -> Task | Refused:
    """Store progress; it never goes down within an attempt."""
    row = transaction.row(statements.PROGRESS, {**fence.params, **said.params, "now": reader.now})
    if row is None:
        return _refusal(transaction, fence, reader, TaskStatus.WORKING)
    transaction.notify(fence.task_id)
    return task_of(row, reader)


def complete(
    transaction: Transaction,
    fence: Fence,
    said: Progress,
    *,
    result: bytes,
    is_error: bool,
    outcome_digest: str,
    reader: Reader,
    min_retention: int,
) -> Task | Refused:
    """Store the result and status ``completed`` in one write; the same write again is answered the same."""
    row = transaction.change(
        statements.COMPLETE,
        {
            **fence.params,
            **said.params,
            "result": result,
            "is_error": is_error,
            "outcome_digest": outcome_digest,
            "now": reader.now,
            "min_retention": min_retention,
        },
    )
    if row is not None:
        return task_of(row, reader)
    return _refusal(transaction, fence, reader, TaskStatus.COMPLETED, outcome_digest)


def fail(
    transaction: Transaction,
    fence: Fence,
    said: Progress,
    *,
    error: bytes,
    outcome_digest: str,
    reader: Reader,
    min_retention: int,
) -> Task | Refused:
    """Store a JSON-RPC error and status ``failed`` in one write; the same write again is answered the same."""
    row = transaction.change(
        statements.FAIL,
        {
            **fence.params,
            **said.params,
            "error": error,
            "outcome_digest": outcome_digest,
            "now": reader.now,
            "min_retention": min_retention,
        },
    )
    if row is not None:
        return task_of(row, reader)
    return _refusal(transaction, fence, reader, TaskStatus.FAILED, outcome_digest)


def ask(transaction: Transaction, fence: Fence, questions: Sequence[Params], *, reader: Reader) -> Task | Refused:
    """Store questions and status ``input_required`` in one transaction.

    Args:
        questions: Per question the ``key`` on the wire, the tool's own ``name``, and the ``request``.
    """
    row = transaction.change(statements.ASK, {**fence.params, "now": reader.now})
    if row is None:
        return _refusal(transaction, fence, reader, TaskStatus.INPUT_REQUIRED)
    for question in questions:
        transaction.execute(statements.ADD_INPUT, {**fence.params, **question, "asked_at": reader.now})
    return task_of(row, reader)


def read_answers(
    transaction: Transaction, fence: Fence, keys: Iterable[str], *, reader: Reader
) -> dict[str, JsonValue]:
    """Read the answers to some questions of this attempt, by the tool's own names; open ones are left out."""
    asked = set(keys)
    return {
        row["name"]: _input(reader, row["response"], "response", fence.task_id, row["key"])
        for row in transaction.rows(statements.ANSWERS, fence.params)
        if row["key"] in asked and row["response"] is not None
    }


def check_fence(transaction: Transaction, fence: Fence, *, reader: Reader) -> Task | Refused:
    """Read the task a handle holds; refused when the handle lost it."""
    row = transaction.row(statements.OPERATOR_GET, reader.params(fence.task_id))
    if row is None:
        return Refused(TaskNotFoundError(fence.task_id))
    if (row["instance_id"], row["attempt"]) != (fence.instance_id, fence.attempt):
        return Refused(LeaseLostError(fence.task_id))
    return task_of(row, reader)


def _read(transaction: Transaction, task_id: str, reader: Reader, own: Executable, operators: Executable) -> Row | None:
    return transaction.row(operators if reader.auth_key is None else own, reader.params(task_id))


def _refusal(
    transaction: Transaction,
    fence: Fence,
    reader: Reader,
    requested: TaskStatus,
    outcome_digest: str | None = None,
) -> Task | Refused:
    """Find out why a handle's write touched no row: not found, then lease lost, then finished."""
    row = transaction.row(statements.OPERATOR_GET, reader.params(fence.task_id))
    if row is None:
        return Refused(TaskNotFoundError(fence.task_id))
    if (row["instance_id"], row["attempt"]) != (fence.instance_id, fence.attempt):
        return Refused(LeaseLostError(fence.task_id))
    task = task_of(row, reader)
    if outcome_digest is not None and row["outcome_digest"] == outcome_digest:
        return task
    error = TaskFinishedError if task.is_finished else IllegalTransitionError
    return Refused(error(task, requested))


# --- upkeep


def recover_orphans(
    transaction: Transaction,
    dead: str | None,
    *,
    reader: Reader,
    writer: str,
    min_retention: int,
    limit: int,
    crashed: bool,
) -> list[tuple[Task, str]]:
    """Fail up to ``limit`` live tasks of an instance that died (CRASH_RECOVERY) or stopped (SERVER_STOPPED).

    Args:
        dead: The instance, or None for tasks whose instance has no row.
        crashed: Whether it died, which counts as a crash of the task, or stopped in good order.

    Returns:
        The failed tasks with their auth keys. A task that somebody else decided over in between is not among them.
    """
    statement = statements.ORPHANS_OF_NOBODY if dead is None else statements.ORPHANS_OF
    orphans = transaction.rows(statement, {"instance_id": dead, "limit": limit})
    recovered = []
    for orphan in sorted(orphans, key=lambda row: str(row["task_id"])):
        error, message, digest = verdict(orphan, reader.cipher, crashed=crashed)
        row = transaction.change(
            statements.RECOVER if crashed else statements.HAND_OVER,
            {
                "task_id": orphan["task_id"],
                "instance_id": orphan["instance_id"],
                "attempt": orphan["attempt"],
                "writer": writer,
                "error": error,
                "status_message": message,
                "outcome_digest": digest,
                "crashed": int(crashed),
                "now": reader.now,
                "min_retention": min_retention,
            },
        )
        if row is not None:
            recovered.append((task_of(row, reader), str(row["auth_key"])))
    return recovered


def verdict(orphan: Row, cipher: Cipher, *, crashed: bool) -> tuple[bytes, bytes, str]:
    """Write the error, the status message and the outcome digest of an orphan.

    The requestor learns how far the task had come and in which attempt; process and host are for the log alone.
    """
    reason, cause = (ReasonCode.CRASH_RECOVERY, "died") if crashed else (ReasonCode.SERVER_STOPPED, "stopped")
    message = f"{reason}: the server process that ran this task {cause} before it finished."
    data: dict[str, JsonValue] = {
        "reason": reason.value,
        "progress": orphan["progress"],
        "total": orphan["progress_total"],
        "attempt": orphan["attempt"],
        # The tool may have done part of its work, and has not said that a second run does no harm.
        "retrySafe": False,
    }
    task_id = orphan["task_id"]
    error = cipher.seal(payload.encode({"code": -32603, "message": message, "data": data}), "tasks", "error", task_id)
    said = cipher.seal(payload.encode(message), "tasks", "status_message", task_id)
    return error, said, f"recovered:{shorten(orphan['task_id'])}:{orphan['attempt']}"


def sweep(transaction: Transaction, *, now: int, limit: int) -> int:
    """Delete up to ``limit`` expired tasks, the longest expired first; return how many."""
    return len(transaction.rows(statements.SWEEP, {"now": now, "limit": limit}))


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
