"""Settings are checked when they are made, and the error names the setting."""

from datetime import timedelta

import pytest

from taskstore import StoreOptions

NOTHING, SECOND = timedelta(0), timedelta(seconds=1)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"durability": "none"}, "durability"),
        ({"journal": "memory"}, "journal"),
        ({"lease": NOTHING}, "lease"),
        ({"heartbeat": -SECOND}, "heartbeat"),
        ({"heartbeat": timedelta(seconds=11)}, "a third of the lease"),
        ({"max_ttl": -SECOND}, "max_ttl"),
        ({"min_retention": -SECOND}, "min_retention"),
        ({"default_ttl": None}, "must not exceed max_ttl"),
        ({"default_ttl": timedelta(days=31)}, "must not exceed max_ttl"),
        ({"binding_secret": b""}, "at least 16 bytes"),
        ({"table_prefix": "x; DROP TABLE y"}, "table_prefix"),
        ({"table_prefix": "x" * 30}, "table_prefix"),
        ({"schema": 'a"b'}, "schema"),
        ({"payload_policy": "drop"}, "payload_policy"),
        ({"recovery_interval": NOTHING}, "recovery_interval"),
        ({"sweep_interval": NOTHING}, "sweep_interval"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(settings, names):
    with pytest.raises(ValueError, match=names):
        StoreOptions(**settings)


def test_a_secret_does_not_show_in_the_representation():
    """Options end up in logs."""
    assert "hidden" not in repr(StoreOptions(binding_secret=b"hidden" * 4))


def test_the_defaults_are_those_that_the_documentation_promises():
    """Whoever embeds the store relies on them; a change is one for the changelog."""
    options, limits = StoreOptions(), StoreOptions().limits

    assert (options.lease, options.heartbeat) == (30 * SECOND, 10 * SECOND)
    assert (limits.live_tasks, limits.stored_tasks, limits.reads_per_minute) == (None, None, None)
    assert (limits.payload_bytes, limits.page_size) == (16 * 2**20, 1000)
