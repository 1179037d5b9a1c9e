"""From a table of events to recommendations, in one call.

    python -m examples.fit_a_frame

The log is made up: films belong to ten series, and whoever has begun a series mostly goes on with its next film.
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

import turbogr

SERIES, FILMS = 10, 30


def made_up_log(users: int = 500, events: int = 25, seed: int = 0) -> pa.Table:
    """Columns user_id, item_id, ts (seconds) and title."""
    rng = np.random.default_rng(seed)
    series, film = rng.integers(SERIES, size=users), rng.integers(FILMS, size=users)
    rows = []
    for event in range(events):
        jump = rng.random(users) < 0.2
        series = np.where(jump, rng.integers(SERIES, size=users), series)
        film = np.where(jump, rng.integers(FILMS, size=users), (film + 1) % FILMS)
        ts = 1_700_000_000 + 86_400 * event + rng.integers(3_600, size=users)
        rows += list(zip(range(users), series.tolist(), film.tolist(), ts.tolist(), strict=True))
    return pa.table(
        {
            "user_id": [user for user, *_ in rows],
            "item_id": [f"s{series}e{film}" for _, series, film, _ in rows],
            "ts": [ts for *_, ts in rows],
            "title": [f"Series {series}, film {film}" for _, series, film, _ in rows],
        }
    )


def main() -> dict[str, dict[str, float]]:
    """Train, evaluate, ask, save and load; answers the metrics."""
    config = {
        "model.dim": 32,
        "model.max_history": 50,
        "train.epochs": 4,
        "train.batch_tokens": 1024,
        "dense.lr": 3e-3,
        "tables.lr": 3e-3,
        "device.threads": 1,  # enough for a model this small
        "log.tensorboard": False,
    }
    model = turbogr.fit(made_up_log(), user="user_id", item="item_id", time="ts", title="title", config=config)

    found = model.evaluate(beside_baselines=True)
    for name, metrics in found.metrics.items():
        print(f"{name:<12}HR@10 {metrics['hr@10']:.3f}   NDCG@10 {metrics['ndcg@10']:.3f}")

    print("\nuser 7:")
    for row in model.recommend(7, k=3).to_pylist():
        print(f"  {row['rank']}. {row['title']}  ({row['score']:.3f})")

    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        loaded = turbogr.load(Path(folder) / "model")
        print("\nafter films 3, 4 and 5 of series 2, asked of the saved model:")
        for row in loaded.recommend_history(["s2e3", "s2e4", "s2e5"], k=3).to_pylist():
            print(f"  {row['rank']}. {row['title']}  ({row['score']:.3f})")
    return found.metrics


if __name__ == "__main__":
    main()
