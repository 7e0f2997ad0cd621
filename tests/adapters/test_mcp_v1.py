"""The adapter for the SDK 1.x, in an environment of its own: mcp 1.x cannot be installed beside 2.x."""

import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.environments import PeerUnavailableError, python_of
from taskstore.testing import PostgresServer
from taskstore.testing.postgres import URL_VARIABLE

ROOT = Path(__file__).parents[2]
PACKAGES = ("--editable", f"{ROOT}[mcp1,postgres]", "mypy>=1.15", "pytest>=8.3")
MODULES = sorted((ROOT / "taskstore" / "adapters").glob("mcp_v1*.py"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with this checkout and the SDK 1.x; else skipped at home and failed in CI."""
    try:
        return python_of("mcp1", PACKAGES, install=True, say=print, cache=tmp_path_factory.mktemp("environments"))
    except PeerUnavailableError as problem:
        if os.environ.get("CI"):
            pytest.fail(str(problem))
        pytest.skip(str(problem))


def run(python: str, *arguments: str | Path, **environment: str) -> None:
    """Run a module of Python in the checkout; when it fails, what it said is in the error."""
    ran = subprocess.run(
        [python, "-m", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout


def test_the_adapter_passes_its_tests_on_both_databases(
    python: str, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """They stand in a folder of their own, which the main run cannot even import."""
    report = tmp_path / "report.xml"

    run(
        python,
        *("pytest", "-p", "no:cacheprovider", "-q", "--junitxml", report, ROOT / "tests" / "mcp1"),
        **{URL_VARIABLE: postgres_server.url},
    )

    (suite,) = ElementTree.parse(report).getroot()
    assert int(suite.attrib["tests"]) > 0
    assert suite.attrib["skipped"] == "0"


def test_the_adapter_has_right_types(python: str, tmp_path: Path) -> None:
    """The main run of mypy has the SDK 2.x, and leaves these modules out."""
    assert MODULES

    run(python, "mypy", "--cache-dir", tmp_path, *MODULES)
