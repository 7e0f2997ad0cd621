"""What every store promises, as tests to inherit: through its public methods alone, and on each database."""

import pytest

# Before the modules are imported, or their assertions would fail without saying why.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "binding",
            "create",
            "expiry",
            "finish",
            "idempotency",
            "inputs",
            "limits",
            "listing",
            "recovery",
            "strict_ttl",
            "waiting",
        )
    )
)

from taskstore.testing.contract.binding import BindingContract  # noqa: E402
from taskstore.testing.contract.create import CreateContract  # noqa: E402
from taskstore.testing.contract.expiry import ExpiryContract  # noqa: E402
from taskstore.testing.contract.finish import FinishContract  # noqa: E402
from taskstore.testing.contract.idempotency import IdempotencyContract  # noqa: E402
from taskstore.testing.contract.inputs import InputsContract  # noqa: E402
from taskstore.testing.contract.limits import LimitsContract  # noqa: E402
from taskstore.testing.contract.listing import ListingContract  # noqa: E402
from taskstore.testing.contract.recovery import RecoveryContract  # noqa: E402
from taskstore.testing.contract.strict_ttl import StrictTtlContract  # noqa: E402
from taskstore.testing.contract.waiting import WaitingContract  # noqa: E402


@pytest.mark.anyio
class StoreContract(
    CreateContract,
    IdempotencyContract,
    LimitsContract,
    BindingContract,
    FinishContract,
    InputsContract,
    WaitingContract,
    ListingContract,
    ExpiryContract,
    StrictTtlContract,
    RecoveryContract,
):
    """The tests that a store passes. Inherit it, and say in one fixture how your store is opened.

    ::

        pytest_plugins = ["taskstore.testing.fixtures"]  # in conftest.py


        class TestMyStore(StoreContract):
            @pytest.fixture
            def store_opener(self, database_url):
                return partial(MyStore.open, database_url)

    ``store_opener`` gives a callable that takes ``options=`` and returns an async context manager of a store, always
    on the same database within one test: other calls of it are the other server processes. A store that is no
    subclass of ``TaskStore`` has the same methods, raises the same errors, takes its time from ``options.clock``, and
    overrides the fixture ``crash`` too: from then on its process must look dead to all others.
    """

    @pytest.fixture
    def anyio_backend(self) -> str:
        """Run the coroutines on asyncio, which is what the store supports."""
        return "asyncio"
