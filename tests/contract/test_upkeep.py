"""Upkeep: recovery and the sweep run by themselves, beside everything else."""

import asyncio
import logging
from datetime import timedelta

from taskstore import OnCrash, TaskStatus, database, statements
from taskstore.recovery import SWEEP_BATCH, Recovery
from taskstore.schema import REVISIONS

from .conftest import ALICE, MINUTE

SOON = timedelta(milliseconds=50)
LONG = timedelta(seconds=30)


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


async def test_a_sweep_of_many_batches_looks_at_live_tasks_only_while_some_are_due(store, finish, clock, monkeypatch):
    """With many live tasks and many expired ones, a look at each of the former for each batch held up every writer."""
    external = (store.create_task(auth=ALICE, ttl=MINUTE, on_crash=OnCrash.EXTERNAL) for _ in range(SWEEP_BATCH + 1))
    await asyncio.gather(*external, *(finish(store, ttl=MINUTE) for _ in range(2 * SWEEP_BATCH + 1)))
    clock.advance(timedelta(hours=1))
    looks, rows = [], database._Transaction.rows

    def watched(self, statement, params):
        found = rows(self, statement, params)
        if statement is statements.DUE:
            looks.append(len(found))
        return found

    monkeypatch.setattr(database._Transaction, "rows", watched)

    report = await store.sweep()

    assert (report.ended, report.deleted) == (SWEEP_BATCH + 1, 2 * SWEEP_BATCH + 1)
    assert looks == [SWEEP_BATCH, 1]


def upkeep_of(store):
    """Run what the timer runs; tell whether it scanned."""
    parts, done = store._parts, []
    parts._in_turn(lambda: done.append(True))()
    return bool(done)


async def test_one_process_of_many_does_the_upkeep(open_store, finish, clock):
    """Every worker process ran the job, and each of them scanned the tables."""
    stores = [await open_store() for _ in range(4)]

    turns = [[upkeep_of(store) for store in stores] for _ in range(3)]

    assert turns == [[True, False, False, False]] * 3


async def test_the_upkeep_goes_to_another_when_its_process_stops_or_dies(open_store, crash):
    first, second, third = [await open_store() for _ in range(3)]
    assert upkeep_of(first)

    await asyncio.to_thread(first._parts.close)
    after_stop = [upkeep_of(second), upkeep_of(third)]
    crash(second)
    after_death = [upkeep_of(third), upkeep_of(second)]

    assert after_stop == [True, False]
    assert after_death == [True, False]


async def test_a_suspended_process_loses_the_upkeep_after_its_lease(open_store, clock):
    """The process table shows it as alive; while it stands still, nobody would recover anything."""
    suspended, working = await open_store(), await open_store()
    assert upkeep_of(suspended)

    looks = []
    for _ in range(5):
        looks.append(upkeep_of(working))
        clock.advance(timedelta(seconds=10))

    assert looks == [False, False, False, True, True]
    assert not upkeep_of(suspended)


async def test_a_process_that_beats_keeps_the_upkeep(open_store, clock):
    beating, other = await open_store(), await open_store()
    assert upkeep_of(beating)

    for _ in range(10):
        beating._parts.instance.beat()
        clock.advance(timedelta(seconds=10))
        assert not upkeep_of(other)


async def test_two_that_find_the_upkeep_free_do_not_both_take_it(open_store):
    stores = [await open_store() for _ in range(4)]

    turns = await asyncio.gather(*(asyncio.to_thread(upkeep_of, store) for store in stores))

    assert turns.count(True) == 1
