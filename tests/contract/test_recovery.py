"""Recovery: an honest verdict for every orphan, and live work is never touched."""

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import make_url, text

from taskstore import (
    DatabaseUnavailableError,
    EventKind,
    OnCrash,
    ReasonCode,
    TaskStatus,
    operations,
)
from taskstore.instances import Verdict, release
from tests.unit.outside import query

from .conftest import ALICE


def run(store, sql, **params):
    """Change a row behind the store's back."""
    statement = text(sql)
    return store._parts.database.write(lambda transaction: transaction.execute(statement, params)).result()


def move_elsewhere(store):
    """Let a store's instance look as if it ran on another machine, where only its beat shows that it lives."""
    run(
        store, "UPDATE taskstore_instances SET machine_id = 'elsewhere' WHERE instance_id = :id", id=store._parts.writer
    )


async def test_the_verdict_does_not_name_the_process(store, peer, crash):
    """Who runs what and where is for the operator's log, not for a client."""
    task = await store.create_task(auth=ALICE)
    instance = store._parts.writer
    crash(store)
    await peer.recover()

    shown = repr(await peer.get_details(task.task_id, auth=ALICE))

    assert instance not in shown


async def test_a_task_whose_instance_has_no_row_is_an_orphan(store, peer):
    """Where the owner's row was pruned first, its tasks became invisible to recovery.

    Case 37, procrastinate-org/procrastinate#1518: the owner's row was pruned first, so its tasks were invisible to
    recovery.
    """
    task = await store.create_task(auth=ALICE)
    run(store, "DELETE FROM taskstore_instances WHERE instance_id = :id", id=store._parts.writer)

    report = await peer.recover()

    assert report.recovered == (task.task_id,)


async def test_an_instance_elsewhere_is_dead_only_after_its_beat_stood_still_for_a_lease(store, peer, clock):
    """No clock is compared with another one: the judge watches, by its own clock, for the whole lease."""
    task = await store.create_task(auth=ALICE)
    move_elsewhere(store)
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


@pytest.mark.parametrize("step", [timedelta(days=-400), timedelta(days=400)], ids=["back", "forward"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_a_wall_clock_that_is_stepped_kills_nobody(store, peer, clock, step, where):
    """An administrator sets it right, or a virtual machine wakes up; the work goes on, and so does its recovery."""
    task, other = await store.create_task(auth=ALICE), await store.create_task(auth=ALICE)
    mine = store._parts.writer
    if where == "elsewhere":
        run(store, "UPDATE taskstore_instances SET machine_id = 'elsewhere' WHERE instance_id = :id", id=mine)
    await peer.recover()

    clock.set_wall(clock.now() + step // timedelta(milliseconds=1))
    reports = [await peer.recover(), await peer.recover()]
    done = await store.handle(task).complete({})
    run(store, "DELETE FROM taskstore_instances WHERE instance_id = :id", id=mine)
    last = await peer.recover()

    assert [report.recovered for report in reports] == [(), ()]
    assert (done.status, done.attempt) == (TaskStatus.COMPLETED, 1)
    assert last.recovered == (other.task_id,)


async def test_two_servers_of_one_name_are_two(open_store, crash):
    """Replicas have their name in common, and often host and container name too; one's death is not the other's."""
    dying, living, judging = [await open_store(server="reports") for _ in range(3)]
    lost, kept = await dying.create_task(auth=ALICE), await living.create_task(auth=ALICE)
    crash(dying)

    report = await judging.recover()

    assert report.recovered == (lost.task_id,)
    assert (await living.handle(kept).complete({})).status is TaskStatus.COMPLETED


async def test_an_outage_longer_than_the_lease_kills_nobody(store, peer, clock):
    """While the database is away nobody can beat and no judge can look; the first look after it proves nothing."""
    task = await store.create_task(auth=ALICE)
    move_elsewhere(store)
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
    move_elsewhere(store)
    reports = [await peer.recover()]
    for _ in range(2):  # the instance was suspended, and is resumed when the disk is full
        clock.advance(timedelta(seconds=10))
        reports.append(await peer.recover())
    with full_disk(database_url):
        for _ in range(5):
            clock.advance(timedelta(seconds=10))
            with pytest.raises(DatabaseUnavailableError):
                await peer.recover()

    reports.append(await peer.recover())
    for _ in range(2):
        clock.advance(timedelta(seconds=10))
        reports.append(await peer.recover())

    assert [report.recovered for report in reports] == [()] * 6
    assert (await store.handle(task).complete({})).status is TaskStatus.COMPLETED


async def test_a_lock_that_was_kept_for_long_kills_nobody(store, peer, clock, monkeypatch):
    """A judge that had to wait for its own beat knows that others waited too, and may not have beaten yet."""
    task = await store.create_task(auth=ALICE)
    move_elsewhere(store)
    await peer.recover()
    for _ in range(2):
        clock.advance(timedelta(seconds=10))
        await peer.recover()
    database, write = peer._parts.database, peer._parts.database.write

    def write_late(unit):
        clock.advance(timedelta(seconds=11))
        return write(unit)

    monkeypatch.setattr(database, "write", write_late)
    after = await peer.recover()
    monkeypatch.undo()

    assert after.recovered == ()
    assert (await store.handle(task).complete({})).status is TaskStatus.COMPLETED


async def test_an_instance_that_beats_before_the_verdict_is_written_is_spared(store, peer, clock):
    """The write of a verdict may wait long for its turn; what it rests on must still be true when it comes."""
    task = await store.create_task(auth=ALICE)
    move_elsewhere(store)
    instance_id = store._parts.writer
    await peer.recover()
    for _ in range(3):
        clock.advance(timedelta(seconds=10))
        (watched,) = [row for row in peer._parts.recovery._others("") if row["instance_id"] == instance_id]
        verdict = peer._parts.recovery._judge.judge([watched])[instance_id]
    run(store, "UPDATE taskstore_instances SET beat = beat + 1 WHERE instance_id = :id", id=instance_id)

    call, crashed = peer._parts.operator_call(), ReasonCode.CRASH_RECOVERY
    unit = partial(operations.recover_orphans, dead=instance_id, call=call, limit=10, reason=crashed)
    decided = peer._parts.database.write(partial(unit, last_beat=watched["beat"])).result()
    done = await store.handle(task).complete({})
    released = release(peer._parts.database, instance_id, watched["beat"])

    assert verdict is Verdict.DEAD
    assert decided == []
    assert done.status is TaskStatus.COMPLETED
    assert not released


async def test_a_process_that_was_suspended_beats_before_it_takes_a_task(store, peer, clock):
    """Seen in the crash laboratory: taken for dead while it was suspended, it took tasks that were failed at once."""
    suspended = store._parts.writer
    run(store, "DELETE FROM taskstore_instances WHERE instance_id = :id", id=suspended)
    clock.advance(timedelta(seconds=16))

    task = await store.create_task(auth=ALICE)
    report = await peer.recover()

    assert store._parts.writer != suspended
    assert report.recovered == ()
    assert (await store.handle(task).complete({})).status is TaskStatus.COMPLETED


async def test_a_process_that_was_suspended_beats_before_it_claims_a_task(store, peer, clock, crash):
    """As for a create: the task that it runs again would be taken from it at once."""
    lost = await peer.create_task(auth=ALICE, name="render", on_crash=OnCrash.RETRY)
    crash(peer)
    await store.recover()
    run(store, "DELETE FROM taskstore_instances WHERE instance_id = :id", id=store._parts.writer)
    clock.advance(timedelta(seconds=16))

    claim = await store.claim_task(["render"])
    report = await store.recover()

    assert claim is not None
    assert claim.task.task_id == lost.task_id
    assert report.recovered == ()
    assert (await store.handle(claim.task).complete({})).status is TaskStatus.COMPLETED


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
