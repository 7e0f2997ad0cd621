"""A process that works on a store until it is killed: ``python worker.py URL JOB [ARGUMENT...]``.

It tells on standard output, a JSON line each, what has been acknowledged to it, before it goes on. A kill point is
named ``STATEMENT:MOMENT``, such as ``CREATE:after-write``; SIGKILL comes when the process reaches it.
"""

import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from datetime import timedelta

from taskstore import AuthContext, EventKind, OwnerKind, ReasonCode, StoreOptions, TaskHandle, TaskStore, statements
from taskstore.clock import SYSTEM
from taskstore.database import Database, _Transaction
from taskstore.statements import Change

ALICE = AuthContext(subject="alice")
MEGABYTE = 1_000_000
ORPHANS = {statements.ORPHANS_OF, statements.ORPHANS_OF_NOBODY}
ORPHAN_FAILS = statements.FOR_ORPHANS[ReasonCode.CRASH_RECOVERY, OwnerKind.INSTANCE]


def tell(**facts: object) -> None:
    print(f"{json.dumps(facts)}\n", end="", flush=True)  # in one piece, whenever the process is killed


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, after: int = 1) -> None:
    """Be killed the ``after``-th time the point is reached; recovery reaches it once a batch.

    The moments: ``after-write``, when the statement has run and its transaction is open; ``before-commit`` and
    ``after-commit``, of the transaction it ran in, the latter before anybody hears of it.
    """
    name, moment = point.split(":")
    watched: Change = ORPHAN_FAILS if name == "RECOVER" else getattr(statements, name)
    reached, ran = 0, False
    change, change_all, transact = _Transaction.change, _Transaction.change_all, Database._transact

    def reach(statement):
        nonlocal reached, ran
        if statement is watched:
            reached += 1
            ran = reached >= after
            if ran and moment == "after-write":
                die()

    def watching_change(self, statement, params):
        row = change(self, statement, params)
        reach(statement)
        return row

    def watching_change_all(self, statement, rows):
        change_all(self, statement, rows)
        reach(statement)

    def watching_transact(self, units):
        def last(transaction):
            if ran and moment == "before-commit":
                die()

        done = transact(self, [*units, last])
        if ran and moment == "after-commit":
            die()
        return done[:-1]

    _Transaction.change = watching_change  # type: ignore[method-assign]
    _Transaction.change_all = watching_change_all  # type: ignore[method-assign]
    Database._transact = watching_transact  # type: ignore[method-assign]


async def finish_and_hang(store: TaskStore) -> None:
    """Complete one task, leave three working, and wait for the end."""
    done = await store.create_task(auth=ALICE, name="done")
    await store.handle(done).complete({"pages": list(range(1000))})
    working = [await store.create_task(auth=ALICE, name="working") for _ in range(3)]
    tell(completed=done.task_id, working=[task.task_id for task in working])
    await asyncio.Event().wait()


async def create_many(store: TaskStore, count: str) -> None:
    tasks = await asyncio.gather(*(store.create_task(auth=ALICE) for _ in range(int(count))))
    tell(created=[task.task_id for task in tasks])
    await asyncio.Event().wait()


async def create_then_die(store: TaskStore, point: str) -> None:
    for number in range(5):
        if number == 4:
            arm(point)
        task = await store.create_task(auth=ALICE, request={"number": number})
        tell(created=task.task_id)


async def complete_then_die(store: TaskStore, point: str) -> None:
    acknowledged = await store.create_task(auth=ALICE)
    await store.handle(acknowledged).complete({"blob": "x" * 100_000})
    tell(completed=acknowledged.task_id)
    task = await store.create_task(auth=ALICE)
    tell(created=task.task_id)
    arm(point)
    await store.handle(task).complete({"blob": "y" * 100_000})
    tell(completed=task.task_id)


async def recover_then_die(store: TaskStore, point: str, after: str) -> None:
    arm(point, int(after))
    report = await store.recover()
    tell(recovered=list(report.recovered))


async def hold(store: TaskStore) -> None:
    """Work on one task until told to finish it."""
    task = await store.create_task(auth=ALICE)
    async with store.handle(task) as handle:
        tell(created=task.task_id)
        await asyncio.to_thread(sys.stdin.readline)
        done = await handle.complete({"ok": True})
    tell(completed=task.task_id, attempt=done.attempt)


async def work(store: TaskStore, rounds: str) -> None:
    """Eight tasks at a time: create, read, report, complete, read again."""

    async def flow() -> None:
        for _ in range(int(rounds)):
            task = await store.create_task(auth=ALICE)
            handle = store.handle(task)
            await store.get_task(task.task_id, auth=ALICE)
            await handle.progress(1)
            await handle.complete({"task": task.task_id})
            result = (await store.get_outcome(task.task_id, auth=ALICE)).result
            assert result == {"task": task.task_id}

    await asyncio.gather(*(flow() for _ in range(8)))
    tell(finished=8 * int(rounds))


async def work_in_a_crowd(store: TaskStore, seconds: str) -> None:
    """Hold one task for so long, and work off others meanwhile; say whether anybody touched one of them."""
    tell(ready=True)
    await asyncio.to_thread(sys.stdin.readline)
    ends, touched, finished = SYSTEM.monotonic() + float(seconds), [], 1
    held = store.handle(await store.create_task(auth=ALICE))

    async def end(handle: TaskHandle) -> None:
        done = await handle.complete({"task": handle.task_id})
        kinds = [event.kind for event in await store.list_events(handle.task_id, auth=ALICE)]
        if done.attempt != 1 or done.crashes or kinds != [EventKind.CREATED, EventKind.COMPLETED]:
            touched.append(handle.task_id)

    while SYSTEM.monotonic() < ends:
        handle = store.handle(await store.create_task(auth=ALICE))
        await handle.progress(1)
        await held.progress(finished)
        await end(handle)
        finished += 1
    await end(held)
    tell(finished=finished, touched=touched)


JOBS = {
    job.__name__: job
    for job in (
        finish_and_hang,
        create_many,
        create_then_die,
        complete_then_die,
        recover_then_die,
        hold,
        work,
        work_in_a_crowd,
    )
}


async def main(url: str, job: str, *arguments: str) -> None:
    # recover_then_die recovers itself, under its kill point; upkeep would come first.
    upkeep = job != "recover_then_die"
    options = StoreOptions(upkeep=upkeep, lease=timedelta(seconds=30))
    async with TaskStore.open(url, options=options) as store:
        await JOBS[job](store, *arguments)


async def open_and_recover(url: str, times: str) -> None:
    """Open the store again and again, recovering each time."""
    recovered = []
    for _ in range(int(times)):
        async with TaskStore.open(url) as store:
            recovered += (await store.recover()).recovered
    tell(recovered=recovered)


def crowd(url: str, processes: str, seconds: str) -> None:
    """Open the store, recover and close it again, in so many processes at once for so long."""
    # Forked: so many interpreters would take longer to start than all the rest.
    fork = multiprocessing.get_context("fork").Process
    started = [fork(target=come_and_go, args=(url, float(seconds)), daemon=True) for _ in range(int(processes))]
    tell(ready=True)
    sys.stdin.readline()
    for each in started:
        each.start()
    for each in started:
        each.join()
    tell(codes=[each.exitcode for each in started])


def come_and_go(url: str, seconds: float) -> None:
    async def come_and_go_on() -> None:
        ends, recovered, times = SYSTEM.monotonic() + seconds, [], 0
        while SYSTEM.monotonic() < ends:
            async with TaskStore.open(url) as store:
                recovered += (await store.recover()).recovered
            times += 1
        tell(recovered=recovered, times=times)

    asyncio.run(come_and_go_on())


async def keep_up(url: str) -> None:
    """Do what upkeep there is until told to stop; count how often the tables were scanned for it."""
    often, scanned = timedelta(milliseconds=50), {statements.SWEEP, statements.DUE, *ORPHANS}
    scans, swept, rows = 0, 0, _Transaction.rows

    def counting_rows(self, statement, params):
        nonlocal scans, swept
        found = rows(self, statement, params)
        scans += statement in scanned
        swept += len(found) if statement is statements.SWEEP else 0
        return found

    options = StoreOptions(
        recovery_interval=often,
        sweep_interval=often,
        on_recovered=lambda tasks: tell(decided=[task.task_id for task in tasks]),
    )
    async with TaskStore.open(url, options=options):
        _Transaction.rows = counting_rows  # type: ignore[method-assign]
        tell(ready=True)
        await asyncio.to_thread(sys.stdin.readline)
        tell(scans=scans, swept=swept)


def be_killed_while_completing(url: str, times: str) -> None:
    """Fork a process that stores a megabyte, kill it at a moment of the storing; and again, so many times."""
    usual = 0.02  # how long storing takes, in seconds, as far as is known
    for _ in range(int(times)):
        begun, begins = os.pipe()
        pid = os.fork()
        if pid == 0:
            asyncio.run(store_a_megabyte(url, begins))
        os.read(begun, 1)
        time.sleep(random.uniform(0, 2 * usual))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        usual *= 0.9 if os.waitstatus_to_exitcode(status) == 0 else 1.1
        for end in (begun, begins):
            os.close(end)


async def store_a_megabyte(url: str, begins: int) -> None:
    async with TaskStore.open(url) as store:
        task = await store.create_task(auth=ALICE)
        tell(created=task.task_id)
        os.write(begins, b"!")
        await store.handle(task).complete({"task": task.task_id, "blob": "x" * MEGABYTE})
        tell(completed=task.task_id)
        os._exit(0)


def run(url: str, job: str, *arguments: str) -> None:
    match job:
        case "crowd":
            crowd(url, *arguments)
        case "be_killed_while_completing":
            be_killed_while_completing(url, *arguments)
        case "open_and_recover":
            asyncio.run(open_and_recover(url, *arguments))
        case "keep_up":
            asyncio.run(keep_up(url))
        case _:
            asyncio.run(main(url, job, *arguments))


if __name__ == "__main__":
    run(*sys.argv[1:])
