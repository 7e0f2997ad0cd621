"""docs/requirements.md names, for each requirement, code and tests; none of it may go stale."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = [
    f"{source}-{number:02}" for source, last in (("T25", 49), ("X26", 38), ("C", 22)) for number in range(1, last + 1)
]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| (T25|X26|C)-", line)
]


def references(cell: str) -> list[str]:
    """Return what a cell names: file, two colons, and a name in it."""
    return [reference for reference in re.findall(r"`([^`]*)`", cell) if "::" in reference]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Read the names that a file defines; those of a class with its own name in front.

    The file is not imported: of the two SDKs, only one can be installed.
    """
    return frozenset(defined(ast.parse(path.read_text(encoding="utf-8")).body))


def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)):
                yield prefix + name.id


def test_every_requirement_has_one_row() -> None:
    """A requirement that nobody wrote down is one that nobody keeps."""
    assert [row[0].removeprefix("| ") for row in ROWS] == REQUIREMENTS


@pytest.mark.parametrize("row", ROWS, ids=REQUIREMENTS)
def test_what_a_row_names_exists(row: list[str]) -> None:
    """Code and tests are renamed; the table would go on naming what was there once."""
    _, _, code, tests = row

    for reference in references(code):
        file, name = reference.split("::")
        assert name in names_in(ROOT / "taskstore" / file), reference
    for reference in references(tests):
        file, name = reference.split("::")
        folder = "taskstore" if file.startswith("testing/") else "tests"
        assert name.startswith("test_"), reference
        assert name in {each.rpartition(".")[2] for each in names_in(ROOT / folder / file)}, reference


@pytest.mark.parametrize("row", ROWS, ids=REQUIREMENTS)
def test_a_row_has_code_and_tests_or_says_why_not(row: list[str]) -> None:
    """An empty cell would look as if somebody had forgotten it, and perhaps somebody had."""
    _, required, code, tests = row

    assert required.endswith(".")
    assert (references(code) and references(tests)) or re.fullmatch(r"(Not used|Nothing of).*\.", tests.rstrip(" |"))


def test_a_test_names_no_requirement_that_there_is_not() -> None:
    """A misspelled number would prove nothing."""
    named = {
        number
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__)
        for number in re.findall(r"\b(?:T25|X26|C)-\d\d\b", path.read_text(encoding="utf-8"))
    }

    assert named <= set(REQUIREMENTS)
