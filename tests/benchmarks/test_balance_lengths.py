"""The benchmark of balance on lengths: its rules are what they are called, its bound is one, its figures have names."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks import balance_lengths
from benchmarks.baselines import partitions
from turbogr.data.balance import imbalance


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder as TURBOGR_DATA, with lengths of 500 users."""
    path = tmp_path / balance_lengths.KUAIRAND
    path.parent.mkdir()
    counts = np.random.default_rng(0).lognormal(8, 1, 500).astype(int) + 1
    path.write_text("exposures,clicks,ctr\n" + "".join(f"{2 * n},{n}.0,0.5\n" for n in counts))
    return tmp_path


def test_a_run_gives_every_figure_and_a_plot(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a benchmark that nobody can run."""
    monkeypatch.setattr(balance_lengths, "RANKS", (8, 64, 512))
    monkeypatch.setattr(balance_lengths, "USERS", 2)
    monkeypatch.setattr(balance_lengths, "SEEDS", (0,))
    found = balance_lengths.run(data, quick=True)
    assert set(balance_lengths.NAMES) <= set(found["figures"]) and not found["reasons"]
    balance_lengths.print_tables(found["details"])
    balance_lengths.plot(found["details"], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_without_data_every_figure_has_its_reason(tmp_path: Path) -> None:
    """Catches: an absent log that ends as an error."""
    found = balance_lengths.run(tmp_path, quick=True)
    assert all(found["figures"][name] is None and "KuaiRand" in found["reasons"][name] for name in found["figures"])


@settings(max_examples=50)
@given(hnp.arrays(np.int64, st.integers(1, 40), elements=st.integers(1, 500)), st.integers(1, 6))
def test_every_rule_puts_every_user_on_a_rank(lengths: np.ndarray, ranks: int) -> None:
    """Catches: a baseline that loses users and so looks light."""
    for rule in balance_lengths.RULES.values():
        part = rule(lengths, lengths.astype(float), ranks)
        assert part.shape == lengths.shape and ((part >= 0) & (part < ranks)).all()


def test_karmarkar_karp_does_its_textbook_example() -> None:
    """Catches: sums joined largest to largest."""
    costs = np.array([8.0, 7, 6, 5, 4])
    sums = np.bincount(partitions.karmarkar_karp(costs, 2), costs)
    assert sorted(sums.tolist()) == [14.0, 16.0]
    equal = partitions.karmarkar_karp(np.arange(1.0, 13), 4, equal_users=True)
    assert np.bincount(equal).tolist() == [3, 3, 3, 3]


def test_nvidias_formula_is_the_published_one() -> None:
    """Catches: a baseline that is mended in silence."""
    # projections 2 L D 4D, output 2 L D D, attention 2 * heads * 2 L L D
    assert partitions.nvidia_cost(np.array([3]), 2, 4).tolist() == [2 * 3 * 8 * 32 + 2 * 3 * 8 * 8 + 2 * 2 * 2 * 9 * 8]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.just(20), st.just(20), st.integers(1, 20)), min_size=1, max_size=8), st.integers(2, 3))
def test_no_assignment_is_more_equal_than_the_lower_bound(costs: list[int], ranks: int) -> None:
    """Catches: a bound that is none, by which any result could be called near to the best."""
    values = np.array(costs, float)
    every = itertools.product(range(ranks), repeat=len(costs))
    best = min(imbalance(np.bincount(part, values, ranks)) for part in every)
    assert partitions.lower_bound(values, ranks) <= best + 1e-9


def test_filled_batches_have_nearer_tokens_than_fixed_ones() -> None:
    """Catches: thresholds that are compared with batches of another size."""
    found = balance_lengths.measure_filled(balance_lengths.amazon_like_lengths(20_000), 64)
    assert found["filled_users"] == pytest.approx(found["fixed_users"], rel=0.02)
    assert found["filled_max_gap"] < found["fixed_max_gap"] / 3
