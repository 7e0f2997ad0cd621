"""TasksExtension: tasks for a server on the official Python SDK, 2.x.

Serves the extension io.modelcontextprotocol/tasks of MCP 2026-07-28 and, beside it and from the same rows, the tasks of
MCP 2025-11-25. Under older protocol versions tools run inline.
"""

import functools
import getpass
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, overload

import anyio
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import principal_components
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.server import require_client_extension
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types import (
    HEADER_MISMATCH,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    CallToolRequestParams,
    CallToolResult,
    RequestParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import JsonValue

from taskstore.adapters.mcp_v2_context import task_context, work_result
from taskstore.adapters.mcp_v2_legacy import (
    LEGACY_VERSION,
    AugmentedContext,
    LegacyMiddleware,
    TaskMode,
    ask_on_stream,
)
from taskstore.adapters.requests import (
    LIMIT_EXCEEDED,
    Params,
    RequestError,
    cancel_task,
    get_task,
    legacy_cancel_task,
    legacy_get_task,
    legacy_list_tasks,
    legacy_task_result,
    update_task,
)
from taskstore.adapters.wire import WireObject, create_task_result
from taskstore.binding import AuthContext
from taskstore.errors import LimitExceededError, PayloadError, TaskStoreError
from taskstore.handle import TaskHandle
from taskstore.options import StoreOptions
from taskstore.runner import TaskRunner, WorkError, WorkResult
from taskstore.store import DEFAULT, Default, TaskStore
from taskstore.task import OnCrash

if sys.platform != "win32":
    import pwd

logger = logging.getLogger("taskstore")

ResolveAuth = Callable[[ServerRequestContext], AuthContext | None]

ToolT = TypeVar("ToolT", bound=Callable[..., object])
LifespanT = TypeVar("LifespanT")
Lifespan = Callable[[MCPServer[LifespanT]], AbstractAsyncContextManager[LifespanT]]
Answer = Callable[[TaskStore, AuthContext | None, Params], Awaitable[WireObject]]

# Per request how each generation answers it; None: it has no such request.
_ANSWERS: Mapping[str, tuple[Answer | None, Answer | None]] = {
    "tasks/get": (get_task, legacy_get_task),
    "tasks/update": (update_task, None),
    "tasks/result": (None, legacy_task_result),
    "tasks/list": (None, legacy_list_tasks),
    "tasks/cancel": (cancel_task, legacy_cancel_task),
}


@dataclass(frozen=True, slots=True)
class TaskPolicy:
    """How a tool runs as a task; bound to the tool's function, so that no rename loses it."""

    tool: Callable[..., object]
    mode: TaskMode
    ttl: timedelta | Default | None
    poll_interval: timedelta | None
    on_crash: OnCrash


@dataclass(frozen=True, slots=True)
class _Serving:
    """What exists while the server's lifespan lasts."""

    server: MCPServer[Any]
    store: TaskStore
    runner: TaskRunner
    closing: AsyncExitStack


class TasksExtension(Extension):
    """Runs decorated tools as durable tasks and answers tasks/get, tasks/update and tasks/cancel.

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

    Whose request it is, without ``resolve_auth``: that of the access token's client, issuer and subject; on stdio
    and in process that of the local user; over HTTP without authorization nobody's, so that the task's id is all
    that protects it. A server with authorization refuses a request without a token. Behind authentication that
    is not the SDK's, and over a transport of your own, give ``resolve_auth``.

    Raises:
        ValueError: ``options`` were given for a store that is already open, or a duration is not positive.
    """

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(
        self,
        store: str | TaskStore,
        *,
        options: StoreOptions | None = None,
        resolve_auth: ResolveAuth | None = None,
        default_ttl: timedelta | Default | None = DEFAULT,
        default_poll_interval: timedelta = timedelta(seconds=1),
        drain: timedelta = timedelta(seconds=5),
    ) -> None:
        if options is not None and isinstance(store, TaskStore):
            raise ValueError("options are for opening a URL; an open TaskStore already has its own.")
        _check_span("default_ttl", default_ttl)
        _check_span("default_poll_interval", default_poll_interval)
        self._store = store
        self._options = options
        self._resolve_auth = resolve_auth
        self._default_ttl = default_ttl
        self._default_poll_interval = default_poll_interval
        self._drain = drain
        self._policies: dict[int, TaskPolicy] = {}  # by id(); each policy holds its function, so no id comes again
        self.legacy = LegacyMiddleware(self._mode_of, self._tells_apart)
        self._gate = anyio.Lock()
        self._users = 0
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
        on_crash: OnCrash | Literal["fail"] = OnCrash.FAIL,
    ) -> Callable[[ToolT], ToolT]:
        """Let a tool run as a task; stands below ``@server.tool()`` and returns the function unchanged.

        Args:
            mode: ``required`` refuses clients that did not declare the extension (-32021); for them an
                ``optional`` tool runs inline.
            ttl: Lifetime from creation; None is unlimited; left out, the extension's default.
            poll_interval: How often clients are asked to poll; None is the extension's default.
            on_crash: What recovery does when the server dies; ``fail`` ends the task with an honest error.

        Raises:
            ValueError: The mode or the policy is unknown, or a duration is not positive.
        """
        if mode not in ("optional", "required"):
            raise ValueError(f'mode must be "optional" or "required", not {mode!r}; write @tasks.task() with brackets.')
        _check_span("ttl", ttl)
        _check_span("poll_interval", poll_interval)

        def bind(tool: ToolT) -> ToolT:
            self._policies[id(tool)] = TaskPolicy(tool, mode, ttl, poll_interval, OnCrash(on_crash))
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
            return self._serve(argument)
        own = argument

        @asynccontextmanager
        async def composed(server: MCPServer[LifespanT]) -> AsyncIterator[LifespanT]:
            async with own(server) as context, self._serve(server):
                yield context

        return composed

    def methods(self) -> list[MethodBinding]:
        """Bind the requests about tasks; under protocol versions that have none they are unknown."""
        return [
            MethodBinding(
                method=method,
                # The handler itself reads the params: the missing capability must be reported before bad params.
                params_type=RequestParams,
                handler=functools.partial(self._answer, *answers),
                protocol_versions=frozenset({LEGACY_VERSION, *MODERN_PROTOCOL_VERSIONS}),
            )
            for method, answers in _ANSWERS.items()
        ]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: ServerRequestContext, call_next: CallNext
    ) -> HandlerResult:
        """Run the call as a task when the tool's policy and the client allow it, else inline."""
        policy = self._policy_of(params.name)
        augmentation = ctx.augmentation if isinstance(ctx, AugmentedContext) else None
        if policy is None or (policy.mode == "optional" and augmentation is None and not self._is_declared(ctx)):
            return await call_next(ctx)
        if augmentation is None:
            if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
                problem = f"runs only as a task, which protocol version {ctx.protocol_version} cannot carry here"
                raise MCPError(METHOD_NOT_FOUND, f"Tool {params.name} {problem}; use {MODERN_PROTOCOL_VERSIONS[-1]}.")
            require_client_extension(ctx, self.identifier)
        ttl = self._default_ttl if policy.ttl is DEFAULT else policy.ttl
        if augmentation is not None and augmentation.ttl is not DEFAULT:
            ttl = augmentation.ttl

        auth = self._auth_of(ctx)

        async def work(handle: TaskHandle) -> WorkResult:
            if augmentation is not None:
                self.legacy.follow(ctx, self.store, auth, handle.task_id)
            inside = task_context(ctx, handle, self.legacy.creator_of(handle.task_id))
            try:
                return work_result(await call_next(inside), params.name, ctx.protocol_version)
            except MCPError as error:
                raise WorkError(error.code, error.message, error.data) from error

        try:
            task = await self._now_serving().runner.start(
                work,
                auth=auth,
                ttl=ttl,
                poll_interval=policy.poll_interval or self._default_poll_interval,
                name=params.name,
                request={"name": params.name, "arguments": params.arguments or {}},
            )
        except PayloadError as refusal:
            raise MCPError(INVALID_PARAMS, str(refusal)) from refusal
        except LimitExceededError as refusal:
            raise MCPError(INTERNAL_ERROR, str(refusal), {"reason": LIMIT_EXCEEDED}) from refusal
        except TaskStoreError as problem:
            raise _internal_error(ctx.method) from problem
        if augmentation is None:
            return dict(create_task_result(task))
        augmentation.task = task
        return CallToolResult(content=[])  # nobody's: the middleware answers with the task

    async def _answer(
        self, modern: Answer | None, legacy: Answer | None, ctx: ServerRequestContext, _: RequestParams
    ) -> HandlerResult:
        """Check capability, routing header and auth context, in this order, then answer one request."""
        is_modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
        answer = modern if is_modern else legacy
        if answer is None or not (is_modern or self.legacy in self._now_serving().server.middleware):
            raise MCPError(METHOD_NOT_FOUND, "Method not found", ctx.method)
        params: Mapping[str, JsonValue] = ctx.params or {}
        if answer is legacy_task_result:
            answer = functools.partial(legacy_task_result, ask=ask_on_stream(ctx))
        if is_modern:
            require_client_extension(ctx, self.identifier)
            if ctx.request is not None and _routed_to(ctx) != params.get("taskId"):
                raise MCPError(HEADER_MISMATCH, "The Mcp-Name header must be params.taskId.")
        try:
            # A dict, since the SDK leaves out the null fields of a model, and ttlMs may be null.
            return dict(await answer(self.store, self._auth_of(ctx), params))
        except RequestError as refusal:
            raise MCPError(refusal.code, refusal.message, refusal.data) from refusal
        except TaskStoreError as problem:
            raise _internal_error(ctx.method) from problem

    def _is_declared(self, ctx: ServerRequestContext) -> bool:
        """Tell whether this very request declares the extension; what earlier ones declared does not count."""
        declared = ctx.session.client_capabilities
        return (
            ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
            and declared is not None
            and self.identifier in (declared.extensions or {})
        )

    def _auth_of(self, ctx: ServerRequestContext) -> AuthContext | None:
        if self._resolve_auth is not None:
            return self._resolve_auth(ctx)
        token = get_access_token()
        if token is not None:
            client_id, issuer, subject = principal_components(token)
            if not client_id:
                raise MCPError(INVALID_REQUEST, "The access token names no client, so it cannot own tasks.")
            return AuthContext(client_id=client_id, issuer=issuer or None, subject=subject or None)
        if ctx.request is None:  # no HTTP request: stdio, or a client in this process
            return AuthContext(issuer="local", subject=_local_user())
        if self._now_serving().server.settings.auth is not None:
            raise MCPError(INVALID_REQUEST, "This server's tasks need an access token, and the request carries none.")
        return None

    def _tells_apart(self, ctx: ServerRequestContext) -> bool:
        try:
            return self._auth_of(ctx) is not None
        except MCPError:  # its requests about tasks will be refused alike
            return False

    def _mode_of(self, tool_name: str) -> TaskMode | None:
        policy = self._policy_of(tool_name)
        return None if policy is None else policy.mode

    def _policy_of(self, tool_name: str) -> TaskPolicy | None:
        """Find the policy of a registered tool's function, through whatever wraps the decorated one."""
        if not self._policies:
            return None
        # Private, for want of a public way from a tool's name to its function.
        tool = self._now_serving().server._tool_manager.get_tool(tool_name)
        function: object = None if tool is None else tool.fn
        while function is not None:
            if (policy := self._policies.get(id(function))) is not None:
                return policy
            if isinstance(function, functools.partial):
                function = function.func
            else:
                function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
        return None

    def _now_serving(self) -> _Serving:
        if self._serving is None:
            raise MCPError(
                INTERNAL_ERROR,
                "TasksExtension is not open: create the server with MCPServer(..., lifespan=tasks.lifespan), "
                "or lifespan=tasks.lifespan(my_own).",
            )
        return self._serving

    @asynccontextmanager
    async def _serve(self, server: MCPServer[LifespanT]) -> AsyncIterator[dict[str, object]]:
        """Hold the store open; the first to enter opens it, the last to leave closes it.

        The SDK enters a server's lifespan once per process over HTTP, but once per connection in process.
        """
        async with self._gate:
            if self._serving is None:
                self._serving = await self._open(server)
            elif self._serving.server is not server:
                raise RuntimeError("This TasksExtension already serves another server; give each server its own.")
            self._users += 1
        try:
            yield {}
        finally:
            with anyio.CancelScope(shield=True):
                async with self._gate:
                    self._users -= 1
                    if self._users == 0:
                        serving, self._serving = self._serving, None
                        await serving.closing.aclose()

    async def _open(self, server: MCPServer[LifespanT]) -> _Serving:
        async with AsyncExitStack() as stack:
            if isinstance(self._store, TaskStore):
                store = self._store
            else:
                options = self._options or StoreOptions()
                options = replace(options, server=options.server or server.name)
                store = await stack.enter_async_context(TaskStore.open(self._store, options=options))
            stack.callback(self.legacy.close)
            runner = TaskRunner(store)
            stack.push_async_callback(runner.close, self._drain)
            return _Serving(server, store, runner, stack.pop_all())


def _check_span(name: str, span: timedelta | Default | None) -> None:
    if isinstance(span, timedelta) and span <= timedelta(0):
        raise ValueError(f"{name} must be longer than nothing, not {span}.")


def _internal_error(method: str) -> MCPError:
    """Log the problem at hand and make the error that tells nothing of it; the SDK's own would have code 0 in 2025."""
    logger.exception("%s could not be answered.", method)
    return MCPError(INTERNAL_ERROR, "Internal server error")


def _routed_to(ctx: ServerRequestContext) -> str | None:
    headers: Mapping[str, str] = getattr(ctx.request, "headers", {})
    return decode_header_value(headers.get(MCP_NAME_HEADER))


@functools.cache
def _local_user() -> str:
    """Name the user that this process runs as; not from the environment, which a parent process may change."""
    if sys.platform == "win32":
        return getpass.getuser()
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run as a uid without an entry
        return f"uid-{os.getuid()}"
