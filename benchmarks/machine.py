"""The machine that measures: what it is, how fast its disk says "stored", and how busy others keep it.

Standard library only. What a system does not tell is None.
"""

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TypedDict

_PROBES = 50
_CALM = 0.12
_LOOK_SECONDS = 0.25


class Machine(TypedDict):
    """What measured.

    Attributes:
        folder: Where the databases are.
        flush_us: Time of a write of 4 KiB there and its flush to disk: the median over the runs of what was measured
            before each, the lowest and the highest.
    """

    processor: str
    cores: int | None
    memory_gib: int | None
    system: str
    folder: str
    file_system: str | None
    flush_us: tuple[float, float, float]


class Load:
    """CPU time that the whole machine spends from now on."""

    def __init__(self) -> None:
        self._start = _cpu_ticks()

    def others(self, own_seconds: float) -> float | None:
        """Return the share of the machine's CPU time since the start that others than this process used."""
        end = _cpu_ticks()
        if self._start is None or end is None:
            return None
        busy, total = end[0] - self._start[0], end[1] - self._start[1]
        own = own_seconds * os.sysconf("SC_CLK_TCK")
        return max(busy - own, 0.0) / total if total else 0.0


def wait_until_calm(seconds: float) -> None:
    """Wait until others use less than 12 % of the machine, but for ``seconds`` at most."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        load = Load()
        time.sleep(_LOOK_SECONDS)
        share = load.others(own_seconds=0.0)
        if share is None or share < _CALM:
            return


def flush_us(folder: str) -> float:
    """Measure the disk that a folder is on: the median time of a write of 4 KiB and its flush, microseconds."""
    flush = getattr(os, "fdatasync", os.fsync)
    spans = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(_PROBES):
            start = time.perf_counter()
            file.seek(0)
            file.write(bytes(4096))
            flush(file.fileno())
            spans.append(time.perf_counter() - start)
    return sorted(spans)[_PROBES // 2] * 1e6


def resident_mib() -> float | None:
    """Read how much memory of this process is resident now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return None


def describe(folder: str, file_system: str | None, flushes_us: Sequence[float]) -> Machine:
    """Name the hardware and the system; ``flushes_us`` is how the disk was found before each run."""
    # Without a run, there is still a disk.
    flushes = flushes_us or [flush_us(folder)]
    return Machine(
        processor=_processor(),
        cores=os.cpu_count(),
        memory_gib=_memory_gib(),
        system=f"{platform.system()} {platform.release()}",
        folder=folder,
        file_system=file_system,
        flush_us=(median(flushes), min(flushes), max(flushes)),
    )


def _cpu_ticks() -> tuple[int, int] | None:
    """Read busy and total CPU time of all cores, in clock ticks since boot."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            user, nice, system, idle, waiting, *rest = (int(field) for field in stat.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return None
