"""The JSON that a generation of the protocol has for a task; pure functions of the store's records.

The functions without prefix make that of MCP 2026-07-28, extension io.modelcontextprotocol/tasks. There a tool result
with ``isError`` belongs to a ``completed`` task, and ``failed`` means a JSON-RPC error.

Those with the prefix ``legacy_`` make that of MCP 2025-11-25, "Tasks". There both are ``failed``; a result comes with
a mark that names its task, and an error as the JSON-RPC error that it is.

Those with the prefix ``lesson_`` make what clients written after a course on SEP-1686 expect beside that of 2025-11-25:
other names for the same facts.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from pydantic import JsonValue

from taskstore.task import Outcome, Task, TaskDetails, TaskPage, TaskStatus

WireObject = dict[str, JsonValue]

RELATED_TASK = "io.modelcontextprotocol/related-task"
PROGRESS = "taskstore/progress"


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


def input_error(code: int, message: str, data: JsonValue = None) -> WireObject:
    """Make the stored response to an input request that the client answered with a JSON-RPC error.

    No result of a request that clients can be asked looks like it: each of those has other required fields.
    """
    error: WireObject = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return {"error": error}


def legacy_task(task: Task, outcome: Outcome | None = None) -> WireObject:
    """Make a task of 2025-11-25: the result of tasks/get and tasks/cancel, the params of notifications/tasks/status.

    Args:
        outcome: Gives a tool's own error something to say; without it such a task shows what the tool said last.
    """
    wire = _fields(task, legacy_status(task), ttl="ttl", poll_interval="pollInterval")
    if task.is_error and outcome is not None:
        said = _first_text(outcome.result)
        if said is not None:
            wire["statusMessage"] = said
    return wire


def legacy_status(task: Task) -> TaskStatus:
    """Tell the status in 2025-11-25: a tool that reported an error of its own has failed there.

    Source: MCP 2025-11-25, tasks, "Task Execution Errors".
    """
    return TaskStatus.FAILED if task.is_error else task.status


def legacy_create_task_result(task: Task) -> WireObject:
    """Make the CreateTaskResult of 2025-11-25, which nests the task."""
    return {"task": legacy_task(task)}


def legacy_list_result(page: TaskPage) -> WireObject:
    """Make the result of tasks/list; ``nextCursor`` is there only when there is more."""
    wire: WireObject = {"tasks": [legacy_task(task) for task in page.tasks]}
    if page.next_cursor is not None:
        wire["nextCursor"] = page.next_cursor
    return wire


def legacy_related(message: Mapping[str, JsonValue] | None, task_id: str) -> WireObject:
    """Mark a result or params as belonging to a task, in ``_meta``; what else is in there stays.

    Source: MCP 2025-11-25, tasks, "Associating Task-Related Messages".
    """
    wire = dict(message or {})
    meta = wire.get("_meta")
    wire["_meta"] = {**(meta if isinstance(meta, Mapping) else {}), RELATED_TASK: {"taskId": task_id}}
    return wire


def lesson_create_task_result(task: Task) -> WireObject:
    """Make the CreateTaskResult of 2025-11-25, which names the task in ``_meta`` too."""
    wire = legacy_task(task)
    envelope: WireObject = {"id": wire["taskId"], "state": wire["status"], "ttl": wire["ttl"]}
    return {"task": wire, "_meta": {"task": envelope}}


def lesson_get_result(task: Task, outcome: Outcome | None = None) -> WireObject:
    """Make the result of tasks/get: a task of 2025-11-25, with its progress in ``_meta`` as the tool reported it."""
    wire = legacy_task(task, outcome)
    if task.progress is not None:
        wire["_meta"] = {PROGRESS: {"progress": task.progress, "total": task.progress_total}}
    return wire


def lesson_status_result(task: Task, outcome: Outcome | None = None) -> WireObject:
    """Make the result of tasks/status: a task of 2025-11-25, and the same facts under the names of the lesson."""
    wire = legacy_task(task, outcome)
    return {**wire, "id": wire["taskId"], "state": wire["status"], **_lesson_progress(task)}


def lesson_updated(task: Task) -> WireObject:
    """Make the params of notifications/tasks/updated."""
    return {"taskId": task.task_id, "state": legacy_status(task).value, **_lesson_progress(task)}


def _lesson_progress(task: Task) -> WireObject:
    """Make the hint of how far a task is: a part of one if the tool said of how much, else the number it reported."""
    if task.progress is None:
        return {}
    return {"progress": task.progress / task.progress_total if task.progress_total else task.progress}


def _task(task: Task) -> WireObject:
    return _fields(task, task.status, ttl="ttlMs", poll_interval="pollIntervalMs")


def _fields(task: Task, status: TaskStatus, *, ttl: str, poll_interval: str) -> WireObject:
    """Make the fields that every answer about a task has; the ttl is there even when it is null (unlimited)."""
    wire: WireObject = {
        "taskId": task.task_id,
        "status": status.value,
        "createdAt": _timestamp(task.created_at),
        "lastUpdatedAt": _timestamp(task.last_updated_at),
        ttl: None if task.ttl is None else _milliseconds(task.ttl),
    }
    if task.poll_interval is not None:
        wire[poll_interval] = _milliseconds(task.poll_interval)
    message = _status_message(task)
    if message is not None:
        wire["statusMessage"] = message
    return wire


def _first_text(result: JsonValue) -> str | None:
    content = result.get("content") if isinstance(result, Mapping) else None
    for block in content if isinstance(content, list) else []:
        text = block.get("text") if isinstance(block, Mapping) else None
        if isinstance(text, str):
            return text
    return None


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
