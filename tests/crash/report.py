"""What a run of the laboratory did and found, for people and for programs."""

import json
from collections import Counter
from dataclasses import dataclass, field

_LONGEST = 200  # of a message in the table
_RESULTS = ("completed", "failed", "cancelled")


@dataclass
class Report:
    """What a run did, and what it found.

    Attributes:
        counts: How often what happened: acknowledgements, kills and suspensions by place, outages, verdicts.
        unavailable: What workers were told when the database was away.
    """

    database: str
    seed: int
    seconds: float = 0.0
    lives: int = 0
    machines: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    unavailable: Counter[str] = field(default_factory=Counter)
    longest_recovery_ms: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Processes that were ended by SIGKILL."""
        return sum(number for what, number in self.counts.items() if what.startswith("kill "))

    @property
    def results(self) -> int:
        """Acknowledged ends of tasks."""
        return sum(self.counts[status] for status in _RESULTS)


def line(report: Report) -> str:
    """Say in a line how far a run is."""
    return (
        f"{report.kills:,} kills, {report.counts['created']:,} creates, {report.results:,} results acknowledged, "
        f"{len(report.violations):,} violations"
    )


def table(report: Report) -> str:
    """Write a report for people."""
    rows = [
        ("database", report.database),
        ("seed", str(report.seed)),
        ("time", f"{report.seconds:.0f} s"),
        ("processes started", f"{report.lives:,} on {report.machines} machines"),
        ("killed", f"{report.kills:,}"),
        ("creates acknowledged", f"{report.counts['created']:,}"),
        ("results acknowledged", f"{report.results:,}"),
        ("longest recovery", f"{report.longest_recovery_ms / 1000:.1f} s after the death"),
        *((what, f"{number:,}") for what, number in sorted(report.counts.items()) if what != "created"),
        ("violations", f"{len(report.violations):,}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    lines += [f"told {number} times: {what[:_LONGEST]}" for what, number in report.unavailable.most_common()]
    lines += [f"VIOLATION {what}" for what in report.violations]
    return "\n".join(lines)


def to_json(report: Report) -> str:
    """Write a report for programs."""
    return json.dumps(
        {
            "database": report.database,
            "seed": report.seed,
            "seconds": round(report.seconds, 1),
            "machines": report.machines,
            "processes": report.lives,
            "kills": report.kills,
            "creates": report.counts["created"],
            "results": report.results,
            "longest_recovery_ms": report.longest_recovery_ms,
            "counts": dict(sorted(report.counts.items())),
            "unavailable": dict(report.unavailable),
            "violations": report.violations,
        },
        indent=1,
    )
