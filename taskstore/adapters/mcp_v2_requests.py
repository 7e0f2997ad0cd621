"""What every server on the SDK 2.x shares, FastMCP's too: calls that become tasks, requests about them, and whose."""

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

from mcp.server.auth.provider import AccessToken, principal_components
from mcp.server.context import HandlerResult, ServerRequestContext
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
    RequestParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import JsonValue

from taskstore.adapters.local import local_user
from taskstore.adapters.mcp_v2_context import run_tool, task_context
from taskstore.adapters.mcp_v2_legacy import LEGACY_VERSION, AugmentedContext, LegacyMiddleware, ask_on_stream
from taskstore.adapters.mcp_v2_policy import TaskMode, TaskPolicy
from taskstore.adapters.mcp_v2_rerun import caller_of, request_of
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
from taskstore.runner import TaskRunner, WorkParked, WorkResult
from taskstore.store import DEFAULT, TaskStore

logger = logging.getLogger("taskstore")

IDENTIFIER = "io.modelcontextprotocol/tasks"
TASK_VERSIONS = frozenset({LEGACY_VERSION, *MODERN_PROTOCOL_VERSIONS})  # all that know requests about tasks

Answer = Callable[[TaskStore, AuthContext | None, Params], Awaitable[WireObject]]
Handler = Callable[[ServerRequestContext, RequestParams], Awaitable[HandlerResult]]
ResolveAuth = Callable[[ServerRequestContext], AuthContext | None]
CallInTask = Callable[[TaskHandle, ServerRequestContext], Awaitable[HandlerResult]]
Compat = Literal["lesson"]
ResultMode = Literal["block", "fail-fast"]

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


class TaskRequests:
    """Makes a server's tool calls tasks, answers its requests about tasks, and knows whose request it is.

    Args:
        store: Returns the open store; raises ``MCPError`` while there is none.
        runner: Returns the runner of its tasks.
        mode_of: Says how the tool of a name runs as a task; None is never.
        serves_legacy: Whether clients of MCP 2025-11-25 have tasks here.
        demands_token: Whether the server has authorization.
        access_token: Returns the access token of the request at hand.
        resolve_auth: Says whose request it is, in place of the token and of the local user.
        compat: Who else is served under MCP 2025-11-25.
        result_mode: Whether tasks/result of a live task waits, or is refused.
        middleware: The type of ``legacy``, which serves clients of MCP 2025-11-25.

    Raises:
        ValueError: A mode is unknown, or needs another one.
    """

    def __init__(
        self,
        *,
        store: Callable[[], TaskStore],
        runner: Callable[[], TaskRunner],
        mode_of: Callable[[str], Awaitable[TaskMode | None]],
        serves_legacy: Callable[[], bool],
        demands_token: Callable[[], bool],
        access_token: Callable[[], AccessToken | None],
        resolve_auth: ResolveAuth | None,
        compat: Compat | None,
        result_mode: ResultMode,
        middleware: type[LegacyMiddleware] = LegacyMiddleware,
    ) -> None:
        if compat not in (None, "lesson"):
            raise ValueError(f'compat must be "lesson" or None, not {compat!r}.')
        if result_mode not in ("block", "fail-fast"):
            raise ValueError(f'result_mode must be "block" or "fail-fast", not {result_mode!r}.')
        if compat is None and result_mode == "fail-fast":
            raise ValueError('result_mode="fail-fast" needs compat="lesson": MCP 2025-11-25 has tasks/result wait.')
        self.legacy = middleware(mode_of, self.tells_apart, lesson=compat == "lesson")
        self._store, self._runner = store, runner
        self._serves_legacy = serves_legacy
        self._demands_token = demands_token
        self._access_token = access_token
        self._resolve_auth = resolve_auth
        self._answers = {**_ANSWERS, **(_LESSON_ANSWERS if compat == "lesson" else {})}
        if result_mode == "fail-fast":
            self._answers["tasks/result"] = (None, lesson_task_result)

    def handlers(self) -> Mapping[str, Handler]:
        """Map each method to its handler, which reads the raw params; for the versions of ``TASK_VERSIONS``."""
        return {method: functools.partial(self._answer, *answers) for method, answers in self._answers.items()}

    def admit_listener(self, ctx: ServerRequestContext) -> tuple[TaskStore, AuthContext | None]:
        """Check a request for notifications of tasks, and say which store and whose tasks are meant."""
        require_client_extension(ctx, IDENTIFIER)
        return self._store(), self.auth_of(ctx)

    def auth_of(self, ctx: ServerRequestContext) -> AuthContext | None:
        """Say whose request this is.

        Raises:
            MCPError: It carries no token, or one that names nobody, and the server has authorization.
        """
        if self._resolve_auth is not None:
            return self._resolve_auth(ctx)
        token = self._access_token()
        if token is not None:
            client_id, issuer, subject = principal_components(token)
            if not client_id:
                raise MCPError(INVALID_REQUEST, "The access token names no client, so it cannot own tasks.")
            # A verifier may leave the subject to the claims; two users of one client must not share their tasks.
            subject = subject or str((token.claims or {}).get("sub") or "")
            return AuthContext(client_id=client_id, issuer=issuer or None, subject=subject or None)
        if ctx.request is None:  # no HTTP request: stdio, or a client in this process
            return local_user()
        if self._demands_token():
            raise MCPError(INVALID_REQUEST, "This server's tasks need an access token, and the request carries none.")
        return None

    def tells_apart(self, ctx: ServerRequestContext) -> bool:
        """Tell whether the requestor has an auth context, and so a list of its own."""
        try:
            return self.auth_of(ctx) is not None
        except MCPError:  # its requests about tasks will be refused alike
            return False

    def must_be_task(self, policy: TaskPolicy, params: CallToolRequestParams, ctx: ServerRequestContext) -> bool:
        """Tell whether a call of a tool is to become a task now, as its policy and the client allow; else it is inline.

        Raises:
            MCPError: The tool runs only as a task, and this client cannot have one.
        """
        if isinstance(ctx, AugmentedContext):
            return True
        if policy.mode == "optional" and not _is_declared(ctx):
            return False
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            problem = f"runs only as a task, which protocol version {ctx.protocol_version} cannot carry here"
            raise MCPError(METHOD_NOT_FOUND, f"Tool {params.name} {problem}; use {MODERN_PROTOCOL_VERSIONS[-1]}.")
        require_client_extension(ctx, IDENTIFIER)
        is_first = params.input_responses is None and params.request_state is None
        return not (policy.input_first and is_first)

    async def run_as_task(
        self,
        call: CallInTask,
        policy: TaskPolicy,
        params: CallToolRequestParams,
        ctx: ServerRequestContext,
        *,
        headers: Mapping[str, JsonValue] | None = None,
    ) -> WireObject | None:
        """Make a tool call a task, which runs from then on.

        Args:
            call: Calls the tool, once or more, in the context that it gets inside the task.
            headers: Those of the request that the tool needs in later runs; None if it needs none.

        Returns:
            The CreateTaskResult; None for a client of MCP 2025-11-25, which the middleware answers with the task.

        Raises:
            MCPError: It was not created, and the client hears why, as far as that is its business.
        """
        augmentation = ctx.augmentation if isinstance(ctx, AugmentedContext) else None
        auth = self.auth_of(ctx)
        # Before anything runs: the work may change the params.
        request, caller = request_of(params), caller_of(ctx, self._token_for(policy, params.name))
        if headers is not None:
            self._check_sealed(f"Tool {params.name} keeps headers")
            caller["headers"] = dict(headers)
        ttl, session_id = policy.ttl, None
        if augmentation is not None:
            ttl = ttl if augmentation.ttl is DEFAULT else augmentation.ttl
            session_id = _headers(ctx).get(MCP_SESSION_ID_HEADER)

        async def work(handle: TaskHandle) -> WorkResult | WorkParked:
            if augmentation is not None:
                self.legacy.follow(ctx, self._store(), auth, handle.task_id)
            inside = task_context(ctx, handle, self.legacy.creator_of(handle.task_id))
            return await run_tool(params, inside, functools.partial(call, handle))

        try:
            task = await self._runner().start(
                work,
                auth=auth,
                ttl=ttl,
                poll_interval=policy.poll_interval,
                name=params.name,
                request=request,
                session_id=session_id,
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
            return create_task_result(task)
        augmentation.task = task
        return None

    def _token_for(self, policy: TaskPolicy, tool_name: str) -> AccessToken | None:
        """Return the access token of this request if the tool needs it in later runs.

        Raises:
            MCPError: There is none, or it could not be kept sealed.
        """
        if not policy.needs_token:
            return None
        token = self._access_token()
        if token is None:
            raise MCPError(INVALID_REQUEST, f"Tool {tool_name} needs an access token, and the request carries none.")
        self._check_sealed(f"Tool {tool_name} keeps access tokens")
        return token

    def _check_sealed(self, what: str) -> None:
        """Refuse to keep secrets in a store that does not seal them.

        Raises:
            MCPError: It does not.
        """
        if not self._store().seals:
            problem = f"{what}, so its store needs StoreOptions(keys=...)."
            logger.error("%s", problem)
            raise MCPError(INTERNAL_ERROR, problem)

    async def _answer(
        self, modern: Answer | None, legacy: Answer | None, ctx: ServerRequestContext, _: RequestParams
    ) -> HandlerResult:
        """Check capability, routing header and auth context, in this order, then answer one request."""
        is_modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
        answer = modern if is_modern else legacy
        if answer is None or not (is_modern or self._serves_legacy()):
            raise MCPError(METHOD_NOT_FOUND, "Method not found", ctx.method)
        params: Mapping[str, JsonValue] = ctx.params or {}
        if answer is legacy_task_result:
            answer = functools.partial(legacy_task_result, ask=ask_on_stream(ctx))
        if is_modern:
            require_client_extension(ctx, IDENTIFIER)
            if ctx.request is not None and _routed_to(ctx) != params.get("taskId"):
                raise MCPError(HEADER_MISMATCH, "The Mcp-Name header must be params.taskId.")
        try:
            # A dict, since the SDK leaves out the null fields of a model, and ttlMs may be null.
            return dict(await answer(self._store(), self.auth_of(ctx), params))
        except RequestError as refusal:
            raise MCPError(refusal.code, refusal.message, refusal.data) from refusal
        except TaskStoreError as problem:
            raise _internal_error(ctx.method) from problem


@asynccontextmanager
async def open_store(store: str | TaskStore, options: StoreOptions | None, server: str) -> AsyncIterator[TaskStore]:
    """Open the store at a URL, for a server of this name if the options have none; an open store is left open."""
    if isinstance(store, TaskStore):
        yield store
        return
    options = options or StoreOptions()
    async with TaskStore.open(store, options=replace(options, server=options.server or server)) as opened:
        yield opened


def check_options(store: str | TaskStore, options: StoreOptions | None) -> None:
    """Refuse options for a store that is open.

    Raises:
        ValueError: There are some.
    """
    if options is not None and isinstance(store, TaskStore):
        raise ValueError("options are for opening a URL; an open TaskStore already has its own.")


def _is_declared(ctx: ServerRequestContext) -> bool:
    """Tell whether this very request declares the extension; what earlier ones declared does not count."""
    declared = ctx.session.client_capabilities
    return (
        ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
        and declared is not None
        and IDENTIFIER in (declared.extensions or {})
    )


def _internal_error(method: str) -> MCPError:
    """Log the problem at hand and make the error that tells nothing of it; the SDK's own would have code 0 in 2025."""
    logger.exception("%s could not be answered.", method)
    return MCPError(INTERNAL_ERROR, "Internal server error")


def _routed_to(ctx: ServerRequestContext) -> str | None:
    return decode_header_value(_headers(ctx).get(MCP_NAME_HEADER))


def _headers(ctx: ServerRequestContext) -> Mapping[str, str]:
    headers: Mapping[str, str] = getattr(ctx.request, "headers", {})
    return headers
