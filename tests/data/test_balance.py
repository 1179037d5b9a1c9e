"""Users onto ranks: every one once, equal cost, the token limit held, few tokens moved."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.instruction_sets import runnable
from turbogr.data.balance import UserCost, imbalance, largest_first, moved_tokens_bound, partition, rebalance
from turbogr.ops import native
from turbogr.ops.partition import Goal, partition_users

COST = UserCost(30.0 * 1024 * 1024, 14.0 * 1024)
lengths = hnp.arrays(np.int64, st.integers(0, 60), elements=st.integers(1, 300))
few_lengths = hnp.arrays(np.int64, st.integers(1, 7), elements=st.integers(1, 30))
needs_compiled = pytest.mark.skipif(
    not runnable() or native.rejects("partition")(native.torch.device("cpu")) is not None, reason="not compiled here"
)


def sums(part: np.ndarray, values: np.ndarray, ranks: int) -> np.ndarray:
    return np.bincount(part, values, ranks)


def drawn(users: int, cap: int, seed: int = 0) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(8, 1, users).astype(np.int64) + 1, cap)


def test_the_cost_counts_causal_pairs() -> None:
    """Catches: a cost of the full square, or of L^2 / 2 without the diagonal."""
    assert UserCost(3.0, 2.0)(np.array([0, 1, 4])).tolist() == [0.0, 5.0, 32.0]


def test_imbalance_is_the_spread_over_the_largest() -> None:
    """Catches: another denominator, and a division by zero where no rank has work."""
    assert imbalance(np.array([4.0, 3.0, 2.0])) == 0.5
    assert imbalance(np.zeros(3)) == 0.0


@given(lengths, st.integers(1, 9), st.sampled_from([0, 1, 400, 3000]))
def test_every_user_is_on_one_rank(users: np.ndarray, ranks: int, limit: int) -> None:
    """Catches: a user that is lost in an exchange or that fits nowhere, fewer users than ranks, none at all."""
    part = partition(COST(users), users, ranks, limit)
    assert part.dtype == np.int64 and part.shape == users.shape
    assert ((part >= 0) & (part < ranks)).all()
    assert (part == partition(COST(users), users, ranks, limit)).all()


@given(lengths, st.integers(1, 9))
def test_no_rank_gets_above_a_limit_that_leaves_room_for_one_more_user(users: np.ndarray, ranks: int) -> None:
    """Catches: a limit given up, or passed by an exchange, where a partition by tokens alone would hold it."""
    limit = int(users.sum() / ranks) + int(users.max(initial=1)) + 1
    assert sums(partition(COST(users), users, ranks, limit), users, ranks).max() <= limit


def test_a_limit_without_slack_is_held_where_equal_tokens_exist() -> None:
    """Catches: a limit that is given up as soon as the partition by cost finds no room."""
    users, square = np.array([1, 32, 19, 21, 25, 12, 39, 3, 11, 15]), UserCost(0.0, 1.0)
    assert sums(partition(square(users), users, 3), users, 3).max() > 60
    assert sums(partition(square(users), users, 3, 60), users, 3).max() <= 60


@given(lengths, st.integers(1, 9))
def test_refinement_is_never_worse_than_largest_first_beyond_its_goal(users: np.ndarray, ranks: int) -> None:
    """Catches: an exchange that widens the spread."""
    costs = COST(users)
    plain = sums(largest_first(costs, ranks), costs, ranks)
    ours = sums(partition(costs, users, ranks), costs, ranks)
    assert ours.max() <= max(plain.max(), costs.sum() / ranks * 1.0001) * (1 + 1e-6)


@pytest.mark.parametrize(("cap", "most"), [(16384, 5e-4), (8192, 5e-4), (4096, 1.5e-3)])
def test_long_histories_are_balanced_to_a_fraction_of_largest_first(cap: int, most: float) -> None:
    """Catches: a refinement that is off."""
    users = drawn(64 * 32, cap)
    costs = COST(users)
    part = partition(costs, users, 64)
    assert imbalance(sums(part, costs, 64)) <= most
    assert imbalance(sums(part, costs, 64)) < imbalance(sums(largest_first(costs, 64), costs, 64)) / 2


def test_tokens_get_nearer_while_the_cost_stays_equal() -> None:
    """Catches: the second aim given up, or reached at the price of the first."""
    users = drawn(16 * 32, 16384)
    costs = COST(users)
    part, plain = partition(costs, users, 16), largest_first(costs, 16)
    assert np.ptp(sums(part, users, 16)) < np.ptp(sums(plain, users, 16)) / 2
    assert imbalance(sums(part, costs, 16)) <= 5e-4


def test_largest_first_is_the_greedy_rule() -> None:
    """Catches: a baseline that is refined too, or that breaks ties otherwise."""
    assert largest_first(np.array([1.0, 5.0, 4.0, 3.0, 3.0]), 2).tolist() == [1, 0, 1, 1, 0]


@needs_compiled
@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12),
    hnp.arrays(np.int64, st.integers(0, 80), elements=st.integers(0, 1 << 36)),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_compiled_partition_is_the_reference_to_the_last_user(ranks: int, costs, limited: bool, random) -> None:
    """Catches: machines of one run, with and without a compiler, that plan different ranks for one user."""
    costs = -np.sort(-costs)
    tokens = np.array([random.choice([1, 7, 300]) for _ in costs], np.int64)
    goal = Goal(random.randint(0, 1 << 20), random.randint(0, 9), random.randint(0, 200_000), random.randint(0, 50_000))
    limit = int(tokens.sum() / ranks * 1.2) + 1 if limited else 0
    start = np.array([random.randrange(ranks) for _ in costs], np.int64) if random.random() < 0.3 else None
    answers = [partition_users(costs, tokens, ranks, limit, goal, start, name) for name in ("cpu", "reference")]
    assert (answers[0] == answers[1]).all()


@settings(max_examples=60, deadline=None)
@given(few_lengths, st.integers(2, 3), st.randoms(use_true_random=False))
def test_no_assignment_moves_fewer_tokens_than_the_bound(users: np.ndarray, ranks: int, random) -> None:
    """Catches: a bound that a cleverer exchange goes below, which would make any figure beside it look good."""
    owners = np.array([random.randrange(ranks) for _ in users])
    costs = COST(users)
    every = [np.array(part) for part in itertools.product(range(ranks), repeat=len(users))]
    heaviest = np.array([sums(part, costs, ranks).max() for part in every])
    moved = np.array([users[part != owners].sum() for part in every])
    for most in {*np.quantile(heaviest, [0, 0.1, 0.5]).tolist(), sums(owners, costs, ranks).max()}:
        least = moved[heaviest <= most * (1 + 1e-12)].min(initial=1 << 40)
        quick = moved_tokens_bound(costs, users, owners, ranks, most, exact=False)
        assert quick <= moved_tokens_bound(costs, users, owners, ranks, most) <= least


@settings(deadline=None)
@given(lengths, st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_an_exchange_keeps_every_user_and_the_limit(users: np.ndarray, ranks: int, limited: bool, random) -> None:
    """Catches: users lost on the way, a rank above its limit where the owners were not, answers that differ by rank."""
    owners = np.array([random.randrange(ranks) for _ in users], np.int64)
    limit = int(sums(owners, users, ranks).max()) if limited else 0
    costs = COST(users)
    part = rebalance(costs, users, owners, ranks, limit)
    assert part.shape == users.shape and ((part >= 0) & (part < ranks)).all()
    assert not limit or sums(part, users, ranks).max() <= limit
    assert (part == rebalance(costs, users, owners, ranks, limit)).all()


@pytest.mark.parametrize("seed", range(4))
def test_an_exchange_moves_little_more_than_it_must(seed: int) -> None:
    """Catches: a new partition from nothing, which moves three users of four."""
    ranks, users = 4, drawn(128, 8192, seed)
    owners, costs = np.repeat(np.arange(ranks), 32), COST(users)
    part = rebalance(costs, users, owners, ranks)
    loads = sums(part, costs, ranks)
    assert imbalance(loads) <= 0.01
    assert users[part != owners].sum() <= 1.2 * moved_tokens_bound(costs, users, owners, ranks, loads.max())


def test_users_that_lie_well_stay() -> None:
    """Catches: an exchange for its own sake."""
    users = np.array([100, 90, 80, 100, 90, 80])
    owners = np.array([0, 0, 0, 1, 1, 1])
    assert (rebalance(COST(users), users, owners, 2) == owners).all()


def test_owners_above_a_limit_that_can_be_held_are_relieved() -> None:
    """Catches: a rank that runs out of memory though another one has room."""
    users, owners = np.full(8, 50), np.array([0, 0, 0, 0, 0, 0, 0, 1])
    assert sums(rebalance(COST(users), users, owners, 2, 200), users, 2).tolist() == [200, 200]


def test_a_limit_nobody_can_hold_moves_nobody() -> None:
    """Catches: an exchange that costs network and mends nothing."""
    users, owners = np.full(4, 50), np.array([0, 0, 0, 1])
    assert (rebalance(COST(users), users, owners, 2, 60) == owners).all()
