"""What importing the package does, and which of its modules may know of which."""

import ast
from pathlib import Path

import pytest

import taskstore
from tests.unit.outside import run_python

PACKAGE = Path(taskstore.__file__).parent

# The rule: a module imports only what stands before it. A name of a folder stands for all that is in it.
ORDER = (
    "clock",
    "binding",
    "task",
    "errors",
    "payload",
    "cipher",
    "schema",
    "statements",
    "operations",
    "dialects",
    "lanes",
    "database",
    "migrate",
    "waiting",
    "instances",
    "options",
    "recovery",
    "scheduler",
    "handle",
    "rows",
    "store",
    "sync",
    "runner",
    "",  # taskstore itself, the public names
    "testing",
    "adapters",
    "cli",
    "__main__",
)

SDKS = {"fastmcp", "mcp", "mcp_types"}


def modules() -> dict[str, Path]:
    """Map the dotted name of every module, without the package's own, to its file."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in names.items() if not name.startswith("alembic")}


MODULES = modules()


def place(name: str) -> int:
    """Return where a module stands in the order."""
    return ORDER.index(name.split(".", maxsplit=1)[0])


def imports(name: str, *, deferred: bool = True) -> set[str]:
    """List the full name of everything a module imports; without ``deferred``, only what importing it imports."""
    tree: list[ast.AST] = [ast.parse(MODULES[name].read_text(encoding="utf-8"))]
    found: set[str] = set()
    while tree:
        node = tree.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively; every import names its whole path"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                found.add(member if member.removeprefix("taskstore.") in MODULES else str(node.module))
        elif deferred or not is_deferred(node):
            tree.extend(ast.iter_child_nodes(node))
    return found


def is_deferred(node: ast.AST) -> bool:
    """Tell whether what is inside does not run at import: a function, or what only type checkers see."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
        return node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def own_imports(name: str, *, deferred: bool = True) -> set[str]:
    """List the modules of the package that a module imports."""
    return {
        found.removeprefix("taskstore").removeprefix(".")
        for found in imports(name, deferred=deferred)
        if found == "taskstore" or found.startswith("taskstore.")
    } - {name}


def test_every_module_has_its_place_in_the_order() -> None:
    """A module that the rule does not know could import anything."""
    assert {name.split(".")[0] for name in MODULES} <= set(ORDER)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_only_to_what_stands_before(name: str) -> None:
    """So each module can be read, and tested, knowing only those before it."""
    later = {found for found in own_imports(name) if place(found) > place(name)}

    assert later == set()


def test_no_imports_go_in_a_circle() -> None:
    """Also not inside a folder, where the order says nothing; a circle works or not by who is imported first."""
    graph = {name: own_imports(name, deferred=False) for name in MODULES}

    while leaves := [name for name, found in graph.items() if not found & graph.keys()]:
        for name in leaves:
            del graph[name]

    assert graph == {}


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(("adapters", "cli.demo"))])
def test_only_adapters_know_an_sdk(name: str) -> None:
    """The store outlives the SDKs, and runs without any of them; the command's demo is a server and its client."""
    assert {found.split(".")[0] for found in imports(name)} & SDKS == set()


@pytest.mark.parametrize("name", [name for name in MODULES if place(name) <= place("")])
def test_the_core_needs_no_extra_to_be_imported(name: str) -> None:
    """What an extra brings is imported where it is used, inside a function, with an error that names the extra."""
    at_once = {found.split(".")[0] for found in imports(name, deferred=False)}

    assert at_once & {"alembic", "apscheduler", "cryptography", "opentelemetry", "psycopg", "rich", "typer"} == set()


IMPORT_UNDER_WATCH = """
import sys, threading
before = set(sys.modules)
threads = threading.active_count()
opened = []

def hook(event, args):
    if event == "open":
        mode = args[1]
        if isinstance(mode, str) and set(mode) & set("wax+"):
            opened.append(("open", args[0]))
    elif event.startswith(("sqlite3.", "socket.", "subprocess.", "os.fork", "os.system", "os.mkdir", "os.remove")):
        opened.append((event, args))

sys.dont_write_bytecode = True
sys.addaudithook(hook)
import taskstore
print(*opened, sep="\\n", end="")
assert threading.active_count() == threads
"""

LISTED = """
import sys
import taskstore
print(*sys.modules)
"""


def test_importing_opens_nothing_and_starts_nothing() -> None:
    """Seen elsewhere: an import made a database, and a command that only wanted the version hung on a lock.

    An event loop would show too: it makes a pair of sockets.

    Case 29, omnilib/aiosqlite#369, PrefectHQ/marvin#1255: a process hung at its exit, and an import did the work of
    a database.
    """
    said = run_python(IMPORT_UNDER_WATCH)

    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


MISSING_DRIVER = """
import sys
sys.modules["psycopg"] = None
from taskstore import DatabaseUnavailableError, SyncTaskStore
try:
    SyncTaskStore.open("postgresql://localhost/tasks").__enter__()
except DatabaseUnavailableError as error:
    print(error)
"""


def test_a_missing_driver_is_named_with_the_extra_that_brings_it() -> None:
    """Whoever changes the URL to PostgreSQL hears what to install, and not of a module.

    Case 59, akougkas/zulipchat-mcp PR#11, PrefectHQ/fastmcp#864: authors of synchronous tools were shut out.
    """
    said = run_python(MISSING_DRIVER)

    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == "PostgreSQL needs the driver psycopg: pip install 'taskstore[postgres]'.\n"


def test_importing_loads_no_more_than_the_store_needs_itself() -> None:
    """Each of these costs a command line or a cold start tens of milliseconds, or need not be installed at all."""
    loaded = set(run_python(LISTED).stdout.split())

    heavy = {"alembic", "apscheduler", "cryptography", "psycopg", "pytest", "rich", "typer"}
    assert "taskstore.store" in loaded
    assert loaded & (heavy | SDKS) == set()


def test_no_module_prints_when_it_is_imported() -> None:
    """On stdio, stdout is the protocol."""
    importable = [name for name in MODULES if place(name) <= place("testing")]
    script = "\n".join(f"import taskstore.{name}" if name else "import taskstore" for name in importable)

    said = run_python(script)

    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_the_package_is_typed() -> None:
    """Without the marker, type checkers take everything for Any."""
    assert (PACKAGE / "py.typed").exists()
