"""The contract of a store, kept by TaskStore on SQLite and on PostgreSQL."""

from taskstore.testing import StoreContract


class TestTaskStore(StoreContract):
    """What a user's own store inherits, it must keep itself."""
