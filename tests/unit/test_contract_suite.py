"""The contract as users inherit it: in a project that is not ours, with nothing configured but the plugin."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.unit.outside import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "test_counting_store.py"

LEAKY = """
from functools import partial

import pytest

from taskstore import TaskStore
from taskstore.testing import StoreContract

pytest_plugins = ["taskstore.testing.fixtures"]


class LeakyStore(TaskStore):
    async def get_task(self, task_id, *, auth):
        return await self.operator.get_task(task_id)


class TestLeakyStore(StoreContract):
    @pytest.fixture
    def store_opener(self, database_url):
        return partial(LeakyStore.open, database_url)
"""


def run_pytest(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the tests of a folder as a project of its own, on SQLite."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", str(folder), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_store_of_ones_own_passes_by_inheriting(tmp_path: Path) -> None:
    """The example is what users copy; it runs as it stands, and tests the store that it says."""
    shutil.copy(EXAMPLE, tmp_path)

    ran = run_pytest(tmp_path, "-k", "sqlite")

    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout
    assert "warning" not in ran.stdout


def test_a_store_that_breaks_a_promise_fails_and_hears_which(tmp_path: Path) -> None:
    """A contract that passes everything would be worth nothing; and a failure must show the values compared."""
    (tmp_path / "test_leaky.py").write_text(LEAKY)

    ran = run_pytest(tmp_path, "-k", "sqlite and only_the_same_auth_context_finds_a_task")

    assert ran.returncode == 1
    assert (
        "FAILED test_leaky.py::TestLeakyStore::test_only_the_same_auth_context_finds_a_task[sqlite-bob-" in ran.stdout
    )
    assert "DID NOT RAISE" in ran.stdout
    assert "4 failed, 2 passed" in ran.stdout


def test_a_clock_and_a_crash_need_no_pytest() -> None:
    """Who uses another test runner has them all the same."""
    said = run_python("import sys; from taskstore.testing import ManualClock, crash; print('pytest' in sys.modules)")

    assert said.stdout == "False\n", said.stderr
