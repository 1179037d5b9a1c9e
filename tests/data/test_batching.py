"""Which users stand in which batch of an epoch."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_store import tiny_store
from turbogr.config import SplitConfig, TrainConfig
from turbogr.data.batching import EpochPlan, plan_epoch, training_pairs
from turbogr.data.split import make_split
from turbogr.errors import DataError

PAIRS = st.lists(st.integers(0, 30), min_size=1, max_size=60).filter(any)


def batches(plan: EpochPlan) -> list[list[int]]:
    return [plan.batches(number, number + 1).users.tolist() for number in range(len(plan))]


@given(pairs=PAIRS, config=st.sampled_from((TrainConfig(batch_users=4), TrainConfig(batch_tokens=40))))
def test_every_user_with_a_pair_stands_once_in_an_epoch(pairs: list[int], config: TrainConfig) -> None:
    """Catches: users lost at the end of an epoch, users without a pair in a batch, an empty batch."""
    found = batches(plan_epoch(np.array(pairs), 3, config))
    assert sorted(user for batch in found for user in batch) == [user for user, n in enumerate(pairs) if n]
    assert all(found)


@given(pairs=PAIRS, budget=st.integers(1, 50))
def test_a_batch_keeps_to_its_tokens_and_takes_all_that_fit(pairs: list[int], budget: int) -> None:
    """Catches: a budget overrun by the last user, a long user mixed with others, batches left half empty."""
    found = batches(plan_epoch(np.array(pairs), 0, TrainConfig(batch_tokens=budget)))
    for batch, following in zip(found, [*found[1:], None], strict=True):
        tokens = sum(pairs[user] for user in batch)
        assert tokens <= budget or len(batch) == 1
        assert following is None or tokens + pairs[following[0]] > budget


def test_batches_of_users_are_full_but_for_the_last() -> None:
    plan = plan_epoch(np.ones(10, np.int64), 0, TrainConfig(batch_users=4))
    assert [len(batch) for batch in batches(plan)] == [4, 4, 2] and len(plan) == 3
    assert len(plan_epoch(np.ones(8, np.int64), 0, TrainConfig(batch_users=4))) == 2


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    """Catches: one order for all epochs, or one that a resumed run would not find again."""
    pairs = np.arange(100) % 9
    one = batches(plan_epoch(pairs, 2, TrainConfig(seed=5)))
    np.random.seed(0)
    assert batches(plan_epoch(pairs, 2, TrainConfig(seed=5))) == one
    assert batches(plan_epoch(pairs, 3, TrainConfig(seed=5))) != one
    assert batches(plan_epoch(pairs, 2, TrainConfig(seed=6))) != one


def test_no_pair_at_all_is_said() -> None:
    with pytest.raises(DataError, match="no user has two training events under this split"):
        plan_epoch(np.zeros(3, np.int64), 0, TrainConfig())


def test_a_user_gives_a_pair_less_than_training_events_up_to_the_models_history(tmp_path: Path) -> None:
    """Catches: the test event counted, a negative count for users without training events."""
    store = tiny_store(tmp_path / "s", [[1], [1, 2], [1, 2, 3], list(range(9))])
    split = make_split(store, SplitConfig())
    assert training_pairs(store, split, 5).tolist() == [0, 0, 1, 5]
    split = make_split(store, SplitConfig(protocol="leave-one-out-validation"))
    assert training_pairs(store, split, 50).tolist() == [0, 0, 0, 6]
