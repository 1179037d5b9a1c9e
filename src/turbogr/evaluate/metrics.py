"""Retrieval metrics from the rank of each user's one target.

HR@k = share of ranks <= k; NDCG@k = mean of 1/log2(1 + rank) over ranks <= k (one relevant item, so the ideal is 1);
MRR = mean of 1/rank. A miss has rank infinity and counts as 0.
"""

import numpy as np

HIT_CUTOFFS = (1, 10, 50, 200, 500, 1000)
NDCG_CUTOFFS = (10, 50, 200)
METRICS = (*(f"hr@{k}" for k in HIT_CUTOFFS), *(f"ndcg@{k}" for k in NDCG_CUTOFFS), "mrr")


def retrieval_metrics(ranks: np.ndarray) -> dict[str, float]:
    """`ranks` [n], 1-based, infinity for a miss -> every name of METRICS."""
    ranks = np.asarray(ranks, np.float64)
    gain = 1 / np.log2(1 + ranks)
    hits = {f"hr@{k}": float(np.mean(ranks <= k)) for k in HIT_CUTOFFS}
    ndcg = {f"ndcg@{k}": float(np.mean(np.where(ranks <= k, gain, 0))) for k in NDCG_CUTOFFS}
    return {**hits, **ndcg, "mrr": float(np.mean(1 / ranks))}
