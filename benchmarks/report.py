"""What a session showed: medians over the rounds, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.backends import BACKENDS, survives
from benchmarks.machine import Machine
from benchmarks.session import Run, Session

Json = dict[str, object]

_QUIET = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One backend in one scenario with so many clients: medians over the rounds.

    Attributes:
        per_second: Median, slowest and fastest round, operations of all clients together.
        ratio: ``per_second`` over the baseline's of the same round: median, lowest, highest. None without a baseline,
            and for the baseline itself.
        cpu_us: CPU time of the backend's own process for an operation.
        other_cpu: Share of the machine that others used, in the worst round.
    """

    scenario: str
    tasks: int
    clients: int
    backend: str
    rounds: int
    per_second: tuple[float, float, float]
    p50_us: float
    p99_us: float
    cpu_us: float
    other_cpu: float | None
    ratio: tuple[float, float, float] | None
    steps_p50_us: dict[str, float]
    figures: dict[str, float]


def summarize(runs: Sequence[Run], baseline: str | None) -> list[Summary]:
    """Take together the rounds of each scenario, size, number of clients and backend; backends in BACKENDS' order."""
    order = list(BACKENDS)
    groups: dict[tuple[str, int, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.scenario, run.tasks, run.clients, run.backend), []).append(run)
    summaries = []
    for scenario, tasks, clients, backend in sorted(groups, key=lambda key: (*key[:3], order.index(key[3]))):
        own = groups[scenario, tasks, clients, backend]
        others = {run.round: run for run in groups.get((scenario, tasks, clients, baseline or ""), ())}
        ratios = [_per_second(run) / _per_second(others[run.round]) for run in own if run.round in others]
        loads = [run.measured["other_cpu"] for run in own if run.measured["other_cpu"] is not None]
        summaries.append(
            Summary(
                scenario=scenario,
                tasks=tasks,
                clients=clients,
                backend=backend,
                rounds=len(own),
                per_second=_middle_and_ends([_per_second(run) for run in own]),
                p50_us=median(run.measured["p50_us"] for run in own),
                p99_us=median(run.measured["p99_us"] for run in own),
                cpu_us=median(run.measured["cpu_us"] for run in own),
                other_cpu=max(loads, default=None),
                ratio=_middle_and_ends(ratios) if ratios and backend != baseline else None,
                steps_p50_us={
                    step: median(run.measured["steps"][step] for run in own) for step in own[0].measured["steps"]
                },
                figures={
                    name: median(run.measured["figures"][name] for run in own) for name in own[0].measured["figures"]
                },
            )
        )
    return summaries


def table(summaries: Sequence[Summary], baseline: str | None) -> str:
    """Write the summaries as a Markdown table that can be read as it is."""
    head = ["scenario", "backend", "tasks", "clients", "survives", "per second", "min-max", "p50", "p99", "CPU each"]
    rows = [[*head, f"ratio to {baseline}"] if baseline else head]
    for each in summaries:
        middle, low, high = each.per_second
        row = [
            *_names(each),
            survives(BACKENDS[each.backend]),
            _number(middle),
            f"{_number(low)}-{_number(high)}",
            _span(each.p50_us),
            _span(each.p99_us),
            _span(each.cpu_us),
        ]
        if baseline:
            row.append("" if each.ratio is None else "{:.2f} [{:.2f}-{:.2f}]".format(*each.ratio))
        rows.append(row)
    return _aligned(rows)


def details(summaries: Sequence[Summary]) -> str:
    """Write a table of what stands behind the totals: steps, and figures that are no times; '' where there is nothing.

    The last column compares with the smallest size at which the same was measured.
    """
    rows = [["scenario", "backend", "tasks", "clients", "of it", "median", "growth"]]
    smallest: dict[tuple[str, int, str, str], float] = {}
    for each in summaries:
        steps = each.steps_p50_us if len(each.steps_p50_us) > 1 else {}
        for name, value in (*steps.items(), *each.figures.items()):
            first = smallest.setdefault((each.scenario, each.clients, each.backend, name), value)
            growth = f"{value / first:.2f}" if each.tasks and first else ""
            shown = _span(value) if name in steps else _number(value)
            rows.append([*_names(each), name, shown, growth])
    return _aligned(rows) if len(rows) > 1 else ""


def _names(summary: Summary) -> list[str]:
    return [summary.scenario, summary.backend, f"{summary.tasks:,}" if summary.tasks else "", str(summary.clients)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    names = [column for column, head in enumerate(rows[0]) if head in ("scenario", "backend", "survives", "of it")]
    aligned = [
        [
            text.ljust(width) if column in names else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    rule = ["-" * width if column in names else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (aligned[0], rule, *aligned[1:]))


def verdict(summaries: Sequence[Summary], machine: Machine) -> str:
    """Say what the disk, and the user's own database if it was measured, are worth to this store."""
    middle, low, high = (each / 1000 for each in machine["flush_us"])
    lines = [
        f"This disk ({machine['folder']}) syncs in {middle:.2f} ms ({low:.2f}-{high:.2f})"
        + _tasks_a_second(summaries, "sqlite")
    ]
    if url := [each for each in summaries if (each.backend, each.scenario) == ("url", "flow")]:
        stored = url[0].steps_p50_us["create"] / 1000
        lines.append(f"Your database stores a new task in {stored:.2f} ms" + _tasks_a_second(summaries, "url"))
    return "\n".join(lines)


def _tasks_a_second(summaries: Sequence[Summary], backend: str) -> str:
    flows = [each for each in summaries if (each.backend, each.scenario) == (backend, "flow")]
    if not flows:
        return "."
    first, *others = (f"{each.per_second[0]:,.0f}" for each in flows)
    figures = [f"{first} tasks a second with {flows[0].clients} client{'s' if flows[0].clients > 1 else ''}"]
    figures += [f"{rate} with {each.clients}" for rate, each in zip(others, flows[1:], strict=True)]
    return f": about {', '.join(figures)}."


def notes(session: Session, machine: Machine) -> str:
    """Write what the figures stand for: durability, versions, hardware, and what could not run."""
    lines = []
    for name, versions in session.versions.items():
        backend = BACKENDS[name]
        named = ", ".join(f"{package} {number}" for package, number in versions.items())
        lines.append(f"{name}: {backend.what}; what was acknowledged survives {backend.survives}. {named}.")
    lines.append(
        "Machine: {processor}, {cores} cores, {memory_gib} GiB, {system}; {folder} on {file_system}.".format(**machine)
    )
    # A database server counts as another program, so its runs say nothing about strangers.
    loads = [
        run.measured["other_cpu"] or 0.0
        for run in session.runs
        if BACKENDS[run.backend].place not in ("postgres", "redis")
    ]
    if max(loads, default=0.0) > _QUIET:
        lines.append(
            f"Other programs used up to {max(loads):.0%} of the machine during a run: "
            "trust the ratios more than the figures, and repeat on a quiet machine."
        )
    lines += [f"{name} did not run to the end: {reason}" for name, reason in session.unavailable.items()]
    return "\n".join(lines)


def document(session: Session, summaries: Sequence[Summary], *, machine: Machine, settings: Json) -> Json:
    """Put everything that was measured into one JSON object."""
    return {
        "format": 1,
        "machine": machine,
        "settings": settings,
        "backends": {
            name: {"what": BACKENDS[name].what, "survives": BACKENDS[name].survives, "versions": dict(versions)}
            for name, versions in session.versions.items()
        },
        "unavailable": session.unavailable,
        "summaries": [asdict(summary) for summary in summaries],
        "runs": [asdict(run) for run in session.runs],
    }


def _per_second(run: Run) -> float:
    return run.measured["operations"] / run.measured["seconds"]


def _middle_and_ends(values: Sequence[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


def _span(us: float) -> str:
    return f"{us:,.0f} µs" if us < 10_000 else f"{us / 1000:,.1f} ms"
