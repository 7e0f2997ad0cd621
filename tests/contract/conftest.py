"""What the tests of this folder share beside the fixtures: those that look behind the public API."""

from datetime import timedelta

from taskstore.testing.protocols import ALICE, BOB, Crash, OpenStore

__all__ = ["ALICE", "BOB", "MINUTE", "Crash", "OpenStore"]

MINUTE = timedelta(minutes=1)
