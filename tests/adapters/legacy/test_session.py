"""What a session of 2025-11-25 hears of its tasks, and what it is asked for them."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import anyio
import httpx2
import pytest
from mcp.client._memory import InMemoryTransport
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    JSONRPCNotification,
    JSONRPCRequest,
    SamplingMessage,
    TextContent,
)
from pydantic import BaseModel

from taskstore import AuthContext, Task, TaskStatus, TaskStore
from taskstore.adapters import mcp_v2_legacy

RELATED_TASK = "io.modelcontextprotocol/related-task"
QUESTION: dict[str, Any] = {
    "method": "elicitation/create",
    "params": {"message": "Delete?", "requestedSchema": {"type": "object", "properties": {}}, "_meta": {"k": 1}},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
CLIENT = {"name": "legacy", "version": "1"}
ACCEPTED: dict[str, Any] = {"action": "accept", "content": {"confirm": True}}

Notified = list[tuple[str, Mapping[str, Any]]]


def statuses(notified: Notified, task_id: str) -> list[str]:
    return [
        params["status"]
        for method, params in notified
        if method == "notifications/tasks/status" and params["taskId"] == task_id
    ]


@pytest.fixture(params=["stream", "http"])
async def peer(request: pytest.FixtureRequest, reports: Any, connect_legacy: Any, serve: Any) -> AsyncIterator[Any]:
    """A client in process or over HTTP, once the stream is open on which it hears of its tasks."""
    async with AsyncExitStack() as stack:
        over_http = request.param == "http"
        target = await stack.enter_async_context(serve(reports.server)) if over_http else reports.server
        peer = await stack.enter_async_context(connect_legacy(target))
        with anyio.fail_after(30):
            while not peer.notified:  # what is sent before the GET stream is open gets lost
                await peer.result(await peer.start("add", {"a": 1, "b": 2}))
        yield peer


# --- notifications


async def test_each_new_status_is_sent_as_the_whole_task(peer: Any, reports: Any) -> None:
    """A client that listens need not poll; the task is all that is in there, without a mark (T25-31, T25-32)."""
    task_id = await peer.start("wait")
    reports.opened.set()
    await peer.until_notified(lambda notified: "completed" in statuses(notified, task_id))
    polled = await peer.get(task_id)

    assert statuses(peer.notified, task_id) == ["completed"]
    assert ("notifications/tasks/status", polled) in peer.notified


async def test_a_change_made_elsewhere_is_sent_too(
    reports: Any, connect_legacy: Any, local: AuthContext, database_url: str
) -> None:
    """The task may be cancelled through another process."""
    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("wait")
        async with TaskStore.open(database_url) as elsewhere:
            await elsewhere.cancel_task(task_id, auth=local)
            await peer.until_notified(lambda notified: statuses(notified, task_id) == ["cancelled"])


async def test_nobody_follows_a_task_for_a_session_that_ended(reports: Any, connect_legacy: Any) -> None:
    """A task may wait for days; what follows it costs reads, and must not go on for nobody."""

    async def until_followed(*followed: str) -> None:
        with anyio.fail_after(30):
            while [each for each in (gone, kept) if reports.tasks.legacy.creator_of(each)] != list(followed):
                await anyio.lowlevel.checkpoint()

    async with connect_legacy(reports.server) as stays:
        async with connect_legacy(reports.server) as goes:
            gone, kept = await goes.start("wait"), await stays.start("wait")
            await until_followed(gone, kept)
        await until_followed(kept)
        polled = await stays.get(gone)

    assert polled["status"] == "working"


@pytest.mark.parametrize("token", ["seven", 7, 0])
async def test_progress_keeps_the_token_of_the_call(peer: Any, reports: Any, token: str | int) -> None:
    """The call is answered long ago, and its token goes on, with its JSON type and the mark (T25-30, T25-33)."""

    @reports.server.tool()
    @reports.tasks.task()
    async def count(ctx: Context) -> None:
        for value, total, message in ((1, 3, "one"), (1, 3, "again"), (0.5, 3, "back"), (2.5, None, None)):
            await ctx.report_progress(value, total, message)

    task_id = await peer.start("count", _meta={"progressToken": token})
    await peer.until_notified(lambda notified: "completed" in statuses(notified, task_id))

    mark = {"_meta": {RELATED_TASK: {"taskId": task_id}}}
    sent = [params for method, params in peer.notified if method == "notifications/progress"]
    assert sent == [
        {"progressToken": token, "progress": 1, "total": 3, "message": "one", **mark},
        {"progressToken": token, "progress": 2.5, **mark},
    ]
    assert type(sent[0]["progressToken"]) is type(token)


async def test_a_call_without_a_token_gets_no_progress_notification(reports: Any, connect_legacy: Any) -> None:
    """The client did not ask for any; its polls show the progress all the same."""
    shown = asyncio.Event()

    @reports.server.tool()
    @reports.tasks.task()
    async def count(ctx: Context) -> None:
        await ctx.report_progress(1, 3, "one")
        await shown.wait()

    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("count")
        with anyio.fail_after(30):
            while (await peer.get(task_id)).get("statusMessage") != "one (1/3)":
                await anyio.lowlevel.checkpoint()
        shown.set()
        await peer.until_notified(lambda notified: "completed" in statuses(notified, task_id))

    assert [method for method, _ in peer.notified] == ["notifications/tasks/status"]


async def test_no_progress_is_sent_once_the_task_is_finished(reports: Any, connect_legacy: Any) -> None:
    """The token ends with the task, whatever the tool still does (T25-33)."""
    released, ended = asyncio.Event(), asyncio.Event()

    @reports.server.tool()
    @reports.tasks.task()
    async def stubborn(ctx: Context) -> None:
        await ctx.report_progress(1)
        reports.running.set()
        try:
            await reports.opened.wait()
        except asyncio.CancelledError:
            await released.wait()
        await ctx.report_progress(2)
        ended.set()

    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("stubborn", _meta={"progressToken": "p"})
        await reports.running.wait()
        await peer.cancel(task_id)
        released.set()
        await ended.wait()
        await peer.request("ping")
        await peer.until_notified(lambda notified: "cancelled" in statuses(notified, task_id))

    assert [params["progress"] for method, params in peer.notified if method == "notifications/progress"] == [1]


async def test_a_client_that_reads_nothing_does_not_hold_up_the_tool(
    reports: Any, local: AuthContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended laptop keeps its connection open; the work must go on, and be there when it wakes."""
    monkeypatch.setattr(mcp_v2_legacy, "SEND_PATIENCE", timedelta(milliseconds=50))

    @reports.server.tool()
    @reports.tasks.task()
    async def count(ctx: Context) -> str:
        for value in range(100):
            await ctx.report_progress(value)
        return "counted"

    async with InMemoryTransport(reports.server) as (_, write):
        await write.send(message("initialize", 1, protocolVersion="2025-11-25", capabilities={}, clientInfo=CLIENT))
        await write.send(message("notifications/initialized"))
        await write.send(message("tools/call", 2, name="count", task={}, _meta={"progressToken": 2}))
        with anyio.fail_after(30):
            while not (page := await listed(reports, local)):
                await anyio.lowlevel.checkpoint()
            task = await reports.tasks.store.wait_for_task(page[0].task_id, auth=local)

    assert task.status is TaskStatus.COMPLETED
    assert task.progress == 99


async def listed(reports: Any, auth: AuthContext) -> tuple[Task, ...]:
    try:
        return (await reports.tasks.store.list_tasks(auth=auth)).tasks
    except MCPError:  # the lifespan has not been entered yet
        return ()


def message(method: str, request_id: int | None = None, **params: Any) -> SessionMessage:
    if request_id is None:
        return SessionMessage(JSONRPCNotification(jsonrpc="2.0", method=method))
    return SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=request_id, method=method, params=params))


@pytest.mark.filterwarnings("ignore:The logging capability is deprecated")
async def test_log_messages_of_a_task_carry_its_mark(peer: Any, reports: Any) -> None:
    """They come on a stream of their own, among those of other tasks (T25-30)."""

    @reports.server.tool()
    @reports.tasks.task()
    async def talk(ctx: Context) -> None:
        await ctx.info("half-way")

    task_id = await peer.start("talk")
    await peer.until_notified(lambda notified: any(method == "notifications/message" for method, _ in notified))

    (message,) = [params for method, params in peer.notified if method == "notifications/message"]
    assert (message["level"], message["data"]) == ("info", "half-way")
    assert message["_meta"] == {RELATED_TASK: {"taskId": task_id}}


# --- questions


class Asking:
    """A task whose tool asks, and what came of it; the tool is the test itself."""

    def __init__(self, store: TaskStore, task: Task) -> None:
        self.task_id = task.task_id
        self.handle = store.handle(task)
        self.answers: asyncio.Task[Mapping[str, Any]] = asyncio.create_task(self.handle.ask({"delete": QUESTION}))

    async def answer(self) -> Any:
        return (await self.answers)["delete"]


@pytest.fixture
def ask(reports: Any, local: AuthContext) -> Any:
    """Make a task that asks: of the local user, or else of nobody."""

    async def make(auth: AuthContext | None = local) -> Asking:
        store = reports.tasks.store
        task = await store.create_task(auth=auth)
        asking = Asking(store, task)
        await store.wait_for_task(task.task_id, auth=auth, since_version=task.version)
        return asking

    return make


class Hesitant:
    """A user who is asked and does not answer."""

    def __init__(self) -> None:
        self.asked, self.withdrawn = asyncio.Event(), asyncio.Event()

    async def respond(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.withdrawn.set()
        return {}

    async def let_off(self) -> None:
        """Wait until the question is withdrawn."""
        with anyio.fail_after(30):
            await self.withdrawn.wait()


async def accept(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return ACCEPTED


@pytest.mark.parametrize("over_http", [False, True], ids=["stream", "http"])
async def test_a_question_is_asked_on_the_stream_of_the_waiting_request(
    reports: Any, connect_legacy: Any, serve: Any, ask: Any, local: AuthContext, over_http: bool
) -> None:
    """tasks/result is the way to the client; the answer resumes the tool, and the wait goes on (T25-21..23)."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serve(reports.server)) if over_http else reports.server
        peer = await stack.enter_async_context(connect_legacy(target, respond=accept))
        asking = await ask(None if over_http else local)
        polled = await peer.get(asking.task_id)
        asked_by_polling = list(peer.asked)
        waiting = asyncio.create_task(peer.result(asking.task_id))
        answer = await asking.answer()
        resumed = await peer.get(asking.task_id)
        await asking.handle.complete({"content": []})
        result = await waiting

    ((method, params),) = peer.asked
    assert (polled["status"], asked_by_polling, resumed["status"]) == ("input_required", [], "working")
    assert method == "elicitation/create"
    assert params == {**QUESTION["params"], "_meta": {"k": 1, RELATED_TASK: {"taskId": asking.task_id}}}
    assert answer == ACCEPTED
    assert result["content"] == []


async def test_a_question_may_be_asked_while_the_client_already_waits(
    reports: Any, connect_legacy: Any, local: AuthContext
) -> None:
    """Clients are told to call tasks/result beforehand; one question after the other reaches them (T25-23)."""
    async with connect_legacy(reports.server, respond=accept) as peer:
        task = await reports.tasks.store.create_task(auth=local)
        handle = reports.tasks.store.handle(task)
        waiting = asyncio.create_task(peer.result(task.task_id))
        answers = [await handle.ask({"q": QUESTION}) for _ in range(3)]
        await handle.complete({"content": []})
        await waiting

    assert answers == [{"q": ACCEPTED}] * 3
    assert len(peer.asked) == 3


async def test_each_question_is_asked_once_on_a_stream(reports: Any, connect_legacy: Any, ask: Any) -> None:
    """Whatever else changes meanwhile, one dialog is on the screen for one question."""
    user = Hesitant()

    async with connect_legacy(reports.server, respond=user.respond) as peer:
        asking = await ask()
        waiting = asyncio.create_task(peer.result(asking.task_id))
        await user.asked.wait()
        user.asked.clear()
        second = {**QUESTION, "params": {**QUESTION["params"], "message": "Really?"}}
        another = asyncio.create_task(asking.handle.ask({"second": second}))
        await user.asked.wait()
        await peer.cancel(asking.task_id)
        await user.let_off()
        await asyncio.gather(waiting, asking.answers, another, return_exceptions=True)

    assert [params["message"] for _, params in peer.asked] == ["Delete?", "Really?"]


async def test_the_question_comes_in_the_response_of_the_waiting_request(reports: Any, serve: Any, ask: Any) -> None:
    """A client may have no other stream open: the one of tasks/result is where the question is due (T25-23)."""
    accepted = {"Accept": "application/json, text/event-stream"}
    initialize = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT}

    async with serve(reports.server) as url, httpx2.AsyncClient(headers=accepted) as http:

        def body(**message: Any) -> dict[str, Any]:
            return {"jsonrpc": "2.0", **message}

        answer = await http.post(url, json=body(id=1, method="initialize", params=initialize))
        http.headers.update({"Mcp-Session-Id": answer.headers["mcp-session-id"], "MCP-Protocol-Version": "2025-11-25"})
        await http.post(url, json=body(method="notifications/initialized"))
        asking = await ask(None)
        request = body(id=2, method="tasks/result", params={"taskId": asking.task_id})
        async with http.stream("POST", url, json=request) as stream:
            messages = (json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {"))
            question = await anext(messages)
            await http.post(url, json=body(id=question["id"], result=ACCEPTED))
            answered = await asking.answer()
            await asking.handle.complete({"content": []})
            result = await anext(messages)

    assert question["method"] == "elicitation/create"
    assert answered == ACCEPTED
    assert (result["id"], result["result"]["content"]) == (2, [])


async def test_the_refusal_of_a_client_is_an_answer(reports: Any, connect_legacy: Any, ask: Any) -> None:
    """A tool that waited for ever instead would never learn that nobody can be asked."""

    async def refuse(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        raise MCPError(-32601, "Elicitation not supported", {"why": "headless"})

    async with connect_legacy(reports.server, respond=refuse) as peer:
        asking = await ask()
        waiting = asyncio.create_task(peer.result(asking.task_id))
        answer = await asking.answer()
        waiting.cancel()

    assert answer == {"error": {"code": -32601, "message": "Elicitation not supported", "data": {"why": "headless"}}}


async def test_a_malformed_answer_is_an_error_to_the_tool(reports: Any, connect_legacy: Any, ask: Any) -> None:
    """The client believes that it has answered, and will not be asked again."""

    async def babble(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"action": "perhaps"}

    async with connect_legacy(reports.server, respond=babble) as peer:
        asking = await ask()
        waiting = asyncio.create_task(peer.result(asking.task_id))
        answer = await asking.answer()
        waiting.cancel()

    assert answer["error"]["code"] == -32602


async def test_every_waiting_client_is_asked_and_the_first_answer_counts(
    reports: Any, connect_legacy: Any, ask: Any
) -> None:
    """Any of them may be gone without a sign; for those that come too late the question is withdrawn."""
    user = Hesitant()

    async with (
        connect_legacy(reports.server, respond=user.respond) as slow,
        connect_legacy(reports.server, respond=accept) as quick,
    ):
        asking = await ask()
        waiting = [asyncio.create_task(slow.result(asking.task_id))]
        await user.asked.wait()
        waiting.append(asyncio.create_task(quick.result(asking.task_id)))
        answer = await asking.answer()
        await user.let_off()
        await asking.handle.complete({"content": []})
        results = await asyncio.gather(*waiting)

    assert answer == ACCEPTED
    assert [result["content"] for result in results] == [[], []]


async def test_a_question_outlives_the_session_that_was_asked(
    reports: Any, connect_legacy: Any, ask: Any, local: AuthContext
) -> None:
    """The connection breaks while the user thinks; after a reconnect the question is there again."""
    user = Hesitant()

    async with connect_legacy(reports.server) as first_to_enter_the_lifespan:
        async with connect_legacy(reports.server, respond=user.respond) as broken:
            asking = await ask()
            lost = asyncio.create_task(broken.result(asking.task_id))
            await user.asked.wait()
        await asyncio.wait({lost})
        still_open = await first_to_enter_the_lifespan.get(asking.task_id)
        async with connect_legacy(reports.server, respond=accept) as again:
            waiting = asyncio.create_task(again.result(asking.task_id))
            answer = await asking.answer()
            await asking.handle.complete({"content": []})
            await waiting

    assert lost.exception() is not None
    assert still_open["status"] == "input_required"
    assert answer == ACCEPTED


async def test_a_client_of_2026_answers_what_a_legacy_client_was_asked(
    reports: Any, connect_legacy: Any, connect: Any, ask: Any
) -> None:
    """One question in the store; whoever of the user's clients answers first, the other one is let off."""
    user = Hesitant()

    async with connect_legacy(reports.server, respond=user.respond) as legacy, connect(reports.server) as modern:
        asking = await ask()
        waiting = asyncio.create_task(legacy.result(asking.task_id))
        await user.asked.wait()
        polled = await modern.get(asking.task_id)
        await modern.update(asking.task_id, dict.fromkeys(polled["inputRequests"], ACCEPTED))
        answer = await asking.answer()
        await user.let_off()
        await asking.handle.complete({"content": []})
        result = await waiting

    assert [RELATED_TASK in str(request) for request in polled["inputRequests"].values()] == [False]
    assert answer == ACCEPTED
    assert result["content"] == []


@pytest.mark.parametrize("mode", ["json_response", "stateless_http"])
async def test_a_stream_that_takes_no_requests_only_waits(
    reports: Any, connect_legacy: Any, connect: Any, serve: Any, ask: Any, mode: str
) -> None:
    """A server without streams or sessions has no way to ask; another client may, and the wait ends all the same."""
    app = reports.server._lowlevel_server
    streamed = app.streamable_http_app
    app.streamable_http_app = lambda: streamed(**{mode: True})

    async with serve(app) as url, connect_legacy(url) as peer, connect(url) as modern:
        asking = await ask(None)
        waiting = asyncio.create_task(peer.result(asking.task_id))
        polled = await modern.get(asking.task_id)
        await modern.update(asking.task_id, dict.fromkeys(polled["inputRequests"], ACCEPTED))
        await asking.answer()
        await asking.handle.complete({"content": []})
        result = await waiting

    assert peer.asked == []
    assert result["content"] == []


async def test_a_cancelled_task_takes_its_question_back(reports: Any, connect_legacy: Any, ask: Any) -> None:
    """A dialog that nobody waits for must not stay on the screen."""
    user = Hesitant()

    async with connect_legacy(reports.server, respond=user.respond) as peer:
        asking = await ask()
        waiting = asyncio.create_task(peer.result(asking.task_id))
        await user.asked.wait()
        cancelled = await peer.cancel(asking.task_id)
        await user.let_off()
        await asyncio.wait({waiting, asking.answers})

    assert cancelled["status"] == TaskStatus.CANCELLED
    assert asking.answers.exception() is not None
    assert waiting.exception() is not None


# --- questions of a tool


class Confirmation(BaseModel):
    """What the user says."""

    confirm: bool


@pytest.fixture
def delete(reports: Any) -> None:
    """Give the server a tool that asks before it deletes."""

    @reports.server.tool()
    @reports.tasks.task()
    async def delete(ctx: Context) -> str:
        answer = await ctx.elicit("Delete?", Confirmation)
        return f"{answer.action}: {answer.data.confirm}" if answer.action == "accept" else answer.action


@pytest.mark.usefixtures("delete")
async def test_a_tool_that_elicits_inside_a_task_gets_its_answer(reports: Any, connect_legacy: Any) -> None:
    """The tool is written as for a plain call; its coroutine waits and goes on."""
    async with connect_legacy(reports.server, capabilities={"elicitation": {}}, respond=accept) as peer:
        task_id = await peer.start("delete")
        result = await peer.result(task_id)

    ((method, params),) = peer.asked
    assert (method, params["message"]) == ("elicitation/create", "Delete?")
    assert params["_meta"] == {RELATED_TASK: {"taskId": task_id}}
    assert result["content"] == [{"type": "text", "text": "accept: True"}]


@pytest.mark.filterwarnings("ignore:The sampling capability is deprecated")
async def test_a_tool_that_samples_inside_a_task_gets_its_answer(reports: Any, connect_legacy: Any) -> None:
    """Sampling goes the same way as elicitation (T25-21)."""

    @reports.server.tool()
    @reports.tasks.task()
    async def summarize(ctx: Context) -> str:
        messages = [SamplingMessage(role="user", content=TextContent(type="text", text="Summarize."))]
        answer = await ctx.session.create_message(messages, max_tokens=10)
        assert isinstance(answer.content, TextContent)
        return f"{answer.model}: {answer.content.text}"

    async def sample(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "model": "small", "content": {"type": "text", "text": "Short."}}

    async with connect_legacy(reports.server, capabilities={"sampling": {}}, respond=sample) as peer:
        result = await peer.result(await peer.start("summarize"))

    assert [method for method, _ in peer.asked] == ["sampling/createMessage"]
    assert result["content"] == [{"type": "text", "text": "small: Short."}]


@pytest.fixture
def parked(reports: Any) -> None:
    """Give the server a tool that returns its question, and is called again with the answer."""

    @reports.server.tool()
    @reports.tasks.task()
    async def parked(ctx: Context) -> str | InputRequiredResult:
        if ctx.input_responses is None:
            question = ElicitRequest(params=ElicitRequestFormParams(message="Delete?", requested_schema={}))
            return InputRequiredResult(input_requests={"sure": question}, request_state="asked")
        answer = ctx.input_responses["sure"]
        assert isinstance(answer, ElicitResult)
        return f"{ctx.request_state}: {answer.content}"


@pytest.mark.usefixtures("parked")
async def test_a_tool_that_returns_its_questions_is_called_again_for_a_legacy_client(
    reports: Any, connect_legacy: Any
) -> None:
    """Under that version a plain call could not be answered so; through a task the tool works for both."""
    async with connect_legacy(reports.server, capabilities={"elicitation": {}}, respond=accept) as peer:
        task_id = await peer.start("parked")
        result = await peer.result(task_id)

    assert result["content"][0]["text"] == "asked: {'confirm': True}"
    assert len(peer.asked) == 1


@pytest.mark.usefixtures("parked")
async def test_the_refusal_of_a_client_ends_a_task_that_is_parked(reports: Any, connect_legacy: Any) -> None:
    """The tool has no place to hear it, so the call ends in it."""

    async def refuse(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        raise MCPError(-31001, "Nobody is here", {"until": "Monday"})

    async with connect_legacy(reports.server, capabilities={"elicitation": {}}, respond=refuse) as peer:
        task_id = await peer.start("parked")
        with pytest.raises(MCPError) as caught:
            await peer.result(task_id)

    error = caught.value.error
    assert (error.code, error.message, error.data) == (-31001, "Nobody is here", {"until": "Monday"})


@pytest.mark.usefixtures("delete")
async def test_the_refusal_of_a_client_reaches_the_tool_as_an_error(reports: Any, connect_legacy: Any) -> None:
    """As it would in a plain call: the tool may handle it, and if not, the call ends in it."""

    async def refuse(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        raise MCPError(-31001, "Nobody is here", {"until": "Monday"})

    async with connect_legacy(reports.server, capabilities={"elicitation": {}}, respond=refuse) as peer:
        task_id = await peer.start("delete")
        with pytest.raises(MCPError) as caught:
            await peer.result(task_id)

    error = caught.value.error
    assert (error.code, error.message, error.data) == (-31001, "Nobody is here", {"until": "Monday"})


@pytest.mark.usefixtures("delete")
async def test_a_question_reaches_a_client_of_another_process(
    reports: Any, make_reports: Any, connect_legacy: Any
) -> None:
    """Behind a balancer, the request that waits may be in another server than the tool that asks."""
    other = make_reports()

    async with (
        connect_legacy(reports.server, capabilities={"elicitation": {}}) as creating,
        connect_legacy(other.server, respond=accept) as waiting,
    ):
        task_id = await creating.start("delete")
        result = await waiting.result(task_id)

    assert (creating.asked, len(waiting.asked)) == ([], 1)
    assert result["content"] == [{"type": "text", "text": "accept: True"}]


@pytest.mark.usefixtures("delete")
async def test_a_legacy_task_is_answered_by_a_client_of_2026(reports: Any, connect_legacy: Any, connect: Any) -> None:
    """The user asked for the task in one application, and answers in the other."""
    async with (
        connect_legacy(reports.server, capabilities={"elicitation": {}}) as legacy,
        connect(reports.server) as modern,
    ):
        task_id = await legacy.start("delete")
        await legacy.until_notified(lambda notified: statuses(notified, task_id) == ["input_required"])
        polled = await modern.get(task_id)
        await modern.update(task_id, dict.fromkeys(polled["inputRequests"], ACCEPTED))
        result = await legacy.result(task_id)

    assert legacy.asked == []
    assert result["content"] == [{"type": "text", "text": "accept: True"}]


@pytest.mark.usefixtures("delete")
@pytest.mark.parametrize(
    ("answer", "code"),
    [({"error": {"code": -31001, "message": "no"}}, -31001), ({"error": {"code": "x"}}, -32603)],
    ids=["error", "odd error"],
)
async def test_a_client_of_2026_can_refuse_too(
    reports: Any, connect_legacy: Any, connect: Any, refused: Any, answer: Any, code: int
) -> None:
    """What the one generation stores for a refusal means the same from the other, whatever is in it."""
    async with (
        connect_legacy(reports.server, capabilities={"elicitation": {}}) as legacy,
        connect(reports.server) as modern,
    ):
        task_id = await legacy.start("delete")
        await legacy.until_notified(lambda notified: statuses(notified, task_id) == ["input_required"])
        polled = await modern.get(task_id)
        await modern.update(task_id, dict.fromkeys(polled["inputRequests"], answer))
        with refused(code):
            await legacy.result(task_id)


@pytest.mark.usefixtures("delete")
async def test_a_task_of_2026_is_answered_by_a_legacy_client(
    reports: Any, connect_legacy: Any, connect: Any, can_be_asked: Any
) -> None:
    """And the other way round: the question reaches whoever waits for the result."""
    async with (
        connect_legacy(reports.server, respond=accept) as legacy,
        connect(reports.server, **can_be_asked) as modern,
    ):
        task_id = await modern.start("delete")
        result = await legacy.result(task_id)
        polled = await modern.get(task_id)

    assert [method for method, _ in legacy.asked] == ["elicitation/create"]
    assert result["content"] == polled["result"]["content"] == [{"type": "text", "text": "accept: True"}]


async def test_a_tool_that_returns_its_questions_is_called_again_with_the_answers(
    reports: Any, connect_legacy: Any
) -> None:
    """Its task is parked meanwhile; progress goes on under the token of the call (T25-33)."""

    @reports.server.tool()
    @reports.tasks.task()
    async def delete(ctx: Context) -> str | InputRequiredResult:
        if ctx.input_responses is None:
            await ctx.report_progress(1)
            question = ElicitRequest(params=ElicitRequestFormParams(message="Delete?", requested_schema=SCHEMA))
            return InputRequiredResult(input_requests={"confirm": question})
        await ctx.report_progress(2)
        answer = ctx.input_responses["confirm"]
        assert isinstance(answer, ElicitResult)
        return answer.action

    async with connect_legacy(reports.server, capabilities={"elicitation": {}}, respond=accept) as peer:
        task_id = await peer.start("delete", _meta={"progressToken": "p"})
        result = await peer.result(task_id)

    ((method, params),) = peer.asked
    assert (method, params["message"]) == ("elicitation/create", "Delete?")
    assert result["content"] == [{"type": "text", "text": "accept"}]
    assert [params["progress"] for method, params in peer.notified if method == "notifications/progress"] == [1, 2]
