"""The requests tasks/get, tasks/update and tasks/cancel, for an auth context and raw params; knows no SDK.

Whoever calls these has already checked the protocol version, the client's capability and the routing headers.

Source: MCP 2026-07-28, extension io.modelcontextprotocol/tasks.
"""

from collections.abc import Mapping

from pydantic import JsonValue

from taskstore.adapters.wire import WireObject, acknowledgement, detailed_task
from taskstore.binding import AuthContext
from taskstore.errors import LimitExceededError, PayloadError, TaskFinishedError, TaskNotFoundError
from taskstore.store import TaskStore

INVALID_PARAMS = -32602  # JSON-RPC 2.0, "Error object"
INTERNAL_ERROR = -32603
LIMIT_EXCEEDED = "LIMIT_EXCEEDED"  # the data.reason of an error that waiting, or asking less often, cures

Params = Mapping[str, JsonValue]


class RequestError(Exception):
    """A request is refused with this JSON-RPC error."""

    def __init__(self, code: int, message: str, data: JsonValue = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


async def get_task(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/get: the task with its result, error or open input requests.

    Raises:
        RequestError: -32602 for malformed params, and for a task that is unknown, expired or somebody else's;
            -32603 for a client that polls faster than the store's limits allow.
    """
    task_id = _task_id(params)
    try:
        return detailed_task(await store.get_details(task_id, auth=auth))
    except TaskNotFoundError as refusal:
        raise _not_found() from refusal
    except LimitExceededError as refusal:
        raise RequestError(INTERNAL_ERROR, str(refusal), {"reason": LIMIT_EXCEEDED}) from refusal


async def update_task(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/update: store the responses to open input requests, and ignore all others unread.

    A finished task has no open requests, so every response to it is ignored.

    Raises:
        RequestError: -32602 for malformed params, for a response that cannot be stored, and for a task that is
            unknown, expired or somebody else's.
    """
    task_id = _task_id(params)
    responses = params.get("inputResponses")
    if not isinstance(responses, Mapping):
        raise _invalid("inputResponses must be an object that maps the keys of input requests to responses")
    try:
        await store.answer_inputs(task_id, responses, auth=auth)
    except TaskNotFoundError as refusal:
        raise _not_found() from refusal
    except PayloadError as refusal:
        raise RequestError(INVALID_PARAMS, str(refusal)) from refusal
    return acknowledgement()


async def cancel_task(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/cancel; a task that is already finished stays as it is, and is acknowledged all the same.

    Raises:
        RequestError: -32602 for malformed params, and for a task that is unknown, expired or somebody else's.
    """
    task_id = _task_id(params)
    try:
        await store.cancel_task(task_id, auth=auth)
    except TaskNotFoundError as refusal:
        raise _not_found() from refusal
    except TaskFinishedError:
        pass
    return acknowledgement()


def _task_id(params: Params) -> str:
    task_id = params.get("taskId")
    if not isinstance(task_id, str) or not task_id:
        raise _invalid("taskId must be a non-empty string")
    return task_id


def _invalid(problem: str) -> RequestError:
    return RequestError(INVALID_PARAMS, f"Invalid params: {problem}.")


def _not_found() -> RequestError:
    # One text for unknown, expired and foreign: it must not tell a stranger that the id exists.
    return RequestError(INVALID_PARAMS, "Failed to retrieve task: Task not found")
