"""The blocking store: the same calls, from scripts, threads, and beside running loops."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from taskstore import (
    DatabaseUnavailableError,
    OperatorView,
    StoreOptions,
    SyncOperatorView,
    SyncTaskHandle,
    SyncTaskStore,
    TaskFinishedError,
    TaskHandle,
    TaskStatus,
    TaskStore,
)
from taskstore.testing import crash

from .conftest import ALICE


@pytest.fixture
def sync_store(database_url, clock):
    with SyncTaskStore.open(database_url, options=StoreOptions(clock=clock, upkeep=False)) as store:
        yield store


def public(kind) -> dict[str, inspect.Signature]:
    methods = inspect.getmembers(kind, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
    return {name: inspect.signature(method) for name, method in methods if not name.startswith("_") and name != "open"}


@pytest.mark.parametrize(
    ("blocking", "original"),
    [(SyncTaskStore, TaskStore), (SyncTaskHandle, TaskHandle), (SyncOperatorView, OperatorView)],
    ids=lambda kind: kind.__name__,
)
def test_every_call_is_there_with_the_same_arguments(blocking, original):
    """Whoever knows one knows the other."""
    theirs, ours = public(original), public(blocking)
    theirs.pop("stop_work", None)  # the store's own means to tell a handle

    assert ours.keys() == theirs.keys()
    for name, signature in theirs.items():
        assert ours[name].parameters == signature.parameters, name


def test_a_plain_script_runs_a_whole_task(sync_store):
    """Nobody should need to know of event loops for it.

    Case 59, akougkas/zulipchat-mcp PR#11, PrefectHQ/fastmcp#864: authors of synchronous tools were shut out.
    """
    task = sync_store.create_task(auth=ALICE, name="report", request={"a": 1}, session_id="s")
    with sync_store.handle(task) as handle:
        handle.progress(3, total=10, message="rendering")
        seen = sync_store.get_task(task.task_id, auth=ALICE)
        done = handle.complete({"pages": 10})

    assert (seen.progress, seen.status_message) == (3, "rendering")
    assert sync_store.wait_for_task(task.task_id, auth=ALICE) == done
    assert sync_store.get_outcome(task.task_id, auth=ALICE).result == {"pages": 10}
    assert sync_store.get_details(task.task_id, auth=ALICE).task == done
    assert sync_store.list_tasks(auth=ALICE, session_id="s").tasks == (done,)
    assert [event.to_status for event in sync_store.list_events(task.task_id, auth=ALICE)][-1] is TaskStatus.COMPLETED
    assert sync_store.operator.health().finished == 1
    assert sync_store.operator.get_task(task.task_id) == sync_store.operator.list_tasks().tasks[0] == done
    sync_store.delete_task(task.task_id, auth=ALICE)
    assert (sync_store.recover().recovered, sync_store.sweep().deleted) == ((), 0)


def test_a_block_that_raises_fails_its_task(sync_store):
    task = sync_store.create_task(auth=ALICE, name="report")

    with pytest.raises(ZeroDivisionError), sync_store.handle(task):
        raise ZeroDivisionError

    assert sync_store.get_task(task.task_id, auth=ALICE).status_message == "Error executing tool report"


def test_threads_share_one_store(sync_store):
    def flow(_: int) -> TaskStatus:
        task = sync_store.create_task(auth=ALICE)
        sync_store.handle(task).complete({"thread": threading.get_ident()})
        return sync_store.get_task(task.task_id, auth=ALICE).status

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(flow, range(80)))

    assert set(statuses) == {TaskStatus.COMPLETED}


def test_a_thread_that_waits_is_woken_by_another_one(sync_store):
    task = sync_store.create_task(auth=ALICE)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sync_store.wait_for_task, task.task_id, auth=ALICE, timeout=timedelta(seconds=30))
        cancelled = sync_store.cancel_task(task.task_id, auth=ALICE)

        assert waiting.result(30) == cancelled
    with pytest.raises(TaskFinishedError):
        sync_store.cancel_task(task.task_id, auth=ALICE)


def test_a_tool_in_a_thread_asks_and_is_answered(sync_store):
    task = sync_store.create_task(auth=ALICE)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(sync_store.handle(task).ask, {"name": {"method": "elicitation/create"}})
        asked = sync_store.wait_for_task(task.task_id, auth=ALICE, since_version=1, timeout=timedelta(seconds=30))
        key = next(iter(sync_store.get_details(task.task_id, auth=ALICE).input_requests))

        sync_store.answer_inputs(task.task_id, {key: "Ann"}, auth=ALICE)

        assert asking.result(30) == {"name": "Ann"}
    assert asked.status is TaskStatus.INPUT_REQUIRED


def test_worker_threads_of_several_loops_use_it(sync_store):
    """Two event loops in two threads, each with workers: nothing may be bound to one of them.

    Case 59, akougkas/zulipchat-mcp PR#11, PrefectHQ/fastmcp#864: authors of synchronous tools were shut out.
    """

    async def serve() -> list[TaskStatus]:
        async def one() -> TaskStatus:
            task = await asyncio.to_thread(sync_store.create_task, auth=ALICE)
            return (await asyncio.to_thread(sync_store.handle(task).complete, {})).status

        return await asyncio.gather(*(one() for _ in range(10)))

    with ThreadPoolExecutor(2) as pool:
        statuses = [status for each in pool.map(lambda _: asyncio.run(serve()), range(2)) for status in each]

    assert statuses == [TaskStatus.COMPLETED] * 20


async def test_a_call_inside_a_coroutine_says_what_to_do_instead(database_url):
    """It would stop the loop, perhaps for ever; the error must come instead, and name the way out.

    Case 59, akougkas/zulipchat-mcp PR#11, PrefectHQ/fastmcp#864: authors of synchronous tools were shut out.
    """
    with pytest.raises(RuntimeError, match="use TaskStore there"):
        SyncTaskStore.open(database_url).__enter__()

    opened = SyncTaskStore.open(database_url)
    store = await asyncio.to_thread(opened.__enter__)
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        store.create_task(auth=ALICE)
    assert (await asyncio.to_thread(store.operator.health)).live == 0
    await asyncio.to_thread(opened.__exit__, None, None, None)


def test_its_process_can_be_made_to_look_dead(sync_store, database_url, clock):
    """Users test what becomes of their tasks after a crash, with the store that they use."""
    task = sync_store.create_task(auth=ALICE)
    crash(sync_store)

    with SyncTaskStore.open(database_url, options=StoreOptions(clock=clock, upkeep=False)) as peer:
        report = peer.recover()

    assert report.recovered == (task.task_id,)
    with pytest.raises(ValueError, match="no instance"):
        crash(sync_store)


def test_a_closed_store_says_so(database_url):
    with SyncTaskStore.open(database_url) as store:
        pass

    with pytest.raises(DatabaseUnavailableError, match="closed"):
        store.create_task(auth=ALICE)
