"""Train one config under several seeds and say the mean and the spread."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from turbogr.config import Config
from turbogr.errors import ConfigError
from turbogr.files import write_json
from turbogr.launch import restarted
from turbogr.ranks import ALONE, Ranks
from turbogr.train.trainer import train


def train_seeds(
    config: Config, folder: Path, seeds: list[int], *, resume: bool, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Runs in folder/seed-N; folder/seeds.json holds, for the last and the best epoch, mean and standard deviation."""
    with ranks.agreed():
        if len(set(seeds)) != len(seeds):
            raise ConfigError(f"--seeds names a seed twice: {seeds}.")
    results = []
    for seed in seeds:
        target = folder / f"seed-{seed}"
        of_seed = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        # a seed that the interrupted run had not begun starts now
        results.append(
            train(
                of_seed, target, resume=(resume and (target / "config.json").exists()) or restarted(target), ranks=ranks
            )
        )
    summary: dict[str, Any] = {"seeds": seeds, "card": results[0]["card"]}
    for which in ("last", "best"):
        if all(which in result for result in results):
            summary[which] = _spread([result[which]["metrics"] for result in results])
    if ranks.first:
        write_json(folder / "seeds.json", summary)
    return summary


def _spread(metrics: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Metric -> mean, and standard deviation over seeds (0 for a single one)."""
    table = {}
    for name in metrics[0]:
        values = [one[name] for one in metrics]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        table[name] = {"mean": statistics.fmean(values), "std": spread}
    return table
