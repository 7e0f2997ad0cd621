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


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (float("nan"), None),
        ({"a": [1, {"b": float("-inf")}], "c": (float("inf"),)}, {"a": [1, {"b": None}], "c": [None]}),
        ({"a": ["x\ud800y", "ok"]}, {"a": ["x\ufffdy", "ok"]}),
        ({"a\udfff": 1}, {"a\ufffd": 1}),
        ("\ud800", "\ufffd"),
        ("\udc00\ud800", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),
        ({"a": "\\ud800", "b": "\ufffd"}, {"a": "\\ud800", "b": "\ufffd"}),
    ],
    ids=ascii,
)
def test_on_request_what_json_lacks_is_repaired_and_the_log_says_where(value, stored, caplog):
    """A tool that cannot be changed may rather lose a number than its whole outcome."""
    encoded = encode(value, what="$.result", repair=True)

    assert decode(encoded) == stored
    assert ("$.result" in caplog.text) == (value != stored)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (dict.fromkeys(("\ud800", "\ufffd")), "key"),
        ({"a": float("nan"), "b": object()}, "object"),
        ({1: float("nan")}, "no string"),
        ([float("nan"), nested(MAX_DEPTH + 1)], "deeper"),
    ],
    ids=["keys that would become one", "object", "number key", "depth"],
)
def test_what_no_repair_can_keep_is_refused_all_the_same(value, problem):
    with pytest.raises(PayloadError, match=problem):
        encode(value, repair=True)


def test_a_value_that_contains_itself_is_refused():
    value: list[object] = []
    value.append(value)

    for repair in (False, True):
        with pytest.raises(PayloadError, match="deeper"):
            encode(value, repair=repair)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
def test_a_short_text_that_not_every_database_stores_is_refused(text):
    with pytest.raises(PayloadError, match=r"\$\.name"):
        check_text(text, "$.name")
