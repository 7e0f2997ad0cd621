"""Fail points: places in the package where the death of the process matters.

In the package a fail point is a comment on a line of its own, ``# fail point: NAME``, so without this module there is
nothing to run. ``install`` makes the package's modules compile with a call in that line's place; ``arm`` says what
happens when one of them is reached.
"""

import re
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import taskstore as package_without_points

_COMMENT = re.compile(r"^([ ]*)# fail point: ([a-z-]+)$", re.MULTILINE)
_FOLDER = Path(package_without_points.__file__).parent

NAMES: tuple[str, ...] = tuple(
    sorted(name for path in _FOLDER.rglob("*.py") for _, name in _COMMENT.findall(path.read_text(encoding="utf-8")))
)
"""Every fail point of the package."""

_lock = threading.Lock()
_armed: dict[str, tuple[int, Callable[[], None]]] = {}


def arm(name: str, after: int, act: Callable[[], None]) -> None:
    """Act the ``after``-th time that a point is reached, on the thread that reaches it; once."""
    assert name in NAMES, f"no fail point is named {name}; there are {', '.join(NAMES)}"
    _armed[name] = (after, act)


def reach(name: str) -> None:
    """Note that a point is reached; the package calls it once ``install`` has run."""
    if name not in _armed:
        return
    with _lock:
        left, act = _armed[name]
        if left > 1:
            _armed[name] = (left - 1, act)
            return
        del _armed[name]
    act()


def install() -> None:
    """Import the package anew, with its fail points; the process must not have opened a store yet."""
    for name in [name for name in sys.modules if name == "taskstore" or name.startswith("taskstore.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        return compile(_COMMENT.sub(r'\1_reach_fail_point("\2")', source), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_reach_fail_point"] = reach
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "taskstore":
            return None
        found = PathFinder.find_spec(fullname, path, target)  # type: ignore[arg-type]
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = _Loader(found.loader.name, str(found.loader.path))
        return found
