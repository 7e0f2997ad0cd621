"""Lanes: threads that serve units of work from a queue, for callers that block and for coroutines."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, Generic, TypeVar, cast

from taskstore.errors import DatabaseUnavailableError
from taskstore.operations import Transaction

T = TypeVar("T")
Unit = Callable[[Transaction], T]


class Submission(Generic[T]):
    """A unit on its way, and how it ended; its caller is told when its batch is done."""

    def __init__(self, unit: Unit[T], snapshot: bool) -> None:
        self.unit, self.snapshot = unit, snapshot
        self.value: T | None = None
        self.error: BaseException | None = None

    def settle(self, run: Callable[[Unit[T]], T]) -> None:
        """Run the unit, and keep how it ended."""
        try:
            self.value = run(self.unit)
        except BaseException as error:  # noqa: BLE001  whatever it is belongs to the caller; the thread serves the next
            self.error = error


class _Blocking(Submission[T]):
    """Its caller waits, or will, on a thread."""

    def __init__(self, unit: Unit[T], snapshot: bool) -> None:
        super().__init__(unit, snapshot)
        self.future: Future[T] = Future()

    def begin(self) -> bool:
        """Tell whether somebody still wants it."""
        return self.future.set_running_or_notify_cancel()

    def tell(self) -> None:
        """Tell the caller how it ended."""
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(cast(T, self.value))


class _Awaited(Submission[T]):
    """Its caller is a coroutine."""

    def __init__(
        self, unit: Unit[T], snapshot: bool, loop: asyncio.AbstractEventLoop, undo: Callable[[T], None] | None
    ) -> None:
        super().__init__(unit, snapshot)
        self.loop, self.undo = loop, undo
        self.future: asyncio.Future[T] = loop.create_future()

    def begin(self) -> bool:
        """Tell whether somebody still wants it."""
        return not self.future.cancelled()

    def tell(self) -> None:
        """Tell the caller how it ended; on its loop."""
        if self.future.done():  # given up meanwhile
            if self.undo is not None and self.error is None:
                self.undo(cast(T, self.value))
        elif self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(cast(T, self.value))


class Lane:
    """Threads that serve one queue of submissions, in batches of what has come together.

    Args:
        batch: About how many submissions are served at once, twice as many at most; 1 shares them out among the
            threads.
        serve: Runs a batch, and leaves in each submission how it ended.
        keeping: What a thread does around its life.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        batch: int,
        serve: "Callable[[Sequence[_Blocking[Any] | _Awaited[Any]]], None]",
        keeping: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._queue: queue.SimpleQueue[Sequence[_Blocking[Any] | _Awaited[Any]] | None] = queue.SimpleQueue()
        self._batch, self._serve, self._keeping = batch, serve, keeping
        self._gathered: dict[asyncio.AbstractEventLoop, list[_Awaited[Any]]] = {}
        self._lock, self._open = threading.Lock(), True
        # Daemons: a program that ends without close() must not hang. What was acknowledged is committed.
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, unit: Unit[T], *, snapshot: bool) -> "Future[T]":
        """Take a unit of a caller that blocks.

        Raises:
            DatabaseUnavailableError: The lane is closed.
        """
        submission = _Blocking(unit, snapshot)
        if not self._put([submission]):
            raise closed_error()
        return submission.future

    def submit_soon(
        self, unit: Unit[T], *, snapshot: bool, undo: Callable[[T], None] | None = None
    ) -> "asyncio.Future[T]":
        """Take a unit of a coroutine; those of one turn of its loop are handed over together.

        Args:
            undo: Called on the loop with the value of a unit whose caller gave up when it had begun.

        Raises:
            DatabaseUnavailableError: The lane is closed.
        """
        if not self._open:
            raise closed_error()
        loop = asyncio.get_running_loop()
        submission = _Awaited(unit, snapshot, loop, undo)
        gathered = self._gathered.get(loop)
        if gathered is None:
            self._gathered[loop] = [submission]
            loop.call_soon(self._hand_over, loop)
        else:
            gathered.append(submission)
        return submission.future

    def close(self) -> None:
        """Serve what was submitted, and end the threads."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        gathered = self._gathered.pop(loop)
        if not self._put(gathered):
            for submission in gathered:
                submission.error = closed_error()
                submission.tell()

    def _put(self, submissions: "Sequence[_Blocking[Any] | _Awaited[Any]]") -> bool:
        with self._lock:
            if self._open:
                for start in range(0, len(submissions), self._batch):
                    self._queue.put(submissions[start : start + self._batch])
            return self._open

    def _run(self) -> None:
        with self._keeping():
            ends = False
            while not ends and (submissions := self._queue.get()) is not None:
                batch = list(submissions)
                while len(batch) < self._batch:
                    try:
                        following = self._queue.get_nowait()
                    except queue.Empty:
                        break
                    if following is None:
                        ends = True
                        break
                    batch += following
                # A caller that gave up before its unit began: the unit does not run at all.
                batch = [submission for submission in batch if submission.begin()]
                if batch:
                    self._serve(batch)
                    # fail point: before-callers-hear
                    _tell(batch)


def _tell(batch: "Sequence[_Blocking[Any] | _Awaited[Any]]") -> None:
    """Tell the callers of a batch, with one hop to each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Awaited[Any]]] = {}
    for submission in batch:
        if isinstance(submission, _Awaited):
            by_loop.setdefault(submission.loop, []).append(submission)
        else:
            submission.tell()
    for loop, awaited in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody is left to hear
            loop.call_soon_threadsafe(_tell_here, awaited)


def _tell_here(awaited: "Sequence[_Awaited[Any]]") -> None:
    for submission in awaited:
        submission.tell()


def closed_error() -> DatabaseUnavailableError:
    """Make the error of a call on a store that is closed."""
    return DatabaseUnavailableError("The store is closed; open it again with TaskStore.open().")
