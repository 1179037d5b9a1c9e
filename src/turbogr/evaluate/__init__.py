"""Full-catalogue evaluation: named protocols, streamed ranks, baselines, and a card beside every metric."""

from turbogr.data.queries import Queries, read_queries
from turbogr.evaluate.baselines import MarkovScorer, PopularityScorer, RandomScorer
from turbogr.evaluate.card import Evaluation
from turbogr.evaluate.evaluation import baselines, evaluate
from turbogr.evaluate.exclude import Exclude
from turbogr.evaluate.metrics import METRICS, retrieval_metrics
from turbogr.evaluate.predictions import evaluate_predictions
from turbogr.evaluate.ranking import RankResult, Scorer, TopK, draw_targets, rank_targets, top_k

__all__ = [
    "METRICS",
    "Evaluation",
    "Exclude",
    "MarkovScorer",
    "PopularityScorer",
    "Queries",
    "RandomScorer",
    "RankResult",
    "Scorer",
    "TopK",
    "baselines",
    "draw_targets",
    "evaluate",
    "evaluate_predictions",
    "rank_targets",
    "read_queries",
    "retrieval_metrics",
    "top_k",
]
