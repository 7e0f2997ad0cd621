"""The names and signatures that users build on. More may be added; what stands here must not change."""

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

import taskstore
from taskstore import OperatorView, StoreOptions, TaskHandle, TaskStore

NAMES = {
    "DEFAULT",
    "AuthContext",
    "BindingError",
    "Clock",
    "DatabaseUnavailableError",
    "EventKind",
    "FailingJob",
    "Health",
    "IllegalTransitionError",
    "InvalidCursorError",
    "LeaseLostError",
    "NotFinishedError",
    "OnCrash",
    "OperatorView",
    "Outcome",
    "OwnerKind",
    "PayloadError",
    "ReasonCode",
    "RecoveryReport",
    "SchemaError",
    "StoreOptions",
    "SweepReport",
    "Task",
    "TaskDetails",
    "TaskEvent",
    "TaskFinishedError",
    "TaskHandle",
    "TaskNotFoundError",
    "TaskPage",
    "TaskStatus",
    "TaskStore",
    "TaskStoreError",
}

# Per method what can be passed by position, and by keyword only; a default is written as Python writes it.
SIGNATURES: dict[Callable[..., Any], tuple[str, str]] = {
    TaskStore.open: ("url", "options=None"),
    TaskStore.create_task: (
        "",
        "auth ttl=DEFAULT poll_interval=None method='tools/call' name=None request=None session_id=None "
        "idempotency_key=None max_attempts=None parent_task_id=None",
    ),
    TaskStore.get_task: ("task_id", "auth"),
    TaskStore.get_details: ("task_id", "auth"),
    TaskStore.get_outcome: ("task_id", "auth"),
    TaskStore.wait_for_task: ("task_id", "auth since_version=None timeout=None"),
    TaskStore.list_tasks: ("", "auth status=None cursor=None limit=100 session_id=None"),
    TaskStore.cancel_task: ("task_id", "auth"),
    TaskStore.answer_inputs: ("task_id responses", "auth"),
    TaskStore.list_events: ("task_id", "auth after=0"),
    TaskStore.delete_task: ("task_id", "auth"),
    TaskStore.handle: ("task", ""),
    TaskStore.recover: ("", ""),
    TaskStore.sweep: ("", ""),
    TaskHandle.progress: ("value total=None message=None", ""),
    TaskHandle.ask: ("requests", ""),
    TaskHandle.park: ("requests", "state=None"),
    TaskHandle.complete: ("result", "is_error=False"),
    TaskHandle.fail: ("message", "code=-32603 data=None"),
    TaskHandle.wait_cancelled: ("", ""),
    OperatorView.get_task: ("task_id", ""),
    OperatorView.get_details: ("task_id", ""),
    OperatorView.list_tasks: ("", "status=None name=None server=None session_id=None cursor=None limit=100"),
    OperatorView.list_events: ("task_id", "after=0"),
    OperatorView.cancel_task: ("task_id", ""),
    OperatorView.handle: ("task_id", ""),
    OperatorView.health: ("", ""),
}

REQUESTOR = [
    TaskStore.create_task,
    TaskStore.get_task,
    TaskStore.get_details,
    TaskStore.get_outcome,
    TaskStore.wait_for_task,
    TaskStore.list_tasks,
    TaskStore.cancel_task,
    TaskStore.answer_inputs,
    TaskStore.list_events,
    TaskStore.delete_task,
]

FIELDS = {
    taskstore.Task: "task_id status status_message progress progress_total is_error created_at last_updated_at "
    "finished_at ttl expires_at poll_interval method name server attempt crashes version owner_kind cancel_requested "
    "existing",
    taskstore.TaskDetails: "task outcome input_requests",
    taskstore.Outcome: "result error is_error",
    taskstore.TaskPage: "tasks next_cursor",
    taskstore.RecoveryReport: "recovered",
    taskstore.SweepReport: "deleted",
}

OPTIONS = (
    "durability lease heartbeat default_ttl max_ttl min_retention binding_secret table_prefix schema migrate upkeep "
    "server clock"
)

ERRORS = {
    taskstore.TaskNotFoundError: taskstore.TaskStoreError,
    taskstore.IllegalTransitionError: taskstore.TaskStoreError,
    taskstore.TaskFinishedError: taskstore.IllegalTransitionError,
    taskstore.LeaseLostError: taskstore.TaskStoreError,
    taskstore.NotFinishedError: taskstore.TaskStoreError,
    taskstore.InvalidCursorError: taskstore.TaskStoreError,
    taskstore.PayloadError: taskstore.TaskStoreError,
    taskstore.BindingError: taskstore.TaskStoreError,
    taskstore.SchemaError: taskstore.TaskStoreError,
    taskstore.DatabaseUnavailableError: taskstore.TaskStoreError,
    taskstore.TaskStoreError: Exception,
}


def named(value: object) -> str:
    """Return the part of a qualified name that tells methods of different classes apart."""
    return getattr(value, "__qualname__", str(value))


def public_methods(owner: type) -> dict[str, Any]:
    """Map the names of what a class of ours offers by itself, methods and properties, to it."""
    return {
        name: member
        for name, member in vars(owner).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod))
    }


def written(parameter: inspect.Parameter) -> str:
    """Write a parameter as SIGNATURES does."""
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    default = "DEFAULT" if parameter.default is taskstore.DEFAULT else repr(parameter.default)
    return f"{parameter.name}={default}"


def test_the_public_names_are_there() -> None:
    """Programs import them by name; taking one away breaks them at their start."""
    assert set(taskstore.__all__) >= NAMES
    assert all(hasattr(taskstore, name) for name in taskstore.__all__)
    assert len(taskstore.__all__) == len(set(taskstore.__all__))


def test_everything_public_is_named_as_public() -> None:
    """What is importable but not listed would be used all the same, and then could not be changed."""
    unlisted = {
        name
        for name, value in vars(taskstore).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in taskstore.__all__
    }

    assert unlisted == set()


@pytest.mark.parametrize("method", SIGNATURES, ids=named)
def test_a_method_takes_what_it_always_took(method: Callable[..., Any]) -> None:
    """A parameter that is added must have a default and be given by name, so that no call of today changes meaning."""
    positional: list[str] = []
    keyword: list[str] = []
    for parameter in inspect.signature(method).parameters.values():
        if parameter.name not in ("self", "cls"):
            by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            (keyword if by_name else positional).append(written(parameter))

    expected_positional, expected_keyword = (part.split() for part in SIGNATURES[method])
    added = set(keyword) - set(expected_keyword)
    assert positional == expected_positional
    assert set(expected_keyword) <= set(keyword)
    assert {name for name in added if "=" not in name} == set()


@pytest.mark.parametrize("method", REQUESTOR, ids=named)
def test_who_asks_must_always_be_said(method: Callable[..., Any]) -> None:
    """A default would be "anybody" for whoever forgets it. Seen elsewhere: a scope was accepted, and ignored."""
    auth = inspect.signature(method).parameters["auth"]

    assert auth.kind is inspect.Parameter.KEYWORD_ONLY
    assert auth.default is inspect.Parameter.empty


@pytest.mark.parametrize("owner", [TaskHandle, OperatorView], ids=named)
def test_what_has_no_requestor_takes_no_auth(owner: type) -> None:
    """A handle carries its fence, and the operator sees everything; an auth there would only look like a check."""
    takers = [
        name
        for name, member in public_methods(owner).items()
        if callable(member) and "auth" in inspect.signature(member).parameters
    ]

    assert takers == []


def test_every_method_of_the_store_that_may_touch_a_task_asks_who_asks() -> None:
    """A method that is added later falls under the same rule as those of today."""
    without = {
        name
        for name, member in public_methods(TaskStore).items()
        if callable(member) and "auth" not in inspect.signature(member).parameters
    }

    assert without <= {"open", "handle", "claim_task", "recover", "sweep"}


@pytest.mark.parametrize("owner", [TaskStore, TaskHandle, OperatorView, StoreOptions], ids=named)
def test_every_public_method_says_what_it_does(owner: type) -> None:
    """The docstrings are the reference."""
    silent = [name for name, member in public_methods(owner).items() if not inspect.getdoc(member)]

    assert inspect.getdoc(owner)
    assert silent == []


@pytest.mark.parametrize("name", [name for name in taskstore.__all__ if name != "DEFAULT"])
def test_every_public_name_says_what_it_is(name: str) -> None:
    """In an editor, that is all that a user sees of it."""
    assert inspect.getdoc(getattr(taskstore, name))


@pytest.mark.parametrize("record", FIELDS, ids=named)
def test_a_record_has_the_fields_it_always_had(record: Any) -> None:
    """Programs read them by name."""
    assert set(FIELDS[record].split()) <= set(record.model_fields)


@pytest.mark.parametrize("record", FIELDS, ids=named)
def test_a_record_cannot_be_changed(record: Any) -> None:
    """A Task is what the database said at one moment; changing it would change nothing there."""
    assert record.model_config["frozen"]


def test_the_options_are_there_and_all_have_defaults() -> None:
    """``TaskStore.open(url)`` alone must do; an option is given by name."""
    parameters = inspect.signature(StoreOptions).parameters

    assert set(OPTIONS.split()) <= set(parameters)
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert StoreOptions() is not None


@pytest.mark.parametrize("error", ERRORS, ids=named)
def test_an_error_is_a_kind_of_what_it_always_was(error: type[Exception]) -> None:
    """Programs catch the wider class."""
    assert issubclass(error, ERRORS[error])


def test_the_version_is_that_of_the_installed_package() -> None:
    """Bug reports quote the one, and package managers the other."""
    assert taskstore.__version__ == version("taskstore")
