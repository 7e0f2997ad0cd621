"""The schema's revisions, driven from code: Alembic without an ini file, a process or a logging configuration."""

import io
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from taskstore import statements
from taskstore.database import Database
from taskstore.errors import SchemaError
from taskstore.schema import DEFAULT_PREFIX, REVISIONS

if TYPE_CHECKING:
    from alembic.config import Config

# Alembic keeps the migration that runs in module globals.
_one_at_a_time = threading.Lock()


def upgrade(url: str, *, revision: str = "head", table_prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> None:
    """Bring a database to a revision: all in one transaction, under a lock that makes other migrations wait.

    The journal mode of SQLite stays as it is; ``TaskStore.open`` sets it.

    Raises:
        DatabaseUnavailableError: The database cannot be opened or reached, or refuses the change.
    """
    with closing(Database(url, prefix=table_prefix, schema=schema, observer=True)) as database:
        upgrade_database(database, revision)


def downgrade(url: str, revision: str, *, table_prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> None:
    """Take a database back to a revision, or to ``base``, which drops every table of ours and all that is in them."""
    with closing(Database(url, prefix=table_prefix, schema=schema, observer=True)) as database:
        _run("downgrade", database, revision)


def upgrade_database(database: Database, revision: str = "head") -> None:
    """Bring an open database to a revision; see ``upgrade``."""
    if database.revision() not in (None, *REVISIONS):
        check(database)  # ahead of this code, which has nothing to add, and may be able to run it
        return
    _run("upgrade", database, revision)


def offline_sql(dialect_name: str, *, table_prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> str:
    """Write the SQL that brings an empty database to the newest revision, for an administrator to run.

    Args:
        dialect_name: ``sqlite`` or ``postgresql``.
    """
    if dialect_name not in ("sqlite", "postgresql"):
        raise ValueError(f"There are no revisions for {dialect_name!r}; use sqlite or postgresql.")
    from alembic import command

    written = io.StringIO()
    config = _config(table_prefix, schema)
    config.attributes["dialect_name"] = dialect_name
    config.output_buffer = written
    with _one_at_a_time:
        command.upgrade(config, "head", sql=True)
    return written.getvalue()


def check(database: Database) -> None:
    """Make sure that this code can run the database's schema; Alembic is not imported for it.

    Raises:
        SchemaError: There is no schema, it is behind, or it is ahead of what this code can run.
    """
    revision = database.revision()
    if revision == REVISIONS[-1]:
        return
    if revision is None:
        raise SchemaError(f"{database.label} has no taskstore tables; create them with: taskstore migrate URL.")
    if revision in REVISIONS:
        raise SchemaError(
            f"{database.label} is at revision {revision}, this code needs {REVISIONS[-1]}; "
            "bring it up to date with: taskstore migrate URL (or open with migrate=True)."
        )
    row = database.read_here(lambda transaction: transaction.row(statements.META, {"name": "oldest_code"}))
    if row is None or int(row["value"]) > len(REVISIONS):
        raise SchemaError(
            f"{database.label} is at revision {revision}, which this version of taskstore cannot run; "
            "upgrade the package."
        )


def needs_upgrade(database: Database) -> bool:
    """Tell whether there is no schema yet, or one behind this code."""
    revision = database.revision()
    return revision is None or revision in REVISIONS[:-1]


def scripts() -> Path:
    """Find the folder of env.py and versions: beside the package's modules in a wheel, at the top of a checkout."""
    package = Path(__file__).parent
    packaged = package / "alembic"
    return packaged if packaged.is_dir() else package.parent / "alembic"


def _run(direction: str, database: Database, revision: str) -> None:
    from alembic import command

    config = _config(database.prefix, database.schema)
    with _one_at_a_time, database.migration() as connection:
        config.attributes["connection"] = connection
        getattr(command, direction)(config, revision)


def _config(prefix: str, schema: str | None) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    config.attributes.update(prefix=prefix, schema=schema)
    return config
