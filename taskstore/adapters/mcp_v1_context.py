"""What a request handler and the work of a task hold on the SDK 1.x: its own classes, over our runner and handles."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from mcp.server.experimental.request_context import Experimental
from mcp.server.experimental.task_context import ServerTaskContext
from mcp.server.experimental.task_support import TaskSupport
from mcp.server.session import ServerSession
from mcp.server.validation import validate_sampling_tools, validate_tool_use_result_messages
from mcp.shared.context import RequestContext
from mcp.shared.exceptions import McpError
from mcp.shared.experimental.tasks.helpers import MODEL_IMMEDIATE_RESPONSE_KEY
from mcp.types import (
    CallToolRequestParams,
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    CreateTaskResult,
    ElicitRequest,
    ElicitRequestedSchema,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    ElicitResult,
    ErrorData,
    IncludeContext,
    ModelPreferences,
    ProgressNotification,
    ProgressNotificationParams,
    Result,
    SamplingMessage,
    ServerNotification,
    Task,
    TaskExecutionMode,
    TaskStatusNotification,
    TaskStatusNotificationParams,
    Tool,
    ToolChoice,
)
from pydantic import JsonValue

from taskstore.adapters.mcp_v1_store import sdk_task, winner, work_result
from taskstore.adapters.wire import legacy_create_task_result, legacy_related
from taskstore.binding import AuthContext, shorten
from taskstore.errors import LeaseLostError, TaskFinishedError, TaskNotFoundError, TaskStoreError
from taskstore.handle import TaskHandle
from taskstore.store import TaskStore
from taskstore.task import Task as Record

logger = logging.getLogger("taskstore")

Context = RequestContext[ServerSession, Any, Any]
Work = Callable[["DurableTaskContext"], Awaitable[Result]]
Start = Callable[[Work], Awaitable[Record]]
ResultT = TypeVar("ResultT", bound=Result)


class DurableExperimental(Experimental):
    """``request_context.experimental`` of a tool call: ``run_task()`` creates a durable task.

    Attributes:
        refusal: What ``validate_task_mode()`` or ``run_task()`` raised. The SDK's decorator ``call_tool()`` makes a
            tool's error of it, and on the wire it has to be a JSON-RPC error.
    """

    def __init__(self, context: Context, params: CallToolRequestParams, start: Start) -> None:
        client = context.session.client_params
        super().__init__(
            task_metadata=params.task,
            _client_capabilities=None if client is None else client.capabilities,
            _session=context.session,
        )
        self._start = start
        self.refusal: McpError | None = None

    def validate_task_mode(
        self, tool_task_mode: TaskExecutionMode | None, *, raise_error: bool = True
    ) -> ErrorData | None:
        """See the SDK."""
        try:
            return super().validate_task_mode(tool_task_mode, raise_error=raise_error)
        except McpError as refusal:
            self.refusal = refusal
            raise

    async def run_task(
        self, work: Work, *, task_id: str | None = None, model_immediate_response: str | None = None
    ) -> CreateTaskResult:
        """Create a task, run the work apart from this request and its session, and return at once.

        Raises:
            ValueError: A ``task_id`` is given: ids are the store's own, so that none can be guessed.
            RuntimeError: The request did not ask for a task.
            McpError: The task cannot be created.
        """
        if task_id is not None:
            raise ValueError("run_task(task_id=...) is not possible: a durable task's id is the store's own.")
        if self.task_metadata is None:
            raise RuntimeError("The request has no field task, so it cannot be answered with a task.")
        try:
            record = await self._start(work)
        except McpError as refusal:
            self.refusal = refusal
            raise
        created: dict[str, Any] = legacy_create_task_result(record)
        if model_immediate_response is not None:
            created["_meta"] = {MODEL_IMMEDIATE_RESPONSE_KEY: model_immediate_response}
        return CreateTaskResult.model_validate(created)


class Creator:
    """The session that created a task: hears of it for as long as the session lasts, and nobody waits for that."""

    def __init__(self, context: Context) -> None:
        self._session = context.session
        self._token = None if context.meta is None else context.meta.progressToken
        self._progress = -math.inf
        # A client that reads nothing must not hold up the work, nor fill the memory: what is oldest is left out.
        self._untold: deque[ServerNotification] = deque(maxlen=16)
        self._telling: asyncio.Task[None] | None = None

    def status(self, task: Task) -> None:
        """Send notifications/tasks/status; without the mark of the task, which is all that is in there."""
        params = TaskStatusNotificationParams.model_validate(task.model_dump())
        self._tell(ServerNotification(TaskStatusNotification(params=params)))

    def progress(self, task_id: str, progress: float, total: float | None, message: str | None) -> None:
        """Send progress under the token of the call, if it had one; only what is more than the last time.

        Source: MCP 2025-11-25, "Progress": the value must increase, and a task keeps its token until it is finished.
        """
        if self._token is None or progress <= self._progress:
            return
        self._progress = progress
        said: dict[str, JsonValue] = {"progressToken": self._token, "progress": progress}
        if total is not None:
            said["total"] = total
        if message is not None:
            said["message"] = message
        params = ProgressNotificationParams.model_validate(legacy_related(said, task_id))
        self._tell(ServerNotification(ProgressNotification(params=params)))

    async def follow(self, store: TaskStore, auth: AuthContext | None, task: Record) -> None:
        """Tell each new status of a task, whoever set it, until it is finished."""
        try:
            while not task.is_finished:
                shown = task.status
                while task.status is shown:
                    task = await store.wait_for_task(task.task_id, auth=auth, since_version=task.version)
                self.status(sdk_task(task))
        except TaskStoreError as problem:
            logger.info("Task %s is followed no longer: %s", shorten(task.task_id), problem)
        if self._telling is not None:
            await self._telling

    def _tell(self, notification: ServerNotification) -> None:
        self._untold.append(notification)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_all())

    async def _tell_all(self) -> None:
        try:
            while self._untold:
                await self._session.send_notification(self._untold.popleft())
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            logger.debug("The session that created a task is gone; the task goes on.")


class DurableTaskContext(ServerTaskContext):
    """The context that work gets: what it says goes to the task's row, and from there to whoever asks.

    What it says too late, after a cancellation, say, is not stored, and raises nothing. Beyond what the SDK's context
    has there is ``report_progress()``.
    """

    def __init__(self, handle: TaskHandle, record: Record, creator: Creator, context: Context, support: TaskSupport):
        task = sdk_task(record)
        super().__init__(
            task=task, store=support.store, session=context.session, queue=support.queue, handler=support.handler
        )
        self._handle, self._current, self._creator = handle, task, creator

    @property
    def task(self) -> Task:
        """The task as this work knows it."""
        return self._current

    @property
    def is_cancelled(self) -> bool:
        """Whether the work should stop: the task was cancelled, here or elsewhere, or its server is taken for dead."""
        return super().is_cancelled or self._handle.cancel_requested

    async def update_status(self, message: str, *, notify: bool = True) -> None:
        """Say what the work is doing."""
        if not await self._said(self._handle.progress(None, message=message)):
            return
        self._current = self._current.model_copy(update={"statusMessage": message})
        if notify:
            self._creator.status(self._current)

    async def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Say how far the work is; polls show it, and the caller's progress token still counts."""
        if not await self._said(self._handle.progress(progress, total=total, message=message)):
            return
        if message is not None:
            self._current = self._current.model_copy(update={"statusMessage": message})
        self._creator.progress(self.task_id, progress, total, message)

    async def complete(self, result: Result, *, notify: bool = True) -> None:
        """Finish the task with a result; the work may go on. Clients hear of every finish, ``notify`` or not."""
        outcome = work_result(result)
        await self._settle(self._handle.complete(outcome.result, is_error=outcome.is_error))

    async def fail(self, error: str, *, notify: bool = True) -> None:
        """Finish the task with an error; the work may go on. Clients hear of every finish, ``notify`` or not."""
        await self._settle(self._handle.fail(error))

    async def elicit(self, message: str, requestedSchema: ElicitRequestedSchema) -> ElicitResult:  # noqa: N803
        """Ask the user; the question waits in the task until some tasks/result of the requestor brings an answer.

        Raises:
            McpError: The client that created the task did not declare elicitation, or answered with an error.
        """
        self._check_elicitation_capability()
        params = ElicitRequestFormParams(message=message, requestedSchema=requestedSchema)
        return await self._ask(ElicitRequest(params=params), ElicitResult)

    async def elicit_url(self, message: str, url: str, elicitation_id: str) -> ElicitResult:
        """Ask the user to go to a URL; as ``elicit``."""
        self._check_elicitation_capability()
        params = ElicitRequestURLParams(message=message, url=url, elicitationId=elicitation_id)
        return await self._ask(ElicitRequest(params=params), ElicitResult)

    async def create_message(
        self,
        messages: list[SamplingMessage],
        *,
        max_tokens: int,
        system_prompt: str | None = None,
        include_context: IncludeContext | None = None,
        temperature: float | None = None,
        stop_sequences: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        model_preferences: ModelPreferences | None = None,
        tools: list[Tool] | None = None,
        tool_choice: ToolChoice | None = None,
    ) -> CreateMessageResult:
        """Ask the client's model; as ``elicit``."""
        self._check_sampling_capability()
        client = self._session.client_params
        validate_sampling_tools(None if client is None else client.capabilities, tools, tool_choice)
        validate_tool_use_result_messages(messages)
        params = CreateMessageRequestParams(
            messages=messages,
            systemPrompt=system_prompt,
            includeContext=include_context,
            temperature=temperature,
            maxTokens=max_tokens,
            stopSequences=stop_sequences,
            metadata=metadata,
            modelPreferences=model_preferences,
            tools=tools,
            toolChoice=tool_choice,
        )
        return await self._ask(CreateMessageRequest(params=params), CreateMessageResult)

    async def elicit_as_task(
        self,
        message: str,
        requestedSchema: ElicitRequestedSchema,  # noqa: N803
        *,
        ttl: int = 60000,
    ) -> ElicitResult:
        """Refuse: a task that the client hosts is lost with its connection; use ``elicit()``."""
        raise NotImplementedError("Tasks that the client hosts are not durable; use elicit() in a durable task.")

    async def create_message_as_task(
        self,
        messages: list[SamplingMessage],
        *,
        max_tokens: int,
        ttl: int = 60000,
        system_prompt: str | None = None,
        include_context: IncludeContext | None = None,
        temperature: float | None = None,
        stop_sequences: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        model_preferences: ModelPreferences | None = None,
        tools: list[Tool] | None = None,
        tool_choice: ToolChoice | None = None,
    ) -> CreateMessageResult:
        """Refuse: a task that the client hosts is lost with its connection; use ``create_message()``."""
        raise NotImplementedError("Tasks that the client hosts are not durable; use create_message().")

    async def _ask(self, request: ElicitRequest | CreateMessageRequest, answer: type[ResultT]) -> ResultT:
        question = request.model_dump(by_alias=True, mode="json", exclude_none=True)
        responses = await self._handle.ask({request.method.partition("/")[0]: question})
        (response,) = responses.values()
        if isinstance(response, dict) and "error" in response:
            raise McpError(ErrorData.model_validate(response["error"]))
        return answer.model_validate(response)

    async def _said(self, saying: Awaitable[None]) -> bool:
        """Tell whether what the work said was stored."""
        try:
            await saying
        except (LeaseLostError, TaskFinishedError, TaskNotFoundError) as refusal:
            logger.debug("What the work said is dropped, since the task is over. %s", refusal)
            return False
        return True

    async def _settle(self, finishing: Awaitable[Record]) -> None:
        record = await winner(finishing)
        if record is not None:
            self._current = sdk_task(record)
