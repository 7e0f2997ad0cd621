"""What every server on the SDK 2.x has in common, FastMCP's too, which sits on it: requests about tasks, and whose."""

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
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
    RequestParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import JsonValue

from taskstore.adapters.local import local_user
from taskstore.adapters.mcp_v2_legacy import LEGACY_VERSION, Augmentation, ask_on_stream
from taskstore.adapters.mcp_v2_policy import TaskPolicy
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
from taskstore.adapters.wire import WireObject
from taskstore.binding import AuthContext
from taskstore.errors import LimitExceededError, PayloadError, TaskStoreError
from taskstore.options import StoreOptions
from taskstore.runner import TaskRunner, Work
from taskstore.store import DEFAULT, Default, TaskStore
from taskstore.task import Task

logger = logging.getLogger("taskstore")

IDENTIFIER = "io.modelcontextprotocol/tasks"
TASK_VERSIONS = frozenset({LEGACY_VERSION, *MODERN_PROTOCOL_VERSIONS})  # all that know requests about tasks

Answer = Callable[[TaskStore, AuthContext | None, Params], Awaitable[WireObject]]
Handler = Callable[[ServerRequestContext, RequestParams], Awaitable[HandlerResult]]
ResolveAuth = Callable[[ServerRequestContext], AuthContext | None]
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
    """Answers a server's requests about tasks, and knows whose request it is.

    Args:
        store: Returns the open store; raises ``MCPError`` while there is none.
        serves_legacy: Whether clients of MCP 2025-11-25 have tasks here.
        demands_token: Whether the server has authorization.
        access_token: Returns the access token of the request at hand.
        resolve_auth: Says whose request it is, in place of the token and of the local user.
        compat: Who else is served under MCP 2025-11-25.
        result_mode: Whether tasks/result of a live task waits, or is refused.

    Raises:
        ValueError: A mode is unknown, or needs another one.
    """

    def __init__(
        self,
        *,
        store: Callable[[], TaskStore],
        serves_legacy: Callable[[], bool],
        demands_token: Callable[[], bool],
        access_token: Callable[[], AccessToken | None],
        resolve_auth: ResolveAuth | None,
        compat: Compat | None,
        result_mode: ResultMode,
    ) -> None:
        if compat not in (None, "lesson"):
            raise ValueError(f'compat must be "lesson" or None, not {compat!r}.')
        if result_mode not in ("block", "fail-fast"):
            raise ValueError(f'result_mode must be "block" or "fail-fast", not {result_mode!r}.')
        if compat is None and result_mode == "fail-fast":
            raise ValueError('result_mode="fail-fast" needs compat="lesson": MCP 2025-11-25 has tasks/result wait.')
        self._store = store
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

    def must_be_task(
        self, policy: TaskPolicy, tool_name: str, ctx: ServerRequestContext, augmentation: Augmentation | None
    ) -> bool:
        """Tell whether a call of a tool is to become a task now, as its policy and the client allow; else it is inline.

        Raises:
            MCPError: The tool runs only as a task, and this client cannot have one.
        """
        if augmentation is not None:
            return True
        if policy.mode == "optional" and not _is_declared(ctx):
            return False
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            problem = f"runs only as a task, which protocol version {ctx.protocol_version} cannot carry here"
            raise MCPError(METHOD_NOT_FOUND, f"Tool {tool_name} {problem}; use {MODERN_PROTOCOL_VERSIONS[-1]}.")
        require_client_extension(ctx, IDENTIFIER)
        return True

    def token_for(self, policy: TaskPolicy, tool_name: str) -> AccessToken | None:
        """Return the access token of this request if the tool needs it in later runs.

        Raises:
            MCPError: There is none, or it could not be kept sealed.
        """
        if not policy.needs_token:
            return None
        token = self._access_token()
        if token is None:
            raise MCPError(INVALID_REQUEST, f"Tool {tool_name} needs an access token, and the request carries none.")
        self.check_sealed(f"Tool {tool_name} keeps access tokens")
        return token

    def check_sealed(self, what: str) -> None:
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


async def start_task(
    runner: TaskRunner,
    work: Work,
    ctx: ServerRequestContext,
    *,
    auth: AuthContext | None,
    policy: TaskPolicy,
    augmentation: Augmentation | None,
    default_ttl: timedelta | Default | None,
    default_poll_interval: timedelta,
    name: str,
    request: Mapping[str, JsonValue],
    caller: Mapping[str, JsonValue],
) -> Task:
    """Make a tool call a task.

    Args:
        augmentation: What a client of MCP 2025-11-25 asks for, with a session whose id is kept.

    Raises:
        MCPError: It was not created, and the client hears why, as far as that is its business.
    """
    ttl, session_id = default_ttl if policy.ttl is DEFAULT else policy.ttl, None
    if augmentation is not None:
        ttl = ttl if augmentation.ttl is DEFAULT else augmentation.ttl
        session_id = _headers(ctx).get(MCP_SESSION_ID_HEADER)
    try:
        return await runner.start(
            work,
            auth=auth,
            ttl=ttl,
            poll_interval=policy.poll_interval or default_poll_interval,
            name=name,
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
