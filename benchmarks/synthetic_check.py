"""Is the synthetic log as long, as popular and as bursty as the real one, and learnable beyond the last item?

    python -m benchmarks.synthetic_check [--quick] [--out DIR]

Makes the demo's log and ranks every user's last exposure (leave-one-out, full catalogue, history removed) by
popularity; by a first-order Markov chain (item-to-item counts, popularity where they end); by the true topics (counted
transitions mixed with the last 6 and all of the user's events: within reach of a good model); and by the generator's
oracle.

Shapes: U users, E events, M items, K topics, n users ranked at a time.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.csv as csv

from turbogr.data.sources.shape import load_shape, popularity_shares, quantiles
from turbogr.data.sources.synthetic import GAP_EDGES_S, LOG_NAME, synthesize
from turbogr.files import write_json

DEMO = {"users": 3000, "items": 6000, "length_scale": 0.01, "popularity": 0.6}
QUICK = {"users": 1000, "items": 5000, "length_scale": 0.01, "popularity": 0.6}
Scorer = Callable[[np.ndarray], np.ndarray]
"""Rows of users -> scores [n, M] of what comes after their visible history."""


class Log:
    """The log's columns, and of each user the last event as target."""

    def __init__(self, folder: Path, items: int) -> None:
        columns = csv.read_csv(folder / LOG_NAME)
        self.user, self.item, self.time = (columns[c].to_numpy() for c in ("user_id", "video_id", "time_ms"))
        self.clicked = columns["is_click"].to_numpy() == 1
        videos = csv.read_csv(folder / "video_features_basic_synthetic.csv")
        self.topic = videos["tag"].to_numpy()[np.argsort(videos["video_id"].to_numpy())]
        self.items = items
        self.offsets = np.concatenate([np.flatnonzero(np.diff(self.user, prepend=-1)), [len(self.user)]])
        self.last = self.offsets[1:][np.diff(self.offsets) > 1] - 1
        self.is_train = np.ones(len(self.user), bool)
        self.is_train[self.last] = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    arguments = QUICK if asked.quick else DEMO
    with tempfile.TemporaryDirectory() as place:
        report = synthesize(Path(place) / "log", **arguments)  # type: ignore[arg-type]
        log = Log(report.path, report.items)
    figures = {"rows": report.rows, "ctr": report.clicks / report.rows, "repeat_share": report.repeats / report.rows}
    figures |= shape_figures(log, arguments) | ranking_figures(log)
    for name, metrics in report.oracle.items():
        figures |= {f"oracle_{name}_hr10": metrics["HR@10"], f"oracle_{name}_ndcg10": metrics["NDCG@10"]}
    figures = {name: round(float(value), 5) for name, value in figures.items()}
    if asked.out:
        write_json(asked.out / "synthetic_check.json", {"arguments": arguments, "figures": figures})
    print(json.dumps({"arguments": arguments, **figures}))


def shape_figures(log: Log, arguments: dict[str, float]) -> dict[str, float]:
    """Distances between the log and the packaged table."""
    lengths = np.diff(log.offsets)
    real = quantiles("kuairand-27k", "exposures") * arguments["length_scale"]
    at = np.arange(lengths.max() + 1)
    ours = np.searchsorted(np.sort(lengths), at + 0.5) / len(lengths)
    ks = np.abs(ours - np.interp(at + 0.5, real, np.linspace(0, 1, len(real)))).max()
    gap = np.diff(log.time)[log.user[1:] == log.user[:-1]] / 1000
    shares = {name: np.mean((gap >= low) & (gap < high)) for name, (low, high) in GAP_EDGES_S.items()}
    off = {name: abs(share - load_shape()["gap_shares"][name]) for name, share in shares.items()}
    curve = np.cumsum(np.sort(np.bincount(log.item, minlength=log.items))[::-1]) / len(log.item)
    wanted = np.cumsum(popularity_shares("kuairand-27k", log.items, arguments["popularity"]))
    return {
        "length_ks": ks,
        "gap_below_1s_share": shares["<1s"],
        "gap_share_error_max": max(off.values()),
        "gap_mean_s": gap.mean(),
        "popularity_curve_error_max": np.abs(curve - wanted).max(),
        "popularity_top1pct_share": curve[log.items // 100 - 1],
    }


def ranking_figures(log: Log) -> dict[str, float]:
    popularity = np.bincount(log.item[log.is_train], minlength=log.items).astype(float)
    scorers: dict[str, Scorer] = {
        "popularity": lambda rows: np.broadcast_to(popularity, (len(rows), log.items)).copy(),
        "markov": markov(log, popularity),
        "topics": topics(log, popularity),
    }
    return {f"{name}_hr10": hit_rate(log, scorer) for name, scorer in scorers.items()}


def hit_rate(log: Log, scorer: Scorer, k: int = 10) -> float:
    hits = 0
    for rows in np.array_split(np.arange(len(log.last)), max(1, len(log.last) // 256)):
        scores, last = scorer(rows), log.last[rows]
        for row, event in enumerate(last):
            begin = log.offsets[log.user[event]]
            scores[row, log.item[begin:event]] = -np.inf
        target = scores[np.arange(len(rows)), log.item[last]]
        hits += int(((scores >= target[:, None]).sum(1) <= k)[np.isfinite(target)].sum())
    return hits / len(log.last)


def markov(log: Log, popularity: np.ndarray) -> Scorer:
    """Counts of (item, next item); popularity breaks ties and fills what is left."""
    counts = np.zeros((log.items, log.items), np.float32)
    follows = np.flatnonzero(log.is_train[1:] & (log.user[1:] == log.user[:-1]))
    np.add.at(counts, (log.item[follows], log.item[follows + 1]), 1)
    return lambda rows: counts[log.item[log.last[rows] - 1]] + popularity / (popularity.max() + 1)


def topics(log: Log, popularity: np.ndarray) -> Scorer:
    """Counted P(topic | last topic), the topics of the last 6 and of all the user's events; counted P(item | topic)."""
    num = int(log.topic.max()) + 1
    topic = log.topic[log.item]
    follows = np.flatnonzero(log.is_train[1:] & (log.user[1:] == log.user[:-1]))
    chain = np.full((num, num), 0.1)
    np.add.at(chain, (topic[follows], topic[follows + 1]), 1)
    chain /= chain.sum(1, keepdims=True)
    mass = np.bincount(log.topic, weights=popularity, minlength=num)

    def score(rows: np.ndarray) -> np.ndarray:
        chances = 0.4 * chain[topic[log.last[rows] - 1]]
        for row, event in enumerate(log.last[rows]):
            begin = log.offsets[log.user[event]]
            for weight, start in ((0.2, begin), (0.4, max(begin, event - 6))):
                chances[row] += weight * np.bincount(topic[start:event], minlength=num) / (event - start)
        return np.asarray((chances / mass)[:, log.topic] * popularity)

    return score


if __name__ == "__main__":
    main()
