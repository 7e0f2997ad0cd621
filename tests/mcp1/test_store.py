"""The SDK's TaskStore interface over ours, as code calls it that was written for that interface."""

from datetime import timedelta
from typing import Any

import pytest
from mcp import types
from mcp.shared.exceptions import McpError
from mcp.shared.experimental.tasks.context import TaskContext
from mcp.shared.experimental.tasks.helpers import cancel_task, task_execution
from mcp.shared.experimental.tasks.store import TaskStore as SDKTaskStore

from taskstore import AuthContext, StoreOptions, TaskNotFoundError, TaskStore
from taskstore.adapters.mcp_v1 import DurableTasks, enable_durable_tasks

RESULT = types.CallToolResult(content=[types.TextContent(type="text", text="done")])
MINUTE = types.TaskMetadata(ttl=60_000)


@pytest.fixture
def store(reports: Any, tasks: DurableTasks) -> SDKTaskStore:
    """What the SDK calls."""
    chosen: SDKTaskStore = reports.server.experimental.task_support.store
    return chosen


async def test_storing_the_result_is_the_finish(store: SDKTaskStore) -> None:
    """The interface has two calls for it; a process that dies in between must not lose the result."""
    task = await store.create_task(MINUTE)

    await store.store_result(task.taskId, RESULT)

    finished = await store.get_task(task.taskId)
    assert finished is not None
    assert finished.status == "completed"
    result = await store.get_result(task.taskId)
    assert result is not None
    assert types.CallToolResult.model_validate(result.model_dump(by_alias=True)).content == RESULT.content


async def test_the_sdks_own_context_runs_a_task_on_it(store: SDKTaskStore) -> None:
    """Its helpers know nothing but the interface."""
    created = await store.create_task(MINUTE)
    async with task_execution(created.taskId, store) as context:
        await context.update_status("halfway")
        seen = await store.get_task(created.taskId)
        await context.complete(RESULT)
    broken = await store.create_task(MINUTE)
    async with task_execution(broken.taskId, store):
        raise RuntimeError("no paper")

    assert seen is not None
    assert (seen.status, seen.statusMessage) == ("working", "halfway")
    assert context.task.status == "completed"
    failed = await store.get_task(broken.taskId)
    assert failed is not None
    assert (failed.status, failed.statusMessage) == ("failed", "no paper")
    with pytest.raises(McpError, match="no paper"):
        await store.get_result(broken.taskId)


async def test_a_late_write_is_absorbed_and_changes_nothing(store: SDKTaskStore) -> None:
    """T25-39; an exception here would end a session of the SDK."""
    task = await store.create_task(MINUTE)
    context = TaskContext(task, store)
    cancelled = await cancel_task(store, task.taskId)

    await context.update_status("too late")
    await context.complete(RESULT)
    await context.fail("too late as well")

    assert cancelled.status == context.task.status == "cancelled"
    with pytest.raises(McpError, match="cancelled"):
        await store.get_result(task.taskId)


async def test_a_write_after_a_cancellation_elsewhere_is_absorbed_too(
    store: SDKTaskStore, local: AuthContext, database_url: str
) -> None:
    """This process still holds the task, and hears of it only now."""
    task = await store.create_task(MINUTE)
    async with TaskStore.open(database_url) as elsewhere:
        await elsewhere.cancel_task(task.taskId, auth=local)

    await store.store_result(task.taskId, RESULT)
    seen = await store.update_task(task.taskId, status="failed", status_message="too late")

    assert seen.status == "cancelled"


async def test_a_task_of_another_process_is_not_written(
    store: SDKTaskStore, local: AuthContext, database_url: str
) -> None:
    """It may be read here; only its holder says what becomes of it."""
    async with TaskStore.open(database_url) as elsewhere:
        task = await elsewhere.create_task(auth=local)

        await store.store_result(task.task_id, RESULT)
        seen = await store.update_task(task.task_id, status="failed", status_message="not mine")

    assert (seen.status, seen.statusMessage) == ("working", None)


async def test_an_empty_finish_and_a_plain_message_are_possible(store: SDKTaskStore) -> None:
    """Nothing says that a result was stored before."""
    task = await store.create_task(types.TaskMetadata())
    unchanged = await store.update_task(task.taskId)
    told = await store.update_task(task.taskId, status="working", status_message="going")
    finished = await store.update_task(task.taskId, status="completed", status_message="gone")

    assert (unchanged.status, task.ttl) == ("working", 3_600_000)
    assert (told.status, told.statusMessage) == ("working", "going")
    assert (finished.status, finished.statusMessage) == ("completed", "gone")


async def test_waiting_for_input_comes_of_asking_alone(store: SDKTaskStore) -> None:
    """A task that waits for input and asks nothing would wait for ever."""
    task = await store.create_task(MINUTE)

    with pytest.raises(ValueError, match="elicit"):
        await store.update_task(task.taskId, status="input_required")


async def test_a_live_task_is_not_deleted(store: SDKTaskStore) -> None:
    """Its work would have nothing to write to."""
    task = await store.create_task(MINUTE)
    with pytest.raises(ValueError, match="working"):
        await store.delete_task(task.taskId)
    await store.store_result(task.taskId, RESULT)

    assert await store.delete_task(task.taskId)
    assert not await store.delete_task(task.taskId)
    assert await store.get_task(task.taskId) is None


async def test_an_unknown_task_is_what_the_interface_says(store: SDKTaskStore) -> None:
    """None where it reads, ValueError where it writes or waits."""
    assert await store.get_task("nope") is None
    assert await store.get_result("nope") is None
    for call in (store.update_task("nope"), store.store_result("nope", RESULT), store.wait_for_update("nope")):
        with pytest.raises(ValueError, match="not found"):
            await call


async def test_a_task_has_no_result_before_its_end(store: SDKTaskStore) -> None:
    """Nor does reading it wait, as tasks/result does."""
    task = await store.create_task(MINUTE)

    assert await store.get_result(task.taskId) is None


async def test_a_wait_ends_with_the_change_and_soon_without_one(store: SDKTaskStore) -> None:
    """The SDK reads, and then waits: what changed in between would be missed otherwise."""
    task = await store.create_task(MINUTE)

    await store.wait_for_update(task.taskId)
    await store.notify_update(task.taskId)

    await store.store_result(task.taskId, RESULT)
    await store.wait_for_update(task.taskId)


async def test_a_bad_cursor_and_a_negative_ttl_are_errors_of_the_protocol(store: SDKTaskStore, refused: Any) -> None:
    """The SDK sends any other exception as code 0."""
    with refused(-32602):
        await store.list_tasks("nonsense")
    with refused(-32602):
        await store.create_task(types.TaskMetadata(ttl=-1))


async def test_without_an_auth_context_nothing_is_listed(reports: Any, database_url: str) -> None:
    """Whoever has the id reads the task; nobody is told the ids of others."""
    async with enable_durable_tasks(reports.server, database_url):
        anybodys = reports.server.experimental.task_support.store
        anybodys._auth = lambda: None
        task = await anybodys.create_task(MINUTE)

        assert await anybodys.get_task(task.taskId) is not None
        assert await anybodys.list_tasks() == ([], None)


async def test_a_ttl_is_cut_to_what_the_store_allows(reports: Any, database_url: str) -> None:
    """T25-26, T25-27: the task says what it got, and no number is too large to be asked for."""
    options = StoreOptions(max_ttl=timedelta(hours=2))
    async with enable_durable_tasks(reports.server, database_url, options=options) as tasks:
        store = reports.server.experimental.task_support.store
        task = await store.create_task(types.TaskMetadata(ttl=10**30))

        assert task.ttl == 7_200_000
        with pytest.raises(TaskNotFoundError):
            await tasks.store.get_task(task.taskId, auth=AuthContext(subject="somebody else"))
