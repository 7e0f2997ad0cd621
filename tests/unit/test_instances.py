"""Who is alive: the judge's verdicts, and what an instance does whose row is gone."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest

from taskstore import AuthContext, LeaseLostError, StoreOptions, TaskStore, instances
from taskstore.database import Database
from taskstore.instances import (
    Instance,
    Judge,
    Verdict,
    hold_lock,
    is_lock_free,
    is_proven_dead,
    machine_id,
    process_start,
)
from taskstore.migrate import upgrade_database
from taskstore.operations import Row
from taskstore.testing import ManualClock
from tests.unit.outside import query, run_python, wait_until

ALICE = AuthContext(subject="alice")
LEASE = timedelta(seconds=30)


@pytest.fixture
def clock() -> ManualClock:
    """The judge's own clock."""
    return ManualClock()


@pytest.fixture
def judge(clock: ManualClock) -> Judge:
    """A judge that has not looked yet."""
    return Judge(clock, lambda instance_id: None)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of this machine that does nothing but live."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


def here(pid: int, start: int | None) -> Row:
    """Row of an instance on this machine."""
    return {
        "instance_id": "ins_here",
        "machine_id": machine_id(),
        "pid": pid,
        "process_start": start,
        "beat": 0,
        "lease_ms": LEASE // timedelta(milliseconds=1),
    }


def elsewhere(beat: int, name: str = "ins_elsewhere") -> Row:
    """Row of an instance on another machine, after so many beats."""
    return here(os.getpid(), process_start(os.getpid())) | {
        "instance_id": name,
        "machine_id": "another/pid:[1]",
        "beat": beat,
    }


def verdict(judge: Judge, row: Row) -> Verdict:
    """Let the judge look at one instance."""
    return judge.judge([row])[row["instance_id"]]


def look(judge: Judge, clock: ManualClock, beat: int, *, after: timedelta) -> Verdict:
    """Let time pass, and let the judge look at an instance elsewhere."""
    clock.advance(after)
    return verdict(judge, elsewhere(beat))


# --- on this machine the process table decides


def test_this_process_is_alive(judge: Judge) -> None:
    """A server that judged itself dead would fail its own tasks."""
    assert verdict(judge, here(os.getpid(), process_start(os.getpid()))) is Verdict.ALIVE


def test_a_process_of_this_machine_is_alive_however_long_it_is_silent(
    judge: Judge, clock: ManualClock, process: "subprocess.Popen[bytes]"
) -> None:
    """A debugger, a suspended laptop or a blocked disk stops the beat and not the process."""
    row = here(process.pid, process_start(process.pid))

    verdicts = set()
    for _ in range(10):
        clock.advance(timedelta(hours=1))
        verdicts.add(verdict(judge, row))

    assert verdicts == {Verdict.ALIVE}


def test_a_process_that_has_ended_is_dead_at_the_first_look(judge: Judge, process: "subprocess.Popen[bytes]") -> None:
    """A server that restarts two seconds after a crash recovers at once, and waits for no lease."""
    row = here(process.pid, process_start(process.pid))
    process.kill()
    process.wait()

    assert verdict(judge, row) is Verdict.DEAD


def test_a_pid_that_now_belongs_to_another_process_does_not_keep_the_first_alive(
    judge: Judge, process: "subprocess.Popen[bytes]"
) -> None:
    """In a container the restarted server often has the very pid of the one that died."""
    start = process_start(process.pid)
    assert start is not None

    assert verdict(judge, here(process.pid, start - 1)) is Verdict.DEAD
    assert verdict(judge, here(os.getpid(), 0)) is Verdict.DEAD


def test_a_process_whose_start_is_unknown_is_alive_while_its_pid_is(process: "subprocess.Popen[bytes]") -> None:
    """Where the system does not tell, there is no proof; and only proof fails somebody's live work."""
    assert not is_proven_dead(process.pid, None)


def test_a_start_that_cannot_be_read_now_is_no_proof(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems hide other users' processes from /proc."""
    start = process_start(process.pid)
    monkeypatch.setattr(instances, "process_start", lambda pid: None)

    assert not is_proven_dead(process.pid, start)


def test_a_process_of_another_user_is_alive() -> None:
    """The system refuses to signal it, which proves that it exists."""
    script = """
import os
from taskstore.instances import is_proven_dead, process_start
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
other = os.getppid() if os.getuid() == 65534 else 1
try:
    os.kill(other, 0)
except PermissionError:
    print("not permitted", is_proven_dead(other, process_start(other)))
"""

    said = run_python(script)

    assert (said.stdout, said.stderr) == ("not permitted False\n", "")


def test_on_windows_nobody_is_asked_by_a_signal(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """There os.kill(pid, 0) ends the process. Without a proof, an instance is watched like one elsewhere."""
    monkeypatch.setattr(os, "kill", lambda pid, signal: pytest.fail("a process was signalled"))
    with monkeypatch.context() as windows:
        windows.setattr(sys, "platform", "win32")
        verdicts = is_proven_dead(process.pid, 0), hold_lock("instance.lock"), is_lock_free("instance.lock")

    assert verdicts == (False, None, False)


def test_the_start_of_a_process_is_read_whatever_its_name() -> None:
    """The kernel puts the name in parentheses between the numbers, and it may hold parentheses and blanks itself."""
    script = """
import ctypes, os
from taskstore.instances import process_start
before = process_start(os.getpid())
ctypes.CDLL(None).prctl(15, b") R 1 (x", 0, 0, 0)
print(before is not None and before == process_start(os.getpid()))
"""

    assert run_python(script).stdout == "True\n"


def test_the_machine_is_this_boot_and_this_namespace_of_pids() -> None:
    """A host name or a copied machine id would make two containers judge each other by pids that mean nothing there."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        boot_id = boot.read().strip()

    assert machine_id() == f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"


# --- elsewhere only a beat that this judge has watched


def test_one_that_stands_still_for_its_whole_lease_is_dead(judge: Judge, clock: ManualClock) -> None:
    """Its machine may have burnt down; nobody else will finish its tasks."""
    verdicts = [verdict(judge, elsewhere(7))]
    verdicts += [look(judge, clock, 7, after=timedelta(seconds=10)) for _ in range(3)]

    assert verdicts == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.DEAD]


def test_one_that_stands_still_for_less_than_its_lease_is_not_dead(judge: Judge, clock: ManualClock) -> None:
    """To the millisecond: the lease is a promise to the other one."""
    verdict(judge, elsewhere(7))
    for _ in range(3):
        last = look(judge, clock, 7, after=timedelta(milliseconds=9_999))

    assert last is Verdict.UNKNOWN


def test_one_whose_beat_has_moved_is_alive_and_starts_afresh(judge: Judge, clock: ManualClock) -> None:
    """Slow is not dead; the count begins again with every beat."""
    verdict(judge, elsewhere(7))
    for _ in range(2):
        look(judge, clock, 7, after=timedelta(seconds=10))

    moved = look(judge, clock, 8, after=timedelta(seconds=10))
    after = [look(judge, clock, 8, after=timedelta(seconds=10)) for _ in range(3)]

    assert moved is Verdict.ALIVE
    assert after == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.DEAD]


def test_a_beat_that_went_backwards_has_moved(judge: Judge, clock: ManualClock) -> None:
    """After the restore of a backup it may; it is still somebody who beats."""
    verdict(judge, elsewhere(7))

    assert look(judge, clock, 3, after=timedelta(hours=1)) is Verdict.ALIVE


def test_a_judge_that_was_suspended_judges_nobody(judge: Judge, clock: ManualClock) -> None:
    """Its laptop was closed for a night; that says nothing about the others."""
    verdict(judge, elsewhere(7))

    assert look(judge, clock, 7, after=timedelta(hours=12)) is Verdict.UNKNOWN
    assert look(judge, clock, 7, after=timedelta(seconds=10)) is Verdict.UNKNOWN


def test_an_outage_of_the_database_kills_nobody(judge: Judge, clock: ManualClock) -> None:
    """While nobody could reach it, nobody could beat; each gets the chance to, before the next verdict."""
    verdict(judge, elsewhere(7))
    look(judge, clock, 7, after=timedelta(seconds=10))

    after_the_outage = look(judge, clock, 7, after=timedelta(hours=1))
    then = look(judge, clock, 8, after=timedelta(seconds=10))

    assert (after_the_outage, then) == (Verdict.UNKNOWN, Verdict.ALIVE)


def test_a_step_of_the_wall_clock_changes_no_verdict(judge: Judge, clock: ManualClock) -> None:
    """No clock is compared with another one's, and none with itself before a step."""
    verdict(judge, elsewhere(7))

    clock.set_wall(clock.now() + 10**10)

    assert look(judge, clock, 7, after=timedelta(seconds=10)) is Verdict.UNKNOWN


def test_each_instance_has_its_own_lease(judge: Judge, clock: ManualClock) -> None:
    """A server that asked for an hour gets it, whatever the judge's own lease is."""
    short, patient = elsewhere(7, "ins_short"), elsewhere(7, "ins_patient") | {"lease_ms": 3_600_000}

    for _ in range(4):
        verdicts = judge.judge([short, patient])
        clock.advance(timedelta(seconds=10))

    assert verdicts == {"ins_short": Verdict.DEAD, "ins_patient": Verdict.UNKNOWN}


def test_one_whose_row_was_gone_meanwhile_is_watched_afresh(judge: Judge, clock: ManualClock) -> None:
    """What the judge knew of it is forgotten with its row, or the memory of a busy site would grow for ever."""
    verdict(judge, elsewhere(7))
    for _ in range(2):
        look(judge, clock, 7, after=timedelta(seconds=10))
    judge.judge([])

    assert look(judge, clock, 7, after=timedelta(seconds=10)) is Verdict.UNKNOWN


def test_where_the_system_does_not_tell_its_id_an_instance_is_watched_like_one_elsewhere(
    judge: Judge, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, process: "subprocess.Popen[bytes]"
) -> None:
    """Two machines that know no id of themselves must not take each other's pids for their own."""
    row = here(process.pid, None) | {"machine_id": "ins_here"}
    monkeypatch.setattr(instances, "machine_id", lambda: None)

    verdicts = []
    for _ in range(4):
        verdicts.append(verdict(judge, row))
        clock.advance(timedelta(seconds=10))

    assert verdicts == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.DEAD]


# --- the row of an open store


@pytest.fixture
def instance(database: Database, clock: ManualClock) -> Instance:
    """A registered instance that beats only when it is told to."""
    registered = Instance(
        database, clock, name="reports", lease=LEASE, heartbeat=timedelta(hours=1), on_evicted=lambda _: None
    )
    registered.start()
    return registered


def test_an_instance_says_where_it_runs(instance: Instance, database_url: str) -> None:
    """It is what others judge it by."""
    row = query(
        database_url,
        "SELECT instance_id, name, machine_id, pid, process_start, beat, lease_ms FROM taskstore_instances",
    )
    instance.stop()

    pid = os.getpid()
    assert row == [(instance.instance_id, "reports", machine_id(), pid, process_start(pid), 0, 30_000)]


def test_each_beat_counts(instance: Instance, database_url: str) -> None:
    """A counter, and no instant: two machines' clocks need not agree."""
    for _ in range(3):
        instance.beat()
    instance.stop()

    assert query(database_url, "SELECT beat FROM taskstore_instances") == [(3,)]


def test_it_beats_by_itself_though_the_writer_and_the_loop_are_blocked(database: Database, database_url: str) -> None:
    """A tool that blocks the event loop, or a long write, must not make its server look dead."""
    beating = Instance(
        database, ManualClock(), name="", lease=LEASE, heartbeat=timedelta(milliseconds=5), on_evicted=lambda _: None
    )
    beating.start()

    wait_until(lambda: query(database_url, "SELECT beat FROM taskstore_instances")[0][0] >= 3, "three beats")
    beating.stop()

    beats = query(database_url, "SELECT beat FROM taskstore_instances")
    assert query(database_url, "SELECT beat FROM taskstore_instances") == beats


def test_an_instance_never_comes_back_under_an_id_it_had(
    instance: Instance, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who was declared dead stays dead: what it held has been decided over."""
    first = instance.instance_id
    query(database_url, "DELETE FROM taskstore_instances")

    instance.beat()
    instance.beat()
    instance.stop()

    assert query(database_url, "SELECT instance_id, beat FROM taskstore_instances") == [(instance.instance_id, 1)]
    assert instance.instance_id != first
    (complaint,) = [record for record in caplog.records if record.name == "taskstore"]
    assert complaint.levelno == logging.ERROR
    assert first in complaint.message
    assert instance.instance_id in complaint.message


async def test_a_store_that_was_declared_dead_loses_its_tasks_and_works_on(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its handles hear it at once, their work is told to stop, and new tasks are its own under the new id."""
    options = StoreOptions(upkeep=False, heartbeat=timedelta(milliseconds=5), lease=timedelta(seconds=1))
    async with TaskStore.open(database_url, options=options) as store:
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        cancelled = asyncio.create_task(handle.wait_cancelled())

        query(database_url, "DELETE FROM taskstore_instances")
        await cancelled
        with pytest.raises(LeaseLostError):
            store.handle(task)
        report = await store.recover()
        for call in (lambda: handle.complete("done"), lambda: handle.progress(1)):
            with pytest.raises(LeaseLostError):
                await call()
        fresh = await store.create_task(auth=ALICE)
        completed = await store.handle(fresh).complete("done")

    assert report.recovered == (task.task_id,)
    assert completed.status == "completed"
    assert len([message for message in caplog.messages if "was declared dead" in message]) == 1


def test_an_in_memory_database_has_nobody_to_beat_for(clock: ManualClock) -> None:
    """One thread less in every test of those who embed the store."""
    with closing(Database("sqlite://")) as database:
        upgrade_database(database)
        alone = Instance(
            database, clock, name="", lease=LEASE, heartbeat=timedelta(milliseconds=1), on_evicted=lambda _: None
        )
        alone.start()
        alone.stop()

    assert alone.instance_id.startswith("ins_")
