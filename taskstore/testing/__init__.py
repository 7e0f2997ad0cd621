"""For tests of servers that embed the store, and of stores of one's own.

A clock moved by hand, a process that dies on request, a PostgreSQL server of one's own; the contract that every store
keeps, as tests to inherit; and in ``taskstore.testing.fixtures`` pytest fixtures. pytest is needed for the last two.
"""

from typing import TYPE_CHECKING

from taskstore.testing.clock import ManualClock
from taskstore.testing.crashing import crash
from taskstore.testing.postgres import PostgresServer, PostgresUnavailableError
from taskstore.testing.protocols import StoreOpener

if TYPE_CHECKING:
    from taskstore.testing.contract import StoreContract

__all__ = ["ManualClock", "PostgresServer", "PostgresUnavailableError", "StoreContract", "StoreOpener", "crash"]


def __getattr__(name: str) -> object:
    if name == "StoreContract":  # deferred: it imports pytest, which who only moves a clock may not have
        from taskstore.testing.contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
