"""What the commands print: tables for people, JSON for programs. Whatever a task says is shown, never obeyed."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from taskstore.binding import shorten
from taskstore.task import Outcome, Task, TaskDetails, TaskEvent, TaskStatus

_STYLES = {
    TaskStatus.WORKING: "cyan",
    TaskStatus.INPUT_REQUIRED: "yellow",
    TaskStatus.COMPLETED: "green",
    TaskStatus.FAILED: "red",
    TaskStatus.CANCELLED: "dim",
}
_WIDTH_OF_A_PIPE = 200
_LONGEST_JSON, _LONGEST_LINE = 40, 400
_MILLISECOND = timedelta(milliseconds=1)


def console(*, stderr: bool = False) -> Console:
    """Make a console; in a pipe or a file its lines are wide, so that no table cell is folded at 80 columns."""
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDTH_OF_A_PIPE
    return made


def print_json(value: Mapping[str, JsonValue]) -> None:
    """Print one JSON object on standard output, in ASCII: no encoding of a terminal or a pipe can spoil it."""
    typer.echo(json.dumps(value, indent=2))


def progress_bar(what: str, out: Console) -> Progress:
    """Make a progress bar for upkeep, which goes away when it is done."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def plain(text: str) -> str:
    """Replace whatever a terminal would obey instead of showing it: a tool's message must not move the cursor."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def error_text(message: str) -> str:
    """Make an error's message printable; its lines stay, and it begins with a capital letter."""
    return "\n".join(plain(line.expandtabs(4)) for line in (message[:1].upper() + message[1:]).splitlines())


# --- for people


def task_table(tasks: Iterable[Task], now: datetime) -> Table:
    """Lay out a listing, one task a line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("TASK", no_wrap=True, min_width=19)
    for heading in ("STATUS", "TOOL", "PROGRESS", "AGE"):
        table.add_column(heading, no_wrap=True)
    table.add_column("MESSAGE", no_wrap=True, overflow="ellipsis", ratio=1)
    for task in tasks:
        table.add_row(
            shorten(task.task_id),
            status_text(task.status),
            Text(plain(task.name or task.method)),
            progress_of(task),
            age(now - task.created_at),
            Text(plain(task.status_message or "")),
        )
    return table


def task_sheet(task: Task) -> Table:
    """Lay out everything about one task, one property a line."""
    facts: list[tuple[str, str | Text]] = [
        ("task", task.task_id),
        ("status", status_text(task.status)),
        ("message", plain(task.status_message or "")),
        ("progress", progress_of(task)),
        ("tool", plain(task.name or "")),
        ("method", plain(task.method)),
        ("server", plain(task.server)),
        ("created", _instant(task.created_at)),
        ("last updated", _instant(task.last_updated_at)),
        ("finished", "" if task.finished_at is None else _instant(task.finished_at)),
        ("expires", _expiry(task)),
        ("attempt", str(task.attempt) + (f", after {count(task.crashes, 'crash', 'crashes')}" if task.crashes else "")),
        ("held by", "" if task.is_finished else task.owner_kind.value),
        ("version", str(task.version)),
    ]
    return sheet([(name, value) for name, value in facts if value])


def sheet(facts: Sequence[tuple[str, str | Text]]) -> Table:
    """Lay out names and values in two columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    return table


def event_table(events: Iterable[TaskEvent]) -> Table:
    """Lay out a task's history, oldest first."""
    table = Table(
        "VERSION", "AT", "EVENT", "STATUS", "ATTEMPT", "REASON", box=None, pad_edge=False, header_style="bold"
    )
    for event in events:
        table.add_row(
            str(event.version),
            _instant(event.at),
            event.kind.value,
            status_text(event.to_status),
            str(event.attempt),
            event.reason.value if event.reason else "",
        )
    return table


def outcome_lines(outcome: Outcome) -> list[str]:
    """Write an outcome as indented JSON, cut where it gets long or wide."""
    if outcome.error is not None:
        return _json_lines({"error": outcome.error})
    if outcome.result is not None:
        return _json_lines({"result": outcome.result})
    return ["neither result nor error"]


def question_lines(key: str, request: JsonValue) -> list[str]:
    """Write an open question as indented JSON, cut where it gets long or wide."""
    return _json_lines({"open question": {key: request}})


def _json_lines(value: Mapping[str, JsonValue]) -> list[str]:
    lines = json.dumps(value, indent=2, ensure_ascii=False).splitlines()
    if len(lines) > _LONGEST_JSON:
        left_out = len(lines) - _LONGEST_JSON
        lines = [*lines[:_LONGEST_JSON], f"... {left_out} more lines; --json prints them all"]
    return [plain(line) if len(line) <= _LONGEST_LINE else f"{plain(line[:_LONGEST_LINE])}..." for line in lines]


def status_text(status: TaskStatus) -> Text:
    """Write a status in its colour."""
    return Text(status.value, style=_STYLES[status])


def progress_of(task: Task) -> str:
    """Write how far a task is, such as ``3/10``."""
    if task.progress is None:
        return ""
    return f"{task.progress:g}" if task.progress_total is None else f"{task.progress:g}/{task.progress_total:g}"


def age(span: timedelta) -> str:
    """Write a duration in its largest unit, such as ``3 min``; one below zero, by a clock that differs, as 0 s."""
    seconds = max(int(span.total_seconds()), 0)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def count(number: int, one: str, many: str) -> str:
    """Write a number of things, such as ``1 task`` or ``2 tasks``."""
    return f"{number:,} {one if number == 1 else many}"


def _instant(at: datetime) -> str:
    return at.isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00") + " UTC"


def _expiry(task: Task) -> str:
    if not task.is_finished:
        return "not while it is live"
    return "never" if task.expires_at is None else _instant(task.expires_at)


# --- for programs


def task_json(task: Task) -> dict[str, JsonValue]:
    """Turn a task into JSON: instants in ISO 8601 UTC, durations in milliseconds."""
    made: dict[str, JsonValue] = task.model_dump(mode="json", exclude={"ttl", "poll_interval", "existing"})
    made["ttl_ms"] = _milliseconds(task.ttl)
    made["poll_interval_ms"] = _milliseconds(task.poll_interval)
    return made


def details_json(details: TaskDetails, events: Iterable[TaskEvent]) -> dict[str, JsonValue]:
    """Turn all that is known of a task into JSON."""
    return {
        "task": task_json(details.task),
        "outcome": None if details.outcome is None else details.outcome.model_dump(mode="json"),
        "input_requests": dict(details.input_requests),
        "events": [event.model_dump(mode="json", exclude={"task_id"}) for event in events],
    }


def _milliseconds(span: timedelta | None) -> int | None:
    return None if span is None else span // _MILLISECOND
