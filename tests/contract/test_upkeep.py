"""Upkeep: recovery and the sweep run by themselves, beside everything else."""

import asyncio
import logging
from datetime import timedelta

import pytest

from taskstore import TaskNotFoundError, TaskStatus
from taskstore.recovery import Recovery
from taskstore.schema import REVISIONS

from .conftest import ALICE

SOON = timedelta(milliseconds=50)
LONG = timedelta(seconds=30)


async def test_orphans_get_their_verdict_while_a_server_runs(store, open_store, crash):
    """A peer may die at any time; nobody should have to restart a server to learn of it."""
    task = await store.create_task(auth=ALICE)
    watching = await open_store(upkeep=True, recovery_interval=SOON)
    crash(store)

    seen = await watching.wait_for_task(task.task_id, auth=ALICE, timeout=LONG)

    assert seen.status is TaskStatus.FAILED


async def test_expired_tasks_are_swept_while_a_server_runs(open_store, finish, clock):
    store = await open_store(upkeep=True, sweep_interval=SOON)
    task = await finish(store, ttl=timedelta(minutes=1))

    clock.advance(timedelta(hours=1))

    async with asyncio.timeout(30):
        while (await store.operator.health()).expired:  # noqa: ASYNC110  a sweep tells nobody what it deleted
            await asyncio.sleep(0)
    with pytest.raises(TaskNotFoundError):
        await store.get_task(task.task_id, auth=ALICE)


async def test_a_job_that_fails_is_logged_and_runs_again(store, open_store, crash, caplog, monkeypatch):
    """One hiccup of the database must not end recovery for the life of the process."""
    recover, failures = Recovery.recover, []

    def fail_first(self, writer):
        if len(failures) < 2:
            failures.append(writer)
            raise RuntimeError("the disk is on fire")
        return recover(self, writer)

    task = await store.create_task(auth=ALICE)
    watching = await open_store(upkeep=False)
    monkeypatch.setattr(Recovery, "recover", fail_first)
    parts = watching._parts
    parts.scheduler.add("recover", parts.recover, SOON)
    parts.scheduler.start()
    crash(store)

    with caplog.at_level(logging.ERROR, "taskstore"):
        seen = await watching.wait_for_task(task.task_id, auth=ALICE, timeout=LONG)

    assert seen.status is TaskStatus.FAILED
    assert len(failures) == 2
    assert "the disk is on fire" in caplog.text


async def test_health_counts_what_there_is(store, peer, crash, finish, clock):
    await finish(store, ttl=timedelta(minutes=1))
    clock.advance(timedelta(hours=1))
    await finish(store)
    await store.create_task(auth=ALICE)
    await peer.create_task(auth=None)
    crash(store)

    health = await peer.operator.health()

    assert (health.live, health.finished, health.expired, health.orphans, health.instances) == (2, 1, 1, 1, 1)
    assert health.revision == REVISIONS[-1]
