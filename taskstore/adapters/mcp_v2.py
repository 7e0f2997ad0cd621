"""TasksExtension: tasks for a server on the official Python SDK, 2.x.

Serves the extension io.modelcontextprotocol/tasks of MCP 2026-07-28 and, beside it and from the same rows, the tasks of
MCP 2025-11-25. Under older protocol versions tools run inline.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, overload

import anyio
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    CallToolRequestParams,
    CallToolResult,
    RequestParams,
)

from taskstore.adapters.mcp_v2_client import PolledTask, RemoteTask, TaskCancelledError, TasksClient
from taskstore.adapters.mcp_v2_legacy import LegacyMiddleware
from taskstore.adapters.mcp_v2_listen import serve_tasks_on_listen
from taskstore.adapters.mcp_v2_policy import TaskMode, TaskPolicies, TaskPolicy, check_span
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
from taskstore.adapters.mcp_v2_rerun import RerunContext, run_again
from taskstore.handle import TaskHandle
from taskstore.options import StoreOptions
from taskstore.runner import TaskRunner, Work, WorkParked, WorkResult
from taskstore.store import DEFAULT, Default, TaskStore
from taskstore.task import Claim, OnCrash

__all__ = ["PolledTask", "RemoteTask", "TaskCancelledError", "TasksClient", "TasksExtension"]

logger = logging.getLogger("taskstore")

ToolT = TypeVar("ToolT", bound=Callable[..., object])
LifespanT = TypeVar("LifespanT")
Lifespan = Callable[[MCPServer[LifespanT]], AbstractAsyncContextManager[LifespanT]]


@dataclass(frozen=True, slots=True)
class _Serving:
    """What exists while the server's lifespan lasts.

    Attributes:
        lifespan_contexts: What each lifespan that has been entered yields to its requests; oldest first.
    """

    server: MCPServer[Any]
    store: TaskStore
    runner: TaskRunner
    closing: AsyncExitStack
    lifespan_contexts: dict[object, object]


class TasksExtension(Extension):
    """Runs decorated tools as durable tasks, answers what is asked about them, and pushes their changes to listeners.

    ::

        tasks = TasksExtension("sqlite:///tasks.db")
        server = MCPServer("reports", extensions=[tasks], middleware=[tasks.legacy], lifespan=tasks.lifespan)

        @server.tool()
        @tasks.task(mode="required", ttl=timedelta(minutes=15))
        async def generate_report(topic: str, ctx: Context) -> str: ...

    Clients of MCP 2025-11-25 are served when the middleware ``legacy`` is in place, as the last one; without it, their
    calls run inline.

    Args:
        store: URL of a database, opened and closed with the server's lifespan; or an open store, left open.
        options: Options for opening a URL; ``server`` is the MCP server's name when they leave it open.
        resolve_auth: Says whose request this is, in place of the rules below; None is "no auth context".
        default_ttl: Lifetime of the tasks of tools that name none; left out, the store's default.
        default_poll_interval: How often clients are asked to poll.
        drain: How long running tasks may go on when the server stops; what still runs then is failed.
        compat: ``lesson`` also serves clients written after the course on SEP-1686 that calls a task's id ``id`` and
            its status ``state``: under 2025-11-25 alone, and beside its names. They ask for a task with
            ``_meta.task``, poll with tasks/status, and may cancel a finished task, which stays as it is.
        result_mode: ``fail-fast``, for ``lesson`` alone, has tasks/result of a live task refused with code 404; the
            specification has it wait. Nobody waits there then who could be asked a tool's questions.

    Whose request it is, without ``resolve_auth``: that of the access token's client, issuer and subject; on stdio
    and in process that of the local user; over HTTP without authorization nobody's, so that the task's id is all
    that protects it. A server with authorization refuses a request without a token. Behind authentication that
    is not the SDK's, and over a transport of your own, give ``resolve_auth``.

    Raises:
        ValueError: ``options`` were given for a store that is already open, a duration is not positive, or a mode is
            unknown or without ``lesson``.
    """

    identifier = IDENTIFIER

    def __init__(
        self,
        store: str | TaskStore,
        *,
        options: StoreOptions | None = None,
        resolve_auth: ResolveAuth | None = None,
        default_ttl: timedelta | Default | None = DEFAULT,
        default_poll_interval: timedelta = timedelta(seconds=1),
        drain: timedelta = timedelta(seconds=5),
        compat: Compat | None = None,
        result_mode: ResultMode = "block",
    ) -> None:
        check_options(store, options)
        check_span("default_ttl", default_ttl)
        check_span("default_poll_interval", default_poll_interval)
        self._store = store
        self._options = options
        self._default_ttl = default_ttl
        self._default_poll_interval = default_poll_interval
        self._drain = drain
        self._policies = TaskPolicies()
        self._requests = TaskRequests(
            store=lambda: self.store,
            runner=lambda: self._now_serving().runner,
            mode_of=self._mode_of,
            serves_legacy=lambda: self.legacy in self._now_serving().server.middleware,
            demands_token=lambda: self._now_serving().server.settings.auth is not None,
            access_token=get_access_token,
            resolve_auth=resolve_auth,
            compat=compat,
            result_mode=result_mode,
        )
        self.legacy = self._requests.legacy
        self._gate = anyio.Lock()
        self._serving: _Serving | None = None

    @property
    def store(self) -> TaskStore:
        """The open store.

        Raises:
            MCPError: The server's lifespan is not running.
        """
        return self._now_serving().store

    def task(
        self,
        mode: TaskMode = "optional",
        *,
        ttl: timedelta | Default | None = DEFAULT,
        poll_interval: timedelta | None = None,
        on_crash: OnCrash | Literal["fail", "retry", "ask"] = OnCrash.FAIL,
        max_attempts: int | None = None,
        input_first: bool = False,
        needs_token: bool = False,
    ) -> Callable[[ToolT], ToolT]:
        """Let a tool run as a task; stands below ``@server.tool()`` and returns the function unchanged.

        A tool that *returns* its questions (``InputRequiredResult``) ends with them: its task waits in the database,
        holds no process, and the last answer has the tool called again, by whatever server process of that name takes
        it first. A tool that *awaits* an answer (``ctx.elicit()``) waits in its process.

        Args:
            mode: ``required`` refuses clients that did not declare the extension (-32021); for them an
                ``optional`` tool runs inline. Clients of MCP 2025-11-25 choose for themselves within it.
            ttl: Lifetime from creation; None is unlimited; left out, the extension's default.
            poll_interval: How often clients are asked to poll; None is the extension's default.
            on_crash: What becomes of the task when its process dies or stops. ``fail`` ends it with an honest error;
                ``retry`` has the tool called again, which must bear that; ``ask`` asks the client whether to.
            max_attempts: How many deaths ``retry`` and ``ask`` put up with; None is 3.
            input_first: Run the first call inline, so that what the tool asks there is answered before there is a
                task (multi round-trip requests); the call that brings the answers becomes the task. For tools that
                ask before they do anything else.
            needs_token: Keep the caller's access token, sealed, for as long as the task is live, so that
                ``get_access_token()`` finds it in later runs too; a run that lacks it fails. Without this, later runs
                have no token. Needs ``StoreOptions(keys=...)``.

        Raises:
            ValueError: The mode or the policy is unknown, or a number is out of its range.
        """
        policy = TaskPolicy(
            mode,
            self._default_ttl if ttl is DEFAULT else ttl,
            self._default_poll_interval if poll_interval is None else poll_interval,
            OnCrash(on_crash),
            max_attempts,
            input_first,
            needs_token,
        )

        def bind(tool: ToolT) -> ToolT:
            self._policies.bind(tool, policy)
            return tool

        return bind

    @overload
    def lifespan(self, server: MCPServer[dict[str, object]], /) -> AbstractAsyncContextManager[dict[str, object]]: ...

    @overload
    def lifespan(self, own: Lifespan[LifespanT], /) -> Lifespan[LifespanT]: ...

    def lifespan(
        self, argument: MCPServer[dict[str, object]] | Lifespan[LifespanT], /
    ) -> AbstractAsyncContextManager[dict[str, object]] | Lifespan[LifespanT]:
        """Open the store for as long as the server runs: ``lifespan=tasks.lifespan``, or ``tasks.lifespan(my_own)``.

        A lifespan of your own is entered first and left last, so that running tasks can use what it yields.
        """
        if isinstance(argument, MCPServer):
            return self._serve_alone(argument)
        own = argument

        @asynccontextmanager
        async def composed(server: MCPServer[LifespanT]) -> AsyncIterator[LifespanT]:
            async with own(server) as context, self._serve(server, context):
                yield context

        return composed

    def methods(self) -> list[MethodBinding]:
        """Bind the requests about tasks; under protocol versions that have none they are unknown."""
        return [
            MethodBinding(
                method=method,
                # The handler itself reads the params: the missing capability must be reported before bad params.
                params_type=RequestParams,
                handler=handler,
                protocol_versions=TASK_VERSIONS,
            )
            for method, handler in self._requests.handlers().items()
        ]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: ServerRequestContext, call_next: CallNext
    ) -> HandlerResult:
        """Run the call as a task when the tool's policy and the client allow it, else inline."""
        if isinstance(ctx, RerunContext):
            return await call_next(ctx)  # there is a task already, and this is its work
        policy = self._policy_of(params.name)
        if policy is None or not self._requests.must_be_task(policy, params, ctx):
            return await call_next(ctx)

        async def call(_: TaskHandle, inside: ServerRequestContext) -> HandlerResult:
            return await call_next(inside)

        created = await self._requests.run_as_task(call, policy, params, ctx)
        # The empty result is nobody's: the middleware answers with the task.
        return CallToolResult(content=[]) if created is None else dict(created)

    async def _mode_of(self, tool_name: str) -> TaskMode | None:
        policy = self._policy_of(tool_name)
        return None if policy is None else policy.mode

    def _policy_of(self, tool_name: str) -> TaskPolicy | None:
        return self._policies.find(self._now_serving().server, tool_name) if self._policies else None

    def _now_serving(self) -> _Serving:
        if self._serving is None:
            raise MCPError(
                INTERNAL_ERROR,
                "TasksExtension is not open: create the server with MCPServer(..., lifespan=tasks.lifespan), "
                "or lifespan=tasks.lifespan(my_own).",
            )
        return self._serving

    @asynccontextmanager
    async def _serve_alone(self, server: MCPServer[Any]) -> AsyncIterator[dict[str, object]]:
        context: dict[str, object] = {}
        async with self._serve(server, context):
            yield context

    @asynccontextmanager
    async def _serve(self, server: MCPServer[Any], lifespan_context: object) -> AsyncIterator[None]:
        """Hold the store open; the first to enter opens it, the last to leave closes it.

        The SDK enters a server's lifespan once per process over HTTP, but once per connection in process.
        """
        entry = object()
        async with self._gate:
            if self._serving is None:
                self._serving = await self._open(server, {entry: lifespan_context})
            elif self._serving.server is not server:
                raise RuntimeError("This TasksExtension already serves another server; give each server its own.")
            serving = self._serving
            serving.lifespan_contexts[entry] = lifespan_context
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with self._gate:
                    if len(serving.lifespan_contexts) == 1:
                        self._serving = None
                        await serving.closing.aclose()
                    del serving.lifespan_contexts[entry]

    async def _open(self, server: MCPServer[Any], lifespan_contexts: dict[object, object]) -> _Serving:
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(open_store(self._store, self._options, server.name))
            serve_tasks_on_listen(server, self._requests.admit_listener)
            stack.callback(self.legacy.close)
            rerun = _Rerun(server, self._policies, lifespan_contexts, self.legacy)
            runner = TaskRunner(store, rerun=rerun)
            stack.push_async_callback(runner.close, self._drain)
            return _Serving(server, store, runner, stack.pop_all(), lifespan_contexts)


@dataclass(frozen=True, slots=True)
class _Rerun:
    """Runs a server's tools again, for the tasks that the runner claims."""

    server: MCPServer[Any]
    policies: TaskPolicies
    lifespan_contexts: Mapping[object, object]
    legacy: LegacyMiddleware

    async def names(self) -> list[str]:
        return self.policies.names(self.server)

    def work(self, claim: Claim) -> Work:
        async def work(handle: TaskHandle) -> WorkResult | WorkParked:
            policy = self.policies.find(self.server, claim.task.name or "")
            # Private, for want of a public way to call a tool without a request.
            entry = self.server._lowlevel_server.get_request_handler("tools/call")
            assert entry is not None, "an MCPServer always has a tools/call handler"
            return await run_again(
                entry.handler,
                claim,
                handle,
                lifespan_context=next(iter(self.lifespan_contexts.values())),
                creator=self.legacy.creator_of(handle.task_id),
                needs_token=policy is not None and policy.needs_token,
            )

        return work
