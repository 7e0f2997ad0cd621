"""Connections that go away, at every point of every operation that writes: the call succeeds, and counts once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import psycopg
import pytest
from pydantic import JsonValue

from taskstore import AuthContext, DatabaseUnavailableError, StoreOptions, Task, TaskStore
from taskstore.database import _Transaction
from taskstore.operations import Transaction
from taskstore.testing import ManualClock
from tests.unit.outside import PATIENCE_SECONDS, query, value, wait_until
from tests.unit.proxy import BEGIN_TO_WRITE, Cut, Proxy

ALICE = AuthContext(subject="alice")
HOLDERS = "SELECT instance_id FROM taskstore_tasks"
QUESTION: JsonValue = {"method": "elicitation/create", "params": {"message": "Which?"}}


class World:
    """A task of a store behind the proxy, and a store of another process that reaches the server directly."""

    def __init__(self, store: TaskStore, peer: TaskStore, clock: ManualClock, url: str, proxy: Proxy) -> None:
        self.store, self.peer, self.clock, self.url, self.proxy = store, peer, clock, url, proxy
        self.waiting: asyncio.Task[object] | None = None

    async def create(self) -> Task:
        """Create the one task of a test."""
        return await self.store.create_task(auth=ALICE, name="report")

    def events(self) -> list[tuple[str, int]]:
        """Read the kinds of all events with their numbers, oldest first."""
        counted = "SELECT kind, count(*) FROM taskstore_events GROUP BY kind ORDER BY min(version)"
        return query(self.url, counted)

    def statuses(self) -> list[str]:
        """Read the statuses of all tasks."""
        return [status for (status,) in query(self.url, "SELECT status FROM taskstore_tasks")]


@asynccontextmanager
async def opened(url: str, proxy: Proxy) -> AsyncIterator[World]:
    """Open both stores, with nothing running in either that writes of its own accord."""
    clock = ManualClock()
    options = StoreOptions(upkeep=False, heartbeat=timedelta(hours=1), lease=timedelta(hours=3), clock=clock)
    async with TaskStore.open(proxy.url, options=options) as store, TaskStore.open(url, options=options) as peer:
        world = World(store, peer, clock, url, proxy)
        yield world
        proxy.disarm()
        if world.waiting is not None:
            world.waiting.cancel()


@pytest.fixture
def proxy(postgres_url: str) -> Iterator[Proxy]:
    """A relay in front of the server."""
    with Proxy(postgres_url) as started:
        yield started


@pytest.fixture
async def world(postgres_url: str, proxy: Proxy) -> AsyncIterator[World]:
    """Two open stores, one of them behind the relay."""
    async with opened(postgres_url, proxy) as both:
        yield both


# --- one function an operation: what comes before it, the operation, and what it must have come to


Act = Callable[[], Awaitable[object]]


async def creates(world: World) -> tuple[Act, Callable[[object], None]]:
    """Create a task."""

    def check(created: object) -> None:
        assert isinstance(created, Task)
        assert query(world.url, "SELECT task_id, status, version FROM taskstore_tasks") == [
            (created.task_id, "working", 1)
        ]
        assert world.events() == [("created", 1)]

    return world.create, check


async def creates_under_a_key(world: World) -> tuple[Act, Callable[[object], None]]:
    """Create a task that a repeated create would find."""

    def check(created: object) -> None:
        assert isinstance(created, Task)
        assert (created.status, created.existing) == ("working", False)
        assert world.store.handle(created).task_id == created.task_id
        assert world.events() == [("created", 1)]

    return (lambda: world.store.create_task(auth=ALICE, idempotency_key="once")), check


async def reports_progress(world: World) -> tuple[Act, Callable[[object], None]]:
    """Store progress; it has no event, so it may be written twice, which nobody can tell."""
    handle = world.store.handle(await world.create())

    def check(_: object) -> None:
        found = "SELECT progress, progress_total, convert_from(status_message, 'UTF8') FROM taskstore_tasks"
        assert query(world.url, found) == [(3.0, 10.0, '"rendering"')]
        assert world.events() == [("created", 1)]

    return (lambda: handle.progress(3, 10, "rendering")), check


async def completes(world: World) -> tuple[Act, Callable[[object], None]]:
    """Complete a task."""
    handle = world.store.handle(await world.create())

    def check(completed: object) -> None:
        assert isinstance(completed, Task)
        assert (completed.status, completed.version) == ("completed", 2)
        assert query(world.url, "SELECT version, convert_from(result, 'UTF8') FROM taskstore_tasks") == [(2, '"done"')]
        assert world.events() == [("created", 1), ("completed", 1)]

    return (lambda: handle.complete("done")), check


async def fails(world: World) -> tuple[Act, Callable[[object], None]]:
    """Fail a task."""
    handle = world.store.handle(await world.create())

    def check(failed: object) -> None:
        assert isinstance(failed, Task)
        assert (failed.status, failed.status_message, failed.version) == ("failed", "no paper", 2)
        assert world.statuses() == ["failed"]
        assert world.events() == [("created", 1), ("failed", 1)]

    return (lambda: handle.fail("no paper")), check


async def cancels(world: World) -> tuple[Act, Callable[[object], None]]:
    """Cancel a task: a second run finds it finished, by this very caller."""
    task = await world.create()

    def check(cancelled: object) -> None:
        assert isinstance(cancelled, Task)
        assert (cancelled.status, cancelled.version) == ("cancelled", 2)
        assert world.statuses() == ["cancelled"]
        assert world.events() == [("created", 1), ("cancelled", 1)]

    return (lambda: world.store.cancel_task(task.task_id, auth=ALICE)), check


async def operator_cancels(world: World) -> tuple[Act, Callable[[object], None]]:
    """Cancel a task in the operator's name."""
    task = await world.create()

    def check(cancelled: object) -> None:
        assert isinstance(cancelled, Task)
        assert (cancelled.status, cancelled.version) == ("cancelled", 2)
        assert world.events() == [("created", 1), ("cancelled", 1)]

    return (lambda: world.store.operator.cancel_task(task.task_id)), check


async def asks(world: World) -> tuple[Act, Callable[[object], None]]:
    """Ask, which returns when somebody else has answered."""
    task = await world.create()
    handle = world.store.handle(task)

    async def ask_and_hear() -> object:
        asking = asyncio.create_task(handle.ask({"which": QUESTION}))
        await world.peer.wait_for_task(task.task_id, auth=ALICE, since_version=1, timeout=timedelta(seconds=30))
        details = await world.peer.get_details(task.task_id, auth=ALICE)
        await world.peer.answer_inputs(task.task_id, dict.fromkeys(details.input_requests, "this"), auth=ALICE)
        return await asking

    def check(answers: object) -> None:
        assert answers == {"which": "this"}
        assert query(world.url, "SELECT name, convert_from(response, 'UTF8') FROM taskstore_inputs") == [
            ("which", '"this"')
        ]
        assert world.events() == [("created", 1), ("input_required", 1), ("resumed", 1)]

    return ask_and_hear, check


async def answers(world: World) -> tuple[Act, Callable[[object], None]]:
    """Answer every open question."""
    task = await world.create()
    world.waiting = asyncio.create_task(world.store.handle(task).ask({"which": QUESTION, "when": QUESTION}))
    await world.peer.wait_for_task(task.task_id, auth=ALICE, since_version=1)
    keys = (await world.peer.get_details(task.task_id, auth=ALICE)).input_requests

    def check(answered: object) -> None:
        assert isinstance(answered, Task)
        assert (answered.status, answered.version) == ("working", 3)
        assert query(world.url, "SELECT convert_from(response, 'UTF8') FROM taskstore_inputs") == [('"this"',)] * 2
        assert world.events() == [("created", 1), ("input_required", 1), ("resumed", 1)]

    return (lambda: world.store.answer_inputs(task.task_id, dict.fromkeys(keys, "this"), auth=ALICE)), check


async def answers_in_part(world: World) -> tuple[Act, Callable[[object], None]]:
    """Answer one of two questions, which writes no event."""
    task = await world.create()
    world.waiting = asyncio.create_task(world.store.handle(task).ask({"which": QUESTION, "when": QUESTION}))
    await world.peer.wait_for_task(task.task_id, auth=ALICE, since_version=1)
    key = next(iter((await world.peer.get_details(task.task_id, auth=ALICE)).input_requests))

    def check(answered: object) -> None:
        assert isinstance(answered, Task)
        assert answered.status == "input_required"
        assert value(world.url, "SELECT count(*) FROM taskstore_inputs WHERE response IS NOT NULL") == 1
        assert world.events() == [("created", 1), ("input_required", 1)]

    return (lambda: world.store.answer_inputs(task.task_id, {key: "this"}, auth=ALICE)), check


async def deletes(world: World) -> tuple[Act, Callable[[object], None]]:
    """Delete a finished task, which leaves nothing to recognise it by: a second run finds no such task."""
    task = await world.create()
    await world.store.handle(task).complete("done")

    def check(_: object) -> None:
        assert world.statuses() == []
        assert world.events() == []

    return (lambda: world.store.delete_task(task.task_id, auth=ALICE)), check


async def recovers(world: World) -> tuple[Act, Callable[[object], None]]:
    """Fail what a dead process left."""
    orphans = [await world.peer.create_task(auth=ALICE) for _ in range(3)]
    query(world.url, f"DELETE FROM taskstore_instances WHERE instance_id IN ({HOLDERS})")

    def check(report: object) -> None:
        assert set(getattr(report, "recovered", ())) == {task.task_id for task in orphans}
        assert world.statuses() == ["failed"] * 3
        assert world.events() == [("created", 3), ("recovered", 3)]
        assert query(world.url, "SELECT DISTINCT attempt, crashes, version FROM taskstore_tasks") == [(2, 1, 2)]

    return world.store.recover, check


async def sweeps(world: World) -> tuple[Act, Callable[[object], None]]:
    """Delete what has expired, and count it."""
    for _ in range(3):
        await world.store.handle(await world.create()).complete("done")
    world.clock.advance(timedelta(days=1))

    def check(report: object) -> None:
        assert world.statuses() == []
        assert getattr(report, "deleted", None) == 3

    return world.store.sweep, check


async def imports(world: World) -> tuple[Act, Callable[[object], None]]:
    """Import a task: a second run finds it there, brought by this very caller."""
    task = await world.create()
    details = await world.peer.operator.get_details(task.task_id)
    await world.peer.cancel_task(task.task_id, auth=ALICE)
    await world.peer.delete_task(task.task_id, auth=ALICE)

    def check(imported: object) -> None:
        assert isinstance(imported, Task)
        assert (imported.status, imported.existing) == ("failed", False)
        assert world.statuses() == ["failed"]
        assert world.events() == [("imported", 1)]

    return (lambda: world.store.operator.import_task(details, owner=ALICE)), check


OPERATIONS = [
    creates,
    creates_under_a_key,
    reports_progress,
    completes,
    fails,
    cancels,
    operator_cancels,
    asks,
    answers,
    answers_in_part,
    deletes,
    recovers,
    sweeps,
    imports,
]
operations = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)

Operation = Callable[[World], Awaitable[tuple[Act, Callable[[object], None]]]]


# --- COMMIT


@operations
@pytest.mark.parametrize("where", list(Cut), ids=lambda where: where.name.lower())
async def test_a_connection_lost_during_commit_is_nothing_a_caller_notices(
    world: World, operation: Operation, where: Cut
) -> None:
    """Whether the COMMIT arrived is unknown then; guessing either way would lose a change or make it twice."""
    act, check = await operation(world)

    world.proxy.cut(where)
    came_of_it = await act()

    assert world.proxy.cuts == 1
    check(came_of_it)


@pytest.mark.parametrize("skip", [1, 2, 3])
@pytest.mark.parametrize("where", [Cut.BEFORE, Cut.AFTER], ids=lambda where: where.name.lower())
async def test_a_recovery_survives_the_loss_of_any_of_its_commits(world: World, where: Cut, skip: int) -> None:
    """A recovery pass is several transactions: tasks first, then the row that proves them orphans."""
    for _ in range(3):
        await world.peer.create_task(auth=ALICE)
    query(world.url, f"UPDATE taskstore_instances SET process_start = 0 WHERE instance_id IN ({HOLDERS})")

    world.proxy.cut(where, skip=skip)
    report = await world.store.recover()

    assert world.proxy.cuts == 1
    assert (len(report.recovered), report.dead_instances) == (3, 1)
    assert world.events() == [("created", 3), ("recovered", 3)]
    assert value(world.url, "SELECT count(*) FROM taskstore_instances") == 1


@pytest.mark.parametrize("where", list(Cut), ids=lambda where: where.name.lower())
async def test_a_store_opens_although_the_commit_of_its_registration_is_lost(
    postgres_url: str, proxy: Proxy, where: Cut
) -> None:
    """The row is there then, and is this instance's own: its id is random, so nobody else's is in the way."""
    proxy.cut(where, after=b"INSERT INTO taskstore_instances")

    async with TaskStore.open(proxy.url, options=StoreOptions(upkeep=False)) as store:
        task = await store.create_task(auth=ALICE)
        instances = value(postgres_url, "SELECT count(*) FROM taskstore_instances")
        await store.handle(task).complete("done")

    assert (proxy.cuts, instances) == (1, 1)
    assert value(postgres_url, "SELECT count(*) FROM taskstore_instances") == 0


@pytest.mark.parametrize("where", list(Cut), ids=lambda where: where.name.lower())
async def test_the_first_open_of_a_database_survives_a_lost_commit(postgres_url: str, proxy: Proxy, where: Cut) -> None:
    """It writes the secret that every later open must find unchanged."""
    proxy.cut(where, after=b"INSERT INTO taskstore_meta")

    async with TaskStore.open(proxy.url, options=StoreOptions(upkeep=False)) as store:
        task = await store.create_task(auth=ALICE)
        await store.handle(task).complete("done")

    async with TaskStore.open(postgres_url) as store:
        found = await store.get_task(task.task_id, auth=ALICE)
    assert (proxy.cuts, found.status) == (1, "completed")


@pytest.mark.parametrize("operation", [completes, cancels, deletes], ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("last", list(Cut), ids=lambda where: where.name.lower())
@pytest.mark.parametrize("first", list(Cut), ids=lambda where: where.name.lower())
async def test_two_commits_lost_in_a_row_are_nothing_a_caller_notices(
    world: World, operation: Operation, first: Cut, last: Cut
) -> None:
    """A network that drops one connection often drops the next one too."""
    act, check = await operation(world)

    world.proxy.cut(first, last)
    came_of_it = await act()

    check(came_of_it)


async def test_a_commit_that_nobody_can_ask_about_is_an_error_that_says_so(world: World) -> None:
    """Neither success nor failure would be honest; the caller hears what to do before trying again."""
    handle = world.store.handle(await world.create())
    world.proxy.cut(Cut.AFTER)

    completing = asyncio.ensure_future(handle.complete("done"))
    await asyncio.to_thread(wait_until, lambda: world.proxy.cuts == 1, "the cut")
    world.proxy.refuse()
    with pytest.raises(DatabaseUnavailableError, match=r"lost during COMMIT.*read the task before you repeat the call"):
        await completing

    world.proxy.accept()
    assert (await handle.complete("done")).version == 2  # the same outcome again is answered the same


# --- statements, idle connections, servers that are gone


@operations
@pytest.mark.parametrize("message", [BEGIN_TO_WRITE, b" taskstore_"], ids=["begin", "statement"])
async def test_a_connection_lost_before_the_commit_costs_one_more_try(
    world: World, operation: Operation, message: bytes
) -> None:
    """Nothing was stored then, so the same can simply be run again."""
    act, check = await operation(world)

    world.proxy.cut(Cut.BEFORE, message=message)
    came_of_it = await act()

    assert world.proxy.cuts == 1
    check(came_of_it)


@operations
async def test_idle_connections_that_went_away_are_replaced(world: World, operation: Operation) -> None:
    """Firewalls and administrators cut what has been idle for long."""
    act, check = await operation(world)

    world.proxy.cut_all()
    came_of_it = await act()

    check(came_of_it)


async def test_connections_that_the_server_ended_are_replaced(world: World) -> None:
    """A restart of the server, or pg_terminate_backend, while nobody uses the store."""
    task = await world.create()
    handle = world.store.handle(task)

    ended = query(
        world.url,
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )

    assert len(ended) >= 2
    assert {was_ended for (was_ended,) in ended} == {True}
    assert (await world.store.get_task(task.task_id, auth=ALICE)).status == "working"
    assert (await handle.complete("done")).status == "completed"


async def test_trouble_on_the_way_is_no_refusal_of_the_server(world: World) -> None:
    """Seen in the crash laboratory: a pipeline that was cut while it was busy says so without the server's code.

    The connection may still look open then, and is of no use to anybody.
    """
    connections: list[int] = []

    def unit(transaction: Transaction) -> str:
        assert isinstance(transaction, _Transaction)
        connections.append(transaction.driver.info.backend_pid)
        if len(connections) == 1:
            raise psycopg.OperationalError("cannot exit pipeline mode while busy")
        return "done"

    value = await world.store._parts.database.write_soon(unit)

    assert value == "done"
    assert len(set(connections)) == 2


async def test_a_read_survives_the_loss_of_its_connection(world: World) -> None:
    """A poll has nothing to lose, and is asked again."""
    task = await world.create()

    world.proxy.cut(Cut.BEFORE, message=b" taskstore_tasks")
    found = await world.store.get_task(task.task_id, auth=ALICE)
    world.proxy.cut(Cut.AFTER, message=b" taskstore_tasks")
    details = await world.store.get_details(task.task_id, auth=ALICE)

    assert world.proxy.cuts == 2
    assert found == details.task == task


async def test_a_server_that_is_gone_is_named_with_the_remedy_until_it_is_back(world: World) -> None:
    """An outage is no reason to restart the servers that use the store."""
    task = await world.create()
    handle = world.store.handle(task)

    calls: list[Act] = [
        lambda: world.store.create_task(auth=ALICE),
        lambda: world.store.get_task(task.task_id, auth=ALICE),
        lambda: handle.complete("done"),
    ]

    world.proxy.refuse()
    for call in calls:
        with pytest.raises(
            DatabaseUnavailableError, match=r"(?s)cannot be reached:.*Check that the server runs"
        ) as gone:
            await call()
        assert world.proxy.url.rpartition("@")[2] in str(gone.value)
    world.proxy.accept()

    assert (await handle.complete("done")).status == "completed"
    assert world.events() == [("created", 1), ("completed", 1)]


async def test_waiters_survive_an_outage(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A client that waits for its task hears of the outcome, not of the hour in which nobody could be asked."""
    task = await world.peer.create_task(auth=ALICE)
    waiting = asyncio.create_task(world.store.wait_for_task(task.task_id, auth=ALICE))
    await asyncio.to_thread(wait_until, lambda: polls(world.url) > 0, "the first poll")

    with caplog.at_level(logging.WARNING):
        world.proxy.refuse()
        await asyncio.to_thread(wait_until, lambda: bool(caplog.messages), "the poll's warning")
        world.proxy.accept()
        await world.peer.handle(task).complete("done")
        completed = await asyncio.wait_for(waiting, PATIENCE_SECONDS)

    assert completed.status == "completed"
    assert [record.message for record in caplog.records if "trying again" not in record.message] == []


@pytest.mark.parametrize("where", [Cut.BEFORE, Cut.AFTER], ids=lambda where: where.name.lower())
@pytest.mark.parametrize("message", [b"LISTEN", b"pg_notify(", b"taskstore_tasks.task_id IN ("])
async def test_waiters_survive_the_loss_of_any_connection_they_depend_on(
    world: World, message: bytes, where: Cut
) -> None:
    """Seen elsewhere: after the connection that listened was lost, nobody was woken until the next restart."""
    task = await world.peer.create_task(auth=ALICE)

    world.proxy.cut(where, message=message)
    waiting = asyncio.create_task(world.store.wait_for_task(task.task_id, auth=ALICE))
    await asyncio.to_thread(wait_until, lambda: world.proxy.cuts == 1, "the cut")
    await world.peer.handle(task).complete("done")

    assert (await asyncio.wait_for(waiting, PATIENCE_SECONDS)).status == "completed"


@pytest.mark.parametrize("where", [Cut.BEFORE, Cut.AFTER], ids=lambda where: where.name.lower())
async def test_an_open_that_loses_a_connection_succeeds_or_says_that_the_database_is_away(
    postgres_url: str, proxy: Proxy, where: Cut
) -> None:
    """Seen in the crash laboratory: the driver's own error came out, and servers that retry an outage ended."""
    outcomes = []
    for sent in range(200):
        cuts = proxy.cuts
        proxy.cut(where, message=b"", skip=sent)
        try:
            async with TaskStore.open(proxy.url, options=StoreOptions(upkeep=False)):
                proxy.disarm()
        except DatabaseUnavailableError:
            outcomes.append("away")
        else:
            outcomes.append("open")
        if proxy.cuts == cuts:
            break  # the open sends no more than that

    assert outcomes[-1] == "open"
    assert "away" in outcomes


async def test_a_store_closes_although_its_server_is_gone(postgres_url: str, proxy: Proxy) -> None:
    """A shutdown during an outage neither hangs nor raises; the others find its tasks when they judge it dead."""
    async with TaskStore.open(proxy.url, options=StoreOptions(upkeep=False)) as store:
        await store.create_task(auth=ALICE)
        proxy.refuse()

    assert value(postgres_url, "SELECT status FROM taskstore_tasks") == "working"


def polls(url: str) -> int:
    """Count the connections whose last statement was the waiters' poll."""
    last = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    return sum("taskstore_tasks.task_id IN (" in text for (text,) in query(url, last))
