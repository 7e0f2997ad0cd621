"""How a process ends that has a store open: at once, with the right code, quietly, and with everything stored."""

import os
import signal
from datetime import timedelta

import pytest

from taskstore import AuthContext, StoreOptions, TaskStore
from taskstore.testing import ManualClock
from tests.unit.outside import copy_task, process, query, run_python, value, wait_until, write_lock

ALICE = AuthContext(subject="alice")

START = """
import asyncio, os, sys, threading
from taskstore import AuthContext, TaskStore

ALICE = AuthContext(subject="alice")

async def leave_open(complete=True):
    manager = TaskStore.open(sys.argv[1])
    store = await manager.__aenter__()
    task = await store.create_task(auth=ALICE)
    if complete:
        await store.handle(task).complete("done")
    return manager, store
"""

LEAVE_THE_LOOP_OPEN = """
loop = asyncio.new_event_loop()
kept = loop.run_until_complete(leave_open())
"""
LEFT_OPEN = START + LEAVE_THE_LOOP_OPEN

# The scheduler is imported when the interpreter is ending already, and has the time to fail at it.
SLOW_SCHEDULER = """
import atexit, sys, threading, time
from importlib.machinery import PathFinder

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name != "apscheduler":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_late(module):  # here nobody else's imports wait, as they would while a module is looked for
            while threading.main_thread().is_alive():
                time.sleep(0.001)
            execute(module)

        spec.loader.exec_module = execute_late
        return spec

@atexit.register
def wait_for_upkeep():
    for thread in threading.enumerate():
        if thread.name == "taskstore-upkeep":
            thread.join(5)

sys.meta_path.insert(0, Slow())
"""

# Each way to leave: what the script does after START, its exit code, and how its stderr ends (None: with nothing).
WAYS_TO_LEAVE = {
    "close": ("async def main():\n    async with TaskStore.open(sys.argv[1]) as store:\n"
              "        await store.handle(await store.create_task(auth=ALICE)).complete('done')\n"
              "asyncio.run(main())", 0, None),
    "no close": ("kept = asyncio.run(leave_open())", 0, None),
    "no close, nothing kept": ("asyncio.run(leave_open())", 0, None),
    "no close, loop left open": (LEAVE_THE_LOOP_OPEN, 0, None),
    "exception": ("async def main():\n    kept = await leave_open()\n    raise ValueError('of the user')\n"
                  "asyncio.run(main())", 1, "ValueError: of the user"),
    "exception inside": (
        "async def main():\n    async with TaskStore.open(sys.argv[1]) as store:\n"
        "        await store.handle(await store.create_task(auth=ALICE)).complete('done')\n"
        "        raise ValueError('of the user')\n"
        "asyncio.run(main())", 1, "ValueError: of the user"
    ),
    "exit": ("async def main():\n    kept = await leave_open()\n    sys.exit(3)\nasyncio.run(main())", 3, None),
    "hard exit": ("async def main():\n    kept = await leave_open()\n    os._exit(4)\nasyncio.run(main())", 4, None),
}  # fmt: skip

INTERRUPTED = (
    START
    + """
async def main():
    async with TaskStore.open(sys.argv[1]) as store:
        await store.handle(await store.create_task(auth=ALICE)).complete("done")
        print("stored", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
)

FORKED = (
    START
    + """
async def main():
    return await leave_open()
loop = asyncio.new_event_loop()
kept = loop.run_until_complete(main())
child = os.fork()
if child == 0:
    sys.exit(0)  # a child that only ends must not end anything of its parent's
_, status = os.waitpid(child, 0)
assert status == 0, status
loop.run_until_complete(kept[1].handle(loop.run_until_complete(kept[1].create_task(auth=ALICE))).complete("done"))
loop.run_until_complete(kept[0].__aexit__(None, None, None))
"""
)


STOPPED = """
import asyncio, sys
from datetime import timedelta
from taskstore import StoreOptions, TaskStore

async def main():
    async with TaskStore.open(sys.argv[1], options=StoreOptions(sweep_interval=timedelta(milliseconds=10))):
        await asyncio.to_thread(sys.stdin.readline)
        print("stopping", flush=True)
asyncio.run(main())
"""

# Each of its children is an interpreter that ends at a moment of its own, in one of the ways, while it works and its
# upkeep runs as often as it can. Forked before anything is open: starting an interpreter takes longer than the rest.
ENDS_AT_RANDOM = """
import asyncio, logging, os, random, sys
from datetime import timedelta
from taskstore import AuthContext, StoreOptions, TaskStore

ALICE, OFTEN = AuthContext(subject="alice"), timedelta(milliseconds=5)
OPTIONS = StoreOptions(recovery_interval=OFTEN, sweep_interval=OFTEN)
logging.getLogger("taskstore").setLevel(logging.ERROR)  # what it says of the tasks of those before

async def work(store, enough):
    while True:
        task = await store.create_task(auth=ALICE, name="work")
        await store.handle(task).complete("done")
        print(task.task_id, flush=True)
        enough.release()

async def main(way, count, moment):
    manager = TaskStore.open(sys.argv[1], options=OPTIONS)
    store = await manager.__aenter__()
    enough = asyncio.Semaphore(0)
    working = [asyncio.ensure_future(work(store, enough)) for _ in range(3)]
    for _ in range(count):
        await enough.acquire()
    await asyncio.sleep(moment)  # the moment itself is the point
    if way == "exit":
        sys.exit(0)
    for each in working:
        each.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    if way == "close":
        await manager.__aexit__(None, None, None)
    return manager

codes = set()
for seed in range(int(sys.argv[2])):
    if os.fork() == 0:
        break
    codes.add(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    sys.exit(codes != {0})
draw = random.Random(seed)
way, count, moment = draw.choice(["close", "no close", "exit", "loop"]), draw.randrange(5), draw.uniform(0, 0.02)
if way == "loop":
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(main(way, count, moment))
else:
    kept = asyncio.run(main(way, count, moment))
"""


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_a_process_ends_with_everything_stored_however_it_leaves(database_url: str, way: str) -> None:
    """Seen elsewhere: a thread of the library kept the interpreter from ending, and containers had to be killed.

    Case 29, omnilib/aiosqlite#369, PrefectHQ/marvin#1255: a process hung at its exit, and an import did the work of
    a database.
    """
    script, code, last_words = WAYS_TO_LEAVE[way]

    said = run_python(START + script, database_url)

    assert said.returncode == code
    assert said.stderr.strip().splitlines()[-1:] == ([] if last_words is None else [last_words])
    assert said.stderr.count("Traceback") == (0 if last_words is None else 1)
    assert query(database_url, "SELECT status FROM taskstore_tasks") == [("completed",)]


def test_a_process_that_does_not_close_ends_within_two_seconds(database_url: str) -> None:
    """Supervisors wait for ten seconds before they kill, and users for less.

    Case 29, omnilib/aiosqlite#369, PrefectHQ/marvin#1255: a process hung at its exit, and an import did the work of
    a database.
    """
    with process(LEFT_OPEN + "print('over', flush=True)", database_url) as server:
        server.says()
        code = server.popen.wait(timeout=2)

    assert code == 0


def test_a_process_that_ends_while_upkeep_is_starting_ends_quietly(database_url: str) -> None:
    """Upkeep imports its scheduler on a thread of its own, and a short program may be over before that is done."""
    said = run_python(SLOW_SCHEDULER + LEFT_OPEN, database_url)

    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
    assert query(database_url, "SELECT status FROM taskstore_tasks") == [("completed",)]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
def test_a_process_that_is_told_to_stop_stops(database_url: str, sent: signal.Signals) -> None:
    """Ctrl-C closes the store on the way out; SIGTERM, which Python does not handle, is as good as a crash."""
    with process(INTERRUPTED, database_url) as server:
        server.says()
        os.kill(server.popen.pid, sent)
        code, _, complaint = server.end()

    assert code == -sent
    assert complaint.strip().splitlines()[-1:] == (["KeyboardInterrupt"] if sent is signal.SIGINT else [])
    assert query(database_url, "SELECT status FROM taskstore_tasks") == [("completed",)]
    assert len(query(database_url, "SELECT * FROM taskstore_instances")) == (0 if sent is signal.SIGINT else 1)


def test_a_task_left_live_by_a_process_that_ended_is_failed_by_the_next_one(database_url: str) -> None:
    """Nobody waits for ever, although nobody closed."""
    left = run_python(START + "asyncio.run(leave_open(complete=False))\nos._exit(0)", database_url)

    said = run_python(START + "asyncio.run(leave_open())", database_url)

    assert (left.returncode, said.returncode) == (0, 0)
    assert query(database_url, "SELECT status FROM taskstore_tasks ORDER BY created_at") == [
        ("failed",),
        ("completed",),
    ]


def test_a_child_of_a_fork_that_ends_leaves_its_parents_store_alone(database_url: str) -> None:
    """Servers that fork helpers after the start are common; the child has no threads of the store's, and no say."""
    said = run_python(FORKED, database_url)

    assert (said.returncode, said.stderr) == (0, "")
    assert query(database_url, "SELECT status FROM taskstore_tasks") == [("completed",), ("completed",)]


async def test_a_stop_in_the_middle_of_a_sweep_leaves_the_rest_to_the_next(database_url: str) -> None:
    """With much to delete it would outlast the patience of a supervisor, who then kills it.

    Case 49, agronholm/apscheduler#632, #985: "cannot schedule new futures" and tracebacks at the end of a process.
    """
    # So many that whoever wants the lock gets it between two batches, however busy the machine is.
    total = await fill_with_expired(database_url, 40_000)
    with process(STOPPED, database_url) as server:
        wait_until(lambda: count_tasks(database_url) < total, "a first batch")
        with write_lock(database_url):  # the sweep stands still, and has more to do
            server.go_on()
            server.says()
        code, _, complaint = server.end()
    left, events = count_tasks(database_url), count_events(database_url)
    async with TaskStore.open(database_url) as store:
        swept = await store.sweep()

    assert (code, complaint) == (0, "")
    assert 0 < left < total
    assert events == 2 * left  # what the last batch did was done whole
    assert swept.deleted == left
    assert query(database_url, "SELECT * FROM taskstore_instances") == []


async def test_a_process_that_ends_at_any_moment_ends_quietly_and_loses_nothing(database_url: str) -> None:
    """Whatever its threads are doing then: starting, committing, sweeping, or about to schedule the next run.

    Case 49, agronholm/apscheduler#632, #985: "cannot schedule new futures" and tracebacks at the end of a process.
    """
    await fill_with_expired(database_url, 2_000)
    said = run_python(ENDS_AT_RANDOM, database_url, "50", patience=300)

    stored = query(database_url, "SELECT task_id FROM taskstore_tasks WHERE name = 'work'")
    acknowledged = said.stdout.split()
    assert (said.returncode, said.stderr) == (0, "")
    assert acknowledged
    assert set(acknowledged) <= {task_id for (task_id,) in stored}
    assert count_events(database_url) == 2 * count_tasks(database_url)  # each batch is stored whole or not at all


async def fill_with_expired(url: str, count: int) -> int:
    """Put so many expired tasks into a database, beside none else; return the number."""
    clock = ManualClock()
    clock.set_wall(0)
    options = StoreOptions(clock=clock, upkeep=False, min_retention=timedelta(0))
    async with TaskStore.open(url, options=options) as store:
        task = await store.create_task(auth=ALICE, name="expired", ttl=timedelta(minutes=1))
        await store.handle(task).complete("done")
    copy_task(url, task.task_id, count - 1)
    return count


def count_tasks(url: str) -> int:
    return int(value(url, "SELECT count(*) FROM taskstore_tasks WHERE name = 'expired'"))


def count_events(url: str) -> int:
    """Count the events of expired tasks, and of tasks that are gone."""
    of_others = "SELECT task_id FROM taskstore_tasks WHERE name <> 'expired'"
    return int(value(url, f"SELECT count(*) FROM taskstore_events WHERE task_id NOT IN ({of_others})"))
