"""The public ML-1M recipes, trained in full on this machine: best and last epoch, curves, wall time.

    python -m benchmarks.ml1m --model hstu --ties shuffled --runs runs    101 epochs; goes on where it was stopped
    python -m benchmarks.ml1m --model hstu --protocol rectools            RecTools' protocol, 100 epochs
    python -m benchmarks.ml1m --quick                                     one epoch of each model: that it runs

Protocol public: the last item is the test, the best epoch is that with the best NDCG@10 on the test target, as the
published figures seem to be; the last epoch stands beside it. Ties shuffled stands for the public code's unstable sort,
ties unstable is that sort (numpy's quicksort of all times), ties file keeps the order of ratings.dat. Protocol
rectools: ties in file order, last item test, last but one validation and not trained on, the best epoch by NDCG@10 on
the validation target. `--seed` seeds the order of ties, the parameters, the batches and the negatives.
Figures: hr10_best, ndcg10_best, hr10_last, ndcg10_last, train_seconds, evaluate_seconds.
"""

import argparse
import dataclasses
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, finish, parser
from turbogr.config import Config, load
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.sources import open_source
from turbogr.device import tune_allocator
from turbogr.train.metrics import read_lines
from turbogr.train.trainer import train

MODELS = ("hstu", "sasrec", "hstu-large")
RECTOOLS_EPOCHS = 100


def store_of(data: Path, runs: Path, ties: str, seed: int = 0) -> Path:
    store = runs / "stores" / (f"ml-1m-{ties}-{seed}" if ties == "shuffled" else f"ml-1m-{ties}")
    if not store.exists():
        archive = data / "movielens-1m" / "ml-1m.zip"
        with tempfile.TemporaryDirectory() as scratch:
            if ties == "unstable":
                archive = sorted_as_published(archive, Path(scratch) / "ml-1m.zip")
            order = PrepareOptions(ties="shuffled", seed=seed) if ties == "shuffled" else PrepareOptions()
            prepare(open_source("movielens", archive), store, order)
    return store


def sorted_as_published(archive: Path, target: Path) -> Path:
    """The archive with its ratings in the order in which the public code's sort by time leaves them."""
    with zipfile.ZipFile(archive) as given, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        for name in given.namelist():
            content = given.read(name)
            if name.endswith("ratings.dat"):
                lines = content.splitlines(keepends=True)
                times = np.array([int(line.rsplit(b"::", 1)[1]) for line in lines])
                content = b"".join(lines[place] for place in np.argsort(times, kind="quicksort"))
            made.writestr(name, content)
    return target


def config_of(model: str, store: Path, threads: int, epochs: int | None, seed: int, protocol: str = "public") -> Config:
    config = load(ROOT / "configs" / "ml-1m" / f"{model}.toml")
    if protocol == "rectools":
        split = dataclasses.replace(config.split, protocol="leave-one-out-validation")
        train_config = dataclasses.replace(config.train, epochs=RECTOOLS_EPOCHS, select_on_test=False)
        config = dataclasses.replace(config, split=split, train=train_config)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, store=str(store)),
        train=dataclasses.replace(config.train, seed=seed, epochs=epochs or config.train.epochs),
        device=dataclasses.replace(config.device, threads=threads),
    )


def run(config: Config, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(result.json, curve by epoch)."""
    result = train(config, folder, resume=(folder / "config.json").exists())
    kept = ("epoch", "loss", "hr@10", "ndcg@10", "mrr", "seconds")
    curve = [{key: line[key] for key in kept if key in line} for line in read_lines(folder / "epochs.jsonl")]
    return result, curve


def figures_of(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "hr10_best": result["best"]["metrics"]["hr@10"],
        "ndcg10_best": result["best"]["metrics"]["ndcg@10"],
        "epoch_best": result["best"]["epoch"],
        "hr10_last": result["last"]["metrics"]["hr@10"],
        "ndcg10_last": result["last"]["metrics"]["ndcg@10"],
        "train_seconds": result["train_seconds"],
        "evaluate_seconds": result["evaluate_seconds"],
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", choices=MODELS, default="hstu")
    made.add_argument("--protocol", choices=("public", "rectools"), default="public")
    made.add_argument("--ties", choices=("shuffled", "unstable", "file"), default=None, help="shuffled, rectools: file")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", type=int, default=1, help="part of a run's identity")
    made.add_argument("--runs", type=Path, default=None, help="folder that keeps the run, to be resumed")
    arguments = made.parse_args()
    names = ("hr10_best", "ndcg10_best", "hr10_last", "ndcg10_last")
    if arguments.data is None or not (arguments.data / "movielens-1m" / "ml-1m.zip").exists():
        why = "no movielens-1m/ml-1m.zip: say --data or TURBOGR_DATA"
        finish("ml1m", arguments, {**dict.fromkeys(names), "reasons": dict.fromkeys(names, why)}, {})
        return
    tune_allocator()
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        if arguments.quick:
            _quick(arguments, runs)
            return
        ties = arguments.ties or ("file" if arguments.protocol == "rectools" else "shuffled")
        store = store_of(arguments.data, runs, ties, arguments.seed)
        config = config_of(arguments.model, store, arguments.threads, None, arguments.seed, arguments.protocol)
        kind = "rectools-" if arguments.protocol == "rectools" else ""
        name = f"ml-1m-{arguments.model}-{kind}{ties}-seed{arguments.seed}"
        result, curve = run(config, runs / name)
    finish(name, arguments, figures_of(result), {"result": result, "curve": curve, "threads": arguments.threads})


def _quick(arguments: argparse.Namespace, runs: Path) -> None:
    figures: dict[str, Any] = {}
    store = store_of(arguments.data, runs, "shuffled")
    for model in ("hstu", "sasrec"):
        config = config_of(model, store, arguments.threads, 1, arguments.seed)
        small = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, max_users=512))
        result, curve = run(small, runs / f"quick-{model}")
        figures |= {f"{model}_loss_1": curve[0]["loss"], f"{model}_hr10_1": result["last"]["metrics"]["hr@10"]}
    finish("ml1m", arguments, figures, {})


if __name__ == "__main__":
    main()
