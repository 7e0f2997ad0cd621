"""MaintenanceScheduler: it starts and stops in any order, as often as anybody likes, and a job that runs ends whole."""

import threading
from datetime import timedelta

import pytest

from taskstore.clock import SYSTEM
from taskstore.scheduler import MaintenanceScheduler
from taskstore.testing import ManualClock

SOON = timedelta(milliseconds=5)
PATIENCE_SECONDS = 120


def test_it_starts_and_stops_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is reloaded, or fails in the middle of its start, stops what it has not started, and twice.

    Case 49, agronholm/apscheduler#632, #985: "cannot schedule new futures" and tracebacks at the end of a process.
    """
    runs = threading.Semaphore(0)
    scheduler = MaintenanceScheduler(SYSTEM)
    scheduler.add("count", runs.release, SOON)

    scheduler.stop()
    for _ in range(2):
        scheduler.start()
        assert runs.acquire(timeout=PATIENCE_SECONDS)
        scheduler.stop()
        scheduler.stop()
    scheduler.start()
    scheduler.stop()

    assert caplog.messages == []
    assert not any("Scheduler" in thread.name or "upkeep" in thread.name for thread in threading.enumerate())


def test_a_job_that_runs_is_waited_for_and_runs_no_more_after_the_stop() -> None:
    """Half a sweep is no harm; a job that goes on in a closed database is an error in the log of every shutdown.

    Case 49, agronholm/apscheduler#632, #985: "cannot schedule new futures" and tracebacks at the end of a process.
    """
    began, goes_on, ended = threading.Event(), threading.Event(), []

    def job() -> None:
        began.set()
        goes_on.wait(PATIENCE_SECONDS)
        ended.append("whole")

    scheduler = MaintenanceScheduler(SYSTEM)
    scheduler.add("long", job, SOON)
    scheduler.start()
    assert began.wait(PATIENCE_SECONDS)
    stopping = threading.Thread(target=scheduler.stop)
    stopping.start()
    in_the_middle = stopping.is_alive(), list(ended)
    goes_on.set()
    stopping.join(PATIENCE_SECONDS)
    at_the_stop = list(ended)

    assert in_the_middle == (True, [])
    assert set(at_the_stop) == {"whole"}
    assert ended == at_the_stop


def test_jobs_keep_their_distance_and_never_run_twice_at_once() -> None:
    """Servers that were started together would look for orphans together; and a job that was late is run once."""
    scheduler = MaintenanceScheduler(SYSTEM)
    scheduler.add("recover", lambda: None, timedelta(seconds=10))
    scheduler.start()
    assert scheduler._thread is not None
    scheduler._thread.join(PATIENCE_SECONDS)
    assert scheduler._scheduler is not None
    (job,) = scheduler._scheduler.get_jobs()
    scheduler.stop()

    assert (job.trigger.interval, job.trigger.jitter) == (timedelta(seconds=10), 1.0)
    assert (job.coalesce, job.max_instances, job.misfire_grace_time) == (True, 1, None)


def test_whatever_a_job_fails_with_is_counted_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    """A probe that knows of the failures that somebody thought of misses the one that matters."""
    clock = ManualClock()
    scheduler = MaintenanceScheduler(clock)
    began = clock.now()

    def burn() -> None:
        clock.advance(SOON)
        raise RuntimeError("the disk is on fire")

    for _ in range(2):
        scheduler.run("sweep", burn)
    (failing,) = scheduler.failing
    scheduler.run("recover", lambda: None)
    beside = scheduler.failing
    scheduler.run("sweep", lambda: None)

    assert (failing.name, failing.failures, failing.error) == ("sweep", 2, "RuntimeError: the disk is on fire")
    assert failing.since.timestamp() * 1000 == began + SOON // timedelta(milliseconds=1)
    assert beside == (failing,)
    assert scheduler.failing == ()
