"""Many expired tasks: they are swept in batches, beside work that does not wait for it."""

import asyncio
import itertools

import pytest
from sqlalchemy import make_url

from taskstore.clock import SYSTEM
from taskstore.recovery import SWEEP_BATCH
from tests.unit.outside import copy_task, query, value

from .conftest import ALICE, THOROUGH

# TASKSTORE_TEST_THOROUGH=100 makes half a million of it.
EXPIRED = 5_000 * THOROUGH
STATEMENT_TIMEOUT_SECONDS = 5.0


class InterruptionError(Exception):
    """What ends a sweep in the middle."""


async def fill(store, url):
    """Put the expired tasks there."""
    task = await store.create_task(auth=ALICE, name="kept")
    await store.handle(task).complete("done")
    copy_task(url, task.task_id, EXPIRED, expires_at="i", name="'expired'")


async def write_until(done, store, seconds):
    """Create and complete tasks until something is done; note how long each took."""
    while not done.done():
        began = SYSTEM.monotonic()
        await store.handle(await store.create_task(auth=ALICE, name="kept")).complete("done")
        seconds.append(SYSTEM.monotonic() - began)


@pytest.fixture
def hurried_url(database_url):
    """The database, where PostgreSQL ends a statement that takes longer than five seconds."""
    if not database_url.startswith("sqlite"):
        name = make_url(database_url).database
        query(database_url, f'ALTER DATABASE "{name}" SET statement_timeout = {STATEMENT_TIMEOUT_SECONDS * 1000:.0f}')
    return database_url


async def test_no_batch_of_a_sweep_is_long_and_none_is_lost_by_an_interruption(hurried_url, open_store):
    """A writer beside it never waits as long as a statement may take, be there ever so much to delete.

    Case 27, bensheldon/good_job#933, que-rb/que#299: one giant DELETE exceeded the statement timeout.
    """
    store, sweeper = await open_store(), (await open_store())._parts.recovery
    await fill(store, hurried_url)

    def interrupt(done):
        if done >= EXPIRED // 2:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        await asyncio.to_thread(sweeper.sweep, progress=interrupt)
    left = (await store.operator.health()).expired
    ticks, waits = [SYSTEM.monotonic()], []
    sweeping = asyncio.create_task(
        asyncio.to_thread(sweeper.sweep, progress=lambda _: ticks.append(SYSTEM.monotonic()))
    )
    await asyncio.gather(*(write_until(sweeping, store, waits) for _ in range(4)))

    slowest = max(later - earlier for earlier, later in itertools.pairwise(ticks))
    p99 = sorted(waits)[int(len(waits) * 0.99)]
    print(f"{EXPIRED} rows, slowest batch {slowest:.3f} s, {len(waits)} writes, p99 {p99:.3f} s")
    assert left == EXPIRED - EXPIRED // 2
    assert (await sweeping).deleted == left
    assert slowest < STATEMENT_TIMEOUT_SECONDS
    assert p99 < STATEMENT_TIMEOUT_SECONDS


async def test_two_sweepers_and_writers_at_once_do_not_get_in_each_others_way(hurried_url, store, peer):
    """Whoever deletes passes over what another one is deleting, and nobody meets a deadlock.

    Case 57, timgit/pg-boss#282, #228: clean-ups at once met in deadlocks, and scanned millions of rows.
    """
    await fill(store, hurried_url)
    waits = []

    sweeping = asyncio.gather(*(asyncio.to_thread(each._parts.recovery.sweep) for each in (store, peer)))
    await asyncio.gather(*(write_until(sweeping, each, waits) for each in (store, peer)))
    swept = [report.deleted for report in await sweeping]
    rest = (await store.sweep()).deleted

    assert sum(swept) + rest == EXPIRED
    assert rest < 2 * SWEEP_BATCH  # a batch that found too few because another one had them may be the last
    assert value(hurried_url, "SELECT count(*) FROM taskstore_tasks") == len(waits) + 1
    if not hurried_url.startswith("sqlite"):
        assert value(hurried_url, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
