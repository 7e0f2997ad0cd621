"""Whose tasks they are on stdio and in process, where no token says it: those of the local user."""

import functools
import getpass
import os
import sys

from taskstore.binding import AuthContext

if sys.platform != "win32":
    import pwd


@functools.cache
def local_user() -> AuthContext:
    """Name the user that this process runs as; not from the environment, which a parent process may change."""
    return AuthContext(issuer="local", subject=_name())


def _name() -> str:
    if sys.platform == "win32":
        return getpass.getuser()
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run as a uid without an entry
        return f"uid-{os.getuid()}"
