"""The seam for running a tool again when there is no request: after its questions were answered, or after a crash.

The tool is called through the server's own ``tools/call`` handler, so that arguments are validated, dependencies
resolved and other extensions asked as for any call; only the request context is of our making. The server's middleware
handles messages, and this is none, so it is not asked.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcp.server.auth.middleware.auth_context import auth_context_var
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.context import HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    PROTOCOL_VERSION_META_KEY,
    CallToolRequestParams,
    RequestParams,
)
from pydantic import JsonValue, ValidationError

from taskstore.adapters.mcp_v2_context import raise_refusal, run_tool, task_session
from taskstore.adapters.mcp_v2_legacy import LegacyClient
from taskstore.handle import TaskHandle
from taskstore.runner import WorkError, WorkParked, WorkResult
from taskstore.task import Claim

CallTool = Callable[[ServerRequestContext, CallToolRequestParams], Awaitable[HandlerResult]]

# What these say stands in fields of its own, for every protocol version.
_ENVELOPE = frozenset({PROTOCOL_VERSION_META_KEY, CLIENT_INFO_META_KEY, CLIENT_CAPABILITIES_META_KEY})


@dataclass(kw_only=True)
class RerunContext(ServerRequestContext):
    """The context of a tool call that nobody requested: it belongs to a task that is there already."""


def request_of(params: CallToolRequestParams) -> dict[str, JsonValue]:
    """Keep what a later run needs to know of the call."""
    request: dict[str, JsonValue] = {"name": params.name, "arguments": params.arguments or {}}
    if params.input_responses is not None:
        request["inputResponses"] = {
            key: response.model_dump(by_alias=True, mode="json", exclude_none=True)
            for key, response in params.input_responses.items()
        }
    if params.request_state is not None:
        request["requestState"] = params.request_state
    return request


def caller_of(ctx: ServerRequestContext, token: AccessToken | None) -> dict[str, JsonValue]:
    """Keep what a later run needs to know of the caller.

    Args:
        token: The caller's access token, if the tool needs it.
    """
    client, capabilities = ctx.session.client_params, ctx.session.client_capabilities
    caller: dict[str, JsonValue] = {"protocolVersion": ctx.protocol_version}
    if capabilities is not None:
        caller["capabilities"] = capabilities.model_dump(by_alias=True, mode="json", exclude_none=True)
    if client is not None:
        caller["clientInfo"] = client.client_info.model_dump(by_alias=True, mode="json", exclude_none=True)
    meta: Mapping[str, JsonValue] = (ctx.params or {}).get("_meta") or {}
    if meta.keys() - _ENVELOPE:
        caller["meta"] = {key: value for key, value in meta.items() if key not in _ENVELOPE}
    if token is not None:
        caller["token"] = token.model_dump(mode="json", exclude_none=True)
    return caller


def token_of(claim: Claim) -> AccessToken | None:
    """Read the access token that was kept for the tool."""
    token = claim.caller.get("token") if isinstance(claim.caller, dict) else None
    return None if token is None else AccessToken.model_validate(token)


async def run_again(
    call_tool: CallTool,
    claim: Claim,
    handle: TaskHandle,
    *,
    lifespan_context: Any,
    creator: LegacyClient | None,
    needs_token: bool,
) -> WorkResult | WorkParked:
    """Call a claimed task's tool with the answers to its questions, or as the first time.

    Args:
        call_tool: The server's handler of tool calls.
        needs_token: Refuse to call the tool without its caller's access token.

    Raises:
        WorkError: The call would have been answered with a JSON-RPC error, the client refused to answer, or an answer
            has not the shape that its question asked for.
    """
    token = token_of(claim)
    if needs_token and token is None:
        problem = f"Tool {claim.task.name} needs its caller's access token, which was not kept."
        raise WorkError(INTERNAL_ERROR, problem)
    caller: Mapping[str, Any] = claim.caller if isinstance(claim.caller, dict) else {}
    call: dict[str, JsonValue] = dict(claim.request) if isinstance(claim.request, dict) else {}
    if claim.answers or claim.state is not None:
        call |= {"inputResponses": dict(claim.answers) or None, "requestState": claim.state}
    if "meta" in caller:
        call["_meta"] = caller["meta"]
    try:
        for answer in claim.answers.values():
            raise_refusal(answer)
        params = CallToolRequestParams.model_validate(call, by_name=False)
    except MCPError as error:
        raise WorkError(error.code, error.message, error.data) from error
    except ValidationError as problem:
        where = ".".join(str(part) for part in problem.errors()[0]["loc"])
        raise WorkError(INVALID_PARAMS, f"The tool cannot be called again: {where} is malformed.") from problem
    version, info, capabilities = caller["protocolVersion"], caller.get("clientInfo"), caller.get("capabilities")
    context = RerunContext(
        session=task_session(handle, version, info, capabilities, handle.task_id, creator),
        lifespan_context=lifespan_context,
        protocol_version=version,
        method="tools/call",
        params=call,
        request_id=handle.task_id,
        meta=RequestParams.model_validate(call, by_name=False).meta,
    )
    # Set in any case: what called before in this context must not lend its name.
    auth_context_var.set(None if token is None else AuthenticatedUser(token))

    async def call_next(context: ServerRequestContext) -> HandlerResult:
        return await call_tool(context, params)

    return await run_tool(params, context, call_next)
