"""The command line as a module: ``python -m taskstore``."""

from taskstore.cli import main

main()
