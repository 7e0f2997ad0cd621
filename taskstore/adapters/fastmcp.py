"""TasksExtension: tasks for a server on FastMCP 4, in place of the one of ``fastmcp-tasks``, and without Redis.

Serves the extension io.modelcontextprotocol/tasks of MCP 2026-07-28 and, beside it and from the same rows, the tasks of
MCP 2025-11-25. FastMCP sits on the official SDK 2.x, so what is not FastMCP's own is that adapter's.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from fastmcp import FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.server.context import Context
from fastmcp.server.dependencies import get_access_token
from fastmcp.server.extensions import MethodBinding, ServerExtension, ToolCallContinuation, ToolCallOutcome
from fastmcp.tools.base import ToolResult
from fastmcp.utilities.tasks import TaskConfig as FastMCPTaskConfig
from mcp.server.context import HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, CallToolRequestParams, RequestParams
from pydantic import RootModel

from taskstore.adapters.fastmcp_context import (
    CurrentTask,
    RunningTask,
    add_middleware,
    call_in_task,
    find_tool,
    is_client_call,
    is_in_task,
    kept_headers,
    name_of,
    sdk_context,
    show_headers,
    store_progress,
    task_tools,
)
from taskstore.adapters.mcp_v2_legacy import LegacyMiddleware
from taskstore.adapters.mcp_v2_listen import TaskListenMiddleware
from taskstore.adapters.mcp_v2_policy import TaskMode, TaskPolicy, check_span
from taskstore.adapters.mcp_v2_requests import (
    IDENTIFIER,
    TASK_VERSIONS,
    Compat,
    ResolveAuth,
    ResultMode,
    TaskRequests,
    check_options,
    open_store,
)
from taskstore.adapters.mcp_v2_rerun import run_again
from taskstore.handle import TaskHandle
from taskstore.options import StoreOptions
from taskstore.runner import TaskRunner, Work, WorkParked, WorkResult
from taskstore.store import DEFAULT, Default, TaskStore
from taskstore.task import Claim, OnCrash

__all__ = ["CurrentTask", "RunningTask", "TaskConfig", "TasksExtension"]


@dataclass
class TaskConfig(FastMCPTaskConfig):
    """FastMCP's ``TaskConfig``, with what a durable task can have besides; synchronous tools may have it too.

    ::

        @mcp.tool(task=TaskConfig(mode="required", ttl=timedelta(minutes=15), on_crash="retry"))
        def generate_report(topic: str) -> str: ...

    Attributes:
        ttl: Lifetime from creation; None is unlimited; left out, the extension's default.
        on_crash: What becomes of the task when its process dies or stops. ``fail`` ends it with an honest error;
            ``retry`` has the tool called again, which must bear that; ``ask`` asks the client whether to.
        max_attempts: How many deaths ``retry`` and ``ask`` put up with; None is 3.
        input_first: Run the first call inline, so that what the tool asks there is answered before there is a task;
            the call that brings the answers becomes the task. For tools that ask before they do anything else.
        needs_token: Keep the caller's access token, sealed, for as long as the task is live, so that
            ``get_access_token()`` finds it in later runs too; a run that lacks it fails. Needs
            ``StoreOptions(keys=...)``.
        needs_headers: Names of HTTP headers to keep in the same way, for ``get_http_headers()``.

    Raises:
        ValueError: The mode or the policy is unknown, or a number is out of its range.
        TypeError: ``needs_headers`` is one string.
    """

    ttl: timedelta | Default | None = DEFAULT
    on_crash: OnCrash | Literal["fail", "retry", "ask"] = OnCrash.FAIL
    max_attempts: int | None = None
    input_first: bool = False
    needs_token: bool = False
    needs_headers: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.needs_headers, str):
            raise TypeError("needs_headers takes a sequence of names, not one string.")
        _policy_of(self)

    def validate_function(self, fn: Callable[..., object], name: str) -> None:
        """Take every function: FastMCP runs synchronous ones in a thread."""


class TasksExtension(ServerExtension):
    """Runs tools that are declared with ``task=`` as durable tasks, answers requests about them, and pushes changes.

    ::

        mcp = FastMCP("reports")
        mcp.add_extension(TasksExtension(url="sqlite:///tasks.db"))

        @mcp.tool(task=True)
        async def generate_report(topic: str, ctx: Context) -> str: ...

    A tool that *returns* its questions (``InputRequiredResult``) ends with them: its task waits in the database, holds
    no process, and the last answer has the tool called again, by whatever server process of that name takes it first.
    A tool that *awaits* an answer (``ctx.elicit()``) waits in its process.

    The server's middleware sees the call that makes the task, and none of the tool's later runs.

    Args:
        url: URL of a database, opened and closed with the server's lifespan; or an open store, left open.
        options: Options for opening a URL; ``server`` is the FastMCP server's name when they leave it open, and
            ``fastmcp`` for a server that was given none.
        resolve_auth: Says whose request this is, in place of the rules below; None is "no auth context".
        default_ttl: Lifetime of the tasks of tools that name none; left out, the store's default.
        drain: How long running tasks may go on when the server stops; what still runs then is failed.
        compat: As for ``taskstore.adapters.mcp_v2.TasksExtension``; so is ``result_mode``.

    Whose request it is, without ``resolve_auth``: that of the access token's client, issuer and subject; on stdio
    and in process that of the local user; over HTTP without authorization nobody's, so that the task's id is all
    that protects it. A server with authorization refuses a request without a token.

    Raises:
        ValueError: ``options`` were given for a store that is already open, a duration is not positive, or a mode is
            unknown or without ``lesson``.
    """

    identifier = IDENTIFIER

    def __init__(
        self,
        url: str | TaskStore,
        *,
        options: StoreOptions | None = None,
        resolve_auth: ResolveAuth | None = None,
        default_ttl: timedelta | Default | None = DEFAULT,
        drain: timedelta = timedelta(seconds=5),
        compat: Compat | None = None,
        result_mode: ResultMode = "block",
    ) -> None:
        check_options(url, options)
        check_span("default_ttl", default_ttl)
        self._url = url
        self._options = options
        self._default_ttl = default_ttl
        self._drain = drain
        self._requests = TaskRequests(
            store=lambda: self.store,
            runner=lambda: self._now_open()[1],
            mode_of=self._mode_of,
            serves_legacy=lambda: True,
            demands_token=lambda: self.server.auth is not None,
            access_token=get_access_token,
            resolve_auth=resolve_auth,
            compat=compat,
            result_mode=result_mode,
            middleware=_Legacy,
        )
        self._legacy = self._requests.legacy
        self._listen = TaskListenMiddleware(self._requests.admit_listener)
        self._opened: tuple[TaskStore, TaskRunner] | None = None

    @property
    def store(self) -> TaskStore:
        """The open store.

        Raises:
            MCPError: The server's lifespan is not running.
        """
        return self._now_open()[0]

    def methods(self) -> Sequence[MethodBinding]:
        """Bind the requests about tasks; under protocol versions that have none they are unknown."""
        return [
            # The handler itself reads the params: the missing capability must be reported before bad params.
            MethodBinding(method=method, params_type=RequestParams, handler=handler, protocol_versions=TASK_VERSIONS)
            for method, handler in self._requests.handlers().items()
        ]

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Open the store, and take up what other processes have left, for as long as the server runs."""
        store_progress()
        add_middleware(self.server, self._listen)
        add_middleware(self.server, self._legacy)
        async with open_store(self._url, self._options, name_of(self.server)) as store:
            runner = TaskRunner(store, rerun=_Rerun(self.server, self._legacy))
            self._opened = store, runner
            try:
                yield
            finally:
                await runner.close(self._drain)
                self._legacy.close()
                self._opened = None

    async def intercept_tool_call(
        self, params: CallToolRequestParams, context: Context, call_next: ToolCallContinuation
    ) -> ToolCallOutcome:
        """Run the call as a task when the tool's configuration and the client allow it, else inline."""
        ctx = sdk_context(context)
        tool = await find_tool(self.server, params)
        policy = None if tool is None else _policy_of(tool.task_config, self._default_ttl)
        if tool is None or policy is None:
            return await call_next()
        if ctx is None or not is_client_call():
            if policy.mode == "required" and not is_in_task():
                raise ToolError(f"Tool {params.name} runs only as a task, and only a client can ask for that.")
            return await call_next()
        if not self._requests.must_be_task(policy, params, ctx):
            return await call_next()
        session_id, config = context.session_id, tool.task_config
        headers = (
            kept_headers(config.needs_headers) if isinstance(config, TaskConfig) and config.needs_headers else None
        )

        async def call(handle: TaskHandle, inside: ServerRequestContext) -> HandlerResult:
            return await call_in_task(self.server, params, inside, handle, tool=tool, session_id=session_id)

        created = await self._requests.run_as_task(call, policy, params, ctx, headers=headers)
        # The empty result is nobody's: the middleware answers with the task.
        return ToolResult(content=[]) if created is None else _CreatedTask(dict(created))

    async def _mode_of(self, tool_name: str) -> TaskMode | None:
        tool = await find_tool(self.server, CallToolRequestParams(name=tool_name))
        mode = "forbidden" if tool is None else tool.task_config.mode
        return None if mode == "forbidden" else mode

    def _now_open(self) -> tuple[TaskStore, TaskRunner]:
        if self._opened is None:
            raise MCPError(INTERNAL_ERROR, "TasksExtension is not open: the lifespan of its server is not running.")
        return self._opened


class _CreatedTask(RootModel[dict[str, Any]]):
    """A CreateTaskResult as it is: a model with fields would leave out the null ones, and ttlMs may be null."""


class _Legacy(LegacyMiddleware):
    async def with_task_support(self, result: HandlerResult) -> HandlerResult:
        return result  # FastMCP says it itself


@dataclass(frozen=True, slots=True)
class _Rerun:
    """Runs a server's tools again, for the tasks that the runner claims."""

    server: FastMCP[Any]
    legacy: LegacyMiddleware

    async def names(self) -> list[str]:
        return [tool.name for tool in await task_tools(self.server)]

    def work(self, claim: Claim) -> Work:
        async def work(handle: TaskHandle) -> WorkResult | WorkParked:
            async def call(inside: ServerRequestContext, params: CallToolRequestParams) -> HandlerResult:
                return await call_in_task(self.server, params, inside, handle)

            caller = claim.caller if isinstance(claim.caller, dict) else {}
            show_headers(caller.get("headers"))
            configs = [tool.task_config for tool in await task_tools(self.server) if tool.name == claim.task.name]
            return await run_again(
                call,
                claim,
                handle,
                lifespan_context={},  # Context.lifespan_context has it from the server
                creator=self.legacy.creator_of(handle.task_id),
                needs_token=any(isinstance(each, TaskConfig) and each.needs_token for each in configs),
            )

        return work


def _policy_of(config: FastMCPTaskConfig, default_ttl: timedelta | Default | None = DEFAULT) -> TaskPolicy | None:
    """Read how a tool runs as a task; None is never."""
    mode = config.mode
    if mode == "forbidden":
        return None
    if not isinstance(config, TaskConfig):
        config = TaskConfig(mode, config.poll_interval)
    return TaskPolicy(
        mode,
        default_ttl if config.ttl is DEFAULT else config.ttl,
        config.poll_interval,
        OnCrash(config.on_crash),
        config.max_attempts,
        config.input_first,
        config.needs_token,
    )
