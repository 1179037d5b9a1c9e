"""The cost of a user fitted to measured step times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.data.cost_fit import LEAST, CostFit

CONSTANT, LINEAR, PAIR = 0.05, 3e-6, 1.2e-9


def steps(
    count: int, seed: int = 0, noise: float = 0.0, linear: float = LINEAR, pair: float = PAIR, ranks: int = 4
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lengths = np.minimum(random.lognormal(7.5, 1.0, (ranks, 8)).astype(np.int64), 8192)
        tokens, pairs = lengths.sum(1), (lengths * (lengths + 1) // 2).sum(1)
        seconds = (CONSTANT + linear * tokens + pair * pairs) * (1 + noise * random.standard_normal(ranks))
        made.append((tokens, pairs, seconds))
    return made


def fitted(seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]], kept: int = 512) -> CostFit:
    fit = CostFit(kept)
    for observation in seen:
        fit.observe(*observation)
    return fit


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-7, 1e-4), st.floats(1e-10, 1e-7), st.integers(0, 1000))
def test_exact_times_give_back_their_cost(linear: float, pair: float, seed: int) -> None:
    """Catches: columns mixed up, a constant that leaks into the slopes."""
    cost = fitted(steps(60, seed, linear=linear, pair=pair)).fitted()
    assert cost is not None
    lengths = np.array([100, 1000, 8192])
    expected = linear * lengths + pair * lengths * (lengths + 1) / 2
    assert cost(lengths) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_stalled_steps_do_not_move_the_fit(share: float) -> None:
    """Catches: least squares, which one step that waited for the disk throws off."""
    random, observations = np.random.default_rng(1), steps(128, noise=0.02)
    stalled = [(t, p, np.where(random.random(4) < share, s * random.uniform(5, 50), s)) for t, p, s in observations]
    cost = fitted(stalled).fitted()
    assert cost is not None
    for tokens, pairs, seconds in steps(20, seed=9):
        predicted = cost.linear * tokens + cost.pair * pairs
        assert predicted == pytest.approx(seconds - CONSTANT, rel=0.1)


def test_held_out_differences_between_ranks_are_predicted() -> None:
    """Catches: a fit that explains the steps it saw and no others."""
    cost = fitted(steps(100, noise=0.03)).fitted()
    assert cost is not None
    tokens, pairs, seconds = steps(1, seed=5, ranks=64)[0]
    predicted = cost.linear * tokens + cost.pair * pairs
    assert np.ptp(predicted) == pytest.approx(np.ptp(seconds), rel=0.1)


def test_no_coefficient_is_negative() -> None:
    """Catches: a user that makes a step cheaper, and is then given away last."""
    for seed in range(20):
        for linear, pair in ((0.0, PAIR), (LINEAR, 0.0)):
            cost = fitted(steps(20, seed, noise=0.1, linear=linear, pair=pair)).fitted()
            assert cost is None or (cost.linear >= 0 and cost.pair >= 0)


def test_too_few_or_too_like_observations_give_no_cost() -> None:
    """Catches: slopes invented from one point."""
    assert CostFit().fitted() is None
    assert fitted(steps(LEAST // 4 - 1)).fitted() is None
    same = steps(1)[0]
    assert fitted([(same[0][:1], same[1][:1], same[2][:1])] * 50).fitted() is None


def test_ranks_without_users_say_nothing() -> None:
    """Catches: an empty batch's time that pulls the constant, or a division by its zero tokens."""
    observations = steps(40)
    empty = [(t * [0, 1, 1, 1], p * [0, 1, 1, 1], s) for t, p, s in observations]
    cost = fitted(empty).fitted()
    assert cost is not None and cost.linear == pytest.approx(LINEAR, rel=1e-4)


def test_old_observations_are_forgotten() -> None:
    """Catches: a cost that stays what it was when the first steps compiled their kernels."""
    fit = fitted([*steps(100, linear=10 * LINEAR), *steps(100, seed=3)], kept=200)
    cost = fit.fitted()
    assert cost is not None and cost.linear == pytest.approx(LINEAR, rel=1e-4)


def test_the_same_observations_give_the_same_cost() -> None:
    """Catches: ranks that fit for themselves and plan differently."""
    assert fitted(steps(50, noise=0.1)).fitted() == fitted(steps(50, noise=0.1)).fitted()
