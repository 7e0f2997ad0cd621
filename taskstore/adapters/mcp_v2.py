"""TasksExtension: tasks for a server on the official Python SDK, 2.x.

Serves the extension io.modelcontextprotocol/tasks of MCP 2026-07-28 and, beside it and from the same rows, the tasks of
MCP 2025-11-25. Under older protocol versions tools run inline.
"""

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, overload

import anyio
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, principal_components
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.server import require_client_extension
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER
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

from taskstore.adapters.local import local_user
from taskstore.adapters.mcp_v2_client import PolledTask, RemoteTask, TaskCancelledError, TasksClient
from taskstore.adapters.mcp_v2_context import run_tool, task_context
from taskstore.adapters.mcp_v2_legacy import (
    LEGACY_VERSION,
    AugmentedContext,
    LegacyMiddleware,
    ask_on_stream,
)
from taskstore.adapters.mcp_v2_listen import serve_tasks_on_listen
from taskstore.adapters.mcp_v2_policy import TaskMode, TaskPolicies, TaskPolicy, check_span
from taskstore.adapters.mcp_v2_rerun import RerunContext, caller_of, request_of, run_again, token_of
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
    lesson_cancel_task,
    lesson_get_task,
    lesson_task_result,
    lesson_task_status,
    update_task,
)
from taskstore.adapters.wire import WireObject, create_task_result
from taskstore.binding import AuthContext
from taskstore.errors import LimitExceededError, PayloadError, TaskStoreError
from taskstore.handle import TaskHandle
from taskstore.options import StoreOptions
from taskstore.runner import TaskRunner, Work, WorkError, WorkParked, WorkResult
from taskstore.store import DEFAULT, Default, TaskStore
from taskstore.task import Claim, OnCrash

__all__ = ["PolledTask", "RemoteTask", "TaskCancelledError", "TasksClient", "TasksExtension"]

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
_LESSON_ANSWERS: Mapping[str, tuple[Answer | None, Answer | None]] = {
    "tasks/get": (get_task, lesson_get_task),
    "tasks/status": (None, lesson_task_status),
    "tasks/cancel": (cancel_task, lesson_cancel_task),
}


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
        compat: Literal["lesson"] | None = None,
        result_mode: Literal["block", "fail-fast"] = "block",
    ) -> None:
        if compat not in (None, "lesson"):
            raise ValueError(f'compat must be "lesson" or None, not {compat!r}.')
        if result_mode not in ("block", "fail-fast"):
            raise ValueError(f'result_mode must be "block" or "fail-fast", not {result_mode!r}.')
        if compat is None and result_mode == "fail-fast":
            raise ValueError('result_mode="fail-fast" needs compat="lesson": MCP 2025-11-25 has tasks/result wait.')
        if options is not None and isinstance(store, TaskStore):
            raise ValueError("options are for opening a URL; an open TaskStore already has its own.")
        check_span("default_ttl", default_ttl)
        check_span("default_poll_interval", default_poll_interval)
        self._store = store
        self._options = options
        self._resolve_auth = resolve_auth
        self._default_ttl = default_ttl
        self._default_poll_interval = default_poll_interval
        self._drain = drain
        self._policies = TaskPolicies()
        self._answers = {**_ANSWERS, **(_LESSON_ANSWERS if compat == "lesson" else {})}
        if result_mode == "fail-fast":
            self._answers["tasks/result"] = (None, lesson_task_result)
        self.legacy = LegacyMiddleware(self._mode_of, self._tells_apart, lesson=compat == "lesson")
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
        policy = TaskPolicy(mode, ttl, poll_interval, OnCrash(on_crash), max_attempts, input_first, needs_token)

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
                handler=functools.partial(self._answer, *answers),
                protocol_versions=frozenset({LEGACY_VERSION, *MODERN_PROTOCOL_VERSIONS}),
            )
            for method, answers in self._answers.items()
        ]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: ServerRequestContext, call_next: CallNext
    ) -> HandlerResult:
        """Run the call as a task when the tool's policy and the client allow it, else inline."""
        if isinstance(ctx, RerunContext):
            return await call_next(ctx)  # there is a task already, and this is its work
        policy = self._policy_of(params.name)
        augmentation = ctx.augmentation if isinstance(ctx, AugmentedContext) else None
        if policy is None or (policy.mode == "optional" and augmentation is None and not self._is_declared(ctx)):
            return await call_next(ctx)
        if augmentation is None:
            if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
                problem = f"runs only as a task, which protocol version {ctx.protocol_version} cannot carry here"
                raise MCPError(METHOD_NOT_FOUND, f"Tool {params.name} {problem}; use {MODERN_PROTOCOL_VERSIONS[-1]}.")
            require_client_extension(ctx, self.identifier)
            if policy.input_first and params.input_responses is None and params.request_state is None:
                return await call_next(ctx)
        ttl = self._default_ttl if policy.ttl is DEFAULT else policy.ttl
        if augmentation is not None and augmentation.ttl is not DEFAULT:
            ttl = augmentation.ttl

        auth = self._auth_of(ctx)
        # Before anything runs: the work may change the params.
        request, caller = request_of(params), caller_of(ctx, self._token_for(policy, params.name))

        async def work(handle: TaskHandle) -> WorkResult | WorkParked:
            if augmentation is not None:
                self.legacy.follow(ctx, self.store, auth, handle.task_id)
            return await run_tool(params, task_context(ctx, handle, self.legacy.creator_of(handle.task_id)), call_next)

        try:
            task = await self._now_serving().runner.start(
                work,
                auth=auth,
                ttl=ttl,
                poll_interval=policy.poll_interval or self._default_poll_interval,
                name=params.name,
                request=request,
                session_id=None if augmentation is None else _headers(ctx).get(MCP_SESSION_ID_HEADER),
                on_crash=policy.on_crash,
                max_attempts=policy.max_attempts,
                caller=caller,
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

    def _admit_listener(self, ctx: ServerRequestContext) -> tuple[TaskStore, AuthContext | None]:
        require_client_extension(ctx, self.identifier)
        return self.store, self._auth_of(ctx)

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
            return local_user()
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
        return self._policies.find(self._now_serving().server, tool_name) if self._policies else None

    def _token_for(self, policy: TaskPolicy, tool_name: str) -> AccessToken | None:
        """Return the access token of this request if the tool needs it in later runs."""
        if not policy.needs_token:
            return None
        token = get_access_token()
        if token is None:
            raise MCPError(INVALID_REQUEST, f"Tool {tool_name} needs an access token, and the request carries none.")
        if not self.store.seals:
            problem = f"Tool {tool_name} keeps access tokens, so its store needs StoreOptions(keys=...)."
            logger.error("%s", problem)
            raise MCPError(INTERNAL_ERROR, problem)
        return token

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
            if isinstance(self._store, TaskStore):
                store = self._store
            else:
                options = self._options or StoreOptions()
                options = replace(options, server=options.server or server.name)
                store = await stack.enter_async_context(TaskStore.open(self._store, options=options))
            serve_tasks_on_listen(server, self._admit_listener)
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

    def names(self) -> list[str]:
        return self.policies.names(self.server)

    def work(self, claim: Claim) -> Work:
        async def work(handle: TaskHandle) -> WorkResult | WorkParked:
            name = claim.task.name or ""
            policy = self.policies.find(self.server, name)
            if policy is not None and policy.needs_token and token_of(claim) is None:
                raise WorkError(INTERNAL_ERROR, f"Tool {name} needs its caller's access token, which was not kept.")
            lifespan_context = next(iter(self.lifespan_contexts.values()))
            creator = self.legacy.creator_of(handle.task_id)
            return await run_again(self.server, claim, handle, lifespan_context, creator)

        return work


def _internal_error(method: str) -> MCPError:
    """Log the problem at hand and make the error that tells nothing of it; the SDK's own would have code 0 in 2025."""
    logger.exception("%s could not be answered.", method)
    return MCPError(INTERNAL_ERROR, "Internal server error")


def _routed_to(ctx: ServerRequestContext) -> str | None:
    return decode_header_value(_headers(ctx).get(MCP_NAME_HEADER))


def _headers(ctx: ServerRequestContext) -> Mapping[str, str]:
    headers: Mapping[str, str] = getattr(ctx.request, "headers", {})
    return headers
