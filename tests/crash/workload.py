"""What a worker of the laboratory does until it is killed: every call that matters, each acknowledgement written down.

A record is a JSON line in the worker's own file, written with one system call before the worker goes on: what the file
holds survives SIGKILL. What a task comes to follows from its name alone, so that the checker knows it too.
"""

import asyncio
import json
import logging
import os
import random
import signal
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from pydantic import JsonValue

from taskstore import (
    AuthContext,
    DatabaseUnavailableError,
    IllegalTransitionError,
    LeaseLostError,
    OnCrash,
    OwnerKind,
    StoreOptions,
    Task,
    TaskHandle,
    TaskNotFoundError,
    TaskStatus,
    TaskStore,
)

from . import points

T = TypeVar("T")

ALICE = AuthContext(subject="alice")
LEASE = timedelta(seconds=6)
HEARTBEAT = timedelta(seconds=1)
UPKEEP = timedelta(seconds=1)
BRIEF = timedelta(milliseconds=500)

FLOWS = 3
ONCE, AGAIN = "once", "again"  # the names of the two tools there are


QUESTION: dict[str, JsonValue] = {"who": {"method": "elicitation/create", "params": {}}}
CALLER: dict[str, JsonValue] = {"capabilities": {"elicitation": {}}}


class Character:
    """What follows from a task's name, which it carries as its method: how it goes, and how it ends."""

    def __init__(self, name: str) -> None:
        draw = random.Random(name)
        self.name = name
        self.ends = draw.choices(["complete", "fail", "leave"], [80, 10, 10])[0]
        self.is_error = draw.random() < 0.1
        self.is_brief = draw.random() < 0.1  # expires soon, for the sweep
        self.is_keyed = not self.is_brief and draw.random() < 0.3
        weights = [100, 0, 0, 0] if self.is_brief else [55, 25, 10, 10]
        self.on_crash = draw.choices([OnCrash.FAIL, OnCrash.RETRY, OnCrash.ASK, OnCrash.EXTERNAL], weights)[0]
        self.is_run_again = self.on_crash in (OnCrash.RETRY, OnCrash.ASK)
        self.parks = self.is_run_again and draw.random() < 0.3
        # What is external is reported by several processes at once, which know nothing of each other.
        self.is_deleted = self.on_crash is not OnCrash.EXTERNAL and draw.random() < 0.05
        self.asks = self.on_crash is not OnCrash.EXTERNAL and draw.random() < 0.1
        self.declines = self.on_crash is OnCrash.ASK and draw.random() < 0.3  # to have it run again
        self.steps = draw.choice([0, 0, 1, 3])
        self.result = {"name": name, "blob": draw.randbytes(draw.choice([0, 10, 200, 200, 5000])).hex()}
        self.error = {"code": -32000, "message": f"{name} failed", "data": {"name": name}}

    @property
    def life(self) -> int:
        """Number of the life that created the task."""
        return int(self.name.partition("-")[0])


def options(seed: int) -> StoreOptions:
    """Return the options of every store of the laboratory; payloads are sealed where the seed is odd."""
    return StoreOptions(
        keys=(random.Random(seed).randbytes(32),) if seed % 2 else (),
        migrate=True,
        lease=LEASE,
        heartbeat=HEARTBEAT,
        recovery_interval=UPKEEP,
        sweep_interval=UPKEEP,
        min_retention=timedelta(0),
        default_ttl=timedelta(days=1),
        binding_secret=b"laboratory %16d" % seed,
    )


class Log:
    """The worker's file."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, did: str, **facts: object) -> None:
        record = {"at": time.time_ns() // 1_000_000, "did": did, **facts}
        os.write(self._descriptor, json.dumps(record).encode() + b"\n")


def main(
    *, url: str, seed: int, life: int, log: str, point: str | None, after: int, act: str, again: list[str]
) -> None:
    """Work on a store until SIGTERM, or until the armed fail point, if any, is reached.

    Args:
        again: Names of keyed tasks whose creation nobody acknowledged to the life before: they are created again.
    """
    kept = Log(log)
    logging.getLogger("taskstore").addHandler(_Complaints(kept))
    logging.getLogger("taskstore").propagate = False
    if point is not None:

        def strike() -> None:
            kept.note("struck", point=point, act=act)
            os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)

        points.arm(point, after, strike)
    asyncio.run(_Worker(url, seed, life, kept, again).work())


class _Complaints(logging.Handler):
    """Notes what the store itself did not expect."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.ERROR)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.getMessage().startswith("Upkeep job"):
            self._log.note("broke", trace="".join(traceback.format_exception(*record.exc_info)))


class _Worker:
    def __init__(self, url: str, seed: int, life: int, log: Log, again: list[str]) -> None:
        self._url, self._seed, self._life, self._log, self._again = url, seed, life, log, again
        self._random = random.Random(f"{seed}/{life}")
        self._made = 0
        self._last_complaint = ""

    async def work(self) -> None:
        ends = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
        while not ends.is_set():
            try:
                async with TaskStore.open(self._url, options=options(self._seed)) as store:
                    self._log.note("opened", instance=store._parts.writer)
                    await self._serve(store, ends)
            except DatabaseUnavailableError as error:
                await self._bear(error)
        self._log.note("closed")

    async def _serve(self, store: TaskStore, ends: asyncio.Event) -> None:
        jobs = [asyncio.create_task(self._flow(store)) for _ in range(FLOWS)]
        jobs += [asyncio.create_task(self._request(store)), asyncio.create_task(self._run_again(store))]
        ending = asyncio.create_task(ends.wait())
        done, left = await asyncio.wait([*jobs, ending], return_when=asyncio.FIRST_COMPLETED)
        for job in left:
            job.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for job in done - {ending}:
            error = job.exception()
            self._log.note("broke", trace="".join(traceback.format_exception(error)) if error else "a job ended")

    async def _pause(self, most: float = 0.1) -> None:
        await asyncio.sleep(self._random.uniform(0, most))

    async def _bear(self, error: DatabaseUnavailableError) -> None:
        complaint = str(error)
        if complaint != self._last_complaint:
            self._last_complaint = complaint
            self._log.note("unavailable", error=complaint)
        await self._pause(0.3)

    # --- the server's part

    async def _flow(self, store: TaskStore) -> None:
        while True:
            await self._pause()
            if self._again:
                name = self._again.pop()
            else:
                self._made += 1
                # Whoever creates a task again under its key is not the one whose death decides over it, so the name
                # says the life, and a name is given again only where the first life is over.
                name = f"{self._life}-{self._made}"
            try:
                await self._run(store, Character(name))
            except DatabaseUnavailableError as error:
                await self._bear(error)
            except (LeaseLostError, IllegalTransitionError, TaskNotFoundError) as error:
                self._log.note("refused", name=name, error=type(error).__name__)

    async def _run(self, store: TaskStore, character: Character) -> None:
        name = character.name
        self._log.note("creating", name=name)
        task = await store.create_task(
            auth=ALICE,
            method=name,
            name=AGAIN if character.is_run_again else ONCE,
            on_crash=character.on_crash,
            caller=CALLER,
            request={"name": name},
            ttl=BRIEF if character.is_brief else timedelta(days=1),
            idempotency_key=name if character.is_keyed else None,
        )
        self._log.note("created", name=name, task=task.task_id, existing=task.existing)
        if task.existing or character.on_crash is OnCrash.EXTERNAL:
            return  # what is external is reported by whoever finds it
        async with store.handle(task) as handle:
            if character.parks:
                await self._insist(lambda: handle.park(QUESTION, state={"name": name}))
                self._log.note("parked", name=name)
            else:
                await self._use(store, character, handle)

    async def _run_again(self, store: TaskStore) -> None:
        """Run what was parked and is answered, and what lost its process."""
        while True:
            try:
                claim = await store.claim_task([AGAIN], timeout=timedelta(seconds=1))
                if claim is None:
                    continue
                task, name = claim.task, claim.task.method
                self._log.note("claimed", name=name, task=task.task_id, attempt=task.attempt)
                async with store.handle(task) as handle:
                    if claim.request != {"name": name}:
                        self._log.note("wrong", name=name, what=f"was claimed with the request {claim.request}")
                    left = (claim.state, claim.answers)
                    if left not in ((None, {}), ({"name": name}, {"who": {"answer": name}})):
                        self._log.note("wrong", name=name, what=f"was claimed with {left}")
                    await self._use(store, Character(name), handle)
            except DatabaseUnavailableError as error:
                await self._bear(error)
            except (LeaseLostError, IllegalTransitionError, TaskNotFoundError) as error:
                self._log.note("refused", name=name, error=type(error).__name__)

    async def _use(self, store: TaskStore, character: Character, handle: TaskHandle) -> None:
        name = character.name
        for step in range(character.steps):
            await handle.progress(step + 1, character.steps, f"step {step + 1}")
            await self._pause(0.03)
        if character.asks:
            answers = await self._insist(lambda: handle.ask(QUESTION))
            if answers is not None and answers != {"who": {"answer": name}}:
                self._log.note("wrong", name=name, what=f"asked, and was answered {answers!r}")
        await self._pause()
        if character.ends == "fail":
            done = await self._insist(lambda: handle.fail(f"{name} failed", code=-32000, data={"name": name}))
        elif character.ends == "complete":
            done = await self._insist(lambda: handle.complete(character.result, is_error=character.is_error))
        else:
            # Left to be cancelled, by anybody; or to die with this process.
            await handle.wait_cancelled()
            return
        assert isinstance(done, Task)
        self._log.note("finished", name=name, task=done.task_id, status=done.status, version=done.version)
        await self._read_back(store, character, done)
        if character.is_deleted:
            self._log.note("deleting", name=name)
            await self._insist(lambda: store.delete_task(done.task_id, auth=ALICE))
            self._log.note("deleted", name=name)

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call until the database can be reached."""
        while True:
            try:
                return await call()
            except DatabaseUnavailableError as error:
                await self._bear(error)

    async def _read_back(self, store: TaskStore, character: Character, done: Task) -> None:
        """What was acknowledged is there at once, also for this process."""
        try:
            outcome = await self._insist(lambda: store.get_outcome(done.task_id, auth=ALICE))
        except TaskNotFoundError:
            if not character.is_brief:
                self._log.note("wrong", name=character.name, what="finished, and not found by the next read")
            return
        if outcome.result != (character.result if character.ends == "complete" else None):
            self._log.note("wrong", name=character.name, what="finished, and read back as something else")

    # --- the client's part, which may meet any process's tasks

    async def _request(self, store: TaskStore) -> None:
        while True:
            await self._pause(0.4)
            try:
                asking = await store.list_tasks(auth=ALICE, status=TaskStatus.INPUT_REQUIRED, limit=20)
                for task in asking.tasks:
                    await self._answer(store, task)
                working = (await store.list_tasks(auth=ALICE, status=TaskStatus.WORKING, limit=20)).tasks
                for task in working:
                    if task.owner_kind is OwnerKind.EXTERNAL and Character(task.method).ends != "leave":
                        await self._report(store, task)
                leaving = [task for task in working if Character(task.method).ends == "leave"]
                if leaving:
                    await self._cancel(store, self._random.choice(leaving))
                elif working and self._random.random() < 0.1:
                    await self._cancel(store, self._random.choice(working))
            except DatabaseUnavailableError as error:
                await self._bear(error)

    async def _answer(self, store: TaskStore, task: Task) -> None:
        try:
            details = await store.get_details(task.task_id, auth=ALICE)
            agrees: dict[str, JsonValue] = {"action": "accept", "content": {"again": True}}
            again: JsonValue = {"action": "decline"} if Character(task.method).declines else agrees
            answers: dict[str, JsonValue] = {
                key: {"answer": task.method} if request in QUESTION.values() else again
                for key, request in details.input_requests.items()
            }
            await store.answer_inputs(task.task_id, answers, auth=ALICE)
        except TaskNotFoundError:
            pass  # brief

    async def _report(self, store: TaskStore, task: Task) -> None:
        """Say what the work elsewhere came to; any process may know it, and several at once."""
        try:
            handle = await store.operator.handle(task.task_id)
            await self._use(store, Character(task.method), handle)
        except (LeaseLostError, IllegalTransitionError, TaskNotFoundError) as error:
            self._log.note("refused", name=task.method, error=type(error).__name__)

    async def _cancel(self, store: TaskStore, task: Task) -> None:
        try:
            done = await store.cancel_task(task.task_id, auth=ALICE)
        except (IllegalTransitionError, TaskNotFoundError):
            return
        self._log.note("finished", name=task.method, task=done.task_id, status=done.status, version=done.version)
