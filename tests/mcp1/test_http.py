"""Durable tasks over streamable HTTP: sessions that end, users that must not see each other, restarts."""

import asyncio
from datetime import timedelta
from typing import Any

import anyio
import pytest
from mcp import types
from mcp.server.experimental.task_context import ServerTaskContext

from taskstore import AuthContext, TaskNotFoundError
from taskstore.adapters.mcp_v1 import DurableTasks, enable_durable_tasks

ALICE = AuthContext(client_id="app", issuer="https://issuer.example", subject="alice")


async def test_the_work_outlives_the_session_and_any_later_one_finds_the_result(
    reports: Any, tasks: DurableTasks, connect: Any, serve: Any
) -> None:
    """The client that asked is gone, with its session; that is what tasks are for."""
    async with serve(reports.server, authorization=True) as url:
        async with connect(url, token="alice") as peer:
            task_id = await peer.start("wait")
            await reports.running.wait()
        async with connect(url, token="alice") as later:
            working = await later.get(task_id)
            reports.opened.set()
            result = await later.result(task_id)
            listed = await later.page()

    assert working.status == "working"
    assert result.content[0].text == "through"
    assert [task.taskId for task in listed.tasks] == [task_id]


async def test_two_users_of_one_client_are_isolated(
    reports: Any, tasks: DurableTasks, connect: Any, serve: Any, refused: Any
) -> None:
    """Alice and Bob use the same application; a stolen id must not open the other's task."""
    async with (
        serve(reports.server, authorization=True) as url,
        connect(url, token="alice") as alice,
        connect(url, token="bob") as bob,
    ):
        task_id = await alice.start("wait")
        for request in (bob.get, bob.result, bob.cancel):
            with refused(-32602, "Failed to retrieve task: Task not found"):
                await request(task_id)
        listed = await bob.page()
        seen_by_alice = await alice.get(task_id)
        task = await tasks.store.get_task(task_id, auth=ALICE)

    assert listed.tasks == []
    assert seen_by_alice.status == "working"
    assert task.task_id == task_id


async def test_a_restarted_server_answers_for_the_first(
    reports: Any, connect: Any, serve: Any, database_url: str
) -> None:
    """Another process on the same database, and the same user."""
    answers = []
    for server_of in (reports, type(reports)()):
        async with (
            enable_durable_tasks(server_of.server, database_url),
            serve(server_of.server, authorization=True) as url,
            connect(url, token="alice") as alice,
        ):
            task_id = answers[0].meta[RELATED_TASK]["taskId"] if answers else await alice.start("quick")
            answers.append(await alice.result(task_id))

    assert answers[0] == answers[1]
    assert answers[0].content[0].text == "done"


async def test_without_authorization_the_id_is_the_key_and_there_is_no_list(
    reports: Any, tasks: DurableTasks, connect: Any, serve: Any, refused: Any, local: AuthContext
) -> None:
    """Over HTTP nobody is the local user: every caller would be, from everywhere (T25-44, T25-45)."""
    async with serve(reports.server) as url, connect(url) as peer, connect(url) as other:
        task_id = await peer.start("wait")
        seen = await other.get(task_id)
        with refused(-32601):
            await peer.page()
        with pytest.raises(TaskNotFoundError):
            await tasks.store.get_task(task_id, auth=local)

    assert seen.status == "working"


async def test_a_server_with_authorization_takes_no_request_without_token(
    reports: Any, tasks: DurableTasks, connect: Any, serve: Any, refused: Any
) -> None:
    """Mounted behind something that forgets to check tokens, tasks must not turn into anybody's."""
    async with serve(reports.server, authorization=True, guarded=False) as url, connect(url) as peer:
        for request in (
            peer.create("wait"),
            peer.get("tsk_1"),
            peer.result("tsk_1"),
            peer.cancel("tsk_1"),
            peer.page(),
        ):
            with refused(-32600, "access token"):
                await request

    assert not reports.running.is_set()


async def test_a_resolver_decides_in_place_of_all_that(
    reports: Any, connect: Any, serve: Any, refused: Any, database_url: str
) -> None:
    """Behind authentication of another kind the server knows best who asks."""

    def by_tenant(context: Any) -> AuthContext:
        return AuthContext(tenant=context.request.headers["authorization"])

    tasks = enable_durable_tasks(reports.server, database_url, resolve_auth=by_tenant, drain=timedelta(0))
    async with tasks, serve(reports.server) as url, connect(url, token="one") as one, connect(url, token="two") as two:
        task_id = await one.start("quick")
        await one.result(task_id)
        with refused(-32602):
            await two.get(task_id)
        task = await tasks.store.get_task(task_id, auth=AuthContext(tenant="Bearer one"))

    assert task.is_finished


async def test_a_stateless_server_keeps_tasks_too(reports: Any, tasks: DurableTasks, connect: Any, serve: Any) -> None:
    """There each request is a session of its own, which ends with its answer."""
    async with serve(reports.server, authorization=True, stateless=True) as url, connect(url, token="alice") as alice:
        task_id = await alice.start("wait")
        await reports.running.wait()
        reports.opened.set()
        result = await alice.result(task_id)
        listed = await alice.page()

    assert result.content[0].text == "through"
    assert [task.taskId for task in listed.tasks] == [task_id]


async def test_a_question_is_asked_on_the_stream_of_whoever_waits(
    reports: Any, tasks: DurableTasks, connect: Any, serve: Any
) -> None:
    """T25-23, and after a reconnect: the session that created the task is gone."""

    async def confirm(task: ServerTaskContext) -> types.Result:
        asked = await task.elicit("Delete?", {"type": "object", "properties": {}})
        return types.CallToolResult(content=[types.TextContent(type="text", text=asked.action)])

    async def accept(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={})

    reports.works["confirm"] = confirm
    async with serve(reports.server, authorization=True) as url:
        async with connect(url, token="alice", elicitation_callback=accept) as first:
            task_id = await first.start("confirm")
            await first.polled(task_id, lambda task: task.status == "input_required")
        async with connect(url, token="alice", elicitation_callback=accept) as later:
            with anyio.fail_after(30):
                result = await later.result(task_id)

    assert result.content[0].text == "accept"


async def test_the_session_narrows_an_operators_list_and_nothing_else(
    reports: Any, tasks: DurableTasks, connect: Any, serve: Any
) -> None:
    """Operators ask what a session left behind; identity it never is."""
    seen: list[str] = []

    async def note(task: ServerTaskContext) -> types.Result:
        seen.append(reports.server.request_context.request.headers["mcp-session-id"])
        return types.CallToolResult(content=[])

    reports.works["note"] = note
    async with serve(reports.server, authorization=True) as url:
        ids = []
        for _ in range(2):
            async with connect(url, token="alice") as peer:
                ids.append(await peer.start("note"))
                await peer.result(ids[-1])
        page = await tasks.store.operator.list_tasks(session_id=seen[0])

    assert [task.task_id for task in page.tasks] == ids[:1]


async def test_a_client_that_reads_nothing_does_not_hold_up_the_work(
    reports: Any, tasks: DurableTasks, connect: Any, serve: Any
) -> None:
    """Its notifications are a courtesy; the oldest are left out."""
    session: Any = None

    async def talk(task: ServerTaskContext) -> types.Result:
        nonlocal session
        session = reports.server.request_context.session
        session.send_notification = never
        for step in range(100):
            await task.update_status(f"step {step}")
        return types.CallToolResult(content=[])

    async def never(*arguments: Any) -> None:
        await asyncio.Event().wait()

    reports.works["talk"] = talk
    async with serve(reports.server, authorization=True) as url, connect(url, token="alice") as peer:
        task_id = await peer.start("talk")
        with anyio.fail_after(30):
            await peer.result(task_id)
        polled = await peer.get(task_id)

    assert (polled.status, polled.statusMessage) == ("completed", "step 99")


RELATED_TASK = "io.modelcontextprotocol/related-task"
