"""The ``taskstore`` command, of the extra ``cli``. Importable without it, so that it can say what is missing."""

import sys
from importlib.util import find_spec

EXIT_USAGE = 2


def main() -> None:
    """Run the command line and exit with a code; ``taskstore --help`` lists the codes."""
    if any(find_spec(name) is None for name in ("typer", "rich")):
        sys.stderr.write("The taskstore command needs typer and rich: pip install 'taskstore[cli]'\n")
        sys.exit(EXIT_USAGE)
    import taskstore.cli.directory
    import taskstore.cli.keys  # noqa: F401  both register their commands
    from taskstore.cli.commands import run

    run()
