"""The database that a command is for, opened as an observer: no instance, no upkeep, no migration, no new file."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import typer
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from taskstore import migrate
from taskstore.database import Database
from taskstore.errors import DatabaseUnavailableError
from taskstore.options import StoreOptions
from taskstore.schema import DEFAULT_PREFIX, check_identifier
from taskstore.store import TaskStore, open_observer

T = TypeVar("T")

SECRET_VARIABLE, KEYS_VARIABLE = "TASKSTORE_BINDING_SECRET", "TASKSTORE_KEYS"


@dataclass(frozen=True, slots=True)
class Target:
    """A database, and where in it the tables are.

    Raises:
        typer.BadParameter: The URL, the prefix or the schema cannot be meant.
    """

    url: str
    prefix: str = DEFAULT_PREFIX
    schema: str | None = None

    def __post_init__(self) -> None:
        try:
            check_identifier(self.prefix, "--prefix")
            if self.schema is not None:
                check_identifier(self.schema, "--schema")
        except ValueError as problem:
            raise typer.BadParameter(str(problem)) from problem
        if self.parsed.get_backend_name() == "sqlite":
            if self.schema is not None:
                raise typer.BadParameter("SQLite has no schemas; leave --schema out, or give --prefix.")
            if self.file is None:
                raise typer.BadParameter(
                    "a SQLite database in memory belongs to one process alone; give a file: sqlite:///tasks.db."
                )

    @property
    def parsed(self) -> URL:
        """The URL's parts."""
        try:
            return make_url(self.url)
        except ArgumentError as problem:
            meant = f"sqlite:///{self.url}" if Path(self.url).exists() else "sqlite:///tasks.db"
            raise typer.BadParameter(
                f"that is no database URL; write it as {meant}, or postgresql+psycopg://user@host/name."
            ) from problem

    @property
    def file(self) -> Path | None:
        """The SQLite file, whether it exists or not; None for another database, or one in memory."""
        parsed = self.parsed
        if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
            return None
        return Path(parsed.database)

    @property
    def label(self) -> str:
        """The URL without its password."""
        return self.parsed.render_as_string(hide_password=True)

    def options(self) -> StoreOptions:
        """Make the options that the servers of this database open it with, as far as a look at it needs them.

        Raises:
            typer.BadParameter: A secret in the environment is none.
        """
        secrets = _secrets(SECRET_VARIABLE)
        with _usage():
            return StoreOptions(
                table_prefix=self.prefix,
                schema=self.schema,
                binding_secret=secrets[0] if secrets else None,
                keys=_secrets(KEYS_VARIABLE),
            )

    @contextmanager
    def database(self, *, create: bool = False) -> Iterator[Database]:
        """Open the database, whatever schema it has.

        Args:
            create: Whether a SQLite file that is missing is made; otherwise it is an error.

        Raises:
            DatabaseUnavailableError: It is missing, or cannot be opened or reached.
        """
        if not create:
            self._check_file()
        with _usage():
            database = Database(self.url, prefix=self.prefix, schema=self.schema, observer=not create)
        with closing(database):
            yield database

    @contextmanager
    def current(self) -> Iterator[Database]:
        """Open the database and make sure that this code can run its schema.

        Raises:
            DatabaseUnavailableError: It is missing, or cannot be opened or reached.
            SchemaError: Its schema is missing, behind, or ahead of this code.
        """
        with self.database() as database:
            migrate.check(database)
            yield database

    def ask(self, question: Callable[[TaskStore], Awaitable[T]], *, binds: bool = False) -> T:
        """Ask a store that is opened for this one question.

        Args:
            binds: Whether the question binds tasks to an auth context.

        Raises:
            DatabaseUnavailableError: The database is missing, or cannot be opened or reached.
            SchemaError: Its schema is missing, behind, or ahead of this code.
            BindingError: Its tasks are bound under another secret than the environment has.
            CipherError: A payload is sealed under a key that the environment has not.
        """
        self._check_file()

        async def open_and_ask() -> T:
            async with AsyncExitStack() as stack:
                with _usage():
                    opening = open_observer(self.url, options=self.options(), binds=binds)
                    store = await stack.enter_async_context(opening)
                return await question(store)

        return asyncio.run(open_and_ask())

    def _check_file(self) -> None:
        if self.file is not None and not self.file.is_file():
            raise DatabaseUnavailableError(
                f"No such database file: {self.file.absolute()}. A server makes it when it starts, "
                f"or: taskstore migrate {self.url}"
            )


def _secrets(variable: str) -> tuple[bytes, ...]:
    """Read secrets from the environment: hexadecimal digits, several with commas between them."""
    written = os.environ.get(variable, "")
    try:
        return tuple(bytes.fromhex(digits) for digits in written.split(",") if digits)
    except ValueError as problem:
        raise typer.BadParameter(f"{variable} must be hexadecimal digits.") from problem


@contextmanager
def _usage() -> Iterator[None]:
    """Report what the store refuses about its settings as wrong usage of the command."""
    try:
        yield
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
