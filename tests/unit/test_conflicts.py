"""Transactions of several PostgreSQL connections that meet in the same rows, at a statement boundary of our choice."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from pydantic import JsonValue
from sqlalchemy import Text, bindparam, text

from taskstore import AuthContext, DatabaseUnavailableError, StoreOptions, TaskFinishedError, TaskStatus, TaskStore
from taskstore.database import Database
from taskstore.operations import Transaction
from tests.unit.outside import connect, lock_waits, query, value, wait_until

ALICE = AuthContext(subject="alice")
QUESTION: JsonValue = {"method": "elicitation/create", "params": {"message": "Which?"}}
OPTIONS = StoreOptions(upkeep=False, heartbeat=timedelta(hours=1), lease=timedelta(hours=3))
FORGET_THE_HOLDERS = "DELETE FROM taskstore_instances WHERE instance_id IN (SELECT instance_id FROM taskstore_tasks)"
TOUCH = text("UPDATE taskstore_meta SET value = value || '!' WHERE name = :name RETURNING value").bindparams(
    bindparam("name", type_=Text)
)


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[tuple[TaskStore, TaskStore]]:
    """Two open stores on one database, with nothing running in either that writes of its own accord."""
    async with (
        TaskStore.open(postgres_url, options=OPTIONS) as one,
        TaskStore.open(postgres_url, options=OPTIONS) as other,
    ):
        yield one, other


@contextmanager
def outside(url: str) -> Iterator[Any]:
    """Open a transaction of somebody else's, which never finds a deadlock itself; it is rolled back at the end."""
    with closing(connect(url)) as connection:
        connection.execute("SET deadlock_timeout TO '1h'")
        connection.execute("BEGIN")
        yield connection


@contextmanager
def locked_tasks(url: str) -> Iterator[None]:
    """Hold every task's row while inside."""
    with outside(url) as connection:
        connection.execute("SELECT * FROM taskstore_tasks FOR UPDATE")
        yield
        connection.execute("COMMIT")


async def waiting(url: str, count: int) -> None:
    """Return once that many connections wait for a lock."""
    await asyncio.to_thread(wait_until, lambda: lock_waits(url) == count, f"{count} connections waiting for a lock")


# --- deadlocks


@pytest.fixture
def notes(postgres_url: str) -> str:
    """A database with two rows, in which a deadlock is found at once."""
    query(postgres_url, "INSERT INTO taskstore_meta VALUES ('a', ''), ('b', '')")
    name = value(postgres_url, "SELECT current_database()")
    query(postgres_url, f"ALTER DATABASE {name} SET deadlock_timeout TO '5ms'")
    return postgres_url


def test_a_unit_that_met_a_deadlock_is_run_again(notes: str) -> None:
    """PostgreSQL ends one of the two transactions; which one it chose is no business of our caller's."""
    runs: list[str] = []
    other_waits = threading.Event()

    def unit(transaction: Transaction) -> bytes:
        runs.append("begun")
        transaction.row(TOUCH, {"name": "b"})
        if len(runs) == 1:
            has_b.set()
            other_waits.wait()
        row = transaction.row(TOUCH, {"name": "a"})
        assert row is not None
        return bytes(row["value"])

    has_b = threading.Event()
    with closing(Database(notes)) as database, outside(notes) as other:
        other.execute("UPDATE taskstore_meta SET value = value || '?' WHERE name = 'a'")
        future = database.write(unit)
        has_b.wait()
        blocked = threading.Thread(
            target=other.execute, args=("UPDATE taskstore_meta SET value = value || '?' WHERE name = 'b'",)
        )
        blocked.start()
        wait_until(lambda: lock_waits(notes) == 1, "the other's wait for our row")
        other_waits.set()
        blocked.join()
        other.execute("COMMIT")
        written = future.result()

    assert len(runs) == 2
    assert written == b"?!"
    assert query(notes, "SELECT value FROM taskstore_meta WHERE name IN ('a', 'b')") == [(b"?!",), (b"?!",)]


def test_units_that_would_deadlock_among_themselves_all_succeed(notes: str) -> None:
    """Several writers take rows in whatever order their callers came; nobody but the database may lose for it."""

    def touch(*names: str) -> Any:
        def unit(transaction: Transaction) -> None:
            for name in names:
                transaction.row(TOUCH, {"name": name})

        return unit

    with closing(Database(notes)) as database:
        futures = [database.write(touch("a", "b") if number % 2 else touch("b", "a")) for number in range(60)]
        for future in futures:
            future.result()

    assert query(notes, "SELECT length(value) FROM taskstore_meta WHERE name IN ('a', 'b')") == [(60,), (60,)]


def test_a_conflict_that_never_ends_is_an_error_and_not_a_loop(notes: str) -> None:
    """Running again for ever would keep a writer from everybody else."""
    runs: list[int] = []

    def unit(transaction: Transaction) -> None:
        runs.append(len(runs))
        transaction.execute(text("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"), {})

    with closing(Database(notes)) as database:
        with pytest.raises(DatabaseUnavailableError, match="kept meeting conflicting transactions"):
            database.write(unit).result()
        after = database.read(lambda transaction: transaction.row(text("SELECT 1 AS one"), {})).result()

    assert 2 <= len(runs) <= 100
    assert after == {"one": 1}


# --- questions


async def test_of_two_answers_that_arrive_at_once_one_resumes_the_task(
    postgres_url: str, stores: tuple[TaskStore, TaskStore]
) -> None:
    """If neither saw the other's answer, both would leave the task waiting for an answer that is there."""
    one, other = stores
    task = await one.create_task(auth=ALICE)
    asking = asyncio.create_task(one.handle(task).ask({"first": QUESTION, "second": QUESTION}))
    await other.wait_for_task(task.task_id, auth=ALICE, since_version=1)
    keys = list((await other.get_details(task.task_id, auth=ALICE)).input_requests)

    with locked_tasks(postgres_url):
        answering = [
            asyncio.create_task(store.answer_inputs(task.task_id, {key: key[:5]}, auth=ALICE))
            for store, key in zip(stores, keys, strict=True)
        ]
        await waiting(postgres_url, 2)
    answered = [await each for each in answering]

    assert await asking == {"first": "first", "second": "secon"}
    assert sorted(each.status for each in answered) == [TaskStatus.INPUT_REQUIRED, TaskStatus.WORKING]
    assert [event.kind for event in await one.list_events(task.task_id, auth=ALICE)] == [
        "created",
        "input_required",
        "resumed",
    ]


async def test_of_two_answers_to_one_question_the_first_one_counts(
    postgres_url: str, stores: tuple[TaskStore, TaskStore]
) -> None:
    """A client that answers twice, on two connections, is answered twice; the tool hears one answer, whole."""
    one, other = stores
    task = await one.create_task(auth=ALICE)
    asking = asyncio.create_task(one.handle(task).ask({"which": QUESTION}))
    await other.wait_for_task(task.task_id, auth=ALICE, since_version=1)
    (key,) = (await other.get_details(task.task_id, auth=ALICE)).input_requests

    with locked_tasks(postgres_url):
        first = asyncio.create_task(one.answer_inputs(task.task_id, {key: "first"}, auth=ALICE))
        await waiting(postgres_url, 1)
        second = asyncio.create_task(other.answer_inputs(task.task_id, {key: "second"}, auth=ALICE))
        await waiting(postgres_url, 2)
    answered = [await first, await second]

    assert await asking == {"which": "first"}
    assert [(each.status, each.version) for each in answered] == [("working", 3), ("working", 3)]


# --- the end of a task


@pytest.mark.parametrize("first", ["complete", "cancel"])
async def test_of_a_result_and_a_cancellation_that_arrive_at_once_one_wins(
    postgres_url: str, stores: tuple[TaskStore, TaskStore], first: str
) -> None:
    """Seen elsewhere: a read, a decision and a write apart turned a finished task into a cancelled one."""
    one, other = stores
    task = await one.create_task(auth=ALICE)
    handle = one.handle(task)
    calls = {
        "complete": lambda: handle.complete("done"),
        "cancel": lambda: other.cancel_task(task.task_id, auth=ALICE),
    }
    last = next(name for name in calls if name != first)

    with locked_tasks(postgres_url):
        racing = [asyncio.create_task(calls[first]())]
        await waiting(postgres_url, 1)
        racing.append(asyncio.create_task(calls[last]()))
        await waiting(postgres_url, 2)
    came_of_it = await asyncio.gather(*racing, return_exceptions=True)

    stands = await other.get_task(task.task_id, auth=ALICE)
    refused = [each for each in came_of_it if isinstance(each, TaskFinishedError)]
    assert [each for each in came_of_it if each not in refused] == [stands]
    assert [each.task for each in refused] == [stands]
    assert stands.version == 2
    assert len(await other.list_events(task.task_id, auth=ALICE)) == 2


async def test_progress_that_meets_a_cancellation_does_not_undo_it(
    postgres_url: str, stores: tuple[TaskStore, TaskStore]
) -> None:
    """Seen elsewhere: progress written from an old copy of the row set a cancelled task back to working.

    Case 23, elizaOS/eliza#23801: progress written from an old copy of the task turned a cancelled one back to working.
    """
    one, other = stores
    task = await one.create_task(auth=ALICE)
    handle = one.handle(task)

    with locked_tasks(postgres_url):
        cancelling = asyncio.create_task(other.cancel_task(task.task_id, auth=ALICE))
        await waiting(postgres_url, 1)
        reporting = asyncio.create_task(handle.progress(1, 2, "half"))
        await waiting(postgres_url, 2)
    cancelled = await cancelling

    with pytest.raises(TaskFinishedError) as refused:
        await reporting
    assert refused.value.task == cancelled
    assert await one.get_task(task.task_id, auth=ALICE) == cancelled
    assert (cancelled.status, cancelled.progress) == ("cancelled", None)


async def test_a_cancellation_that_waited_for_progress_is_carried_out(
    postgres_url: str, stores: tuple[TaskStore, TaskStore]
) -> None:
    """A condition that failed only because the row had changed meanwhile would lose the cancellation."""
    one, other = stores
    task = await one.create_task(auth=ALICE)
    handle = one.handle(task)

    with locked_tasks(postgres_url):
        reporting = asyncio.create_task(handle.progress(1, 2, "half"))
        await waiting(postgres_url, 1)
        cancelling = asyncio.create_task(other.cancel_task(task.task_id, auth=ALICE))
        await waiting(postgres_url, 2)
    await reporting
    cancelled = await cancelling

    assert (cancelled.status, cancelled.progress, cancelled.version) == ("cancelled", 1.0, 3)


async def test_recovery_passes_over_a_task_that_somebody_else_is_deciding_over(
    postgres_url: str, stores: tuple[TaskStore, TaskStore]
) -> None:
    """It neither waits for a row that is locked, nor fails a task whose cancellation is about to be committed."""
    one, other = stores
    cancelled, orphan = [await one.create_task(auth=ALICE) for _ in range(2)]
    query(postgres_url, FORGET_THE_HOLDERS)

    with outside(postgres_url) as deciding:
        deciding.execute(
            "UPDATE taskstore_tasks SET status = 'cancelled', finished_at = created_at WHERE task_id = %s",
            (cancelled.task_id,),
        )
        first = await other.recover()
        deciding.execute("COMMIT")
    second = await other.recover()

    assert first.recovered == (orphan.task_id,)
    assert second.recovered == ()
    assert (await other.get_task(cancelled.task_id, auth=ALICE)).status == "cancelled"


async def test_two_recoveries_at_once_fail_each_orphan_once(
    postgres_url: str, stores: tuple[TaskStore, TaskStore]
) -> None:
    """Every server of a site recovers after a crash of one; each orphan gets one verdict, and none of them waits."""
    one, other = stores
    orphans = [await one.create_task(auth=ALICE) for _ in range(30)]
    query(postgres_url, FORGET_THE_HOLDERS)

    reports = await asyncio.gather(one.recover(), other.recover(), one.recover(), other.recover())

    recovered = [task_id for report in reports for task_id in report.recovered]
    assert sorted(recovered) == sorted(task.task_id for task in orphans)
    assert query(postgres_url, "SELECT DISTINCT status, attempt, crashes, version FROM taskstore_tasks") == [
        ("failed", 2, 1, 2)
    ]
    assert value(postgres_url, "SELECT count(*) FROM taskstore_events WHERE kind = 'recovered'") == 30


async def test_two_sweeps_at_once_delete_each_task_once(postgres_url: str, stores: tuple[TaskStore, TaskStore]) -> None:
    """Seen elsewhere: clean-ups of several servers deadlocked, and one of them gave up."""
    one, other = stores
    for _ in range(30):
        await one.handle(await one.create_task(auth=ALICE)).complete("done")
    query(postgres_url, "UPDATE taskstore_tasks SET expires_at = 0")

    reports = await asyncio.gather(one.sweep(), other.sweep(), one.sweep(), other.sweep())

    assert sum(report.deleted for report in reports) == 30
    assert value(postgres_url, "SELECT count(*) FROM taskstore_tasks") == 0
