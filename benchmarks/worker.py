"""The process that runs one backend, told what to do by lines of JSON; standard library only.

``python -m benchmarks.worker DRIVER DURABILITY PACKAGE...`` imports ``benchmarks.drivers.DRIVER`` and writes one line
with the versions of Python, SQLite and the packages. Then each line it reads is an order, and each line it writes the
answer:

    {"place": ..., "kept": 0, "scenario": "flow", "tasks": 0, "clients": 8, "seconds": 2.0, "operations": null}
    {"operations": ..., "seconds": ..., "p50_us": ..., "p99_us": ..., "cpu_us": ..., "other_cpu": ..., "steps": {...},
     "figures": {...}}

``place`` is where the driver's database is, a path or a URL; it is empty before, and gets ``kept`` tasks that are not
measured. An order that fails is answered with ``{"error": ...}``. The end of the input ends the process.
"""

import asyncio
import gc
import importlib
import json
import os
import platform
import sqlite3
import sys
import traceback
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from time import perf_counter, process_time
from typing import Protocol, TypedDict

from benchmarks.machine import Load
from benchmarks.work import SCENARIOS, Driver, Operation

WARM_UP = 5  # operations of each client, not measured


class DriverModule(Protocol):
    """What a module under ``benchmarks.drivers`` offers."""

    def open_driver(
        self, place: str, durability: str, *, upkeep: bool = True
    ) -> AbstractAsyncContextManager[Driver[object]]:
        """Open a database that is new, and close it at the end.

        Args:
            upkeep: Whether the store does its upkeep by itself; not given to a driver whose store has none.
        """


class Order(TypedDict):
    """One run: as many operations as asked for, or for as many seconds; ``tasks`` is the size of the database."""

    place: str
    kept: int
    scenario: str
    tasks: int
    clients: int
    operations: int | None
    seconds: float | None


class Measured(TypedDict):
    """What one run showed.

    Attributes:
        seconds: From the start of the first operation to the end of the last.
        p50_us: Median time of an operation; ``p99_us`` is the time that one in a hundred exceeds.
        cpu_us: CPU time of this process for an operation.
        other_cpu: Share of the machine's CPU time that others used, a database server included; None if unknown.
        steps: Median time of each step, microseconds.
        figures: What the driver found beside times, by a name with its unit.
    """

    operations: int
    seconds: float
    p50_us: float
    p99_us: float
    cpu_us: float
    other_cpu: float | None
    steps: dict[str, float]
    figures: dict[str, float]


async def measure(driver: DriverModule, durability: str, order: Order) -> Measured:
    """Run a scenario on a new database; opening, preparing, warming up and closing are not measured."""
    scenario = SCENARIOS[order["scenario"]]
    clients = range(order["clients"])
    options = {} if scenario.upkeep else {"upkeep": False}
    async with driver.open_driver(order["place"], durability, **options) as opened:
        if order["kept"]:
            await opened.keep(order["kept"])
        operation = await scenario.prepare(opened, order["tasks"])
        if not scenario.once:
            await asyncio.gather(*(_repeat(operation, client, operations=WARM_UP) for client in clients))
        gc.collect()
        load, cpu, start = Load(), process_time(), perf_counter()
        seconds, operations = order["seconds"], 1 if scenario.once else order["operations"]
        if operations is None:
            work = [_repeat(operation, client, until=start + (seconds or 1.0)) for client in clients]
        else:
            shares = [operations // len(clients) + (client < operations % len(clients)) for client in clients]
            work = [_repeat(operation, client, operations=share) for client, share in zip(clients, shares, strict=True)]
        done = [instants for each in await asyncio.gather(*work) for instants in each]
        elapsed, cpu = perf_counter() - start, process_time() - cpu
        other = load.others(own_seconds=cpu)
    spans = [instants[-1] - instants[0] for instants in done]
    return Measured(
        operations=len(done),
        seconds=elapsed,
        p50_us=_percentile(spans, 50),
        p99_us=_percentile(spans, 99),
        cpu_us=cpu / len(done) * 1e6,
        other_cpu=other,
        steps={
            step: _percentile([instants[index + 1] - instants[index] for instants in done], 50)
            for index, step in enumerate(scenario.steps)
        },
        figures=opened.figures,
    )


async def _repeat(
    operation: Operation, client: int, *, operations: int | None = None, until: float = 0.0
) -> list[tuple[float, ...]]:
    # Tuples of numbers are none of the garbage collector's business; lists would cost whoever does the most work most.
    done: list[tuple[float, ...]] = []
    while len(done) < operations if operations is not None else perf_counter() < until:
        done.append(tuple(await operation(client)))
        # A driver that never waits (raw-sqlite) would keep the others from their turn.
        await asyncio.sleep(0)
    return done


def _percentile(spans: list[float], percent: int) -> float:
    ordered = sorted(spans)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] * 1e6


def main() -> None:
    """Serve orders until the input ends."""
    name, durability, *packages = sys.argv[1:]
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    driver: DriverModule = importlib.import_module(f"benchmarks.drivers.{name}")
    versions = {package: version(package) for package in packages}
    answers.write(
        json.dumps({"Python": platform.python_version(), "SQLite": sqlite3.sqlite_version, **versions}) + "\n"
    )
    for line in sys.stdin:
        try:
            answer = json.dumps(asyncio.run(measure(driver, durability, json.loads(line))))
        except Exception as error:  # noqa: BLE001  the parent decides what a failed run means
            traceback.print_exc()
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(answer + "\n")


if __name__ == "__main__":
    main()
