"""The JSON that a generation of the protocol has for a task; pure functions of the store's records.

Source: MCP 2026-07-28, extension io.modelcontextprotocol/tasks. There a tool result with ``isError`` belongs to a
``completed`` task, and ``failed`` means a JSON-RPC error.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from pydantic import JsonValue

from taskstore.task import Task, TaskDetails, TaskStatus

WireObject = dict[str, JsonValue]


def acknowledgement() -> WireObject:
    """Make the empty result of tasks/update and tasks/cancel."""
    return {"resultType": "complete"}


def create_task_result(task: Task) -> WireObject:
    """Make the CreateTaskResult of a new task: flat, and the only result tagged ``task``."""
    return {"resultType": "task", **_task(task)}


def detailed_task(details: TaskDetails) -> WireObject:
    """Make the result of tasks/get: the task, and what its status adds.

    ``completed`` adds the stored result as it is, ``failed`` the JSON-RPC error, ``input_required`` every open
    input request; ``working`` and ``cancelled`` add nothing.
    """
    task, outcome = details.task, details.outcome
    wire: WireObject = {"resultType": "complete", **_task(task)}
    match task.status:
        case TaskStatus.COMPLETED:
            wire["result"] = outcome.result if outcome is not None else None
        case TaskStatus.FAILED:
            error = outcome.error if outcome is not None else None
            wire["error"] = error
            if "statusMessage" not in wire and isinstance(error, Mapping):
                wire["statusMessage"] = error.get("message")
        case TaskStatus.INPUT_REQUIRED:
            wire["inputRequests"] = dict(details.input_requests)
        case TaskStatus.WORKING | TaskStatus.CANCELLED:
            pass
    return wire


def _task(task: Task) -> WireObject:
    """Make the fields that every answer about a task has; ``ttlMs`` is there even when it is null (unlimited)."""
    wire: WireObject = {
        "taskId": task.task_id,
        "status": task.status.value,
        "createdAt": _timestamp(task.created_at),
        "lastUpdatedAt": _timestamp(task.last_updated_at),
        "ttlMs": None if task.ttl is None else _milliseconds(task.ttl),
    }
    if task.poll_interval is not None:
        wire["pollIntervalMs"] = _milliseconds(task.poll_interval)
    message = _status_message(task)
    if message is not None:
        wire["statusMessage"] = message
    return wire


def _status_message(task: Task) -> str | None:
    """Join what the tool last said and how far it is, such as ``rendering (3/10)``; once finished, only the former."""
    if task.progress is None or task.is_finished:
        return task.status_message
    progress = _number(task.progress)
    if task.progress_total is not None:
        progress += f"/{_number(task.progress_total)}"
    return f"{task.status_message} ({progress})" if task.status_message else progress


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:.12g}"


def _milliseconds(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _timestamp(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
