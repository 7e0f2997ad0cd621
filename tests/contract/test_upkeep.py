"""Upkeep: recovery and the sweep run by themselves, beside everything else."""

import asyncio
import logging
import random
import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial

from taskstore import OnCrash, OperatorView, StoreOptions, TaskStatus, TaskStore, database, dialects, statements
from taskstore.recovery import RECOVERY_BATCH, SWEEP_BATCH, Recovery
from taskstore.schema import REVISIONS
from tests.unit.outside import copy_task, write_lock

from .conftest import ALICE, MINUTE

SOON = timedelta(milliseconds=50)
LONG = timedelta(seconds=30)


async def test_a_job_that_fails_is_logged_and_runs_again(store, open_store, crash, caplog, monkeypatch):
    """One hiccup of the database must not end recovery for the life of the process.

    Case 69, sinas-platform/sinas#145, gabrielkoerich/orch#1396: a sweep was silent, and the reset at the start gave
    up.
    """
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


async def test_upkeep_that_meets_a_lock_tells_what_it_did_and_goes_on_the_next_time(
    database_url, open_store, crash, clock, caplog, monkeypatch
):
    """Another tool holds the lock on the tasks for longer than anybody waits; what is done stays done, and is told.

    Case 69, sinas-platform/sinas#145, gabrielkoerich/orch#1396: a sweep was silent, and the reset at the start gave up.
    """
    store = await open_store()
    monkeypatch.setattr(dialects, "_BUSY_TIMEOUT_MS", 500)
    upkeep = (await open_store())._parts
    orphan, expired = await store.create_task(auth=ALICE), await store.create_task(auth=ALICE)
    await store.handle(expired).complete("done")
    copy_task(database_url, orphan.task_id, RECOVERY_BATCH + 99)
    copy_task(database_url, expired.task_id, 500, expires_at="1")
    crash(store)

    def interrupted(job):
        with ExitStack() as stack:
            upkeep.scheduler.run(
                "upkeep", partial(job, progress=lambda done: stack.enter_context(write_lock(database_url)))
            )

    with caplog.at_level(logging.INFO, "taskstore"):
        await asyncio.to_thread(interrupted, partial(upkeep.recovery.recover, upkeep.writer))
        await asyncio.to_thread(interrupted, upkeep.recovery.sweep)
        between = await OperatorView(upkeep).health()
        recovered = await asyncio.to_thread(upkeep.recovery.recover, upkeep.writer)
        swept = await asyncio.to_thread(upkeep.recovery.sweep)
        health = await OperatorView(upkeep).health()
        said = [each.message for each in caplog.records if each.name == "taskstore"]

    assert (between.orphans, between.expired) == (100, 400)
    assert (len(recovered.recovered), swept.deleted) == (100, 400)
    assert (health.orphans, health.expired, health.live) == (0, 0, 0)
    told = [line for line in said if line.startswith(("Recovery", "Sweep"))]
    assert [line.partition(",")[0] for line in told] == [
        "Recovery: 1 dead processes",
        "Sweep: 100 expired tasks deleted",
        "Recovery: 1 dead processes",
        "Sweep: 400 expired tasks deleted",
    ]
    assert [f"{count} tasks failed" in line for count, line in zip((500, 100), told[::2], strict=True)] == [True] * 2
    assert len([line for line in said if line.startswith("Upkeep job upkeep did not finish")]) == 2


async def test_a_job_that_keeps_failing_shows_in_the_health_until_it_succeeds(
    database_url, open_store, crash, finish, clock, monkeypatch
):
    """Orphans that stay are seen by their requestors first, unless a probe is told that nobody recovers them, and why.

    Case 69, sinas-platform/sinas#145, gabrielkoerich/orch#1396: a sweep was silent, and the reset at the start gave up.
    """
    monkeypatch.setattr(dialects, "_BUSY_TIMEOUT_MS", 50)
    store, dying = await open_store(), await open_store()
    upkeep = store._parts
    await finish(store, ttl=MINUTE)
    orphan = await dying.create_task(auth=ALICE)
    clock.advance(timedelta(hours=1))
    first_failure = datetime.fromtimestamp(clock.now() / 1000, UTC)
    before = (await store.operator.health()).failing
    crash(dying)

    async def run_both():
        await asyncio.to_thread(upkeep.scheduler.run, "recover", upkeep.keep_recovering)
        await asyncio.to_thread(upkeep.scheduler.run, "sweep", upkeep.recovery.sweep)

    with write_lock(database_url):
        for _ in range(3):
            await run_both()
            clock.advance(timedelta(seconds=10))
        during = await store.operator.health()
    await run_both()
    after = await store.operator.health()

    assert (before, after.failing, after.orphans, after.expired) == ((), (), 0, 0)
    assert (during.orphans, during.expired) == (1, 1)
    assert [(job.name, job.failures, job.since) for job in during.failing] == [
        ("recover", 3, first_failure),
        ("sweep", 3, first_failure),
    ]
    assert all("lock" in job.error for job in during.failing)
    assert (await store.get_task(orphan.task_id, auth=ALICE)).status is TaskStatus.FAILED


async def test_stores_open_and_close_in_any_order(database_url):
    """One process may serve several of them, and reload one beside the others.

    Case 49, agronholm/apscheduler#632, #985: "cannot schedule new futures" and tracebacks at the end of a process.
    """
    draw, often = random.Random(49), StoreOptions(recovery_interval=SOON, sweep_interval=SOON)
    opened = []
    for _ in range(20):
        if opened and draw.random() < 0.5:
            manager, store = opened.pop(draw.randrange(len(opened)))
            await manager.__aexit__(None, None, None)
        else:
            manager = TaskStore.open(database_url, options=often)
            opened.append((manager, await manager.__aenter__()))
        for _, store in opened:
            await store.handle(await store.create_task(auth=ALICE)).complete("done")
    for manager, _ in opened:
        await manager.__aexit__(None, None, None)

    async with TaskStore.open(database_url) as last:
        health = await last.operator.health()
    assert (health.live, health.instances) == (0, 1)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("taskstore")]


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


def counted_rows(monkeypatch, watched):
    """Count the rows of a statement, each time that it runs from now on."""
    counts, rows = [], database._Transaction.rows

    def count(self, statement, params):
        found = rows(self, statement, params)
        if statement is watched:
            counts.append(len(found))
        return found

    monkeypatch.setattr(database._Transaction, "rows", count)
    return counts


async def test_a_sweep_of_many_batches_looks_at_live_tasks_only_while_some_are_due(store, finish, clock, monkeypatch):
    """With many live tasks and many expired ones, a look at each of the former for each batch held up every writer."""
    external = (store.create_task(auth=ALICE, ttl=MINUTE, on_crash=OnCrash.EXTERNAL) for _ in range(SWEEP_BATCH + 1))
    await asyncio.gather(*external, *(finish(store, ttl=MINUTE) for _ in range(2 * SWEEP_BATCH + 1)))
    clock.advance(timedelta(hours=1))
    looks = counted_rows(monkeypatch, statements.DUE)

    report = await store.sweep()

    assert (report.ended, report.deleted) == (SWEEP_BATCH + 1, 2 * SWEEP_BATCH + 1)
    assert looks == [SWEEP_BATCH, 1]


async def test_a_sweep_takes_fewer_at_once_of_large_tasks(store, clock, monkeypatch):
    """A hundred results of 100 KB took 25 ms to delete, for which every writer waited."""

    async def finish(ttl, result):
        await store.handle(await store.create_task(auth=ALICE, ttl=ttl)).complete(result)

    await asyncio.gather(*(finish(20 * MINUTE, {"text": "x" * 102_400}) for _ in range(SWEEP_BATCH + 10)))
    await asyncio.gather(*(finish(30 * MINUTE, {}) for _ in range(130)))
    clock.advance(timedelta(hours=1))
    batches = counted_rows(monkeypatch, statements.SWEEP)

    report = await store.sweep()

    assert report.deleted == SWEEP_BATCH + 140
    assert batches == [SWEEP_BATCH, 20, 40, 80]  # the second one begins with ten large ones, and grows by the others


def upkeep_of(store):
    """Run what the timer runs; tell whether it scanned."""
    parts, done = store._parts, []
    parts._in_turn(lambda: done.append(True))()
    return bool(done)


async def test_one_process_of_many_does_the_upkeep(open_store, finish, clock):
    """Every worker process ran the job, and each of them scanned the tables.

    Case 19, agronholm/apscheduler#160, #655: every worker process ran the job.
    """
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
