"""The clock that stands in for the system's in every other test."""

from datetime import timedelta

import pytest

from taskstore.testing import ManualClock


def test_time_stands_still_until_it_is_advanced() -> None:
    """Tests compare instants exactly, so nothing may pass while they run."""
    clock = ManualClock(start_ms=1_000)

    before = (clock.now(), clock.monotonic())
    clock.advance(timedelta(seconds=2, microseconds=500))

    assert before == (1_000, 0.0)
    assert (clock.now(), clock.monotonic()) == (3_000, 2.0005)


def test_a_step_of_the_wall_clock_leaves_monotonic_time_alone() -> None:
    """That is what NTP does to a real machine, and spans must survive it."""
    clock = ManualClock(start_ms=5_000)
    clock.advance(timedelta(seconds=1))

    clock.set_wall(1_000)

    assert (clock.now(), clock.monotonic()) == (1_000, 1.0)


def test_time_does_not_pass_backwards() -> None:
    """A negative span in a test is a mistake in the test."""
    clock = ManualClock()

    with pytest.raises(ValueError, match="set_wall"):
        clock.advance(timedelta(seconds=-1))
