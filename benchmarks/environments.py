"""Python environments for peers, whose dependencies are not ours: made once, kept in a cache folder."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "benchmarks"


class PeerUnavailableError(Exception):
    """A peer cannot run here; the message says why, and how to install it by hand."""


def python_of(
    name: str, requirements: tuple[str, ...], *, install: bool, say: Callable[[str], None], cache: Path | None = None
) -> str:
    """Return the interpreter that has a peer's packages; at first its environment is made, which takes a minute.

    Args:
        requirements: Pinned; none means this interpreter.
        install: Whether an environment that is missing may be made.
        cache: Folder of the environments; None is ``CACHE``.

    Raises:
        PeerUnavailableError: The environment is missing and may not or could not be made.
    """
    if not requirements:
        return sys.executable
    # The same SQLAlchemy on both sides, so that the stores are compared and not its versions.
    wanted = [*requirements, f"SQLAlchemy=={version('SQLAlchemy')}"]
    mark = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    folder = (cache or CACHE) / f"{name}-{mark}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.exists():
        return str(python)
    packages = " ".join(f"'{each}'" for each in wanted)
    by_hand = (
        f"Install it by hand: {sys.executable} -m venv {folder} && {python} -m pip install {packages} && touch {ready}"
    )
    if not install:
        raise PeerUnavailableError(f"it is not installed, and --no-install was given. {by_hand}")
    say(f"Installing {', '.join(requirements)} for {name} into {folder} ...")
    shutil.rmtree(folder, ignore_errors=True)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted],
    ):
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if ran.returncode != 0:
            last = ran.stdout.strip().splitlines()[-3:] or [f"exit code {ran.returncode}"]
            raise PeerUnavailableError(f"its installation failed: {' / '.join(last)} {by_hand}")
    ready.touch()
    return str(python)
