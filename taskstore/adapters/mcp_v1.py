"""enable_durable_tasks: tasks that survive, for a server on the official Python SDK 1.x (its low-level ``Server``).

Serves the tasks of MCP 2025-11-25. The SDK has the interface of a task store, but what stands around it keeps a task
to the session that created it, and its work to the session that connected last. So this registers request handlers of
its own, runs the work in a runner of its own, and gives tool calls a ``request_context.experimental`` of its own.
"""

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.experimental.task_support import TaskSupport
from mcp.server.lowlevel import Server
from mcp.server.lowlevel.server import request_ctx
from mcp.server.session import ServerSession
from mcp.shared.exceptions import McpError
from mcp.shared.message import ServerMessageMetadata
from mcp.types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    CallToolRequest,
    CallToolResult,
    CancelTaskRequest,
    ClientCapabilities,
    ElicitationCapability,
    ErrorData,
    GetTaskPayloadRequest,
    GetTaskRequest,
    ListTasksRequest,
    Result,
    SamplingCapability,
    ServerRequest,
    ServerResult,
)
from pydantic import ConfigDict, JsonValue, ValidationError

from taskstore.adapters.local import local_user
from taskstore.adapters.mcp_v1_context import Context, Creator, DurableExperimental, DurableTaskContext, Work
from taskstore.adapters.mcp_v1_store import DurableTaskStore, mcp_error, requested_ttl, work_result
from taskstore.adapters.requests import (
    LIMIT_EXCEEDED,
    Ask,
    Params,
    RequestError,
    legacy_cancel_task,
    legacy_get_task,
    legacy_list_tasks,
    legacy_task_result,
)
from taskstore.adapters.wire import WireObject
from taskstore.binding import AuthContext
from taskstore.errors import LimitExceededError, PayloadError, TaskStoreError
from taskstore.handle import TaskHandle
from taskstore.options import StoreOptions
from taskstore.runner import TaskRunner, WorkError, WorkResult
from taskstore.store import TaskStore
from taskstore.task import Task

__all__ = ["DurableTaskContext", "DurableTasks", "enable_durable_tasks"]

logger = logging.getLogger("taskstore")

ResolveAuth = Callable[[Context], AuthContext | None]
Answer = Callable[[TaskStore, AuthContext | None, Params], Awaitable[WireObject]]
T = TypeVar("T")
LifespanT = TypeVar("LifespanT")
RequestT = TypeVar("RequestT")
Lifespan = Callable[[Server[LifespanT, RequestT]], AbstractAsyncContextManager[LifespanT]]

_SESSION_ID = "mcp-session-id"


def enable_durable_tasks(
    server: Server[Any, Any],
    store: str | TaskStore,
    *,
    options: StoreOptions | None = None,
    resolve_auth: ResolveAuth | None = None,
    default_ttl: timedelta = timedelta(hours=1),
    default_poll_interval: timedelta = timedelta(seconds=1),
    drain: timedelta = timedelta(seconds=5),
) -> "DurableTasks":
    """Make the tasks of a server durable; call it once, in place of ``server.experimental.enable_tasks()``.

    ::

        server = Server("reports")
        tasks = enable_durable_tasks(server, "sqlite:///tasks.db")

    Tools stay as they are: ``request_context.experimental.run_task(work)``, with ``execution.taskSupport`` in the
    listing of the tool, which is checked here before the tool is called.

    Args:
        store: URL of a database, opened when the server starts to run; or an open store, left open.
        options: Options for opening a URL; ``server`` is the server's name when they leave it open.
        resolve_auth: Says whose request this is, in place of the rules below; None is "no auth context".
        default_ttl: Lifetime of tasks that ask for none, in place of the store's own default; always finite, since
            the SDK cannot send ``"ttl": null``, and its client refuses a task without ttl.
        default_poll_interval: How often clients are asked to poll.
        drain: How long running tasks may go on when the tasks are closed; what still runs then is failed.

    Whose request it is, without ``resolve_auth``: that of the access token's client, issuer and subject; on stdio
    and in process that of the local user; over HTTP without authorization nobody's, so that the task's id is all
    that protects it, and there is no list. Behind the SDK's authentication a request without a token is refused.
    Behind any other, and over websockets or a transport of your own, give ``resolve_auth``.

    Over HTTP without authorization the capability ``tasks.list`` should not be declared:
    ``del server.request_handlers[ListTasksRequest]``.

    Raises:
        ValueError: ``options`` were given for a store that is already open, or a duration is not positive.
        RuntimeError: The server has durable tasks already.
    """
    if options is not None and isinstance(store, TaskStore):
        raise ValueError("options are for opening a URL; an open TaskStore already has its own.")
    for name, span in (("default_ttl", default_ttl), ("default_poll_interval", default_poll_interval)):
        if span <= timedelta(0):
            raise ValueError(f"{name} must be longer than nothing, not {span}.")
    return DurableTasks(
        server,
        store,
        options=options,
        resolve_auth=resolve_auth,
        default_ttl=default_ttl,
        default_poll_interval=default_poll_interval,
        drain=drain,
    )


@dataclass(frozen=True, slots=True)
class _Serving:
    """What exists while the tasks are open."""

    store: TaskStore
    runner: TaskRunner
    background: set[asyncio.Task[Any]] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something apart from the request that it comes of, until it or everything ends."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    def stop(self) -> None:
        """Stop what runs in the background."""
        for task in self.background:
            task.cancel()


class DurableTasks:
    """The durable tasks of one server; made by ``enable_durable_tasks``.

    They are open from the first session on, and no session's end closes them: work goes on, and results stay. They
    close when the event loop ends, which leaves running work no time to finish. ``async with tasks:`` opens them
    early, so that a wrong URL stops the start, and closes them in good order: around ``server.run()`` on stdio, in
    the lifespan of the web application over HTTP (uvicorn passes a signal on as soon as that lifespan is left).

    The SDK enters a server's lifespan once for each session: what it yields is gone when the session ends, though
    the work of a task may go on.
    """

    def __init__(
        self,
        server: Server[Any, Any],
        store: str | TaskStore,
        *,
        options: StoreOptions | None,
        resolve_auth: ResolveAuth | None,
        default_ttl: timedelta,
        default_poll_interval: timedelta,
        drain: timedelta,
    ) -> None:
        self._server, self._store, self._options = server, store, options
        self._resolve_auth, self._drain = resolve_auth, drain
        self._default_ttl, self._default_poll_interval = default_ttl, default_poll_interval
        self._serving: _Serving | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] | None = None
        self._closing: asyncio.Event | None = None
        self._call: Callable[[CallToolRequest], Awaitable[ServerResult]] | None = None
        self._support = self._enable()

    @property
    def store(self) -> TaskStore:
        """The open store.

        Raises:
            McpError: The tasks are not open: the server has not run yet, or is being stopped.
        """
        return self._now_serving().store

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None and self._closing is not None:
            self._closing.set()
            await asyncio.shield(self._keeper)

    def _enable(self) -> TaskSupport:
        server = self._server
        with warnings.catch_warnings():
            # The SDK announces that 2.x has no such tasks. Whoever is here knows, or need not: see mcp_v2.
            warnings.simplefilter("ignore", DeprecationWarning)
            experimental = server.experimental
        if experimental.task_support is not None and isinstance(experimental.task_support.store, DurableTaskStore):
            raise RuntimeError("This server has durable tasks already.")
        for request, answer in (
            (GetTaskRequest, legacy_get_task),
            (GetTaskPayloadRequest, self._task_result),
            (ListTasksRequest, legacy_list_tasks),
            (CancelTaskRequest, legacy_cancel_task),
        ):
            server.request_handlers[request] = partial(self._answer, answer)
        server.lifespan = self._lifespan(server.lifespan)
        return experimental.enable_tasks(
            store=DurableTaskStore(
                lambda: self.store,
                self._auth,
                default_ttl=self._default_ttl,
                poll_interval=self._default_poll_interval,
            )
        )

    def _lifespan(self, own: Lifespan[LifespanT, RequestT]) -> Lifespan[LifespanT, RequestT]:
        """Make sure, whenever the server starts to run, that the store is open and tool calls come here first."""

        @asynccontextmanager
        async def composed(server: Server[LifespanT, RequestT]) -> AsyncIterator[LifespanT]:
            async with own(server) as context:
                await self._open()
                # Only now: the tool handler may be registered before enable_durable_tasks() or after it.
                call = server.request_handlers.get(CallToolRequest)
                if call is not None and call is not self._call:
                    self._call = partial(self._call_tool, call)
                    server.request_handlers[CallToolRequest] = self._call
                yield context

        return composed

    async def _open(self) -> None:
        """Open the store unless it is open; raises what keeps it from opening."""
        if self._keeper is None or self._keeper.done() or self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            self._keeper = asyncio.create_task(self._keep(self._opened, self._closing))
        await asyncio.wait({self._keeper, self._opened}, return_when=asyncio.FIRST_COMPLETED)
        if self._keeper.done():
            await self._keeper

    async def _keep(self, opened: asyncio.Future[None], closing: asyncio.Event) -> None:
        """Hold the store open in a task of its own, which no session's end cancels; the end of the loop does."""
        try:
            async with AsyncExitStack() as stack:
                self._serving = await self._enter(stack)
                opened.set_result(None)
                await closing.wait()
        finally:
            self._serving = None

    async def _enter(self, stack: AsyncExitStack) -> _Serving:
        if isinstance(self._store, TaskStore):
            store = self._store
        else:
            options = self._options or StoreOptions()
            options = replace(options, server=options.server or self._server.name)
            store = await stack.enter_async_context(TaskStore.open(self._store, options=options))
        serving = _Serving(store, TaskRunner(store))
        stack.callback(serving.stop)
        stack.push_async_callback(serving.runner.close, self._drain)
        return serving

    async def _call_tool(
        self, call: Callable[[CallToolRequest], Awaitable[ServerResult]], request: CallToolRequest
    ) -> ServerResult:
        """Check that the tool runs as asked for, and call it with ``experimental`` replaced by the durable one."""
        context = request_ctx.get()
        experimental = DurableExperimental(context, request.params, partial(self._start, context, request))
        # Private, for want of a public way from a tool's name to its listing.
        tool = await self._server._get_cached_tool_definition(request.params.name)
        experimental.validate_task_mode(None if tool is None or tool.execution is None else tool.execution.taskSupport)
        token = request_ctx.set(replace(context, experimental=experimental))
        try:
            result = await call(request)
            root = result.root
            if experimental.refusal is not None and isinstance(root, CallToolResult) and root.isError:
                raise experimental.refusal
            if experimental.is_task and isinstance(root, CallToolResult):
                # It was over before it became a task: bad arguments, say. The client understands nothing but a task.
                return ServerResult(await experimental.run_task(partial(_immediately, root)))
            return result
        finally:
            request_ctx.reset(token)

    async def _start(self, context: Context, request: CallToolRequest, work: Work) -> Task:
        """Create a task and run the work as it.

        Raises:
            McpError: The task cannot be created.
        """
        serving, auth, creator = self._now_serving(), self._auth_of(context), Creator(context)

        async def run(handle: TaskHandle) -> WorkResult:
            record = await serving.store.wait_for_task(handle.task_id, auth=auth, since_version=0)
            try:
                return work_result(await work(DurableTaskContext(handle, record, creator, context, self._support)))
            except McpError as error:
                raise WorkError(error.error.code, error.error.message, error.error.data) from error

        params, asked = request.params, request.params.task
        try:
            task = await serving.runner.start(
                run,
                auth=auth,
                ttl=self._default_ttl if asked is None else requested_ttl(asked, self._default_ttl),
                poll_interval=self._default_poll_interval,
                name=params.name,
                request={"name": params.name, "arguments": params.arguments or {}},
                session_id=None if context.request is None else context.request.headers.get(_SESSION_ID),
            )
        except RequestError as refusal:
            raise mcp_error(refusal) from refusal
        except PayloadError as refusal:
            raise McpError(ErrorData(code=INVALID_PARAMS, message=str(refusal))) from refusal
        except LimitExceededError as refusal:
            data = {"reason": LIMIT_EXCEEDED}
            raise McpError(ErrorData(code=INTERNAL_ERROR, message=str(refusal), data=data)) from refusal
        except (TaskStoreError, RuntimeError) as problem:  # the latter: the runner takes no more tasks
            raise _internal_error(problem) from problem
        serving.start(creator.follow(serving.store, auth, task))
        return task

    async def _answer(self, answer: Answer, request: Any) -> ServerResult:
        """Answer a request about tasks, whatever SDK model it came as."""
        params = {} if request.params is None else request.params.model_dump(by_alias=True, mode="json")
        try:
            return _Verbatim(await answer(self.store, self._auth_of(request_ctx.get()), params))
        except RequestError as refusal:
            raise mcp_error(refusal) from refusal
        except TaskStoreError as problem:
            raise _internal_error(problem) from problem

    async def _task_result(self, store: TaskStore, auth: AuthContext | None, params: Params) -> WireObject:
        return await legacy_task_result(store, auth, params, ask=self._ask_on_stream(request_ctx.get()))

    def _ask_on_stream(self, context: Context) -> Ask:
        """Make what puts questions to the client on the stream of its request."""
        serving, stream = self._now_serving(), ServerMessageMetadata(related_request_id=context.request_id)

        async def ask(method: str, params: WireObject) -> JsonValue:
            if not context.session.check_client_capability(_NEEDED.get(method, ClientCapabilities())):
                # Another client of the same user may be able to answer; an error from this one would be its answer.
                raise ConnectionError(f"This client did not declare what {method} needs.")
            request = _AnyRequest({"method": method, "params": params})
            # An answer to a question that was withdrawn comes all the same, and the SDK would log it as an error.
            sending = serving.start(_send(context.session, request, stream))
            return await asyncio.shield(sending)

        return ask

    def _auth(self) -> AuthContext | None:
        """Say whose request is being answered; outside of one this process asks for itself."""
        context = request_ctx.get(None)
        return local_user() if context is None else self._auth_of(context)

    def _auth_of(self, context: Context) -> AuthContext | None:
        if self._resolve_auth is not None:
            return self._resolve_auth(context)
        token = get_access_token()
        if token is not None:
            if not token.client_id:
                raise _invalid_request("The access token names no client, so it cannot own tasks.")
            issuer = (token.claims or {}).get("iss")
            return AuthContext(
                client_id=token.client_id, issuer=str(issuer) if issuer else None, subject=token.subject or None
            )
        if context.request is None:  # no HTTP request: stdio, or a client in this process
            return local_user()
        if "auth" in context.request.scope:  # set by the middleware that looks for tokens, found or not
            raise _invalid_request("This server's tasks need an access token, and the request carries none.")
        return None

    def _now_serving(self) -> _Serving:
        if self._serving is None:
            message = "The durable tasks are not open: they open when the server runs, or by `async with`."
            raise McpError(ErrorData(code=INTERNAL_ERROR, message=message))
        return self._serving


class _Verbatim(ServerResult):
    """A result that goes out as it is: the SDK's models would leave out every null."""

    root: WireObject  # type: ignore[assignment]


class _AnyRequest(ServerRequest):
    """A request as it was stored."""

    root: WireObject  # type: ignore[assignment]


class _AnyResult(Result):
    model_config = ConfigDict(extra="allow")


async def _send(session: ServerSession, request: _AnyRequest, stream: ServerMessageMetadata) -> JsonValue:
    """Send a request to the client and return its result; errors are those of ``Ask``."""
    try:
        answer = await session.send_request(request, _AnyResult, metadata=stream)
    except (anyio.ClosedResourceError, anyio.BrokenResourceError) as problem:
        raise ConnectionError("The session has ended.") from problem
    except McpError as error:
        if (error.error.code, error.error.message) == (CONNECTION_CLOSED, "Connection closed"):  # the SDK's own words
            raise ConnectionError(error.error.message) from error
        raise RequestError(error.error.code, error.error.message, error.error.data) from error
    except ValidationError as problem:
        raise RequestError(
            INVALID_PARAMS, f"The client's response to {request.root['method']} is malformed."
        ) from problem
    wire: JsonValue = answer.model_dump(by_alias=True, mode="json", exclude_unset=True)
    return wire


_NEEDED = {
    "elicitation/create": ClientCapabilities(elicitation=ElicitationCapability()),
    "sampling/createMessage": ClientCapabilities(sampling=SamplingCapability()),
}


async def _immediately(result: Result, _: object) -> Result:
    return result


def _invalid_request(message: str) -> McpError:
    return McpError(ErrorData(code=INVALID_REQUEST, message=message))


def _internal_error(problem: Exception) -> McpError:
    logger.error("A request about tasks could not be answered.", exc_info=problem)
    return McpError(ErrorData(code=INTERNAL_ERROR, message="The server's tasks are not available at present."))
