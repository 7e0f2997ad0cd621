"""Payloads: what round-trips, and what is refused by the path of the value."""

from types import MappingProxyType

import pytest

from taskstore import PayloadError
from taskstore.payload import MAX_DEPTH, check_text, decode, encode


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        2**53 + 1,
        2**64,
        -(2**70),
        10**3900,
        0.1,
        1e22,
        -0.0,
        "\x00",
        "\\u0000",
        "👩‍🚀",
        {"": {"\x00": None}},
        nested(MAX_DEPTH),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_json_value_round_trips(value):
    assert decode(encode(value)) == value


def test_the_order_of_keys_is_kept_and_nothing_is_escaped_twice():
    value = {"z": '"', "a": "\\", "m": "\\u0000 \n"}

    assert list(decode(encode(value)).items()) == list(value.items())


def test_tuples_and_read_only_mappings_are_taken_as_arrays_and_objects():
    assert decode(encode(MappingProxyType({"a": (1, MappingProxyType({}))}))) == {"a": [1, {}]}


@pytest.mark.parametrize(
    ("value", "path", "problem"),
    [
        (float("nan"), "$", "nan"),
        ({"a": [1, {"b": float("-inf")}]}, "$.a[1].b", "-inf"),
        ({"a": ["ok", "\ud800"]}, "$.a[1]", "surrogate"),
        ({"\udfff": 1}, "$", "key"),
        ({"a": {1: 2}}, "$.a", "no string"),
        ([b"bytes"], "$[0]", "bytes"),
        ({"a": object()}, "$.a", "object"),
        ({"a": {1, 2}}, "$.a", "set"),
        ([10**4301], "$[0]", "4,000 digits"),
        (nested(MAX_DEPTH + 1), "$" + "[0]" * MAX_DEPTH, "deeper"),
    ],
    ids=[
        "nan",
        "infinity",
        "surrogate",
        "surrogate key",
        "number key",
        "bytes",
        "object",
        "set",
        "long integer",
        "depth",
    ],
)
def test_what_is_no_json_is_refused_by_its_path(value, path, problem):
    """A whole outcome must not be lost, or silently changed, for one value in it."""
    with pytest.raises(PayloadError, match=problem) as refused:
        encode(value)

    assert refused.value.path == path


def test_a_value_that_contains_itself_is_refused():
    value: list[object] = []
    value.append(value)

    with pytest.raises(PayloadError, match="deeper"):
        encode(value)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
def test_a_short_text_that_not_every_database_stores_is_refused(text):
    with pytest.raises(PayloadError, match=r"\$\.name"):
        check_text(text, "$.name")
