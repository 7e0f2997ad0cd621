"""SIGKILL at named points: nothing acknowledged is lost, and what was interrupted gets an honest verdict."""

import asyncio
import os
import signal
from datetime import timedelta

import pytest

from taskstore import EventKind, StoreOptions, TaskNotFoundError, TaskStatus, TaskStore
from taskstore.clock import SYSTEM
from taskstore.testing import ManualClock
from tests.unit.outside import copy_task, query, value, wait_until, write_lock

from .conftest import THOROUGH
from .worker import ALICE, MEGABYTE

KILLED = -signal.SIGKILL


async def test_finished_results_survive_and_interrupted_tasks_say_so(start, database_url):
    """Here the first poll has the verdict, and whoever waited through another process wakes with it.

    Case 5, majiayu000/harness#328: tasks of a killed process stayed non-terminal for ever.
    """
    worker = start("finish_and_hang")
    told = worker.hear()
    finished = f"SELECT * FROM taskstore_tasks WHERE task_id = '{told['completed']}'"
    before = query(database_url, finished)
    async with (
        TaskStore.open(database_url, options=StoreOptions(upkeep=False)) as watching,
        asyncio.TaskGroup() as group,
    ):
        waiters = [
            group.create_task(watching.wait_for_task(task_id, auth=ALICE, timeout=timedelta(minutes=2)))
            for task_id in told["working"]
        ]
        worker.kill()
        async with TaskStore.open(database_url) as store:
            completed = await store.get_outcome(told["completed"], auth=ALICE)
            verdicts = [await store.get_details(task_id, auth=ALICE) for task_id in told["working"]]
            again = await store.recover()
            woken = await asyncio.gather(*waiters)

    assert completed.result == {"pages": list(range(1000))}
    assert query(database_url, finished) == before
    assert woken == [details.task for details in verdicts]
    assert [details.task.status for details in verdicts] == [TaskStatus.FAILED] * 3
    for details in verdicts:
        assert details.outcome is not None
        assert isinstance(details.outcome.error, dict)
        assert details.outcome.error["code"] == -32603
        assert details.outcome.error["data"]["reason"] == "CRASH_RECOVERY"
    assert again.recovered == ()


@pytest.mark.parametrize("moment", ["after-write", "before-commit", "after-commit"])
async def test_a_kill_around_a_create_loses_nothing_acknowledged(start, database_url, moment):
    """Before COMMIT the task never was; after it, it is there and gets its verdict, heard of or not."""
    worker = start("create_then_die", f"CREATE:{moment}")
    code, told = worker.end()
    created = [each["created"] for each in told]

    async with TaskStore.open(database_url) as store:
        listed = {task.task_id: task for task in (await store.list_tasks(auth=ALICE)).tasks}

    assert code == KILLED
    assert len(created) == 4
    assert set(created) <= set(listed)
    assert len(listed) == (5 if moment == "after-commit" else 4)
    assert {task.status for task in listed.values()} == {TaskStatus.FAILED}


@pytest.mark.parametrize("moment", ["after-write", "before-commit", "after-commit"])
async def test_a_kill_around_an_outcome_leaves_the_whole_result_or_the_verdict(start, database_url, moment):
    """Result and status are one write: never a status without its result, or a result without its status."""
    worker = start("complete_then_die", f"COMPLETE:{moment}")
    code, (acknowledged, interrupted) = worker.end()

    async with TaskStore.open(database_url) as store:
        kept = await store.get_outcome(acknowledged["completed"], auth=ALICE)
        details = await store.get_details(interrupted["created"], auth=ALICE)
        events = await store.list_events(interrupted["created"], auth=ALICE)

    assert code == KILLED
    assert kept.result == {"blob": "x" * 100_000}
    assert details.outcome is not None
    if moment == "after-commit":
        assert details.outcome.result == {"blob": "y" * 100_000}
        assert [event.kind for event in events] == [EventKind.CREATED, EventKind.COMPLETED]
    else:
        assert details.outcome.result is None
        assert [event.kind for event in events] == [EventKind.CREATED, EventKind.RECOVERED]


@pytest.mark.parametrize(
    ("moment", "after"), [("after-write", 1), ("after-write", 3), ("before-commit", 2), ("after-commit", 2)]
)
async def test_a_kill_in_the_middle_of_recovery_is_made_good_by_the_next(start, database_url, moment, after):
    """Recovery itself may die: its batches are whole or not there, and the next process goes on."""
    dead = start("create_many", "1100")
    created = dead.hear()["created"]
    dead.kill()
    dying = start("recover_then_die", f"RECOVER:{moment}", str(after))
    code, told = dying.end()

    async with TaskStore.open(database_url) as store:
        health = await store.operator.health()
        verdicts = [await store.get_task(task_id, auth=ALICE) for task_id in created]
        histories = [await store.list_events(task_id, auth=ALICE) for task_id in created]

    assert (code, told) == (KILLED, [])
    assert (health.live, health.orphans, health.instances) == (0, 0, 1)
    assert {(task.status, task.attempt, task.crashes) for task in verdicts} == {(TaskStatus.FAILED, 2, 1)}
    assert {tuple(event.kind for event in events) for events in histories} == {(EventKind.CREATED, EventKind.RECOVERED)}


async def test_other_processes_open_and_recover_beside_live_work(start, database_url):
    """Opening a second server failed the live work of the first one.

    Case 7, octos-org/octos PR#1412, bensheldon/good_job#90: opening a second instance failed the live work of the
    first.
    """
    working = start("hold")
    task_id = working.hear()["created"]

    code, told = start("open_and_recover", "20").end()
    working.process.stdin.write("finish\n")
    working.process.stdin.flush()
    done = working.hear()
    async with TaskStore.open(database_url) as store:
        history = [event.kind for event in await store.list_events(task_id, auth=ALICE)]

    assert history == [EventKind.CREATED, EventKind.COMPLETED]
    assert (code, told) == (0, [{"recovered": []}])
    assert done == {"completed": task_id, "attempt": 1}
    assert working.end()[0] == 0


async def test_a_suspended_process_keeps_its_work(start, database_url):
    """A debugger or a closed laptop stops its heartbeat and not its life; it goes on where it was."""
    working = start("hold")
    task_id = working.hear()["created"]
    working.process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, working.process.pid, os.WSTOPPED | os.WNOWAIT)

    clock = ManualClock()
    async with TaskStore.open(database_url, options=StoreOptions(clock=clock, upkeep=False)) as store:
        reports = []
        for _ in range(10):
            reports.append(await store.recover())
            clock.advance(timedelta(seconds=10))
    working.process.send_signal(signal.SIGCONT)
    working.go_on()

    assert {report.recovered for report in reports} == {()}
    assert working.hear() == {"completed": task_id, "attempt": 1}
    assert working.end()[0] == 0


@pytest.mark.parametrize("outsider", [False, True], ids=["alone", "beside-a-lock"])
async def test_four_processes_write_at_once_without_a_locked_database_or_a_lost_update(start, database_url, outsider):
    """Neither among themselves, nor when another tool holds the lock on what they write for a while.

    Case 15, jentic/jentic-one PR#529, coleifer/huey#445: WAL and a busy timeout still gave "locked" to transactions
    that read and then wrote.
    """
    workers = [start("work", "15") for _ in range(4)]
    if outsider:
        await asyncio.to_thread(hold_the_lock, database_url, seconds=2)

    ended = [worker.end() for worker in workers]

    async with TaskStore.open(database_url) as store:
        health = await store.operator.health()
    assert ended == [(0, [{"finished": 120}])] * 4
    assert (health.live, health.finished) == (0, 480)


def hold_the_lock(url, seconds):
    """Keep everybody from writing tasks once there are some; they can be read meanwhile."""
    wait_until(lambda: value(url, "SELECT count(*) FROM taskstore_tasks") > 0, "a first task")
    with write_lock(url):
        ends, seen = SYSTEM.monotonic() + seconds, set()
        while SYSTEM.monotonic() < ends:
            seen.add(value(url, "SELECT sum(version) FROM taskstore_tasks"))
    assert len(seen) == 1, "somebody wrote in spite of the lock"


async def test_a_kill_at_any_moment_of_a_large_result_leaves_all_of_it_or_the_verdict(start, database_url):
    """The named points are those that we thought of; here the moment is drawn, and the result takes its time.

    Case 35, multica-ai/multica PR#8281: recovery ran before the finished result was known, and a success became a
    failure.
    """
    code, told = start("be_killed_while_completing", str(30 * THOROUGH)).end()
    created = [each["created"] for each in told if "created" in each]
    acknowledged = {each["completed"] for each in told if "completed" in each}

    async with TaskStore.open(database_url) as store:
        verdicts = {task_id: await store.get_details(task_id, auth=ALICE) for task_id in created}

    assert code == 0
    assert len(created) == 30 * THOROUGH
    completed = {task_id for task_id, each in verdicts.items() if each.task.status is TaskStatus.COMPLETED}
    assert acknowledged <= completed
    assert 0 < len(completed) < len(created)  # else the moments were badly drawn
    for task_id, each in verdicts.items():
        assert each.outcome is not None
        if task_id in completed:
            assert each.outcome.result == {"task": task_id, "blob": "x" * MEGABYTE}
        else:
            assert each.task.status is TaskStatus.FAILED
            assert each.outcome.error["data"]["reason"] == "CRASH_RECOVERY"
    if database_url.startswith("sqlite"):
        assert value(database_url, "PRAGMA integrity_check") == "ok"


async def test_four_processes_with_upkeep_handle_each_row_once(start, database_url):
    """One does the upkeep, and the others look whose turn it is, and scan nothing.

    Case 19, agronholm/apscheduler#160, #655: every worker process ran the job.
    """
    async with TaskStore.open(database_url, options=StoreOptions(upkeep=False)) as store:
        kept = await store.create_task(auth=ALICE, name="expired")
        await store.handle(kept).complete("done")
        keepers = [start("keep_up") for _ in range(4)]
        for keeper in keepers:
            assert keeper.hear() == {"ready": True}
        dead = start("create_many", "50")
        orphans = dead.hear()["created"]

        copy_task(database_url, kept.task_id, 1000, expires_at="1")
        dead.kill()
        left = "SELECT count(*) FROM taskstore_tasks WHERE expires_at = 1 OR status = 'working'"
        await asyncio.to_thread(wait_until, lambda: value(database_url, left) == 0, "the end of the upkeep")
        for keeper in keepers:
            keeper.go_on()
        told = [keeper.end() for keeper in keepers]
        histories = [await store.list_events(task_id, auth=ALICE) for task_id in orphans]

    assert {code for code, _ in told} == {0}
    decided = [task_id for _, lines in told for line in lines for task_id in line.get("decided", ())]
    counts = sorted((line["scans"] > 0, line["swept"]) for _, lines in told for line in lines if "scans" in line)
    assert sorted(decided) == sorted(orphans)
    assert counts == [(False, 0)] * 3 + [(True, 1000)]
    assert {tuple(event.kind for event in each) for each in histories} == {(EventKind.CREATED, EventKind.RECOVERED)}
    if not database_url.startswith("sqlite"):
        assert value(database_url, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0


async def test_a_process_that_nobody_has_reaped_is_dead_all_the_same(start, database_url):
    """In a container whose first process reaps nobody, its tasks would stay 'working' for ever."""
    worker = start("finish_and_hang")
    told = worker.hear()
    worker.process.send_signal(signal.SIGKILL)
    # It is dead then, and still in the process table.
    await asyncio.to_thread(os.waitid, os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)

    async with TaskStore.open(database_url) as store:
        verdicts = [await store.get_task(task_id, auth=ALICE) for task_id in told["working"]]

    assert {task.status for task in verdicts} == {TaskStatus.FAILED}


async def test_a_task_of_a_dead_process_is_still_only_its_owners(start, database_url):
    worker = start("finish_and_hang")
    told = worker.hear()
    worker.kill()

    async with TaskStore.open(database_url) as store:
        for task_id in (told["completed"], *told["working"]):
            with pytest.raises(TaskNotFoundError):
                await store.get_task(task_id, auth=None)
