"""One session of measurements: workers that run in turn, round after round, each on a database that is new."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import IO, Self, cast

from sqlalchemy import create_engine, make_url

from benchmarks.backends import Backend
from benchmarks.environments import ROOT, PeerUnavailableError, python_of
from benchmarks.machine import flush_us, wait_until_calm
from benchmarks.redis_server import redis_server, redis_version
from benchmarks.work import SCENARIOS
from benchmarks.worker import Measured, Order
from taskstore.database import Database
from taskstore.errors import DatabaseUnavailableError
from taskstore.migrate import downgrade, upgrade
from taskstore.testing import PostgresServer, PostgresUnavailableError

# A million tasks take their time to be made, on a slow disk too.
_PATIENCE_SECONDS = 1800.0


class RunFailedError(Exception):
    """A worker could not start, could not do what it was told, or ended; the message has the end of its log."""


class Worker:
    """The process of one backend."""

    def __init__(self, backend: Backend, process: "subprocess.Popen[str]", log: IO[str]) -> None:
        self.backend, self._process, self._log = backend, process, log
        self.versions = {name: str(text) for name, text in self._answer().items()}

    @classmethod
    @contextmanager
    def start(cls, backend: Backend, python: str, root: Path = ROOT) -> Iterator["Worker"]:
        """Start a worker, and end it with the block.

        Args:
            python: Interpreter that has what the driver needs.
            root: Folder that holds the packages ``benchmarks`` and ``taskstore``.

        Raises:
            RunFailedError: It did not start.
        """
        command = [python, "-m", "benchmarks.worker", backend.driver, backend.durability, *backend.packages]
        with tempfile.TemporaryFile(mode="w+", errors="replace") as log:
            process = subprocess.Popen(
                command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            try:
                yield cls(backend, process, log)
            except BaseException:
                process.kill()
                raise
            finally:
                process.communicate()

    def run(self, order: Order) -> Measured:
        """Have one scenario run.

        Raises:
            RunFailedError: It failed.
        """
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed("it ended") from error
        answer = self._answer()
        if "error" in answer:
            raise self._failed(str(answer["error"]))
        return cast(Measured, answer)

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None, "it is a pipe"
        patience = threading.Timer(_PATIENCE_SECONDS, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        if not line:
            raise self._failed(f"it ended, or did not answer for {_PATIENCE_SECONDS:.0f} s")
        answer: dict[str, object] = json.loads(line)
        return answer

    def _failed(self, reason: str) -> RunFailedError:
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-10:]
        return RunFailedError("\n".join([f"{self.backend.name}: {reason}", *last]))


class Places:
    """Where databases are: a folder for files, servers that are started where they are needed, a database of the user.

    Args:
        url: Of the database of the user; it must not hold a store.
    """

    def __init__(self, folder: str, url: str) -> None:
        self._folder, self._url = folder, url
        self._stack = ExitStack()
        self._server: PostgresServer | None = None
        self._template = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def prepare(self, backend: Backend) -> dict[str, str]:
        """Have the server that a backend needs, and return its name and version; nothing for one without a server.

        Raises:
            PeerUnavailableError: There is no Redis on this machine, or the user's database cannot be used.
            PostgresUnavailableError: There is no PostgreSQL.
        """
        match backend.place:
            case "postgres":
                return {"PostgreSQL": self._start_postgres()}
            case "redis":
                return {"Redis": redis_version()}
            case "url":
                return _check(self._url)
            case "disk" | "memory":
                return {}

    def _start_postgres(self) -> str:
        if self._server is None:
            self._server = self._stack.enter_context(PostgresServer())
            self._template = self._server.create_database()
            upgrade(self._template)
        return str(self._server.version)

    @contextmanager
    def new(self, backend: Backend) -> Iterator[str]:
        """Give one run a database of its own.

        Yields:
            A path where nothing is yet, or the URL of a database: a migrated one of PostgreSQL, a Redis server's only
            one, SQLite's in memory, or the user's, from which the store is dropped at the end.
        """
        match backend.place:
            case "postgres":
                with self._postgres_database() as url:
                    yield url
            case "redis":
                with self._new_folder() as folder, redis_server(folder) as url:
                    yield url
            case "url":
                try:
                    yield self._url
                finally:
                    downgrade(self._url, "base")
            case "disk":
                with self._new_folder() as folder:
                    yield str(folder / "tasks.db")
            case "memory":
                yield "sqlite://"

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="taskstore-benchmark-", dir=self._folder) as folder:
            yield Path(folder)

    @contextmanager
    def _postgres_database(self) -> Iterator[str]:
        assert self._server is not None, "prepare() comes first"
        url = self._server.create_database(template=self._template)
        try:
            yield url
        finally:
            self._server.drop_database(url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        sizes: How many tasks the databases hold before, in place of each scenario's own choice.
        rounds: How often everything is run, interleaved.
        operations: Of a run, by all clients together; None runs for ``seconds``.
        calm_seconds: How long a run waits for others to leave the machine alone.
    """

    scenarios: Sequence[str]
    sizes: Sequence[int] | None
    clients: Sequence[int]
    rounds: int
    operations: int | None
    seconds: float | None
    calm_seconds: float

    def runs_of(self, backend: Backend) -> int:
        """Count the runs of one backend."""
        run = [scenario for scenario in self.scenarios if scenario not in backend.without]
        return sum(len(self.settings_of(scenario)) for scenario in run) * self.rounds

    def settings_of(self, scenario: str) -> list[tuple[int, int]]:
        """List with how many tasks and clients a scenario is run."""
        chosen = SCENARIOS[scenario]
        sizes = chosen.sizes if self.sizes is None or not any(chosen.sizes) else self.sizes
        return [(tasks, clients) for tasks in sizes for clients in ([1] if chosen.once else self.clients)]


@dataclass(frozen=True, slots=True)
class Run:
    """One run and what it showed; rounds count from 1."""

    round: int
    scenario: str
    tasks: int
    clients: int
    backend: str
    measured: Measured


@dataclass(frozen=True, slots=True)
class Session:
    """What came of a plan.

    Attributes:
        unavailable: Why a backend did not run to the end; there may be no run of it or only some.
        flushes_us: Time of a flush of the disk just before each run.
    """

    runs: list[Run]
    versions: dict[str, dict[str, str]]
    unavailable: dict[str, str]
    flushes_us: list[float]


def measure(
    plan: Plan,
    backends: Sequence[Backend],
    *,
    folder: str,
    url: str,
    install: bool,
    say: Callable[[str], None],
    step: Callable[[str], None],
) -> Session:
    """Run a plan.

    Args:
        folder: Where databases are made.
        url: The user's own database, for the backend ``url``.
        install: Whether a peer that is missing may be installed.
        say: Told what takes long, and what failed.
        step: Called before each run with its name.
    """
    session = Session([], {}, {}, [])
    with Places(folder, url) as places, ExitStack() as stack:
        workers = []
        for backend in backends:
            try:
                server = places.prepare(backend)
                python = python_of(backend.driver, backend.requirements, install=install, say=say)
                workers.append(stack.enter_context(Worker.start(backend, python)))
            except (PeerUnavailableError, PostgresUnavailableError, RunFailedError) as error:
                session.unavailable[backend.name] = str(error)
                say(f"{backend.name} cannot run: {error}")
            else:
                session.versions[backend.name] = workers[-1].versions | server
        for number, scenario, tasks, clients, worker in _turns(plan, workers):
            name = worker.backend.name
            if name in session.unavailable:
                continue
            size = f" with {tasks:,} tasks" if tasks else ""
            step(f"round {number}, {scenario}{size}, {name}, {clients} clients")
            wait_until_calm(plan.calm_seconds)
            session.flushes_us.append(flush_us(folder))
            try:
                with places.new(worker.backend) as place:
                    measured = worker.run(
                        Order(
                            place=place,
                            kept=worker.backend.kept,
                            scenario=scenario,
                            tasks=tasks,
                            clients=clients,
                            operations=plan.operations,
                            seconds=plan.seconds,
                        )
                    )
            except (PeerUnavailableError, RunFailedError) as error:
                session.unavailable[name] = str(error)
                say(f"A run failed, and the backend is left out from now on. {error}")
            else:
                session.runs.append(Run(number, scenario, tasks, clients, name, measured))
    return session


def _check(url: str) -> dict[str, str]:
    """Look whether a store can be made in a database and dropped again; return what it is."""
    try:
        with closing(Database(url, observer=True)) as database:
            taken, label = database.revision() is not None, database.label
    except (ValueError, DatabaseUnavailableError) as error:
        raise PeerUnavailableError(str(error)) from error
    if taken:
        raise PeerUnavailableError(
            f"{label} holds a store already. Name an empty one; or, if a benchmark that was killed has left it there: "
            f'{sys.executable} -c \'from taskstore.migrate import downgrade; downgrade("URL", "base")\''
        )
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return {"on": label}
    engine = create_engine(parsed.set(drivername="postgresql+psycopg"))
    with closing(engine.connect()) as connection:
        number = connection.dialect.server_version_info or ()
    engine.dispose()
    return {"on": label, "PostgreSQL": ".".join(map(str, number))}


def _turns(plan: Plan, workers: list[Worker]) -> Iterator[tuple[int, str, int, int, Worker]]:
    """Order the runs: round, scenario, tasks, clients, and whose turn it is."""
    # What a run leaves to its successor, such as a busy disk or a throttled processor, must not always fall to the same
    # backend. The same draw in each session, so that two of them differ in nothing else.
    draw = Random(0)
    for number in range(1, plan.rounds + 1):
        for scenario in plan.scenarios:
            for tasks, clients in plan.settings_of(scenario):
                for worker in draw.sample(workers, len(workers)):
                    if scenario not in worker.backend.without:
                        yield number, scenario, tasks, clients, worker
