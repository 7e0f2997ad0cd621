"""Waiting: every waiter wakes, none is lost, whoever made the change."""

import asyncio
import gc
import itertools
import json
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import text

from taskstore import (
    DatabaseUnavailableError,
    StoreOptions,
    TaskStatus,
    TaskStore,
    database,
    dialects,
    statements,
)
from taskstore import waiting as waiting_module
from taskstore.binding import notice
from taskstore.clock import SYSTEM

from .conftest import ALICE

LONG = timedelta(seconds=60)  # longer than any test: a wait that ends by it fails


async def waiting(store: TaskStore, task_id: str, count: int) -> None:
    """Return once so many waiters are there."""
    while len(store._parts.waiting._waiters.get(task_id, ())) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_waiters_leave_nothing_behind(store):
    """Events that were never freed made other stores grow with every task."""
    task = await store.create_task(auth=ALICE)
    waiter = asyncio.create_task(store.wait_for_task(task.task_id, auth=ALICE))
    await waiting(store, task.task_id, 1)

    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter

    assert not store._parts.waiting._waiters


async def test_a_thousand_waiters_cost_one_query_a_look(store, peer, monkeypatch):
    """A server may have as many clients that wait; a query for each part of them would keep the database busy."""
    looks, asked = [], []
    for feed in (dialects.DataVersion, dialects.Listen):

        def wait(self, stop, wait=feed.wait):
            news = wait(self, stop)
            looks.append(news)
            return news

        monkeypatch.setattr(feed, "wait", wait)

    def rows(self, statement, params, rows=database._Transaction.rows):
        # One that was under way when counting began asks for those who waited by then.
        if statement is statements.WATCH and looks:
            asked.append(json.loads(params["waited_for"]).keys())
        return rows(self, statement, params)

    tasks = await asyncio.gather(*(store.create_task(auth=ALICE) for _ in range(1000)))
    waiters = [asyncio.create_task(peer.wait_for_task(task.task_id, auth=ALICE, timeout=LONG)) for task in tasks]
    for task in tasks:
        await waiting(peer, task.task_id, 1)
    looks.clear()
    monkeypatch.setattr(database._Transaction, "rows", rows)

    await store.handle(tasks[0]).progress(1)
    async with asyncio.timeout(20):
        while not asked:  # noqa: ASYNC110  a look tells nobody
            await asyncio.sleep(0.01)
    queries, all_looks = list(asked), len(looks)
    await asyncio.gather(*(store.handle(task).complete({}) for task in tasks))
    woken = await asyncio.wait_for(asyncio.gather(*waiters), 30)

    assert {len(ids) for ids in queries} == {1000}
    assert len(queries) <= all_looks
    assert all(task.status is TaskStatus.COMPLETED for task in woken)


async def test_a_look_that_fails_for_whatever_reason_is_tried_again(store, peer, monkeypatch, caplog):
    """Without the thread that looks, nobody who waits for another process's task would ever wake."""
    failures = []
    for feed in (dialects.DataVersion, dialects.Listen):

        def wait(self, stop, wait=feed.wait):
            if len(failures) < 2:
                failures.append(self)
                raise RuntimeError("what nobody thought of")
            return wait(self, stop)

        monkeypatch.setattr(feed, "wait", wait)
    monkeypatch.setattr(waiting_module, "RETRY", timedelta(milliseconds=1))
    task = await store.create_task(auth=ALICE)
    waiter = asyncio.create_task(peer.wait_for_task(task.task_id, auth=ALICE, timeout=LONG))
    async with asyncio.timeout(10):
        while len(failures) < 2:  # noqa: ASYNC110  the thread tells nobody but the log
            await asyncio.sleep(0.01)

    await store.handle(task).complete({})

    assert (await asyncio.wait_for(waiter, 10)).status is TaskStatus.COMPLETED
    assert "what nobody thought of" in caplog.text


async def test_a_store_that_closes_lets_its_waiters_go(database_url, clock, store):
    """Whoever waits for another server's task must not hang when this one stops."""
    task = await store.create_task(auth=ALICE)
    async with TaskStore.open(database_url, options=StoreOptions(clock=clock, upkeep=False)) as leaving:
        waiter = asyncio.create_task(leaving.wait_for_task(task.task_id, auth=ALICE))
        await waiting(leaving, task.task_id, 1)

    with pytest.raises(DatabaseUnavailableError, match="closed"):
        await asyncio.wait_for(waiter, 10)
    with pytest.raises(DatabaseUnavailableError, match="closed"):
        await leaving.wait_for_task(task.task_id, auth=ALICE)


@pytest.fixture
def no_poll(monkeypatch, database_url):
    """Let waiters be woken by LISTEN alone once it has proven itself; only PostgreSQL has it."""
    monkeypatch.setattr(dialects, "TRUSTED_POLL_SECONDS", 3600.0)
    return database_url.startswith("postgresql")


async def heard(store: TaskStore, task_id: str) -> None:
    """Return once the store's listener is there, has proven itself, and polls no more."""
    await waiting(store, task_id, 1)
    async with asyncio.timeout(20):
        while not any(feed._trusted for feed in gc.get_objects() if isinstance(feed, dialects.Listen)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_notification_wakes_without_a_poll(store, peer, no_poll):
    """LISTEN is the fast path: a change must not wait for the next poll."""
    task = await store.create_task(auth=ALICE)
    waiter = asyncio.create_task(peer.wait_for_task(task.task_id, auth=ALICE, timeout=LONG))
    if no_poll:
        await heard(peer, task.task_id)

    await store.handle(task).complete({"ok": True})

    assert (await asyncio.wait_for(waiter, 10)).status is TaskStatus.COMPLETED


async def test_a_listener_that_is_cut_costs_no_wake_up(store, peer, no_poll):
    """A dropped LISTEN connection lost every notification until a restart.

    Case 55, dbos-inc/dbos-transact-py#562, taskforcesh/bullmq#4729: a LISTEN connection that dropped lost every
    notification until a restart.
    """
    for _ in range(2):
        task = await store.create_task(auth=ALICE)
        waiter = asyncio.create_task(peer.wait_for_task(task.task_id, auth=ALICE, timeout=LONG))
        if no_poll:
            await heard(peer, task.task_id)
            cut = text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query LIKE '%LISTEN%' AND pid <> pg_backend_pid()"
            )
            assert store._parts.database.read_here(lambda transaction, cut=cut: transaction.rows(cut, {}))

        await store.handle(task).complete({"ok": True})

        assert (await asyncio.wait_for(waiter, 10)).status is TaskStatus.COMPLETED


async def test_a_database_that_is_away_is_looked_for_once_a_second(store, peer, monkeypatch, caplog):
    """A busy loop would take the processor from whatever else this process serves, and from the server that restarts.

    Case 55, dbos-inc/dbos-transact-py#562, taskforcesh/bullmq#4729: a LISTEN connection that dropped lost every
    notification until a restart.
    """
    tries, open_feed = [], database.Database.change_feed

    def away_at_first(self):
        tries.append(SYSTEM.monotonic())
        if len(tries) < 3:
            raise DatabaseUnavailableError("The server restarts.")
        return open_feed(self)

    monkeypatch.setattr(database.Database, "change_feed", away_at_first)
    task = await store.create_task(auth=ALICE)
    waiter = asyncio.create_task(peer.wait_for_task(task.task_id, auth=ALICE, timeout=LONG))
    async with asyncio.timeout(20):
        while len(tries) < 3:  # noqa: ASYNC110  the thread tells nobody but the log
            await asyncio.sleep(0.01)

    await store.handle(task).complete({"ok": True})

    assert (await asyncio.wait_for(waiter, 10)).status is TaskStatus.COMPLETED
    assert all(later - earlier >= 0.9 for earlier, later in itertools.pairwise(tries))
    assert caplog.text.count("Cannot look for changes") == 2


async def test_where_listen_brings_nothing_the_poll_takes_over_and_says_so(store, open_store, monkeypatch, caplog):
    """Behind a transaction pooler LISTEN succeeds, and no notification ever comes."""
    monkeypatch.setattr(dialects, "_LISTEN_PROOF_SECONDS", 0.0)
    monkeypatch.setattr(database.Database, "_announce", lambda self, notice: None)
    monkeypatch.setattr(database, "NOTIFY", "SELECT %s, %s")
    peer = await open_store()
    task = await store.create_task(auth=ALICE)
    waiter = asyncio.create_task(peer.wait_for_task(task.task_id, auth=ALICE, timeout=LONG))
    is_postgres = store._parts.database.name == "postgresql"
    async with asyncio.timeout(20):
        while is_postgres and "LISTEN brings" not in caplog.text:  # noqa: ASYNC110  a log tells nobody
            await asyncio.sleep(0.01)

    await store.handle(task).complete({"ok": True})

    assert (await asyncio.wait_for(waiter, 10)).status is TaskStatus.COMPLETED
    assert caplog.text.count("LISTEN brings no notifications") == is_postgres


async def test_notifications_tell_no_ids(store, database_url):
    """Any role of the database can listen."""
    if store._parts.database.name != "postgresql":
        assert not store._parts.database._dialect.combines  # nothing is sent at all
        return
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as listener:
        listener.execute("LISTEN taskstore_changes")
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await handle.progress(1)
        await handle.complete({})

        notices = [notify.payload for notify in listener.notifies(timeout=10, stop_after=3)]

    assert len(notices) == 3
    assert set(notices) == {notice(task.task_id)}
    assert not any(task.task_id[4:] in each or each in task.task_id for each in notices)
