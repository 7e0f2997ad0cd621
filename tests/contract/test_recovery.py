"""Recovery: an honest verdict for every orphan, and live work is never touched."""

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import make_url, text

from taskstore import (
    DatabaseUnavailableError,
    EventKind,
    LeaseLostError,
    ReasonCode,
    StoreOptions,
    TaskStatus,
    TaskStore,
)
from tests.unit.outside import query

from .conftest import ALICE


def run(store, sql, **params):
    """Change a row behind the store's back."""
    statement = text(sql)
    return store._parts.database.write(lambda transaction: transaction.execute(statement, params)).result()


async def test_orphans_fail_with_crash_recovery_and_finished_tasks_stay(store, peer, crash, finish):
    """Tasks of a killed process stayed 'working' for ever, and clients polled for ever."""
    done = await finish(store, {"pages": 10})
    before = await store.get_details(done.task_id, auth=ALICE)
    orphans = [await store.create_task(auth=ALICE) for _ in range(3)]
    await store.handle(orphans[0]).progress(62, total=100, message="rendering")
    crash(store)

    first, second = await peer.recover(), await peer.recover()

    assert set(first.recovered) == {task.task_id for task in orphans}
    assert (first.dead_instances, second.recovered, second.dead_instances) == (1, (), 0)
    assert await peer.get_details(done.task_id, auth=ALICE) == before
    failed = await peer.get_details(orphans[0].task_id, auth=ALICE)
    assert (failed.task.status, failed.task.attempt, failed.task.crashes) == (TaskStatus.FAILED, 2, 1)
    assert failed.task.status_message is not None
    assert failed.task.status_message.startswith("CRASH_RECOVERY: ")
    assert failed.outcome is not None
    assert failed.outcome.error == {
        "code": -32603,
        "message": failed.task.status_message,
        "data": {
            "reason": "CRASH_RECOVERY",
            "progress": 62.0,
            "total": 100.0,
            "attempt": 1,
            "crashes": 1,
            "retrySafe": False,
        },
    }
    last = (await peer.list_events(orphans[0].task_id, auth=ALICE))[-1]
    assert (last.kind, last.reason, last.from_status) == (
        EventKind.RECOVERED,
        ReasonCode.CRASH_RECOVERY,
        TaskStatus.WORKING,
    )


async def test_the_verdict_does_not_name_the_process(store, peer, crash):
    """Who runs what and where is for the operator's log, not for a client."""
    task = await store.create_task(auth=ALICE)
    instance = store._parts.writer
    crash(store)
    await peer.recover()

    shown = repr(await peer.get_details(task.task_id, auth=ALICE))

    assert instance not in shown


async def test_recovery_is_done_before_open_returns(store, open_store, crash):
    """The first poll after a restart must get the verdict, not 'working'."""
    task = await store.create_task(auth=ALICE)
    crash(store)

    restarted = await open_store(upkeep=True)

    assert (await restarted.get_task(task.task_id, auth=ALICE)).status is TaskStatus.FAILED


async def test_opening_and_recovering_leaves_live_work_alone(store, open_store):
    """The classic bug of this field: a second server declares the first one's work dead."""
    task = await store.create_task(auth=ALICE)

    for _ in range(20):
        other = await open_store(upkeep=True)
        assert (await other.recover()).recovered == ()

    done = await store.handle(task).complete({"ok": True})
    assert (done.status, done.attempt) == (TaskStatus.COMPLETED, 1)


async def test_a_late_result_cannot_undo_recovery(store, peer, crash):
    """A process presumed dead may still be running; its result arrives after the task was failed."""
    task, other = await store.create_task(auth=ALICE), await store.create_task(auth=ALICE)
    handle = store.handle(task)
    crash(store)  # its process is gone for the others, its coroutine runs on
    await peer.recover()

    with pytest.raises(LeaseLostError):
        await handle.complete({"ok": True})
    with pytest.raises(LeaseLostError):
        await store.handle(other).progress(1)

    assert handle.cancel_requested
    assert (await peer.get_task(task.task_id, auth=ALICE)).status is TaskStatus.FAILED


async def test_work_that_recovery_gave_up_is_told_to_stop(store, peer, crash):
    task = await store.create_task(auth=ALICE)

    async with store.handle(task) as handle:
        crash(store)
        await peer.recover()

        await asyncio.wait_for(handle.wait_cancelled(), 10)


async def test_a_task_whose_instance_has_no_row_is_an_orphan(store, peer):
    """Where the owner's row was pruned first, its tasks became invisible to recovery."""
    task = await store.create_task(auth=ALICE)
    run(store, "DELETE FROM taskstore_instances WHERE instance_id = :id", id=store._parts.writer)

    report = await peer.recover()

    assert report.recovered == (task.task_id,)


async def test_a_row_of_a_dead_instance_goes_only_after_its_tasks(store, peer, crash):
    await store.create_task(auth=ALICE)
    crash(store)

    before = (await peer.operator.health()).orphans
    await peer.recover()

    health = await peer.operator.health()
    assert (before, health.orphans, health.instances, health.live) == (1, 0, 1, 0)


async def test_recovery_goes_on_in_batches_until_nothing_is_left(store, peer, crash):
    for _ in range(450):
        await store.create_task(auth=ALICE)
    crash(store)

    report = await peer.recover()

    assert len(report.recovered) == len(set(report.recovered)) == 450
    assert (await peer.operator.health()).live == 0


async def test_two_recoveries_at_once_fail_each_orphan_once(store, peer, open_store, crash):
    other = await open_store()
    tasks = [await store.create_task(auth=ALICE) for _ in range(300)]
    crash(store)

    reports = await asyncio.gather(peer.recover(), other.recover())

    recovered = [task_id for report in reports for task_id in report.recovered]
    assert sorted(recovered) == sorted(task.task_id for task in tasks)
    events = await peer.list_events(tasks[0].task_id, auth=ALICE)
    assert [event.kind for event in events] == [EventKind.CREATED, EventKind.RECOVERED]


async def test_an_instance_elsewhere_is_dead_only_after_its_beat_stood_still_for_a_lease(store, peer, clock):
    """No clock is compared with another one: the judge watches, by its own clock, for the whole lease."""
    task = await store.create_task(auth=ALICE)
    run(
        store, "UPDATE taskstore_instances SET machine_id = 'elsewhere' WHERE instance_id = :id", id=store._parts.writer
    )
    reports = [await peer.recover()]
    for _ in range(2):
        clock.advance(timedelta(seconds=10))
        reports.append(await peer.recover())
    run(store, "UPDATE taskstore_instances SET beat = beat + 1 WHERE instance_id = :id", id=store._parts.writer)
    for _ in range(3):  # it beat: the watch begins anew
        clock.advance(timedelta(seconds=10))
        reports.append(await peer.recover())

    clock.advance(timedelta(seconds=10))
    last = await peer.recover()

    assert all(report.recovered == () for report in reports)
    assert last.recovered == (task.task_id,)


async def test_an_outage_longer_than_the_lease_kills_nobody(store, peer, clock):
    """While the database is away nobody can beat and no judge can look; the first look after it proves nothing."""
    task = await store.create_task(auth=ALICE)
    run(
        store, "UPDATE taskstore_instances SET machine_id = 'elsewhere' WHERE instance_id = :id", id=store._parts.writer
    )
    await peer.recover()

    clock.advance(timedelta(hours=3))
    after = await peer.recover()

    assert after.recovered == ()
    assert (await store.handle(task).complete({})).status is TaskStatus.COMPLETED


@contextmanager
def full_disk(url: str) -> Iterator[None]:
    """Let the database be read and not be written."""
    if url.startswith("sqlite"):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(f"{make_url(url).database}-wal").st_size, most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    else:
        query(
            url,
            """
            CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$;
            CREATE TRIGGER full_disk BEFORE UPDATE ON taskstore_instances EXECUTE FUNCTION full_disk()
            """,
        )
        yield
        query(url, "DROP FUNCTION full_disk CASCADE")


async def test_a_database_that_takes_no_writes_for_longer_than_a_lease_kills_nobody(store, peer, clock, database_url):
    """Seen in the crash laboratory: on a full disk a judge saw that nobody beat, and could not know why."""
    task = await store.create_task(auth=ALICE)
    run(
        store, "UPDATE taskstore_instances SET machine_id = 'elsewhere' WHERE instance_id = :id", id=store._parts.writer
    )
    await peer.recover()
    with full_disk(database_url):
        for _ in range(5):
            clock.advance(timedelta(seconds=10))
            with pytest.raises(DatabaseUnavailableError):
                await peer.recover()

    reports = [await peer.recover()]
    for _ in range(2):
        clock.advance(timedelta(seconds=9))
        reports.append(await peer.recover())

    assert [report.recovered for report in reports] == [()] * 3
    assert (await store.handle(task).complete({})).status is TaskStatus.COMPLETED


async def test_what_is_live_when_a_store_closes_is_failed_at_once(open_store, database_url, store):
    """Nobody should have to wait for a lease to learn that a stopped server will not finish."""
    async with TaskStore.open(database_url, options=StoreOptions(upkeep=False)) as leaving:
        task = await leaving.create_task(auth=ALICE)

    left = await store.get_task(task.task_id, auth=ALICE)
    assert (left.status, left.crashes) == (TaskStatus.FAILED, 0)  # a stop is no crash
    assert left.status_message == "SERVER_STOPPED: the server process that ran this task stopped before it finished."
    assert (await store.operator.health()).instances == 1


async def test_an_evicted_instance_registers_anew_and_lets_go_of_its_work(store, peer):
    """It was taken for dead: its tasks are lost to it, but it can serve new ones."""
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)
    evicted = store._parts.writer
    run(store, "DELETE FROM taskstore_instances WHERE instance_id = :id", id=evicted)
    await peer.recover()

    store._parts.instance.beat()

    assert handle.cancel_requested
    assert store._parts.writer != evicted
    fresh = await store.create_task(auth=ALICE)
    assert (await peer.recover()).recovered == ()
    assert (await store.handle(fresh).complete({})).status is TaskStatus.COMPLETED


async def test_recovery_of_more_than_a_batch_leaves_each_task_its_own_history(store, peer, crash):
    """Many are written by one statement each; every one still has its verdict, its event and its waiter's wake-up."""
    handles = [store.handle(await store.create_task(auth=ALICE, name=f"tool-{n}")) for n in range(501)]
    await asyncio.gather(*(handle.progress(n, total=1000) for n, handle in enumerate(handles)))
    waiting = asyncio.create_task(peer.wait_for_task(handles[500].task_id, auth=ALICE))
    crash(store)

    report = await peer.recover()

    assert sorted(report.recovered) == sorted(handle.task_id for handle in handles)
    assert (await asyncio.wait_for(waiting, 10)).status is TaskStatus.FAILED
    for n, handle in enumerate(handles):
        details = await peer.get_details(handle.task_id, auth=ALICE)
        assert details.outcome.error["data"]["progress"] == n
        events = await peer.list_events(handle.task_id, auth=ALICE)
        assert [(event.kind, event.attempt, event.from_status) for event in events] == [
            (EventKind.CREATED, 1, None),
            (EventKind.RECOVERED, 2, TaskStatus.WORKING),
        ]
        assert events[-1].version == details.task.version
