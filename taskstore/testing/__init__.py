"""For tests of servers that embed the store: a clock moved by hand, and a PostgreSQL server of one's own."""

from taskstore.testing.clock import ManualClock
from taskstore.testing.postgres import PostgresServer, PostgresUnavailableError

__all__ = ["ManualClock", "PostgresServer", "PostgresUnavailableError"]
