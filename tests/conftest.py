"""What every test runs under: one torch thread, and fresh memory full of NaN where torch hands it out uninitialised."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("turbogr", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("turbogr")


@pytest.fixture(autouse=True)
def one_thread_and_poisoned_memory() -> Iterator[None]:
    """A value that is read before it was written shows up as NaN instead of as an accidental zero."""
    torch.set_num_threads(1)
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(was_on)
