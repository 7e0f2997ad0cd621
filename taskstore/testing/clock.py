"""A clock that tests move by hand."""

import threading
from datetime import timedelta

from taskstore.clock import Clock


class ManualClock(Clock):
    """A clock that stands still until a test moves it; safe to share between threads."""

    def __init__(self, start_ms: int = 1_767_225_600_000) -> None:
        self._lock = threading.Lock()
        self._wall_us = start_ms * 1000
        self._elapsed_us = 0

    def now(self) -> int:
        """Return the instant the test has set, milliseconds UTC since 1970."""
        with self._lock:
            return self._wall_us // 1000

    def monotonic(self) -> float:
        """Return the seconds this clock was advanced by since it was made."""
        with self._lock:
            return self._elapsed_us / 1_000_000

    def advance(self, span: timedelta) -> None:
        """Let time pass, on the wall and in monotonic seconds alike.

        Raises:
            ValueError: ``span`` is negative; only the wall clock can step back, see ``set_wall``.
        """
        if span < timedelta(0):
            raise ValueError(f"Time cannot pass by {span}; step the wall clock back with set_wall().")
        with self._lock:
            self._wall_us += span // timedelta(microseconds=1)
            self._elapsed_us += span // timedelta(microseconds=1)

    def set_wall(self, now_ms: int) -> None:
        """Step the wall clock, as an administrator or NTP would; monotonic seconds stay as they are."""
        with self._lock:
            self._wall_us = now_ms * 1000
