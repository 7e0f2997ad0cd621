"""The driver: keeps workers at work on one store, kills and suspends them, breaks what they stand on, and checks."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskstore import DatabaseUnavailableError, SchemaError, TaskStore
from taskstore.store import open_observer

from . import points
from .invariants import NOTICE_MS, Checker, Life
from .machine import Machine, can_have_another
from .outages import LOSSES, Ground
from .report import Report
from .workload import LEASE, options

# What must be over one lease after a death, on a machine that others load: the verdict is due after the lease and a
# recovery pass, the rest is for processes that get no turn.
PATIENCE_SECONDS = LEASE.total_seconds() + 30
_END_SECONDS = 60.0
MACHINE_LOST = "machine-lost"
_LOSS_SECONDS = NOTICE_MS / 1000


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        processes: How many workers are at work at once.
        seconds: How long they are disturbed, in all.
        kill_every_seconds: Mean time between two disturbances.
        round_seconds: How long they are disturbed before they are left alone and what they did is checked.
        outages: What else happens, once a round each in turn.
        kills: End when so many workers were killed; None is no end but the time.
    """

    seed: int
    processes: int = 8
    seconds: float = 60.0
    kill_every_seconds: float = 0.5
    round_seconds: float = 30.0
    outages: Sequence[str] = ()
    kills: int | None = None


class Laboratory:
    """One run.

    Args:
        ground: The database, and what can be done to it.
        folder: Where the workers' files go.
        progress: Called now and then with what the run has come to.
    """

    def __init__(
        self, ground: Ground, plan: Plan, folder: Path, *, progress: Callable[[Report], None] = lambda report: None
    ) -> None:
        self._ground, self._plan, self._folder, self._progress = ground, plan, folder, progress
        self._random = random.Random(plan.seed)
        self._lives: dict[int, Life] = {}
        self._running: dict[int, Life] = {}  # by slot
        self._machines: list[Machine] = []
        self._checker = Checker()
        self._began = time.monotonic()
        self._closing = self._arming = False
        self._lost: Machine | None = None
        self._resuming: set[asyncio.TimerHandle] = set()
        self.report = Report(ground.name, plan.seed)

    async def run(self) -> Report:
        """Run to the end of the plan, or to the first round that finds a violation."""
        await self._start_machines()
        try:
            for slot in range(self._plan.processes):
                self._start_life(slot)
            await self._until_open()
            self._began = time.monotonic()
            outages = list(self._plan.outages)
            while time.monotonic() - self._began < self._plan.seconds and not self._is_done():
                left = self._plan.seconds - (time.monotonic() - self._began)
                await self._disturb(min(self._plan.round_seconds, left))
                if outages:
                    outages.append(outages.pop(0))
                    if outages[-1] in LOSSES:
                        await self._calm()
                        await self._lose_file(outages[-1])
                    else:
                        await self._outage(outages[-1])
                await self._calm()
            await self._end()
        finally:
            for handle in self._resuming:
                handle.cancel()
            self._closing = True
            for machine in self._machines:
                await machine.stop()
        self._look()
        return self.report

    def _is_done(self) -> bool:
        enough = self._plan.kills is not None and self.report.kills >= self._plan.kills
        return enough or bool(self._checker.violations)

    # --- lives

    async def _start_machines(self) -> None:
        self.report.machines = 2 if await asyncio.to_thread(can_have_another) else 1
        for number in range(self.report.machines):
            errors = self._folder / f"machine-{number}.log"
            machine = Machine(own_namespace=number > 0, errors=errors, heard=self._hear)
            await machine.start()
            self._machines.append(machine)

    async def _until_open(self) -> None:
        """Wait until all the first workers have opened the store; what comes before is no time to count."""
        async with asyncio.timeout(_END_SECONDS):
            while not self._checker.violations and any(life.opened_at is None for life in self._lives.values()):
                await asyncio.sleep(0.05)
                self._checker.read_logs(self._lives.values())

    def _start_life(self, slot: int) -> None:
        number, machine = len(self._lives), self._machines[slot % len(self._machines)]
        before = self._running.get(slot)
        if machine is self._lost or (before is not None and not before.gone):
            return
        again = []
        if before is not None:
            self._checker.read_logs([before])
            again = self._checker.unacknowledged(before)
        life = Life(number, slot, machine.is_elsewhere, self._folder / f"life-{number}.jsonl")
        self._lives[number] = self._running[slot] = life
        # What becomes of a life follows from the seed and its number, not from the order in which messages arrive.
        fate = self._fate(life)
        point, after, act = None, 1, "kill"
        if self._arming and fate.random() < 0.5:
            point = fate.choice(points.NAMES)
            # Some points are passed with each write, others once in a life.
            after = fate.choice([1, 1, 2, 5, 20, 50])
            act = fate.choice(["kill", "kill", "stop"])
        machine.fork(
            {
                "url": self._ground.url,
                "seed": self._plan.seed,
                "life": number,
                "log": str(life.log),
                "point": point,
                "after": after,
                "act": act,
                "again": again,
            }
        )

    def _machine(self, life: Life) -> Machine:
        return self._machines[life.slot % len(self._machines)]

    def _fate(self, life: Life) -> random.Random:
        return random.Random(f"{self._plan.seed}/{life.number}/{len(life.suspensions)}")

    def _hear(self, machine: Machine, message: dict[str, Any]) -> None:
        lives = list(self._lives.values())
        if "started" in message:
            lives[message["started"]].pid = message["pid"]
            return
        pid = message.get("stopped", message.get("ended"))
        life = next(life for life in lives if life.pid == pid and not life.gone and self._machine(life) is machine)
        if "stopped" in message:
            life.suspensions.append((_now(), None))
            seconds = self._fate(life).choice([0.05, 0.3, 1.0, 1.0, 1.5 * LEASE.total_seconds()])
            self._later(seconds, lambda: self._resume(life))
            return
        self._checker.read_logs([life])
        life.gone = True
        if life.ended_at is None:
            life.ended_at = _now()
            # SIGTERM may come before a worker is ready to take it as a request.
            if not life.told_to_end or message["code"] not in (0, -signal.SIGTERM):
                self._checker.violations.append(f"life {life.number} ended by itself with {message['code']}")
        if not self._closing and self._running.get(life.slot) is life:
            self._later(self._fate(life).uniform(0, 0.3), lambda: self._start_life(life.slot))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        def run() -> None:
            self._resuming.discard(handle)
            act()

        handle = asyncio.get_running_loop().call_later(seconds, run)
        self._resuming.add(handle)

    def _resume(self, life: Life) -> None:
        if life.gone or not life.suspensions:
            return
        since, until = life.suspensions[-1]
        if until is None:
            life.suspensions[-1] = (since, _now())
            self._signal(life, signal.SIGCONT)

    def _signal(self, life: Life, number: signal.Signals) -> None:
        if life.pid is not None and not life.gone:
            self._machine(life).signal(life.pid, number)

    # --- disturbances

    async def _disturb(self, seconds: float) -> None:
        self._arming = True
        ends = time.monotonic() + seconds
        while (now := time.monotonic()) < ends and not self._is_done():
            await asyncio.sleep(min(self._random.expovariate(1 / self._plan.kill_every_seconds), ends - now))
            self._strike()
            self._look()
        self._arming = False

    def _strike(self) -> None:
        life = self._running[self._random.randrange(self._plan.processes)]
        act = self._random.choices(["kill", "suspend", "end"], [75, 15, 10])[0]
        if life.gone or life.pid is None or life.ended_at is not None or life.told_to_end:
            return
        if act == "kill":
            life.ended_at = _now()
            self.report.counts["kill at random"] += 1
            self._signal(life, signal.SIGKILL)
        elif act == "suspend":
            self.report.counts["stop at random"] += 1
            self._signal(life, signal.SIGSTOP)
        else:
            life.told_to_end = True
            self.report.counts["told to end"] += 1
            self._signal(life, signal.SIGTERM)

    async def _outage(self, name: str) -> None:
        self.report.counts[f"outage: {name}"] += 1
        if name == MACHINE_LOST:
            causing = asyncio.create_task(self._lose_machine())
        else:
            causing = asyncio.create_task(self._ground.outages[name](self._random))  # type: ignore[arg-type]
        # With and without deaths beside it: those who live through all of it must still be alive for the others.
        strikes = self._random.random() < 0.5
        while not causing.done():
            await asyncio.wait([causing], timeout=2 * self._plan.kill_every_seconds)
            if strikes:
                self._strike()
            self._look()
        await causing

    async def _lose_machine(self) -> None:
        """Kill every process of the last machine, and start none there for so long that others decide over it."""
        lost = self._machines[-1]
        self._lost = lost
        for life in self._running.values():
            if self._machine(life) is lost and not life.gone and life.ended_at is None:
                life.ended_at = _now()
                self.report.counts["kill with its machine"] += 1
                self._signal(life, signal.SIGKILL)
        await asyncio.sleep(2 * LEASE.total_seconds())
        self._lost = None
        for slot, life in list(self._running.items()):
            if self._machine(life) is lost:
                self._start_life(slot)

    async def _lose_file(self, name: str) -> None:
        """Take the file away from under all stores: none may go on in it, and what comes after is as good as new."""
        assert self._ground.path is not None
        self.report.counts[f"outage: {name}"] += 1
        self._checker.read_logs(self._lives.values())
        before = [life for life in self._running.values() if not life.gone]
        robbed = [life for life in before if life.opened_at is not None]
        LOSSES[name](self._ground.path)
        for life in robbed:
            life.robbed_at = _now()
        await asyncio.sleep(2 * _LOSS_SECONDS)
        # Nothing that was acknowledged before is left; those who know of it end while others begin anew.
        self._checker.read_logs(self._lives.values())
        self._checker = self._checker.anew()
        self._running = {}
        for slot in range(self._plan.processes):
            self._start_life(slot)
        for life in before:
            if not life.gone and life.ended_at is None:
                life.told_to_end = True
                self._resume(life)
                self._signal(life, signal.SIGTERM)
        await self._disturb(2 * _LOSS_SECONDS)
        self._checker.read_logs(before)
        for life in robbed:
            if life.late_ms > NOTICE_MS:
                self._checker.violations.append(
                    f"life {life.number} heard that something was stored {life.late_ms} ms after its file was gone"
                )

    # --- the checks

    async def _calm(self) -> None:
        """Let nothing happen until every dead process's tasks are decided, and check what has been acknowledged."""
        self._resume_all()
        await self._until_nothing_is_stuck()
        # What has been read of the logs by now was acknowledged before the store is read.
        self._checker.read_logs(self._lives.values())
        async with open_observer(self._ground.url, options=options(self._plan.seed)) as store:
            await self._checker.check(store, self._lives)
        self._look()

    def _resume_all(self) -> None:
        for life in self._lives.values():
            self._resume(life)

    async def _until_nothing_is_stuck(self) -> None:
        """Wait for the verdicts over the tasks of dead processes, at most as long as those may take."""
        ends = time.monotonic() + PATIENCE_SECONDS
        stuck = ["none could be read"]
        while time.monotonic() < ends:
            self._checker.read_logs(self._lives.values())
            with suppress(DatabaseUnavailableError, SchemaError):  # not back yet, or not there yet
                async with open_observer(self._ground.url, options=options(self._plan.seed)) as store:
                    stuck = await self._checker.stuck(store, self._lives)
                if not stuck:
                    return
            self._look()
            await asyncio.sleep(0.5)
        self._checker.stuck_longer(stuck, PATIENCE_SECONDS)

    async def _end(self) -> None:
        """End every worker in good order, and check once more, all of it."""
        self._closing = True
        ends = time.monotonic() + _END_SECONDS
        everybody = list(self._lives.values())
        while any(not life.gone for life in everybody):
            for life in everybody:
                if life.pid is not None and not life.told_to_end and not life.gone:
                    life.told_to_end = True
                    self._signal(life, signal.SIGTERM)
            self._resume_all()
            if time.monotonic() > ends:
                left = [life.number for life in everybody if not life.gone]
                self._checker.violations.append(f"lives {left} do not end {_END_SECONDS:.0f} s after SIGTERM")
                break
            await asyncio.sleep(0.1)
        self._checker.read_logs(self._lives.values())
        # A death while ending is decided by who comes next.
        async with TaskStore.open(self._ground.url, options=options(self._plan.seed)) as store:
            await self._until_nothing_is_stuck()
            await self._checker.check(store, self._lives)

    def _look(self) -> None:
        checker, report = self._checker, self.report
        checker.read_logs(self._running.values())
        own = Counter({name: number for name, number in report.counts.items() if name not in checker.counts})
        report.counts = own + checker.counts
        report.unavailable, report.violations = checker.complaints, checker.violations
        report.longest_recovery_ms = checker.longest_recovery_ms
        report.seconds, report.lives = time.monotonic() - self._began, len(self._lives)
        self._progress(report)


def _now() -> int:
    return time.time_ns() // 1_000_000
