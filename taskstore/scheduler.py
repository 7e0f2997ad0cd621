"""MaintenanceScheduler: runs recovery and the sweep from time to time, on one thread of its own."""

import logging
import threading
from collections.abc import Callable
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from taskstore.clock import Clock
from taskstore.errors import DatabaseUnavailableError
from taskstore.operations import instant
from taskstore.task import FailingJob

if TYPE_CHECKING:
    from apscheduler.schedulers.background import BackgroundScheduler

logger = logging.getLogger("taskstore")


class MaintenanceScheduler:
    """Runs jobs at intervals until it is stopped; a job that fails is logged and runs again the next time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failing: dict[str, FailingJob] = {}
        self._jobs: list[tuple[str, Callable[[], object], timedelta]] = []
        self._thread: threading.Thread | None = None
        self._scheduler: BackgroundScheduler | None = None

    def add(self, name: str, job: Callable[[], object], every: timedelta) -> None:
        """Add a job before the start; the first run comes after one interval."""
        self._jobs.append((name, job, every))

    @property
    def failing(self) -> tuple[FailingJob, ...]:
        """The jobs that failed the last time they ran."""
        return tuple(self._failing.copy().values())

    def run(self, name: str, job: Callable[[], object]) -> None:
        """Run a job now; whatever it raises is logged and counted, until it succeeds."""
        try:
            job()
        except DatabaseUnavailableError as error:
            logger.warning("Upkeep job %s did not finish, and will be run again: %s", name, error)
            self._count(name, str(error))
        except Exception as error:
            logger.exception("Upkeep job %s failed, and will be run again.", name)
            self._count(name, f"{type(error).__name__}: {error}")
        else:
            self._failing.pop(name, None)

    def start(self) -> None:
        """Start. Returns at once: importing APScheduler takes longer than opening a store, so a thread does it."""
        self._thread = threading.Thread(target=self._start, name="taskstore-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for a job that runs, and stop; whether or not it was started, or stopped before."""
        if self._thread is not None:
            self._thread.join()
        if self._scheduler is not None:
            self._scheduler.shutdown()
        self._thread = self._scheduler = None

    def _count(self, name: str, error: str) -> None:
        first = FailingJob(name=name, failures=0, since=instant(self._clock.now()), error="")
        former = self._failing.get(name, first)
        self._failing[name] = former.model_copy(update={"failures": former.failures + 1, "error": error})

    def _start(self) -> None:
        try:
            self._start_scheduler()
        except Exception:
            # A program that ends without closing its store may be over before the import is: nothing to report.
            if not _is_ending():
                raise

    def _start_scheduler(self) -> None:
        from apscheduler.executors.debug import DebugExecutor
        from apscheduler.schedulers.background import BackgroundScheduler

        # DebugExecutor runs each job on the scheduler's own thread, a daemon. A pool of threads would add nothing
        # for jobs that run one after the other, and would be waited for at interpreter exit.
        self._scheduler = BackgroundScheduler(
            executors={"default": DebugExecutor()},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone=UTC,
        )
        for name, job, every in self._jobs:
            seconds = every.total_seconds()
            # Jitter keeps servers that were started together from running recovery together.
            self._scheduler.add_job(
                self.run, "interval", args=(name, job), id=name, seconds=seconds, jitter=seconds / 10
            )
        self._scheduler.start()


def _is_ending() -> bool:
    """Tell whether the interpreter ends: no module that has to do with threads can be imported then any more."""
    # Private, for want of a public way: the main thread counts as alive until the threads of all pools have ended.
    return getattr(threading, "_SHUTTING_DOWN", False) or not threading.main_thread().is_alive()
