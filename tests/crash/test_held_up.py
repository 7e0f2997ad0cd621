"""Processes that live and cannot say so: their interpreter is held up, or their database answers too late."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

from taskstore import AuthContext, DatabaseUnavailableError, EventKind, StoreOptions, TaskStatus, TaskStore, dialects
from taskstore.testing import ManualClock
from tests.unit.outside import Process, process, query, wait_until, write_lock
from tests.unit.proxy import Proxy

ALICE = AuthContext(subject="alice")
HERE, ELSEWHERE = "here", "elsewhere"
# PyDLL calls C without letting go of the interpreter, as a long power or a regular expression that backtracks does;
# read() does it for exactly as long as the test wants. To its judge a process is on the machine that its id names.
WORKER = """
import asyncio, ctypes, logging, sys
from datetime import timedelta
from taskstore import AuthContext, LeaseLostError, StoreOptions, TaskStore, instances

url, where, how = sys.argv[1:]
boot, _, _ = instances.machine_id().partition("/")
if where == "elsewhere":
    instances.machine_id = lambda: f"{boot[::-1]}/pid:[1]"
logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")

def hog():
    print("hogging", flush=True)
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)

async def finish(handle):
    try:
        print("completed", (await handle.complete({"ok": True})).attempt, flush=True)
    except LeaseLostError:
        await handle.wait_cancelled()
        print("lost", handle.cancel_requested, flush=True)

async def main():
    options = StoreOptions(heartbeat=timedelta(milliseconds=20), upkeep=False)
    async with TaskStore.open(url, options=options) as store:
        task = await store.create_task(auth=AuthContext(subject="alice"))
        first = store.operator._parts.writer
        print(task.task_id, first, flush=True)
        handle = store.handle(task)
        if how == "hog":
            hog()
        else:
            await asyncio.to_thread(sys.stdin.read, 1)
            print("completing", flush=True)
        await finish(handle)
        await asyncio.to_thread(sys.stdin.read, 1)
        again = await store.create_task(auth=AuthContext(subject="alice"))
        print(again.task_id, store.operator._parts.writer, flush=True)
        await finish(store.handle(again))

asyncio.run(main())
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Start a worker; none outlives the test."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(process(WORKER, *arguments))


def beats(url: str, instance_id: str) -> int:
    ((beat,),) = query(url, f"SELECT beat FROM taskstore_instances WHERE instance_id = '{instance_id}'")
    return int(beat)


def beating(url: str, instance_id: str) -> None:
    """Return when an instance has beaten once more."""
    before = beats(url, instance_id)
    wait_until(lambda: beats(url, instance_id) > before, "a heartbeat")


async def past_the_lease(url: str) -> list[str]:
    """Recover as a server does that looks every ten seconds for more than a lease; return whom it decided over."""
    clock, decided = ManualClock(), []
    async with TaskStore.open(url, options=StoreOptions(clock=clock, upkeep=False)) as judge:
        for _ in range(6):
            decided += (await judge.recover()).recovered
            clock.advance(timedelta(seconds=10))
    return decided


async def ends_as(url: str, task_id: str) -> tuple[TaskStatus, list[EventKind]]:
    async with TaskStore.open(url, options=StoreOptions(upkeep=False)) as store:
        history = [event.kind for event in await store.list_events(task_id, auth=ALICE)]
        return (await store.get_task(task_id, auth=ALICE)).status, history


async def end_and_count_the_evictions(worker: Process, *, first: str, url: str) -> int:
    """Let a worker do its second task and end; return how often it told that it was declared dead."""
    worker.go_on()
    again, writer = (await asyncio.to_thread(worker.says)).split()
    assert await asyncio.to_thread(worker.says) == "completed 1"
    code, _, said = await asyncio.to_thread(worker.end)
    evictions = said.count("was declared dead by another process")
    assert code == 0, said
    assert (writer != first) == bool(evictions)
    assert await ends_as(url, again) == (TaskStatus.COMPLETED, [EventKind.CREATED, EventKind.COMPLETED])
    return evictions


@pytest.mark.parametrize("where", [HERE, ELSEWHERE])
async def test_a_tool_that_hogs_the_interpreter_keeps_its_task_or_is_fenced(start, database_url, where):
    """No thread of that process runs, its heartbeat least of all; on this machine the process table shows its life.

    Elsewhere nothing does, so after a lease its task fails; what it says later counts for nothing, and it goes on.
    """
    worker = start(database_url, where, "hog")
    task_id, first = (await asyncio.to_thread(worker.says)).split()
    assert await asyncio.to_thread(worker.says) == "hogging"

    decided = await past_the_lease(database_url)
    between = await ends_as(database_url, task_id)
    worker.go_on()
    said = await asyncio.to_thread(worker.says)
    after = await ends_as(database_url, task_id)
    evictions = await end_and_count_the_evictions(worker, first=first, url=database_url)

    if where == HERE:
        assert (decided, said, evictions) == ([], "completed 1", 0)
        assert between == (TaskStatus.WORKING, [EventKind.CREATED])
        assert after == (TaskStatus.COMPLETED, [EventKind.CREATED, EventKind.COMPLETED])
    else:
        assert (decided, said, evictions) == ([task_id], "lost True", 1)
        assert between == after == (TaskStatus.FAILED, [EventKind.CREATED, EventKind.RECOVERED])


async def test_a_database_that_lets_nobody_write_for_longer_than_the_lease_kills_nobody(
    start, database_url, monkeypatch
):
    """A judge that cannot beat itself has no right to take the silence of others for their death."""
    worker = start(database_url, ELSEWHERE, "slow")
    task_id, first = (await asyncio.to_thread(worker.says)).split()
    await asyncio.to_thread(beating, database_url, first)

    monkeypatch.setattr(dialects, "_BUSY_TIMEOUT_MS", 50)
    clock, decided = ManualClock(), []
    async with TaskStore.open(database_url, options=StoreOptions(clock=clock, upkeep=False)) as judge:
        decided += (await judge.recover()).recovered
        with write_lock(database_url, "taskstore_instances"):  # nobody can beat
            for _ in range(6):
                clock.advance(timedelta(seconds=10))
                with pytest.raises(DatabaseUnavailableError):
                    await judge.recover()
        decided += (await judge.recover()).recovered
    worker.go_on()
    said = [await asyncio.to_thread(worker.says) for _ in range(2)]
    evictions = await end_and_count_the_evictions(worker, first=first, url=database_url)

    assert (decided, said, evictions) == ([], ["completing", "completed 1"], 0)
    assert await ends_as(database_url, task_id) == (TaskStatus.COMPLETED, [EventKind.CREATED, EventKind.COMPLETED])


async def test_a_statement_that_arrives_after_the_lease_counts_for_nothing(start, postgres_url):
    """The outcome was on its way when the task was failed; that it comes through then must not make a second one."""
    with Proxy(postgres_url) as slow:
        worker = start(slow.url, ELSEWHERE, "slow")
        task_id, first = (await asyncio.to_thread(worker.says)).split()
        with slow.hold_up():
            worker.go_on()
            assert await asyncio.to_thread(worker.says) == "completing"
            await asyncio.to_thread(wait_until, lambda: slow.held_up >= 2, "an outcome and a heartbeat on the way")
            decided = await past_the_lease(postgres_url)
            between = await ends_as(postgres_url, task_id)
        said = await asyncio.to_thread(worker.says)
        after = await ends_as(postgres_url, task_id)
        evictions = await end_and_count_the_evictions(worker, first=first, url=postgres_url)

    assert (decided, said, evictions) == ([task_id], "lost True", 1)
    assert between == after == (TaskStatus.FAILED, [EventKind.CREATED, EventKind.RECOVERED])
