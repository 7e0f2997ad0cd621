"""Payloads sealed at rest: a key ring, a data key for each task, AES-256-GCM.

The first key of the ring seals, every key opens. Each task has data keys of its own, derived from the ring's keys and
its id, because random nonces are safe for a bounded number of messages under one key. The associated data binds a
value to its table, column and row: a sealed value that was moved elsewhere does not open.
"""

import hashlib
import hmac
import os
from collections.abc import Sequence

from taskstore.errors import CipherError

KEY_BYTES = 32
_NONCE_BYTES = 12
# JSON never begins with this byte, so plain and sealed values can stand side by side in one table.
_SEALED = b"\x01"
_HEADER_BYTES = len(_SEALED) + 4


def check_keys(keys: Sequence[bytes]) -> None:
    """Make sure that every key of a ring is one.

    Raises:
        ValueError: A key is no bytes, has another length than 32, or was plainly not made at random.
    """
    for position, key in enumerate(keys):
        name = f"keys[{position}]"
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ValueError(f"{name} must be {KEY_BYTES} bytes, not {size}; make one with secrets.token_bytes(32).")
        # 32 random bytes hold 30 different ones on average, and fewer than 16 practically never.
        if len(set(key)) < 16 or (key.isascii() and key.decode().isprintable()):
            raise ValueError(f"{name} was not made at random; make one with secrets.token_bytes(32).")


class Cipher:
    """Seals and opens payload bytes; without keys it leaves them as they are."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        check_keys(keys)
        self._ring = {_derive(key, b"key id")[:4]: key for key in keys}
        self._first = next(iter(self._ring), None)

    def seal(self, plain: bytes, table: str, column: str, task_id: str, key: str = "") -> bytes:
        """Seal a value for its place; ``key`` is the one of an input."""
        if self._first is None:
            return plain
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(_NONCE_BYTES)
        data_key = _derive(self._ring[self._first], task_id.encode())
        sealed = AESGCM(data_key).encrypt(nonce, plain, _associated(table, column, task_id, key))
        return _SEALED + self._first + nonce + sealed

    def open(self, stored: bytes, table: str, column: str, task_id: str, key: str = "") -> bytes:
        """Open a value from its place; one that was stored before there were keys is returned as it is.

        Raises:
            CipherError: No key of the ring opens it, or it was altered or moved.
        """
        if not stored.startswith(_SEALED):
            return stored
        key_id = stored[len(_SEALED) : _HEADER_BYTES]
        if key_id not in self._ring:
            raise CipherError(column, task_id, "no key of the ring sealed it")
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce, sealed = stored[_HEADER_BYTES : _HEADER_BYTES + _NONCE_BYTES], stored[_HEADER_BYTES + _NONCE_BYTES :]
        data_key = _derive(self._ring[key_id], task_id.encode())
        try:
            return AESGCM(data_key).decrypt(nonce, sealed, _associated(table, column, task_id, key))
        except (InvalidTag, ValueError) as error:
            raise CipherError(column, task_id, "it was altered, or belongs elsewhere") from error

    def is_current(self, stored: bytes) -> bool:
        """Tell whether a value is as ``seal`` would make it now: under the first key, or plain without keys."""
        return self._first is None or stored[:_HEADER_BYTES] == _SEALED + self._first


def _associated(*place: str) -> bytes:
    return b"".join(len(part.encode()).to_bytes(4) + part.encode() for part in place)


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"taskstore cipher/" + purpose, hashlib.sha256)
