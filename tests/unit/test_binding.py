"""Digests, ids and cursors."""

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from taskstore import AuthContext
from taskstore.binding import Binding, _derive, new_task_id, shorten

SECRET = bytes(range(32))


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

    assert binding.open_cursor(cursor, "alice") == "17 tsk_a"
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
