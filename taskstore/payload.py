"""Payloads: JSON values to bytes and back; what cannot be stored is refused here, before any SQL."""

import json
import logging
import math
from collections.abc import Mapping
from numbers import Real
from types import UnionType
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from taskstore.errors import PayloadError

logger = logging.getLogger("taskstore")

MAX_DEPTH = 100
# PostgreSQL cannot index a text of more than some 2,700 bytes.
_LONGEST_TEXT_BYTES = 1000
_LARGEST_INTEGER_BITS = 13_000


def encode(
    value: JsonValue | Mapping[str, JsonValue], *, what: str = "$", limit: int | None = None, repair: bool = False
) -> bytes:
    """Encode a JSON value: compact UTF-8, keys in the order given.

    Args:
        what: Name of the value, the root of the paths in errors.
        limit: Most bytes that it may take; None is no limit.
        repair: Whether NaN and infinities become null, and lone surrogates U+FFFD, instead of being refused; the log
            says where.

    Raises:
        PayloadError: Somewhere in the value is a NaN or an infinity, a lone surrogate, a key that is no string,
            an object of another type, or nesting deeper than 100; the error names the path. Or it is too large.
    """
    refused = _refusal(value, 0)
    if refused is not None and repair:
        logger.warning("%s is repaired before it is stored: %s.", what + refused[0], refused[1])
        value = _repaired(value, 0)
        refused = _refusal(value, 0)
    if refused is not None:
        path, problem = refused
        raise PayloadError(what + path, problem)
    encoded = encode_own(value)
    if limit is not None and len(encoded) > limit:
        raise PayloadError(what, f"it takes {len(encoded)} bytes, more than the limit payload_bytes={limit}")
    return encoded


def encode_own(value: JsonValue | Mapping[str, JsonValue]) -> bytes:
    """Encode a JSON value that the store itself made, of what it checked before: to look for faults costs the most."""
    return to_json(value, fallback=dict)  # the fallback serves mappings that are no dict


def decode(payload: bytes) -> JsonValue:
    """Decode what ``encode`` made."""
    value: JsonValue = from_json(payload)
    return value


def canonical(payload: bytes | None) -> bytes | None:
    """Write an encoded value with its keys sorted, so that equal values have equal bytes."""
    return None if payload is None else json.dumps(decode(payload), sort_keys=True, ensure_ascii=False).encode()


def check_type(value: object, kind: type | UnionType, what: str) -> None:
    """Check that an argument has the type it is declared with; True and False are no numbers.

    Raises:
        TypeError: It has another one; names the argument and both types.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        declared = kind.__name__ if isinstance(kind, type) else kind
        raise TypeError(f"{what} must be {declared}, not {type(value).__name__}.")


def check_number(value: float, what: str) -> None:
    """Check that a number, numpy's too, is one that every database stores.

    Raises:
        TypeError: It is no number.
        PayloadError: It is not finite.
    """
    check_type(value, Real, what)
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        finite = False
    if not finite:
        raise PayloadError(f"$.{what}", "it is no finite number")


def check_text(value: str, what: str) -> str:
    """Return a short text that every database stores, and can index, as it is.

    Raises:
        TypeError: It is no text.
        PayloadError: It is longer than 1,000 bytes, or holds NUL, which PostgreSQL's text cannot, or a lone surrogate.
    """
    check_type(value, str, what)
    if "\x00" in value:
        raise PayloadError(what, "it contains a NUL character")
    if _has_lone_surrogate(value):
        raise PayloadError(what, "it contains a lone surrogate")
    if len(value.encode()) > _LONGEST_TEXT_BYTES:
        raise PayloadError(what, f"it takes more than {_LONGEST_TEXT_BYTES} bytes")
    return value


def _refusal(value: object, depth: int) -> tuple[str, str] | None:
    """Find what cannot be stored: the path to it and the problem, or None."""
    # Every value is looked at, so the commonest ones come first, and no union is built on the way.
    if isinstance(value, str):
        return ("", "it contains a lone surrogate") if _has_lone_surrogate(value) else None
    if isinstance(value, int):  # a larger one could be written, and never be read again
        readable = value.bit_length() <= _LARGEST_INTEGER_BITS
        return None if readable else ("", "it is an integer of more than 4,000 digits")
    if value is None or isinstance(value, float):
        return None if value is None or math.isfinite(value) else ("", f"JSON has no {value}")
    if depth == MAX_DEPTH:
        return "", f"it is nested deeper than {MAX_DEPTH} levels"
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return "", f"its key {key!r} is no string"
            if _has_lone_surrogate(key):
                return "", f"its key {key!r} contains a lone surrogate"
            if (found := _refusal(item, depth + 1)) is not None:
                return f".{key}{found[0]}", found[1]
        return None
    if isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            if (found := _refusal(item, depth + 1)) is not None:
                return f"[{position}]{found[0]}", found[1]
        return None
    return "", f"{type(value).__name__} is no JSON type"


def _repaired(value: Any, depth: int) -> Any:
    """Copy a value with what JSON or UTF-8 lacks exchanged; whatever else cannot be stored stays to be refused."""
    if isinstance(value, str):
        return _well_formed(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth == MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        items = {
            _well_formed(key) if isinstance(key, str) else key: _repaired(item, depth + 1)
            for key, item in value.items()
        }
        return items if len(items) == len(value) else value  # two keys became one: an item would be lost
    if isinstance(value, list | tuple):
        return [_repaired(item, depth + 1) for item in value]
    return value


def _well_formed(text: str) -> str:
    # By way of UTF-16, the two halves of one character find together; only those without the other one are lost.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _has_lone_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
