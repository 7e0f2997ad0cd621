"""The only module that asks the system for the time."""

import time


class Clock:
    """The system's clocks; tests put a ``ManualClock`` in its place."""

    def now(self) -> int:
        """Return the present instant, milliseconds UTC since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds that only move forward, for measuring spans inside this process."""
        return time.monotonic()


# For deadlines of input and output, which pass whatever a test does to the store's own clock.
SYSTEM = Clock()
