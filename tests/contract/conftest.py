"""What the tests of this folder share beside the fixtures: those that look behind the public API."""

import os
from datetime import timedelta

from hypothesis import settings

from taskstore.testing.protocols import ALICE, BOB, Crash, OpenStore

__all__ = ["ALICE", "BOB", "MINUTE", "Crash", "OpenStore"]

MINUTE = timedelta(minutes=1)

# How many times as much the tests that draw their cases shall draw; then at random, under --hypothesis-seed if given.
THOROUGH = int(os.environ.get("TASKSTORE_TEST_THOROUGH", "1"))


def drawn(examples: int) -> settings:
    """Draw so many examples: the same ones in every run, unless the environment asks for more."""
    return settings(
        max_examples=examples * THOROUGH, derandomize=THOROUGH == 1, database=None, deadline=None, print_blob=True
    )
