"""Tool calls of 2025-11-25 that ask for a task: what is declared, what is answered, what is refused."""

from typing import Any

import pytest

from taskstore import AuthContext, TaskStore

TEXT = {"type": "text"}


async def test_tasks_are_declared_to_a_client_of_that_generation(reports: Any, connect_legacy: Any) -> None:
    """A client asks for no task that the server did not declare (T25-01, T25-07)."""
    async with connect_legacy(reports.server) as peer:
        declared = peer.initialized["capabilities"]["tasks"]

    assert declared == {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}}


@pytest.mark.parametrize("version", ["2025-06-18", "2024-11-05"])
async def test_tasks_are_unknown_to_older_generations(
    reports: Any, connect_legacy: Any, refused: Any, version: str
) -> None:
    """They have no tasks, so their calls run inline whatever they carry."""
    reports.opened.set()

    async with connect_legacy(reports.server, version=version) as peer:
        result = await peer.call("wait", task={"ttl": 1000})
        listed = await peer.request("tools/list")
        for method in ("tasks/get", "tasks/result", "tasks/list", "tasks/cancel"):
            with refused(-32601):
                await peer.request(method, {"taskId": "tsk_1"})

    assert "tasks" not in peer.initialized["capabilities"]
    assert result["content"] == [{**TEXT, "text": "through"}]
    assert not any("execution" in tool for tool in listed["tools"])


async def test_each_tool_says_how_it_runs_as_a_task(reports: Any, connect_legacy: Any) -> None:
    """The client decides, so it must know before it calls; absent means never (T25-04, T25-05)."""
    async with connect_legacy(reports.server) as peer:
        listed = await peer.request("tools/list")

    assert {tool["name"]: tool.get("execution") for tool in listed["tools"]} == {
        "greet": None,
        "wait": {"taskSupport": "optional"},
        "add": {"taskSupport": "required"},
    }


async def test_a_call_that_asks_for_a_task_is_answered_with_a_nested_one(
    reports: Any, connect_legacy: Any, local: AuthContext, database_url: str
) -> None:
    """The work has only begun, and the task is durable before the client hears of it (T25-11, T25-16)."""
    async with connect_legacy(reports.server) as peer:
        created = await peer.call("wait", task={"ttl": 60_000})
        await reports.running.wait()
        async with TaskStore.open(database_url) as elsewhere:
            stored = await elsewhere.get_task(created["task"]["taskId"], auth=local)

    assert created.keys() == {"task"}
    task = created["task"]
    assert task.keys() == {"taskId", "status", "createdAt", "lastUpdatedAt", "ttl", "pollInterval"}
    assert (task["status"], task["ttl"], task["pollInterval"]) == ("working", 60_000, 1_000)
    assert (stored.method, stored.name) == ("tools/call", "wait")


async def test_an_optional_tool_called_without_a_task_runs_inline(reports: Any, connect_legacy: Any) -> None:
    """There the client decides, not the server."""
    reports.opened.set()

    async with connect_legacy(reports.server) as peer:
        result = await peer.call("wait")

    assert result["content"] == [{**TEXT, "text": "through"}]


async def test_a_call_that_does_not_fit_the_tool_is_refused(reports: Any, connect_legacy: Any, refused: Any) -> None:
    """Each mismatch has the code of an unknown method, and says what to do (T25-04, T25-05)."""
    async with connect_legacy(reports.server) as peer:
        with refused(-32601, "send the field task"):
            await peer.call("add", {"a": 1, "b": 2})
        with refused(-32601, "does not run as a task"):
            await peer.call("greet", {"name": "Ada"}, task={})
        with refused(-32601, "does not run as a task"):
            await peer.call("unheard-of", task={})


@pytest.mark.parametrize("task", [True, "now", 7, [], {"ttl": -1}, {"ttl": "60000"}, {"ttl": True}])
async def test_a_malformed_task_field_is_refused(reports: Any, connect_legacy: Any, refused: Any, task: Any) -> None:
    """The author of the client reads this; no task is made of it."""
    async with connect_legacy(reports.server) as peer:
        with refused(-32602, "task"):
            await peer.call("wait", task=task)

    assert not reports.running.is_set()


@pytest.mark.parametrize(
    ("ttl", "given"),
    [({"ttl": None}, 30 * 86_400_000), ({"ttl": 1e300}, 30 * 86_400_000), ({"ttl": 0.5}, 1), ({}, 3_600_000)],
)
async def test_the_task_says_which_ttl_it_got(reports: Any, connect_legacy: Any, ttl: Any, given: int) -> None:
    """The server may override what was asked for, and reports what holds (T25-26, T25-27)."""
    async with connect_legacy(reports.server) as peer:
        created = await peer.call("wait", task=ttl)

    assert created["task"]["ttl"] == given


async def test_malformed_arguments_make_a_task_that_failed(reports: Any, connect_legacy: Any) -> None:
    """Inline they would be a tool error, so as a task they are one too (T25-14)."""
    async with connect_legacy(reports.server) as peer:
        task_id = await peer.start("add", {"a": "one"})
        result = await peer.result(task_id)
        polled = await peer.get(task_id)

    assert result["isError"] is True
    assert polled["status"] == "failed"
    assert polled["statusMessage"] == result["content"][0]["text"]


async def test_a_task_field_on_any_other_request_is_ignored(reports: Any, connect_legacy: Any) -> None:
    """Only tool calls are declared, so all else is processed normally (T25-02)."""

    @reports.server.prompt()
    def hello() -> str:
        return "Say hello."

    async with connect_legacy(reports.server) as peer:
        result = await peer.request("prompts/get", {"name": "hello", "task": {"ttl": 1000}})

    assert result["messages"][0]["content"]["text"] == "Say hello."


async def test_without_the_middleware_nothing_of_it_is_there(
    database_url: str, reports: Any, connect_legacy: Any, refused: Any
) -> None:
    """A server opts in; tasks that nobody declared would be a surprise."""
    reports.server.middleware.remove(reports.tasks.legacy)
    reports.opened.set()

    async with connect_legacy(reports.server) as peer:
        result = await peer.call("wait", task={})
        with refused(-32601):
            await peer.call("add", {"a": 1, "b": 2}, task={})
        for method in ("tasks/get", "tasks/result", "tasks/list", "tasks/cancel"):
            with refused(-32601):
                await peer.request(method, {"taskId": "tsk_1"})

    assert "tasks" not in peer.initialized["capabilities"]
    assert result["content"] == [{**TEXT, "text": "through"}]
