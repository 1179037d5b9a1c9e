"""Is the demo's log learnable, and does order matter? The demo's model over seeds, beside baselines and the oracle.

    python -m benchmarks.demo_quality            seeds 0, 1, 2, ordered and time-shuffled histories
    python -m benchmarks.demo_quality --quick    one seed, two epochs

Time-shuffled: within every user the events before the targets change places at random (their times stay), for training
and for evaluation alike, so that what remains is which items a user saw, not when.
Figures are means over seeds of HR@10 on the test target of leave-one-out-validation: hr10, popularity_hr10,
markov_hr10, oracle_hr10, vs_popularity_x, vs_markov_x, shuffled_hr10, shuffled_loss (1 - shuffled / ordered),
training_tokens, items.
"""

import dataclasses
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, finish, parser
from turbogr.config import Config, load
from turbogr.data.batching import training_pairs
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.sources import open_source
from turbogr.data.sources.synthetic import synthesize
from turbogr.data.split import make_split
from turbogr.data.store import Store
from turbogr.device import tune_allocator
from turbogr.evaluate import baselines, evaluate
from turbogr.files import sha256
from turbogr.train.trainer import train

TARGETS = 2
"""Last events of a user that stay in place: test and validation."""


def demo_store(folder: Path) -> Path:
    """The log and the store of `make demo`."""
    synthesize(folder / "log", users=3000, items=6000, length_scale=0.01, popularity=0.6)
    prepare(open_source("kuairand", folder / "log"), folder / "store", PrepareOptions())
    return folder / "store"


def shuffled_copy(store: Path, target: Path, seed: int) -> Path:
    """The store with every user's events before the targets in random order, times in place."""
    shutil.copytree(store, target)
    opened = Store.open(store)
    rng = np.random.default_rng(seed)
    item = np.array(opened.item)
    for start, stop in zip(opened.offsets[:-1], opened.offsets[1:], strict=True):
        item[start : max(start, stop - TARGETS)] = rng.permutation(item[start : max(start, stop - TARGETS)])
    np.save(target / "item.npy", item)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["item.npy"]["sha256"] = sha256(target / "item.npy")
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def hits(config: Config, store: Path, seed: int, folder: Path) -> float:
    """Test HR@10 of the best epoch by validation."""
    changed = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, store=str(store)),
        train=dataclasses.replace(config.train, seed=seed),
        log=dataclasses.replace(config.log, tensorboard=False),
    )
    return float(train(changed, folder)["best"]["metrics"]["hr@10"])


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--threads", type=int, default=0)
    arguments = made.parse_args()
    tune_allocator()
    config = load(ROOT / "configs" / "demo.toml")
    config = dataclasses.replace(config, device=dataclasses.replace(config.device, threads=arguments.threads))
    if arguments.quick:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2))
    seeds = [0] if arguments.quick else [0, 1, 2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = demo_store(folder)
        ordered = [hits(config, store, seed, folder / f"ordered-{seed}") for seed in seeds]
        shuffled = [
            hits(config, shuffled_copy(store, folder / f"store-{seed}", seed), seed, folder / f"shuffled-{seed}")
            for seed in seeds
        ]
        figures = {**_beside(Store.open(store), config), **_means(ordered, shuffled)}
        oracle = json.loads((folder / "log" / "truth.json").read_text())["oracle"]["exposures"]
    figures["oracle_hr10"] = oracle["HR@10"]
    figures["vs_popularity_x"] = figures["hr10"] / figures["popularity_hr10"]
    figures["vs_markov_x"] = figures["hr10"] / figures["markov_hr10"]
    finish("demo_quality", arguments, figures, {"seeds": seeds, "ordered": ordered, "shuffled": shuffled})


def _means(ordered: list[float], shuffled: list[float]) -> dict[str, Any]:
    mean, mean_shuffled = statistics.fmean(ordered), statistics.fmean(shuffled)
    return {
        "hr10": mean,
        "hr10_std": statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        "shuffled_hr10": mean_shuffled,
        "shuffled_loss": 1 - mean_shuffled / mean,
    }


def _beside(store: Store, config: Config) -> dict[str, Any]:
    """The baselines on the same targets, and how large the log is."""
    split = make_split(store, config.split)
    found = evaluate(
        baselines(store, split), store, split, config=config.evaluate, max_history=config.model.max_history
    )
    return {
        "popularity_hr10": found.metrics["popularity"]["hr@10"],
        "markov_hr10": found.metrics["markov"]["hr@10"],
        "items": store.num_items,
        "training_tokens": int(training_pairs(store, split, config.model.max_history).sum()),
    }


if __name__ == "__main__":
    main()
