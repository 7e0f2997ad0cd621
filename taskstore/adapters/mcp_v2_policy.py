"""How each tool of a server on the SDK 2.x runs as a task."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from mcp.server.mcpserver import MCPServer

from taskstore.store import Default
from taskstore.task import OnCrash

TaskMode = Literal["optional", "required"]


@dataclass(frozen=True, slots=True)
class TaskPolicy:
    """How a tool runs as a task.

    Raises:
        ValueError: A field is out of its range.
    """

    mode: TaskMode
    ttl: timedelta | Default | None
    poll_interval: timedelta | None
    on_crash: OnCrash
    max_attempts: int | None
    input_first: bool
    needs_token: bool

    def __post_init__(self) -> None:
        if self.mode not in ("optional", "required"):
            raise ValueError(
                f'mode must be "optional" or "required", not {self.mode!r}; write @tasks.task() with brackets.'
            )
        if self.on_crash is OnCrash.EXTERNAL:
            raise ValueError("A tool runs here, so its task is not external; create that with TaskStore.create_task().")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}.")
        check_span("ttl", self.ttl)
        check_span("poll_interval", self.poll_interval)


class TaskPolicies:
    """The policies of a server's tools; bound to their functions, so that no rename loses them."""

    def __init__(self) -> None:
        # By id(); the function is held too, so that no id comes again.
        self._by_function: dict[int, tuple[Callable[..., object], TaskPolicy]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_function)

    def bind(self, tool: Callable[..., object], policy: TaskPolicy) -> None:
        """Let a policy count for a tool's function."""
        self._by_function[id(tool)] = tool, policy

    def find(self, server: MCPServer[Any], tool_name: str) -> TaskPolicy | None:
        """Find the policy of a registered tool's function, through whatever wraps the decorated one."""
        # Private, for want of a public way from a tool's name to its function.
        tool = server._tool_manager.get_tool(tool_name)
        function: object = None if tool is None else tool.fn
        while function is not None:
            if (bound := self._by_function.get(id(function))) is not None:
                return bound[1]
            if isinstance(function, functools.partial):
                function = function.func
            else:
                function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
        return None

    def names(self, server: MCPServer[Any]) -> list[str]:
        """Name the registered tools that run as tasks."""
        return [tool.name for tool in server._tool_manager.list_tools() if self.find(server, tool.name) is not None]


def check_span(name: str, span: timedelta | Default | None) -> None:
    """Refuse a duration that is not positive.

    Raises:
        ValueError: It is zero or negative.
    """
    if isinstance(span, timedelta) and span <= timedelta(0):
        raise ValueError(f"{name} must be longer than nothing, not {span}.")
