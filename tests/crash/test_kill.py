"""SIGKILL at named points: nothing acknowledged is lost, and what was interrupted gets an honest verdict."""

import asyncio
import os
import signal

import pytest

from taskstore import EventKind, TaskNotFoundError, TaskStatus, TaskStore

from .worker import ALICE

KILLED = -signal.SIGKILL


async def test_finished_results_survive_and_interrupted_tasks_say_so(start, database_url):
    """Tasks of a killed process stayed non-terminal for ever; here the first poll has the verdict."""
    worker = start("finish_and_hang")
    told = worker.hear()
    worker.kill()

    async with TaskStore.open(database_url) as store:
        completed = await store.get_outcome(told["completed"], auth=ALICE)
        verdicts = [await store.get_details(task_id, auth=ALICE) for task_id in told["working"]]
        again = await store.recover()

    assert completed.result == {"pages": list(range(1000))}
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
    """Opening a second server failed the live work of the first one."""
    working = start("hold")
    task_id = working.hear()["created"]

    code, told = start("open_and_recover", "20").end()
    working.process.stdin.write("finish\n")
    working.process.stdin.flush()
    done = working.hear()

    assert (code, told) == (0, [{"recovered": []}])
    assert done == {"completed": task_id, "attempt": 1}
    assert working.end()[0] == 0


async def test_four_processes_write_at_once_without_a_locked_database_or_a_lost_update(start, database_url):
    """WAL and a busy timeout alone still gave 'database is locked' to transactions that read and then wrote."""
    workers = [start("work", "15") for _ in range(4)]

    ended = [worker.end() for worker in workers]

    async with TaskStore.open(database_url) as store:
        health = await store.operator.health()
    assert ended == [(0, [{"finished": 120}])] * 4
    assert (health.live, health.finished) == (0, 480)


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
