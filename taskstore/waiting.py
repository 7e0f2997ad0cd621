"""Wake-ups: by an event inside the process; by one thread that hears of changes made elsewhere.

No connection is held for a waiter. The thread and its one connection serve all of them, and only while somebody waits.
"""

import asyncio
import itertools
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from taskstore import statements
from taskstore.binding import notice
from taskstore.clock import SYSTEM
from taskstore.database import Database
from taskstore.dialects import ChangeFeed
from taskstore.errors import DatabaseUnavailableError, TaskStoreError
from taskstore.operations import Transaction

logger = logging.getLogger("taskstore")

# How long the thread stays when the last waiter has gone: another one usually comes soon.
LINGER = timedelta(seconds=5)
RETRY = timedelta(seconds=1)


class Waiter:
    """One who waits, on one event loop, for the next change of a task after the version last seen."""

    def __init__(self, closed: threading.Event) -> None:
        self.version = 0
        self._closed, self._loop = closed, asyncio.get_running_loop()
        self._woken = False
        self._waiting: asyncio.Future[None] | None = None

    def watch(self) -> None:
        """Heed wake-ups from here on; call it before reading the task, so that none is lost.

        Raises:
            DatabaseUnavailableError: The store is closed: there is nothing more to wait for.
        """
        if self._closed.is_set():
            raise DatabaseUnavailableError("The store was closed while a task was waited for.")
        self._woken = False

    async def wait(self, timeout: float | None) -> None:
        """Wait until woken since ``watch()``, or for so many seconds; None is for ever."""
        if self._woken:
            return
        # A concurrent future, wrapped for the loop, is a ring of closures that keeps the whole request of a tool call
        # until the garbage collector comes by.
        self._waiting = self._loop.create_future()
        timer = None if timeout is None else self._loop.call_later(timeout, self._wake_here)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Wake up, from any thread; a wake-up without a change is harmless, since the waiter reads again."""
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            self._wake_here()
        else:
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                self._loop.call_soon_threadsafe(self._wake_here)

    def _wake_here(self) -> None:
        self._woken = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Waiting:
    """The waiters of one store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiters: dict[str, set[Waiter]] = defaultdict(set)
        self._noticed: dict[str, str] = {}
        self._for_work: set[Waiter] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._poll: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether nobody will be woken any more."""
        return self._stop.is_set()

    @contextmanager
    def waiter(self, task_id: str) -> Iterator[Waiter]:
        """Count as a waiter for a task while inside."""
        waiter, noticed = Waiter(self._stop), notice(task_id)
        with self._lock:
            self._waiters[task_id].add(waiter)
            self._noticed[noticed] = task_id
            if self._database.shared and self._poll is None and not self._stop.is_set():
                self._poll = threading.Thread(target=self._run, name="taskstore-poll", daemon=True)
                self._poll.start()
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters[task_id].discard(waiter)
                if not self._waiters[task_id]:
                    del self._waiters[task_id], self._noticed[noticed]

    @contextmanager
    def waiter_for_work(self) -> Iterator[Waiter]:
        """Count as a waiter for queued tasks while inside."""
        waiter = Waiter(self._stop)
        with self._lock:
            self._for_work.add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._for_work.discard(waiter)

    def notify(self, task_id: str) -> None:
        """Wake every waiter of a task; call it after COMMIT."""
        with self._lock:
            waiters = list(self._waiters.get(task_id, ()))
        for waiter in waiters:
            waiter.wake()

    def notify_of_work(self) -> None:
        """Wake whoever waits for queued tasks; call it after COMMIT."""
        with self._lock:
            waiters = list(self._for_work)
        for waiter in waiters:
            waiter.wake()

    def close(self) -> None:
        """Stop polling and wake everybody, who then learn that the store is closed."""
        self._stop.set()
        with self._lock:
            poll, waiters = self._poll, [*self._for_work, *itertools.chain(*self._waiters.values())]
        for waiter in waiters:
            waiter.wake()
        if poll is not None:
            poll.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._database.change_feed() as feed:
                    self._serve(feed)
                    return
            except TaskStoreError as error:
                logger.warning("Cannot look for changes by other processes, trying again: %s", error)
            except Exception:  # whatever it is, the waiters must not be left without a poll
                logger.exception("Looking for changes by other processes failed, and is tried again.")
            self._stop.wait(RETRY.total_seconds())

    def _serve(self, feed: ChangeFeed) -> None:
        """Wake waiters until nobody has waited for a while, or the store closes."""
        idle_since: float | None = None
        while not self._stop.is_set():
            anything, notices = feed.wait(self._stop)
            with self._lock:
                anybody = bool(self._waiters)
                # With many waiters and many notices a copy for each notice would cost all of the process's time.
                waited = [(task_id, list(waiters)) for task_id, waiters in self._waiters.items()] if anything else []
                noticed = [self._noticed[each] for each in notices if each in self._noticed]
                idle_since = None if anybody else idle_since or SYSTEM.monotonic()
                if idle_since is not None and SYSTEM.monotonic() - idle_since > LINGER.total_seconds():
                    self._poll = None
                    return
            for task_id in noticed:
                self.notify(task_id)
            if waited:
                self._wake_changed(waited)

    def _wake_changed(self, waited: list[tuple[str, list[Waiter]]]) -> None:
        params = {"waited_for": json.dumps(dict.fromkeys(task_id for task_id, _ in waited))}

        def read(transaction: Transaction) -> dict[str, int]:
            return {row["task_id"]: row["version"] for row in transaction.rows(statements.WATCH, params)}

        versions = self._database.read_here(read)
        for task_id, waiters in waited:
            for waiter in waiters:
                if versions.get(task_id) != waiter.version:  # changed, or gone
                    waiter.wake()
