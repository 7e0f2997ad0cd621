"""SIGKILL while one transaction writes for many callers: each of them is told the truth, whoever its neighbours are."""

import json
import signal
from pathlib import Path

import pytest

from taskstore import EventKind, StoreOptions, TaskStatus, TaskStore
from tests.unit.outside import process

from .conftest import THOROUGH

ROOT = str(Path(__file__).parents[2])
RUNS = 5 * THOROUGH  # 15 times as many, at each of four points, are 300
CALLERS = 16
# Forked for each death: to start an interpreter takes longer than all that happens in it.
DYING = """
import asyncio, json, os, random, signal, sys
sys.path.insert(0, sys.argv[5])
from tests.crash import points
points.install()
from taskstore import AuthContext, StoreOptions, TaskStore

url, point, runs, callers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
draw = random.Random(point)

def tell(**facts):
    os.write(1, (json.dumps(facts) + chr(10)).encode())  # at once and in one piece: what was told survives SIGKILL

async def call(store, number):
    task = await store.create_task(auth=AuthContext(subject="alice"), request={"number": number})
    tell(created=task.task_id)
    await store.handle(task).complete({"task": task.task_id, "blob": "x" * 5000})
    tell(completed=task.task_id)

async def die_together(after):
    async with TaskStore.open(url, options=StoreOptions(upkeep=False)) as store:
        points.arm(point, after, lambda: os.kill(os.getpid(), signal.SIGKILL))
        await asyncio.gather(*(call(store, number) for number in range(callers)))
    os._exit(0)

most = 4
for _ in range(runs):
    after = draw.randint(1, most)
    pid = os.fork()
    if pid == 0:
        asyncio.run(die_together(after))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    most = max(2, most - 3) if code == 0 else most + 1  # as many transactions as there are in all, or nearly so
    tell(code=code)
"""


@pytest.mark.parametrize("point", ["transaction-begun", "before-commit", "after-commit", "before-callers-hear"])
async def test_a_kill_in_the_middle_of_a_group_commit_deceives_none_of_its_callers(database_url, point):
    """What one was told is there; what none was told is whole or has its verdict, and never half of a neighbour's."""
    with process(DYING, database_url, point, str(RUNS), str(CALLERS), ROOT) as dying:
        code, out, err = dying.end()
    told = [json.loads(line) for line in out.splitlines()]
    deaths = sum(line.get("code") == -signal.SIGKILL for line in told)
    created = {line["created"] for line in told if "created" in line}
    acknowledged = {line["completed"] for line in told if "completed" in line}

    found = {}
    async with TaskStore.open(database_url, options=StoreOptions()) as store:
        page = await store.operator.list_tasks()
        while True:
            for task in page.tasks:
                events = [event.kind for event in await store.operator.list_events(task.task_id)]
                found[task.task_id] = (await store.operator.get_details(task.task_id), events)
            if page.next_cursor is None:
                break
            page = await store.operator.list_tasks(cursor=page.next_cursor)

    completed = {task_id for task_id, (each, _) in found.items() if each.task.status is TaskStatus.COMPLETED}
    print(f"{point}: {deaths} deaths, {len(found)} tasks, {len(acknowledged)} of {len(completed)} results acknowledged")
    assert (code, err) == (0, "")
    assert deaths >= RUNS / 3
    assert created <= set(found)
    assert acknowledged <= completed
    for task_id, (each, events) in found.items():
        assert each.outcome is not None
        if task_id in completed:
            assert each.outcome.result == {"task": task_id, "blob": "x" * 5000}
            assert events == [EventKind.CREATED, EventKind.COMPLETED]
        else:
            assert each.task.status is TaskStatus.FAILED
            assert each.outcome.error["data"]["reason"] == "CRASH_RECOVERY"
            assert events == [EventKind.CREATED, EventKind.RECOVERED]
    if point in ("after-commit", "before-callers-hear"):
        unheard = len(found) - len(created) + len(completed) - len(acknowledged)
        assert unheard > deaths, "no death met more than one caller"
