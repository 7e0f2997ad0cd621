"""What users install: the wheel, also when it is built from the sdist, holds all that a store needs to open."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]

OPEN_A_STORE = """
import asyncio, sys
from pathlib import Path
import taskstore
from taskstore import AuthContext, TaskStore, migrate

async def main():
    async with TaskStore.open("sqlite:///tasks.db") as store:
        alice = AuthContext(subject="alice")
        task = await store.create_task(auth=alice)
        await store.handle(task).complete("done")
        print((await store.get_outcome(task.task_id, auth=alice)).result)

asyncio.run(main())
print(Path(taskstore.__file__).parent)
print(migrate.scripts())
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a program to its end and return what it printed; what it complained of is in the error."""
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", folder, SOURCE, cwd=folder)
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module", params=["checkout", "sdist"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout as a release is, and from the sdist as a distributor does."""
    folder = tmp_path_factory.mktemp("wheel")
    source = SOURCE
    if request.param == "sdist":
        with tarfile.open(request.getfixturevalue("sdist")) as archive:
            archive.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_the_revisions_and_the_types(wheel: Path) -> None:
    """Without the revisions no database can be made; without the marker no type checker looks at the package."""
    names = set(zipfile.ZipFile(wheel).namelist())

    revisions = {f"alembic/versions/{path.name}" for path in (SOURCE / "alembic" / "versions").glob("*.py")}
    assert "alembic/versions/0001_first.py" in revisions
    wanted = {"py.typed", "alembic/env.py", "alembic/script.py.mako", "adapters/mcp_v2.py", *revisions}
    assert {f"taskstore/{name}" for name in wanted} <= names


def test_a_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    """Tests that land in site-packages would be everybody's module "tests", and "alembic" would shadow Alembic."""
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0].split("-")[0] for name in names} == {"taskstore"}
    assert [name for name in names if "__pycache__" in name or name == "taskstore/alembic/__init__.py"] == []


def test_an_sdist_holds_what_it_takes_to_test_it(sdist: Path) -> None:
    """Distributors run the tests on their own builds."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"pyproject.toml", "LICENSE", "README.md", "taskstore/py.typed", "alembic/env.py"} <= names
    assert {"tests/conftest.py", "tests/unit/test_migrate.py", "tests/packaging/test_wheel.py"} <= names
    assert [name for name in names if name.endswith((".db", ".pyc"))] == []


def test_a_store_opens_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """Opening runs the revisions, which the installed package must find in itself, wherever it is started from."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    run(sys.executable, *install, "--target", site, wheel, cwd=elsewhere)

    printed = run(sys.executable, "-c", OPEN_A_STORE, cwd=elsewhere, PYTHONPATH=str(site))

    assert printed.splitlines() == ["done", f"{site}/taskstore", f"{site}/taskstore/alembic"]
    assert [path.name for path in elsewhere.iterdir()] == ["tasks.db"]
