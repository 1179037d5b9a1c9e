import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from turbogr.evaluate import METRICS, retrieval_metrics

RANKS = st.lists(st.one_of(st.integers(1, 3000), st.just(math.inf)), min_size=1)


@given(RANKS)
def test_metrics_agree_with_a_plain_loop(ranks: list[float]) -> None:
    metrics = retrieval_metrics(np.array(ranks, float))
    assert tuple(metrics) == METRICS
    for name, value in metrics.items():
        kind, _, cutoff = name.partition("@")
        total = 0.0
        for rank in ranks:
            if kind == "mrr":
                total += 1 / rank
            elif rank <= int(cutoff):
                total += 1 if kind == "hr" else 1 / math.log2(rank + 1)
        assert math.isclose(value, total / len(ranks), abs_tol=1e-12)


def test_a_rank_at_the_cutoff_is_a_hit_and_the_next_is_not() -> None:
    metrics = retrieval_metrics(np.array([10, 11]))
    assert metrics["hr@10"] == 0.5
    assert math.isclose(metrics["ndcg@10"], 0.5 / math.log2(11))


def test_a_miss_counts_as_nothing() -> None:
    assert set(retrieval_metrics(np.array([math.inf])).values()) == {0.0}
