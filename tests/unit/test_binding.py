"""Digests, ids and cursors."""

import re

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from taskstore import AuthContext
from taskstore.binding import Binding, _derive, new_instance_id, new_task_id, notice, shorten

SECRET = bytes(range(32))
GOLDEN = {
    "auth key": "2003fa28e85d545528d23dde3075ea350127c17a908b45b902ec4c42686ee89a",
    "session": "93749aea72c970012e78b12e93e673538f2c5cf779d503071013b6ca732a1fe4",
    "outcome": "a6c9942a416b28ea82fdc756b684fc32499dc07f56275f864f9c6c714b4e25d8",
    "idempotency": "46c28b30a7414f88664b22c01be2bde8c8696ba89546eb7ba4ddc0ef7949d3e8",
    "request": "22051c3132c4ea47cc30628b1eb6649556f9eca8b48088cadc9ab33c80e4265d",
    "fingerprint": "5ee6ca04f4fecbde12bd8d299792717642643167639b25602834c83848e36e1c",
    "cursor": "Qz_YibcJpa-BR6QRRlTd_DE3IHRza19h",
    "notice": "11b40912bac82e58519af8ce0c2e556b",
}


def test_keys_are_derived_by_the_hkdf_of_rfc_5869():
    """It is written out to spare an import at every open; the library says whether it is right."""
    for secret in (SECRET, b"short but long enough", bytes(100)):
        expected = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"taskstore/auth").derive(secret)

        assert _derive(secret, b"auth") == expected


def test_digests_differ_by_purpose_and_by_secret():
    one, other = Binding(SECRET), Binding(SECRET[::-1])

    digests = [
        one.auth_key(AuthContext(subject="a")),
        other.auth_key(AuthContext(subject="a")),
        one.auth_key(AuthContext(issuer="a")),
        one.session_digest("a"),
        one.outcome_digest("a"),
        one.fingerprint,
    ]

    assert len(set(digests)) == len(digests)
    assert one.auth_key(None) == ""


def test_an_outcome_digest_tells_where_one_part_ends_and_the_next_begins():
    binding = Binding(SECRET)

    digests = {
        binding.outcome_digest("completed", b"ab", b""),
        binding.outcome_digest("completed", b"a", b"b"),
        binding.outcome_digest("completed", b"", b"ab"),
        binding.outcome_digest("completed", None, b"ab"),
        binding.outcome_digest("completed", b"ab"),
    }

    assert len(digests) == 5


def test_a_cursor_opens_only_where_and_as_it_was_sealed():
    binding = Binding(SECRET)
    cursor = binding.seal_cursor("17 tsk_a", "alice")

    tampered = [cursor[:position] + "A" + cursor[position + 1 :] for position in range(len(cursor))]
    tampered += [cursor[:position] + "!" + cursor[position:] for position in range(len(cursor) + 1)]
    positions = [f"{number} tsk_a" for number in range(1000)]  # whatever letters it happens to end with

    assert binding.open_cursor(cursor, "alice") == "17 tsk_a"
    assert [binding.open_cursor(binding.seal_cursor(each, "alice"), "alice") for each in positions] == positions
    assert binding.open_cursor(cursor, "bob") is None
    assert Binding(SECRET[::-1]).open_cursor(cursor, "alice") is None
    assert {binding.open_cursor(each, "alice") for each in tampered if each != cursor} == {None}


def test_a_shortened_id_is_useless_to_whoever_reads_the_log():
    task_id = new_task_id(1_767_225_600_000)

    shown = shorten(task_id)

    assert len(task_id) == 68
    assert task_id.startswith(shown.rstrip("…"))
    assert len(shown) < 20
    assert "\n" not in shorten("a\nb" * 20)


def test_digests_are_what_they_were_in_the_first_version():
    """They lie in databases: if one of them changed, nobody would find a task, a key or a page any more."""
    binding, auth = Binding(SECRET), AuthContext(issuer="i", subject="s", client_id="c", tenant="t")

    made = {
        "auth key": binding.auth_key(auth),
        "session": binding.session_digest("session"),
        "outcome": binding.outcome_digest("completed", b"result", None),
        "idempotency": binding.idempotency_digest("auth key", "key"),
        "request": binding.request_digest("tools/call", "report", b"{}"),
        "fingerprint": binding.fingerprint,
        "cursor": binding.seal_cursor("17 tsk_a", "scope"),
        "notice": notice("tsk_a"),
    }

    assert made == GOLDEN


def test_ids_are_of_the_length_and_in_the_order_that_they_promise():
    """40 bytes of a task id leave no padding, of which 34 are random; an instance id holds 128 random bits."""
    earlier, later = new_task_id(1_767_225_600_000), new_task_id(1_767_225_600_001)

    assert earlier[:4] == later[:4] == "tsk_"
    assert earlier < later
    assert len(new_instance_id()) == len("ins_") + 32
    assert new_instance_id().startswith("ins_")
    assert (shorten("x" * 18), shorten("x" * 19)) == ("x" * 18, "x" * 18 + "…")


@pytest.mark.parametrize(
    ("components", "complaint"),
    [
        ({}, "AuthContext needs at least one component; pass auth=None for no auth context."),
        ({"subject": ""}, "AuthContext.subject is empty; leave it out, or give the requestor's subject."),
        ({"subject": "a", "tenant": 7}, "AuthContext.tenant must be a string or None, not int."),
    ],
)
def test_a_requestor_without_a_name_is_none(components, complaint):
    """A token without the claim that an adapter reads must not make everybody the same user."""
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}$"):
        AuthContext(**components)


def test_half_a_character_in_a_name_makes_another_requestor():
    """Tokens are foreign input: a lone surrogate in one must neither break a call nor make two users one."""
    binding = Binding(SECRET)

    keys = {binding.auth_key(AuthContext(subject=subject)) for subject in ("\ud800", "\udbff", "?", "\ufffd")}

    assert len(keys) == 4
