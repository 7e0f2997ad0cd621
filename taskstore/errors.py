"""The errors a caller can meet; one class per thing the caller would do differently.

::

    TaskStoreError
    ├── TaskNotFoundError          unknown, expired, or somebody else's: the three look the same
    │   └── TaskExpiredError       with tombstones on, for the owner of a bound task: it was there, and expired
    ├── IllegalTransitionError     the status a task has does not allow the one asked for
    │   └── TaskFinishedError      ... because the task is finished; carries the winning Task
    ├── LeaseLostError             this handle may not write the task any more
    ├── NotFinishedError           the task has no outcome yet
    ├── IdempotencyConflictError   the idempotency key was used for another request
    ├── TaskExistsError            a task to be imported has the id of another one
    ├── LimitExceededError         the auth context has, or asks, too much
    ├── InvalidCursorError         a page cursor that this store did not issue for this listing
    ├── PayloadError               a value that cannot be stored; names the path of the value
    ├── CipherError                a payload cannot be opened with the keys at hand
    ├── BindingError               the database is bound under another secret
    ├── SchemaError                the database's schema is missing, behind, or ahead of this code
    └── DatabaseUnavailableError   the database cannot be opened or reached
"""

from taskstore.binding import shorten
from taskstore.task import Task, TaskStatus


class TaskStoreError(Exception):
    """Any refusal or failure of the store."""


class TaskNotFoundError(TaskStoreError):
    """No such task for this auth context: unknown, expired or somebody else's."""

    def __init__(self, task_id: str) -> None:
        super().__init__(f"Task {shorten(task_id)} not found.")
        self.task_id = task_id


class TaskExpiredError(TaskNotFoundError):
    """The task was this auth context's own, and has expired; only with ``StoreOptions.tombstones``."""


class IllegalTransitionError(TaskStoreError):
    """The status a task has does not allow the status asked for."""

    def __init__(self, task: Task, requested: TaskStatus) -> None:
        super().__init__(f"Task {shorten(task.task_id)} is {task.status}; it cannot become {requested}.")
        self.task, self.requested = task, requested


class TaskFinishedError(IllegalTransitionError):
    """The task is finished; ``task`` is the record that stands."""


class LeaseLostError(TaskStoreError):
    """The handle's process was declared dead, or the task was taken over; nothing the handle says is stored."""

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f"Task {shorten(task_id)} is no longer held by this handle; "
            "stop the work, its outcome was decided elsewhere."
        )
        self.task_id = task_id


class NotFinishedError(TaskStoreError):
    """The task is still live, so it has no outcome yet and cannot be deleted."""

    def __init__(self, task: Task) -> None:
        super().__init__(
            f"Task {shorten(task.task_id)} is {task.status}; wait for it with wait_for_task(), or cancel it first."
        )
        self.task = task


class IdempotencyConflictError(TaskStoreError):
    """The auth context used this idempotency key for another request, whose task is still kept."""

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f"The idempotency key belongs to task {shorten(task_id)}, created for another request; use a new key."
        )
        self.task_id = task_id


class TaskExistsError(TaskStoreError):
    """A task to be imported has the id of another one: somebody else's, or one that began or ended otherwise."""

    def __init__(self, task_id: str) -> None:
        super().__init__(f"There is another task with the id {shorten(task_id)}; it stays as it is.")
        self.task_id = task_id


class LimitExceededError(TaskStoreError):
    """An auth context is at one of its limits; nothing was written, and nothing of it was evicted.

    Attributes:
        limit: Name of the setting in ``Limits``.
        allowed: Its value.
    """

    def __init__(self, limit: str, allowed: int, remedy: str) -> None:
        super().__init__(f"This auth context is at its limit {limit}={allowed}; {remedy}.")
        self.limit, self.allowed = limit, allowed


class InvalidCursorError(TaskStoreError):
    """The cursor was not issued by this store for this auth context and filter."""

    def __init__(self) -> None:
        super().__init__("Invalid cursor; start again from the first page, with the filter unchanged between pages.")


class PayloadError(TaskStoreError):
    """A value cannot be stored; ``path`` leads to it, such as ``$.rows[3].price``."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"The value at {path} cannot be stored: {problem}.")
        self.path = path


class BindingError(TaskStoreError):
    """The database was first opened with another binding secret; under this one nobody would find a task."""

    def __init__(self, database: str, *, has_secret: bool) -> None:
        remedy = (
            "the binding_secret it was opened with before, or list that one (None, if it had none) in "
            "old_binding_secrets"
            if has_secret
            else "its binding_secret"
        )
        super().__init__(f"The tasks in {database} are bound under another secret; open it with {remedy}.")


class CipherError(TaskStoreError):
    """A sealed payload cannot be opened; the row is intact, and opens with the key that sealed it."""

    def __init__(self, column: str, task_id: str, problem: str) -> None:
        super().__init__(
            f"The {column} of task {shorten(task_id)} cannot be opened: {problem}. "
            "Give the store every key that was in use, the newest first."
        )
        self.column, self.task_id = column, task_id


class SchemaError(TaskStoreError):
    """The database's schema is missing, behind this code, or ahead of what this code can run."""


class DatabaseUnavailableError(TaskStoreError):
    """The database cannot be opened or reached; the cause is chained."""
