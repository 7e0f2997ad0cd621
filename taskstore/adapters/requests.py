"""The requests about tasks of both generations, for an auth context and raw params; knows no SDK.

Whoever calls these has already checked the protocol version, the client's capability and the routing headers.

Source: MCP 2026-07-28, extension io.modelcontextprotocol/tasks; with the prefix ``legacy_``: MCP 2025-11-25, "Tasks".
Those with the prefix ``lesson_`` stand in for some of the latter, see ``wire.py``.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

from pydantic import JsonValue

from taskstore.adapters.wire import (
    WireObject,
    acknowledgement,
    detailed_task,
    input_error,
    legacy_list_result,
    legacy_related,
    legacy_status,
    legacy_task,
    lesson_get_result,
    lesson_status_result,
)
from taskstore.binding import AuthContext, shorten
from taskstore.errors import (
    DatabaseUnavailableError,
    InvalidCursorError,
    LimitExceededError,
    PayloadError,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStoreError,
)
from taskstore.rows import LONGEST_SPAN_MS
from taskstore.store import Default, TaskStore
from taskstore.task import Outcome, Task, TaskStatus

logger = logging.getLogger("taskstore")

METHOD_NOT_FOUND = -32601  # JSON-RPC 2.0, "Error object"
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
LIMIT_EXCEEDED = "LIMIT_EXCEEDED"  # the data.reason of an error that waiting, or asking less often, cures
CANCELLED = "CANCELLED"  # the data.reason of tasks/result for a task that was cancelled
NOT_FINISHED = 404  # an application's own code: outside of what JSON-RPC reserves

_PAGE_SIZE = 100
_RETRY = timedelta(seconds=0.5)

Params = Mapping[str, JsonValue]
# Sends a request to the client and returns its result; RequestError is the client's own error, and ConnectionError
# says that no answer will come.
Ask = Callable[[str, WireObject], Awaitable[JsonValue]]


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
        raise _over_limit(refusal) from refusal


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


async def legacy_get_task(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/get of 2025-11-25: the task without its outcome; if its tool failed, with what the tool said of it.

    Raises:
        RequestError: As ``get_task``.
    """
    return legacy_task(*await _read(store, auth, params))


async def legacy_task_result(
    store: TaskStore, auth: AuthContext | None, params: Params, *, ask: Ask | None = None
) -> WireObject:
    """Answer tasks/result: wait for the task to finish, then give what the call would have got.

    Args:
        ask: Puts the task's questions to the client that waits here; without it they wait for somebody else. Every
            waiting client is asked, since any of them may be gone; once one has answered, ``ask`` is cancelled for
            the others.

    Returns:
        The stored result as it is, but for the mark that names the task.

    Raises:
        RequestError: The JSON-RPC error that the call ended in, with its own code, message and data; -32603 for a
            task that was cancelled, which has neither result nor error; and the errors of ``get_task``.
    """
    task_id = _task_id(params)
    try:
        if ask is None:
            task = await store.wait_for_task(task_id, auth=auth)
        else:
            task = await _wait_and_ask(store, auth, task_id, ask)
        outcome = await store.get_outcome(task_id, auth=auth)
    except TaskNotFoundError as refusal:
        raise _not_found() from refusal
    except LimitExceededError as refusal:
        raise _over_limit(refusal) from refusal
    return legacy_related(_result_of(task, outcome), task_id)


async def legacy_list_tasks(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/list: one page of the requestor's tasks, newest first.

    Raises:
        RequestError: -32601 without an auth context: requestors that cannot be told apart have no list. -32602 for a
            cursor that is not from the page before; -32603 for a client that asks faster than the limits allow.
    """
    if auth is None:
        raise RequestError(METHOD_NOT_FOUND, "Method not found", "tasks/list")
    cursor = params.get("cursor")
    if not (cursor is None or isinstance(cursor, str)):
        raise _invalid("cursor must be a string")
    try:
        page = await store.list_tasks(auth=auth, cursor=cursor, limit=min(_PAGE_SIZE, store.limits.page_size))
    except InvalidCursorError as refusal:
        raise _invalid("the cursor is not one of this list") from refusal
    except LimitExceededError as refusal:
        raise _over_limit(refusal) from refusal
    return legacy_list_result(page)


async def legacy_cancel_task(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/cancel of 2025-11-25: the task, which is ``cancelled`` when this returns.

    Raises:
        RequestError: -32602 for a task that is finished already, for malformed params, and for a task that is
            unknown, expired or somebody else's.
    """
    task_id = _task_id(params)
    try:
        return legacy_task(await store.cancel_task(task_id, auth=auth))
    except TaskNotFoundError as refusal:
        raise _not_found() from refusal
    except TaskFinishedError as refusal:
        status = legacy_status(refusal.task)
        raise RequestError(
            INVALID_PARAMS, f"Cannot cancel task: already in terminal status '{status.value}'"
        ) from refusal


async def lesson_get_task(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/get as ``legacy_get_task`` does, with the progress as a number."""
    return lesson_get_result(*await _read(store, auth, params))


async def lesson_task_status(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/status: what ``legacy_get_task`` does, with the lesson's names beside it.

    Raises:
        RequestError: As ``get_task``.
    """
    return lesson_status_result(*await _read(store, auth, params))


async def lesson_task_result(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/result at once.

    Raises:
        RequestError: 404 for a task that is still live; and as ``legacy_task_result``.
    """
    task, _ = await _read(store, auth, params)
    if not task.is_finished:
        data: WireObject = {"httpStatus": NOT_FINISHED, "status": task.status.value}
        raise RequestError(NOT_FINISHED, f"The task is not finished: it is '{task.status.value}'", data)
    return await legacy_task_result(store, auth, params)


async def lesson_cancel_task(store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
    """Answer tasks/cancel with the task; one that is finished already stays as it is.

    Raises:
        RequestError: -32602 for malformed params, and for a task that is unknown, expired or somebody else's.
    """
    task_id = _task_id(params)
    try:
        return legacy_task(await store.cancel_task(task_id, auth=auth))
    except TaskNotFoundError as refusal:
        raise _not_found() from refusal
    except TaskFinishedError as refusal:
        return legacy_task(refusal.task)


def lesson_augmentation(params: Params, *, can_be_task: bool) -> WireObject | None:
    """Read from ``params._meta.task`` whether a call asks for a task, as the ``task`` field of the call would say it.

    Args:
        can_be_task: Whether the tool runs as a task: then a call for which a task is optional gets one.

    Returns:
        The ``task`` field that the call stands for; None when it asks for no task.

    Raises:
        RequestError: -32602 for what is no object with the flags ``required`` and ``optional``.
    """
    meta = params.get("_meta")
    asked = meta.get("task") if isinstance(meta, Mapping) else None
    if asked is None:
        return None
    flags = [asked.get(name, False) for name in ("required", "optional")] if isinstance(asked, Mapping) else [None]
    if not all(isinstance(flag, bool) for flag in flags):
        raise _invalid("_meta.task must be an object; its required and optional are true or false")
    required, optional = flags
    return {} if required or (optional and can_be_task) else None


def legacy_ttl(task: Mapping[str, JsonValue], default: timedelta | Default | None) -> timedelta | Default | None:
    """Read the lifetime that the ``task`` field of a request asks for: any JSON number of milliseconds, or null.

    A part of a millisecond counts as a whole one, and a lifetime beyond all measure as the longest there is; null is
    unlimited. The store cuts what is longer than it allows.

    Args:
        default: The answer when the request asks for none.

    Raises:
        RequestError: -32602 for what is no number, and for a negative one.
    """
    if "ttl" not in task:
        return default
    ttl = task["ttl"]
    if ttl is None:
        return None
    # In Python a bool is an int, and a NaN, which its JSON parser lets through, is not even ``< 0``.
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl >= 0:
        raise _invalid("task.ttl must be a number of milliseconds, not negative, or null")
    return timedelta(milliseconds=math.ceil(min(ttl, LONGEST_SPAN_MS)))


async def _read(store: TaskStore, auth: AuthContext | None, params: Params) -> tuple[Task, Outcome | None]:
    """Read a task, with what its tool said if the tool failed."""
    task_id = _task_id(params)
    try:
        task = await store.get_task(task_id, auth=auth)
        outcome = await store.get_outcome(task_id, auth=auth) if task.is_error else None
    except TaskNotFoundError as refusal:
        raise _not_found() from refusal
    except LimitExceededError as refusal:
        raise _over_limit(refusal) from refusal
    return task, outcome


async def _wait_and_ask(store: TaskStore, auth: AuthContext | None, task_id: str, ask: Ask) -> Task:
    asking: dict[str, asyncio.Task[None]] = {}
    version = 0  # below every version: the first wait returns at once
    try:
        while True:
            task = await store.wait_for_task(task_id, auth=auth, since_version=version)
            if task.is_finished:
                return task
            version, requests = task.version, {}
            if task.status is TaskStatus.INPUT_REQUIRED:
                details = await store.get_details(task_id, auth=auth)
                version, requests = details.task.version, dict(details.input_requests)
            for key in asking.keys() - requests.keys():
                asking.pop(key).cancel()
            for key, request in requests.items():
                if key not in asking:
                    asking[key] = asyncio.create_task(_ask(store, auth, task_id, key, request, ask))
    finally:
        for each in asking.values():
            each.cancel()


async def _ask(
    store: TaskStore, auth: AuthContext | None, task_id: str, key: str, request: JsonValue, ask: Ask
) -> None:
    """Put one question to the client, and store what it answers; its refusal is an answer too."""
    asked = request if isinstance(request, Mapping) else {}
    params = asked.get("params")
    try:
        answer = await ask(
            str(asked.get("method")), legacy_related(params if isinstance(params, Mapping) else None, task_id)
        )
    except RequestError as refusal:
        answer = input_error(refusal.code, refusal.message, refusal.data)
    except ConnectionError as problem:
        logger.info("A question of task %s goes unanswered here: %s", shorten(task_id), problem)
        return
    try:
        try:
            await _answer(store, auth, task_id, key, answer)
        except PayloadError as refusal:
            await _answer(store, auth, task_id, key, input_error(INVALID_PARAMS, str(refusal)))
    except TaskStoreError as problem:
        logger.warning("An answer for task %s is not stored. %s", shorten(task_id), problem)


async def _answer(store: TaskStore, auth: AuthContext | None, task_id: str, key: str, answer: JsonValue) -> None:
    """Store an answer, trying again for as long as the database is away: the client will not give it twice."""
    while True:
        try:
            await store.answer_inputs(task_id, {key: answer}, auth=auth)
        except DatabaseUnavailableError as problem:
            logger.warning("An answer for task %s waits for the database. %s", shorten(task_id), problem)
            await asyncio.sleep(_RETRY.total_seconds())
        else:
            return


def _result_of(task: Task, outcome: Outcome) -> Mapping[str, JsonValue]:
    """Return the result, or raise what stands in its place."""
    error = outcome.error
    if isinstance(error, Mapping):
        code, message = error.get("code"), error.get("message")
        raise RequestError(code if isinstance(code, int) else INTERNAL_ERROR, str(message), error.get("data"))
    if task.status is TaskStatus.CANCELLED:
        raise RequestError(INTERNAL_ERROR, task.status_message or "The task was cancelled.", {"reason": CANCELLED})
    if not isinstance(outcome.result, Mapping):
        raise RequestError(INTERNAL_ERROR, "The task's result is no JSON object, so no request can have it as result.")
    return outcome.result


def _task_id(params: Params) -> str:
    task_id = params.get("taskId")
    if not isinstance(task_id, str) or not task_id:
        raise _invalid("taskId must be a non-empty string")
    return task_id


def _invalid(problem: str) -> RequestError:
    return RequestError(INVALID_PARAMS, f"Invalid params: {problem}.")


def _over_limit(refusal: LimitExceededError) -> RequestError:
    return RequestError(INTERNAL_ERROR, str(refusal), {"reason": LIMIT_EXCEEDED})


def _not_found() -> RequestError:
    # One text for unknown, expired and foreign: it must not tell a stranger that the id exists.
    return RequestError(INVALID_PARAMS, "Failed to retrieve task: Task not found")
