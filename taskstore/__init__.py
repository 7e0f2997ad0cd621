"""A durable task store with crash recovery for MCP servers."""

from taskstore.binding import AuthContext
from taskstore.clock import Clock
from taskstore.errors import (
    BindingError,
    CipherError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    IllegalTransitionError,
    InvalidCursorError,
    LeaseLostError,
    LimitExceededError,
    NotFinishedError,
    PayloadError,
    SchemaError,
    TaskExistsError,
    TaskExpiredError,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStoreError,
)
from taskstore.handle import TaskHandle
from taskstore.operations import Limits
from taskstore.options import StoreOptions
from taskstore.store import DEFAULT, OperatorView, TaskStore
from taskstore.sync import SyncOperatorView, SyncTaskHandle, SyncTaskStore
from taskstore.task import (
    Claim,
    EventKind,
    FailingJob,
    Health,
    OnCrash,
    Outcome,
    OwnerKind,
    ReasonCode,
    RecoveryReport,
    RotationReport,
    SweepReport,
    Task,
    TaskDetails,
    TaskEvent,
    TaskPage,
    TaskStatus,
)

__version__ = "0.1.0"

__all__ = [
    "DEFAULT",
    "AuthContext",
    "BindingError",
    "CipherError",
    "Claim",
    "Clock",
    "DatabaseUnavailableError",
    "EventKind",
    "FailingJob",
    "Health",
    "IdempotencyConflictError",
    "IllegalTransitionError",
    "InvalidCursorError",
    "LeaseLostError",
    "LimitExceededError",
    "Limits",
    "NotFinishedError",
    "OnCrash",
    "OperatorView",
    "Outcome",
    "OwnerKind",
    "PayloadError",
    "ReasonCode",
    "RecoveryReport",
    "RotationReport",
    "SchemaError",
    "StoreOptions",
    "SweepReport",
    "SyncOperatorView",
    "SyncTaskHandle",
    "SyncTaskStore",
    "Task",
    "TaskDetails",
    "TaskEvent",
    "TaskExistsError",
    "TaskExpiredError",
    "TaskFinishedError",
    "TaskHandle",
    "TaskNotFoundError",
    "TaskPage",
    "TaskStatus",
    "TaskStore",
    "TaskStoreError",
]
