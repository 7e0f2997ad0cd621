"""A task's row as it is first written: of a task that is created, and of one that was kept elsewhere."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from pydantic import JsonValue

from taskstore import payload, statements
from taskstore.binding import new_task_id
from taskstore.operations import Call, Row, milliseconds
from taskstore.options import whole_milliseconds
from taskstore.task import OnCrash, Outcome, OwnerKind, Task, TaskDetails, TaskStatus

LONGEST_ID = 200
LAST_VERSION = 2**63 - 1
LONGEST_SPAN_MS = 10**14  # an instant after it is still one that a datetime can hold
_MAX_ATTEMPTS, _MOST_ATTEMPTS = 3, 1_000_000
_EMPTY: Row = dict.fromkeys(column.name for column in statements.tasks.c)


def created(
    call: Call,
    *,
    server: str,
    session_digest: str | None,
    ttl_ms: int | None,
    poll_interval: timedelta | None,
    method: str,
    name: str | None,
    request: JsonValue | Mapping[str, JsonValue],
) -> Row:
    """Make the row of a new task, held by its writer; its request is encoded and not sealed yet.

    Raises:
        ValueError: ``poll_interval`` is negative or beyond all measure.
        PayloadError: A text or the request cannot be stored.
    """
    payload.check_type(poll_interval, timedelta | None, "poll_interval")
    return _EMPTY | {
        "task_id": new_task_id(call.now),
        "auth_key": call.auth_key,
        "server": server,
        "method": payload.check_text(method, "$.method"),
        "name": _name(name),
        "session_digest": session_digest,
        "status": TaskStatus.WORKING.value,
        "is_error": False,
        "created_at": call.now,
        "last_updated_at": call.now,
        "ttl_ms": ttl_ms,
        "expires_at": None if ttl_ms is None else call.now + ttl_ms,
        "poll_interval_ms": None if poll_interval is None else span_ms("poll_interval", poll_interval),
        "owner_kind": OwnerKind.INSTANCE.value,
        "instance_id": call.writer,
        "attempt": 1,
        "crashes": 0,
        "version": 1,
        "request": None if request is None else call.rules.encode(request, "$.request"),
    }


def imported(details: TaskDetails, call: Call) -> Row:
    """Make the row of a task that was kept elsewhere, but for whose it is.

    Raises:
        ValueError: The record contradicts itself, or its id can be none of ours.
        PayloadError: The outcome or a text cannot be stored.
    """
    task, outcome = details.task, details.outcome
    if not re.fullmatch(f"[A-Za-z0-9._-]{{1,{LONGEST_ID}}}", task.task_id):
        raise ValueError(f"A task id has 1 to {LONGEST_ID} letters, digits and characters of ._-, not others.")
    _check_record(task)
    _check_outcome(task, outcome)
    stored: Row = {}
    for column, value in (
        ("status_message", task.status_message),
        ("result", outcome.result if outcome is not None and task.status is TaskStatus.COMPLETED else None),
        ("error", None if outcome is None else outcome.error),
    ):
        if value is not None or (column == "result" and task.status is TaskStatus.COMPLETED):
            encoded = call.rules.encode(value, f"$.{column}")
            stored[column] = call.rules.cipher.seal(encoded, "tasks", column, task.task_id)
    created_at, updated_at = milliseconds(task.created_at), milliseconds(task.last_updated_at)
    ttl_ms = None if task.ttl is None else span_ms("ttl", task.ttl)
    owner_kind = task.owner_kind if task.is_finished else OwnerKind.INSTANCE
    return (
        _EMPTY
        | {
            "task_id": task.task_id,
            "server": payload.check_text(task.server, "$.server"),
            "method": payload.check_text(task.method, "$.method"),
            "name": _name(task.name),
            "status": task.status.value,
            "is_error": task.is_error,
            "progress": task.progress,
            "progress_total": task.progress_total,
            "created_at": created_at,
            "last_updated_at": updated_at,
            "finished_at": None if task.finished_at is None else milliseconds(task.finished_at),
            "ttl_ms": ttl_ms,
            "expires_at": None if ttl_ms is None else created_at + ttl_ms,
            "poll_interval_ms": None if task.poll_interval is None else span_ms("poll_interval", task.poll_interval),
            "owner_kind": owner_kind.value,
            "instance_id": "" if owner_kind is OwnerKind.INSTANCE else None,  # no process of ours
            "attempt": task.attempt,
            "crashes": task.crashes,
            "version": task.version,
            "cancel_requested_at": updated_at if task.cancel_requested else None,
            **policy(OnCrash.FAIL, None),
        }
        | stored
    )


def _check_record(task: Task) -> None:
    """Let no number or instant through that a database cannot store, or that could not be read again."""
    for name, number in (("progress", task.progress), ("progress_total", task.progress_total)):
        if number is not None:
            payload.check_number(number, name)
    for name, count, least, most in (
        ("attempt", task.attempt, 1, _MOST_ATTEMPTS),
        ("crashes", task.crashes, 0, _MOST_ATTEMPTS),
        ("version", task.version, 1, LAST_VERSION // 2),
    ):
        if not least <= count <= most:
            raise ValueError(f"{name} must be {least} to {most}, not {count}.")
    for name, at in (
        ("created_at", task.created_at),
        ("last_updated_at", task.last_updated_at),
        ("finished_at", task.finished_at),
    ):
        if at is not None and at.tzinfo is None:
            raise ValueError(f"{name} must be an aware datetime, not {at}, which names no instant.")
    if task.ttl is not None and task.ttl > datetime.max.replace(tzinfo=UTC) - task.created_at:
        raise ValueError(f"A ttl of {task.ttl} after {task.created_at} is beyond every calendar.")


def _check_outcome(task: Task, outcome: Outcome | None) -> None:
    """Let only such an outcome through as a task of this status can have."""
    if task.is_finished != (task.finished_at is not None) or task.is_finished != (outcome is not None):
        raise ValueError(f"A task that is {task.status} has {'' if task.is_finished else 'no '}outcome and finish.")
    if outcome is None:
        return
    error = outcome.error
    is_error = isinstance(error, dict) and isinstance(error.get("code"), int) and isinstance(error.get("message"), str)
    if (task.status is TaskStatus.FAILED) != is_error or (error is not None and not is_error):
        raise ValueError("A failed task, and only it, has an error: an object with code and message.")
    if outcome.result is not None and task.status is not TaskStatus.COMPLETED:
        raise ValueError(f"A task that is {task.status} has no result.")


def policy(on_crash: OnCrash, max_attempts: int | None) -> Row:
    """Make the columns that say what becomes of a task when its process is gone."""
    if max_attempts is not None:
        payload.check_type(max_attempts, int, "max_attempts")
        if not 1 <= max_attempts <= _MOST_ATTEMPTS:
            raise ValueError(f"max_attempts must be 1 to {_MOST_ATTEMPTS}, not {max_attempts}.")
    again = on_crash in (OnCrash.RETRY, OnCrash.ASK)
    columns: Row = {"on_crash": on_crash.value, "max_attempts": max_attempts or (_MAX_ATTEMPTS if again else 1)}
    if on_crash is OnCrash.EXTERNAL:
        columns |= {"owner_kind": OwnerKind.EXTERNAL.value, "instance_id": None}
    return columns


def span_ms(name: str, span: timedelta) -> int:
    """Count the whole milliseconds of a span.

    Raises:
        ValueError: It is negative, or beyond all measure.
    """
    if span < timedelta(0):
        raise ValueError(f"{name} must not be negative, but is {span}.")
    ms = whole_milliseconds(span)
    if ms > LONGEST_SPAN_MS:
        raise ValueError(f"{name} is at most {LONGEST_SPAN_MS} ms, some 3,000 years; ask for None instead.")
    return ms


def _name(name: str | None) -> str | None:
    return None if name is None else payload.check_text(name, "$.name")
