"""What the fixtures of ``taskstore.testing.fixtures`` give, and who asks in the contract's tests."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from taskstore import AuthContext, StoreOptions, Task, TaskStore

ALICE, BOB = AuthContext(subject="alice"), AuthContext(subject="bob")

OpenStore = Callable[..., Awaitable[TaskStore]]
Crash = Callable[[TaskStore], None]
Finish = Callable[..., Awaitable[Task]]


class StoreOpener(Protocol):
    """How a store is opened: the fixture ``store_opener``."""

    def __call__(self, *, options: StoreOptions) -> AbstractAsyncContextManager[TaskStore]:
        """Open a store; every call within one test opens one on the same database."""
