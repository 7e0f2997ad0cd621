"""Interleavings: what two processes do to one task at once ends it once, and its history tells how."""

import asyncio
import random
from collections import Counter

from taskstore import EventKind, TaskFinishedError, TaskStatus

from .conftest import ALICE

TASKS, AT_ONCE = 1000, 4


async def race(store, peer, chance):
    """Cancel a task in one process while the other one reports progress and completes it, in a random order."""
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)
    writes = {
        "complete": lambda: handle.complete({"ok": True}),
        "progress": lambda: handle.progress(chance.random()),
        "cancel": lambda: peer.cancel_task(task.task_id, auth=ALICE),
    }

    async def later(write):
        for _ in range(chance.randrange(4)):  # a read takes about as long as the other process's write
            await chance.choice((store, peer)).get_task(task.task_id, auth=ALICE)
        return await write()

    names = chance.sample(sorted(writes), k=3)
    answers = await asyncio.gather(*(later(writes[name]) for name in names), return_exceptions=True)
    return task, dict(zip(names, answers, strict=True))


async def check_one_end(store, task, answers):
    """Whoever was first has won; the others were told of it, and the history has one end."""
    details = await store.get_details(task.task_id, auth=ALICE)
    events = await store.list_events(task.task_id, auth=ALICE)
    won = [name for name in ("complete", "cancel") if not isinstance(answers[name], Exception)]
    assert len(won) == 1, answers
    status = {"complete": TaskStatus.COMPLETED, "cancel": TaskStatus.CANCELLED}[won[0]]
    assert details.task == answers[won[0]]
    assert details.task.status is status
    assert details.outcome.result == ({"ok": True} if status is TaskStatus.COMPLETED else None)
    for name, answer in answers.items():
        if isinstance(answer, Exception):
            assert isinstance(answer, TaskFinishedError), (name, answer)
            assert answer.task == details.task
    assert [(event.kind, event.from_status, event.to_status) for event in events] == [
        (EventKind.CREATED, None, TaskStatus.WORKING),
        (EventKind(status.value), TaskStatus.WORKING, status),
    ]
    assert events[-1].version == details.task.version
    return won[0]


async def test_a_thousand_races_between_two_processes_leave_one_end_each(store, peer):
    """A cancel and a result that cross must never both count, nor leave a history that tells of neither."""
    chance, won = random.Random(0), Counter[str]()

    for _ in range(TASKS // AT_ONCE):
        raced = await asyncio.gather(*(race(store, peer, chance) for _ in range(AT_ONCE)))
        won.update(await asyncio.gather(*(check_one_end(peer, *each) for each in raced)))

    assert won.total() == TASKS, won
    assert min(won["complete"], won["cancel"]) > TASKS // 50  # else they were no races
