"""The client of the official Python SDK 1.x: ``python client_1x.py TARGET`` prints what it saw, as JSON.

Runs in an environment of its own, without this package. TARGET is JSON: {"url", "token"} or {"command", "args"}.
"""

import json
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp import ClientSession, StdioServerParameters, stdio_client, types
from mcp.client.streamable_http import streamablehttp_client
from mcp.shared.exceptions import McpError

warnings.simplefilter("ignore", DeprecationWarning)

RELATED_TASK = "io.modelcontextprotocol/related-task"


@asynccontextmanager
async def connect(target: dict[str, Any]) -> AsyncIterator[Any]:
    if "url" in target:
        headers = {"Authorization": f"Bearer {target['token']}"} if target.get("token") else {}
        async with streamablehttp_client(target["url"], headers=headers) as (read, write, _):
            yield read, write
    else:
        async with stdio_client(StdioServerParameters(command=target["command"], args=target["args"])) as streams:
            yield streams


async def code_of(request: Awaitable[object]) -> int:
    try:
        await request
    except McpError as error:
        return error.error.code
    return 0


class Story:
    """What a client does, and what it sees of it."""

    def __init__(self, read: Any, write: Any) -> None:
        self.seen: dict[str, Any] = {}
        self.asked_for: list[str] = []
        self.notified: list[Any] = []
        self.news = anyio.Event()
        self.session = ClientSession(
            read, write, message_handler=self.listen, elicitation_callback=self.elicit, sampling_callback=self.sample
        )
        self.tasks = self.session.experimental

    async def listen(self, message: object) -> None:
        if isinstance(message, types.ServerNotification):
            self.notified.append(message.root)
            self.news.set()

    async def elicit(self, context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.asked_for.append(context.meta.model_dump()[RELATED_TASK]["taskId"])
        return types.ElicitResult(action="accept", content={"confirm": True})

    async def sample(self, context: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        content = types.TextContent(type="text", text="Short.")
        return types.CreateMessageResult(role="assistant", model="small", content=content)

    async def until(self, heard: Callable[[Any], bool]) -> None:
        with anyio.fail_after(60):
            while not any(map(heard, self.notified)):
                self.news = anyio.Event()
                await self.news.wait()

    async def start(self, tool: str, arguments: dict[str, Any] | None = None, **options: Any) -> types.Task:
        return (await self.tasks.call_tool_as_task(tool, arguments, **options)).task

    async def text_of(self, task: types.Task) -> str:
        result = await self.tasks.get_task_result(task.taskId, types.CallToolResult)
        assert (result.meta or {})[RELATED_TASK]["taskId"] == task.taskId
        return str(result.content[0].text)  # type: ignore[union-attr]

    async def meet(self) -> None:
        """Read what the server declares, and wait until it is heard on the session's own stream."""
        initialized = await self.session.initialize()
        assert initialized.capabilities.tasks is not None
        self.seen["declared"] = sorted(initialized.capabilities.tasks.model_dump(exclude_none=True))
        listed = (await self.session.list_tools()).tools
        self.seen["support"] = {tool.name: tool.execution.taskSupport for tool in listed if tool.execution}
        with anyio.fail_after(60):
            while not self.notified:
                await self.text_of(await self.start("add", {"a": 1, "b": 2}))

    async def run_tasks(self) -> None:
        """Follow tasks to each way they can end."""
        added = await self.start("add", {"a": 1, "b": 2}, ttl=60_000)
        polled = [status.status async for status in self.tasks.poll_task(added.taskId)]
        self.seen["added"] = [added.status, added.ttl, polled[-1], await self.text_of(added)]
        greeted = await self.session.call_tool("greet", {"name": "Ada"})
        self.seen["greeted"] = greeted.content[0].text  # type: ignore[union-attr]
        refused = await self.start("refuse")
        try:
            await self.text_of(refused)
        except McpError as error:
            self.seen["replayed"] = [error.error.code, error.error.message, error.error.data]
        broken = await self.start("break_down")
        result = await self.tasks.get_task_result(broken.taskId, types.CallToolResult)
        self.seen["broken"] = [result.isError, (await self.tasks.get_task(broken.taskId)).status]
        held = await self.start("hold")
        self.seen["cancelled"] = (await self.tasks.cancel_task(held.taskId)).status
        self.seen["codes"] = {
            "cancel again": await code_of(self.tasks.cancel_task(held.taskId)),
            "never a task": await code_of(self.start("greet", {"name": "Ada"})),
            "only a task": await code_of(self.session.call_tool("add", {"a": 1, "b": 2})),
            "unknown": await code_of(self.tasks.get_task("tsk_unknown")),
        }
        try:
            listed = (await self.tasks.list_tasks()).tasks
            self.seen["listed"] = added.taskId in [task.taskId for task in listed]
        except McpError as error:
            self.seen["listed"] = error.error.code

    async def be_asked(self) -> None:
        """Answer what tools ask, and hear of their progress."""
        confirmed = await self.start("confirm")
        self.seen["confirmed"] = await self.text_of(confirmed)
        self.seen["asked"] = [task_id == confirmed.taskId for task_id in self.asked_for]
        self.seen["sampled"] = await self.text_of(await self.start("summarize"))
        counted = await self.start("count", meta={"progressToken": "my token"})
        await self.until(
            lambda each: isinstance(each, types.TaskStatusNotification) and each.params.taskId == counted.taskId
        )
        progress = [each.params for each in self.notified if isinstance(each, types.ProgressNotification)]
        self.seen["progress"] = [params.progress for params in progress if params.progressToken == "my token"]


async def main(target: dict[str, Any]) -> None:
    async with connect(target) as (read, write):
        story = Story(read, write)
        async with story.session:
            await story.meet()
            await story.run_tasks()
            await story.be_asked()
    print(json.dumps(story.seen))


if __name__ == "__main__":
    anyio.run(main, json.loads(sys.argv[1]))
