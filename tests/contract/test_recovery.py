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
    TaskStatus,
)
from tests.unit.outside import query

from .conftest import ALICE


def run(store, sql, **params):
    """Change a row behind the store's back."""
    statement = text(sql)
    return store._parts.database.write(lambda transaction: transaction.execute(statement, params)).result()


async def test_the_verdict_does_not_name_the_process(store, peer, crash):
    """Who runs what and where is for the operator's log, not for a client."""
    task = await store.create_task(auth=ALICE)
    instance = store._parts.writer
    crash(store)
    await peer.recover()

    shown = repr(await peer.get_details(task.task_id, auth=ALICE))

    assert instance not in shown


async def test_a_task_whose_instance_has_no_row_is_an_orphan(store, peer):
    """Where the owner's row was pruned first, its tasks became invisible to recovery."""
    task = await store.create_task(auth=ALICE)
    run(store, "DELETE FROM taskstore_instances WHERE instance_id = :id", id=store._parts.writer)

    report = await peer.recover()

    assert report.recovered == (task.task_id,)


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
