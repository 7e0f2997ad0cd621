"""TasksClient: calls tools that answer with a task, for clients on the official Python SDK, 2.x.

Source: MCP 2026-07-28, extension io.modelcontextprotocol/tasks.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeVar

import anyio
from mcp import Client
from mcp.client.context import ClientRequestContext
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, CallToolResult, ErrorData, InputRequest, Request, Result
from pydantic import JsonValue, TypeAdapter

IDENTIFIER = "io.modelcontextprotocol/tasks"

_POLL_INTERVAL_MS = 1000  # where the server asks for none
_INPUT_REQUEST: TypeAdapter[InputRequest] = TypeAdapter(InputRequest)


class _TaskFields(Result):
    task_id: str
    status: str
    status_message: str | None = None
    created_at: datetime
    last_updated_at: datetime
    ttl_ms: int | None
    poll_interval_ms: int | None = None


class CreatedTask(_TaskFields):
    """A task as a server answers a tool call with it."""

    result_type: Literal["task"] = "task"


class PolledTask(_TaskFields):
    """A task as a poll shows it: with ``result``, ``error`` or ``input_requests``, as its status says.

    Attributes:
        ttl_ms: How long the server keeps it, from its creation; None is for ever.
        input_requests: All open questions, each ``{"method": ..., "params": ...}``.
    """

    result_type: Literal["complete"] = "complete"
    result: dict[str, Any] | None = None
    error: ErrorData | None = None
    input_requests: dict[str, JsonValue] | None = None


class _Acknowledgement(Result):
    result_type: Literal["complete"] = "complete"


class _TaskRequest(Request[dict[str, Any], str]):
    """A request that is routed by its task id (header Mcp-Name)."""

    name_param: ClassVar[str | None] = "taskId"


ResultT = TypeVar("ResultT", bound=Result)
OnPoll = Callable[[PolledTask], Awaitable[None]]


class TaskCancelledError(Exception):
    """The task was cancelled, so its call has no result."""

    def __init__(self, task_id: str, message: str | None) -> None:
        super().__init__(message or "The task was cancelled.")
        self.task_id = task_id


class _StartedError(Exception):
    """Carries a new task out of ``Client.call_tool()`` to who wants no more than its start."""

    def __init__(self, task: CreatedTask) -> None:
        super().__init__(task.task_id)
        self.task = task


_only_start: ContextVar[bool] = ContextVar("_only_start", default=False)


class TasksClient(ClientExtension):
    """Declares the extension, so that servers may answer this client's tool calls with tasks.

    ::

        tasks = TasksClient()
        async with Client(url, extensions=[tasks], elicitation_callback=ask_the_user) as client:
            result = await client.call_tool("generate_report", {"topic": "tides"})  # as long as it takes

            started = await tasks.start(client, "generate_report", {"topic": "tides"})
            if isinstance(started, RemoteTask):
                keep(started.task_id)  # and later, in any process: tasks.resume(client, task_id)

    ``client.call_tool()`` polls until there is a result; the questions of a task go to the client's own callbacks for
    elicitation, sampling and roots. When the caller gives up or the connection is lost, the task goes on: connect
    again, and resume it.

    Args:
        on_poll: Sees every poll's answer, to show how far the task is.
    """

    identifier = IDENTIFIER

    def __init__(self, *, on_poll: OnPoll | None = None) -> None:
        self._on_poll = on_poll

    def claims(self) -> list[ResultClaim[CreatedTask]]:
        """Take the results of tool calls that are tasks."""
        return [ResultClaim(result_type="task", model=CreatedTask, resolve=self._resolve)]

    async def start(
        self,
        client: Client,
        name: str,
        arguments: dict[str, Any] | None = None,
        *,
        read_timeout_seconds: float | None = None,
    ) -> "RemoteTask | CallToolResult":
        """Call a tool and return as soon as there is a task; what is asked before that goes to the client's callbacks.

        Args:
            client: A connected client that has this extension.
            read_timeout_seconds: For each request, as in ``Client.call_tool()``.

        Returns:
            The task; or the result, when the server answered without one.

        Raises:
            MCPError: The server refused the call.
        """
        token = _only_start.set(True)
        try:
            return await client.call_tool(name, arguments, read_timeout_seconds)
        except _StartedError as started:
            return RemoteTask(client.session, started.task, self._on_poll, read_timeout_seconds)
        finally:
            _only_start.reset(token)

    def resume(self, client: Client, task_id: str, *, read_timeout_seconds: float | None = None) -> "RemoteTask":
        """Take up a task by its id, whatever process started it."""
        return RemoteTask(client.session, task_id, self._on_poll, read_timeout_seconds)

    async def _resolve(self, task: CreatedTask, context: ClaimContext) -> CallToolResult:
        if _only_start.get():
            raise _StartedError(task)
        return await RemoteTask(context.session, task, self._on_poll, context.read_timeout_seconds).result()


class RemoteTask:
    """A task on a server. All that it is can be found again by its ``task_id``, with ``TasksClient.resume()``."""

    def __init__(
        self,
        session: ClientSession,
        task: CreatedTask | str,
        on_poll: OnPoll | None,
        read_timeout_seconds: float | None,
    ) -> None:
        self._session, self._on_poll, self._timeout = session, on_poll, read_timeout_seconds
        self._created = None if isinstance(task, str) else task
        self.task_id = task if isinstance(task, str) else task.task_id

    async def get(self) -> PolledTask:
        """Ask how the task stands.

        Raises:
            MCPError: It is not known to the server (any more), or not to this requestor: code -32602.
        """
        return await self._send("tasks/get", PolledTask)

    async def cancel(self) -> None:
        """Ask the server to cancel the task; of one that is finished, nothing changes."""
        await self._send("tasks/cancel", _Acknowledgement)

    async def update(self, responses: Mapping[str, JsonValue]) -> None:
        """Answer questions of the task, under the keys of ``PolledTask.input_requests``; some, or all of them."""
        await self._send("tasks/update", _Acknowledgement, inputResponses=dict(responses))

    async def result(self) -> CallToolResult:
        """Poll, as often as the server asks for, until the task is finished; its questions go to the callbacks.

        Raises:
            MCPError: The call ended in this error; or a callback refused to answer, and the task still asks.
            TaskCancelledError: The task was cancelled.
        """
        if self._created is not None:
            await _pause(self._created.poll_interval_ms)  # it has only just begun
        answered: set[str] = set()
        while True:
            task = await self.get()
            if self._on_poll is not None:
                await self._on_poll(task)
            match task.status:
                case "completed":
                    return CallToolResult.model_validate(task.result, by_name=False)
                case "failed":
                    raise MCPError.from_error_data(
                        task.error or ErrorData(code=INTERNAL_ERROR, message=task.status_message or "The task failed.")
                    )
                case "cancelled":
                    raise TaskCancelledError(self.task_id, task.status_message)
            # The server may be slow to notice an answer; what was answered is not asked of anybody again.
            asked = {key: each for key, each in (task.input_requests or {}).items() if key not in answered}
            if asked:
                await self.update(await self._answers(asked))
                answered.update(asked)
            await _pause(task.poll_interval_ms)

    async def _answers(self, asked: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Let the client's callbacks answer, all at once.

        Raises:
            MCPError: One of them refused.
        """
        answers: dict[str, JsonValue] = {}
        refused: list[ErrorData] = []

        async def answer(key: str, request: InputRequest) -> None:
            meta = request.params.meta if request.params else None
            context = ClientRequestContext(session=self._session, request_id=key, meta=meta)
            response = await self._session.dispatch_input_request(context, request)
            if isinstance(response, ErrorData):
                refused.append(response)
                group.cancel_scope.cancel()
            else:
                answers[key] = response.model_dump(by_alias=True, mode="json", exclude_none=True)

        async with anyio.create_task_group() as group:
            for key, each in asked.items():
                group.start_soon(answer, key, _INPUT_REQUEST.validate_python(each, by_name=False))
        if refused:
            raise MCPError.from_error_data(refused[0])
        return answers

    async def _send(self, method: str, kind: type[ResultT], **params: JsonValue) -> ResultT:
        request = _TaskRequest(method=method, params={"taskId": self.task_id, **params})
        return await self._session.send_request(request, kind, self._timeout)


async def _pause(poll_interval_ms: int | None) -> None:
    await anyio.sleep((_POLL_INTERVAL_MS if poll_interval_ms is None else poll_interval_ms) / 1000)
