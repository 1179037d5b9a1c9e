"""Imbalance of cost and tokens on real lengths, before and after, by every rule; part of `balance`.

run       the table of rules, the token-aware batches, the planning time and the tokens moved by an exchange
plot      imbalance over the cap, one panel for each number of ranks
"""

import csv
import statistics
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines import partitions
from turbogr.config import ModelConfig
from turbogr.data.balance import UserCost, imbalance, largest_first, moved_tokens_bound, partition, rebalance
from turbogr.data.batching import token_bounds
from turbogr.ops.partition import Goal, partition_users
from turbogr.train.flops import ATTENTION_MULTIPLE, GEMM_MULTIPLE, LAYERS

DIM, HEADS, USERS = 1024, 8, 32
CAPS, RANKS, SEEDS = (1024, 2048, 4096, 8192, 16384), (8, 64, 512), tuple(range(8))
MOVING_RANKS, MOVING_USERS, MOVING_CAPS = 4, (4, 8, 16, 32), (2048, 8192)
FILLED_RANKS = 16
KUAIRAND, ML1M = "kuairand-27k-stats/user_exposures_clicks.csv", "movielens-1m/ml-1m.zip"
NAMES = ("imbalance_8192_64", "imbalance_1024_64", "naive_8192_64", "plan_ms_512")
SLOW = ("Karmarkar-Karp", "NVIDIA's rule")  # seconds a draw at 512 ranks: left out of a quick run there
Rule = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
RULES: dict[str, Rule] = {
    "naive": lambda lengths, costs, ranks: partitions.naive(lengths, ranks),
    "sort by length": lambda lengths, costs, ranks: partitions.sort_by_length(lengths, ranks),
    "round-robin": lambda lengths, costs, ranks: partitions.round_robin(lengths, ranks),
    "NVIDIA's rule": lambda lengths, costs, ranks: partitions.nvidia(lengths, ranks, HEADS, DIM // HEADS),
    "Karmarkar-Karp": lambda lengths, costs, ranks: partitions.karmarkar_karp(costs, ranks),
    "largest-first": lambda lengths, costs, ranks: largest_first(costs, ranks),
    "turbogr": lambda lengths, costs, ranks: partition(costs, lengths, ranks),
}


def flops_cost(dim: int = DIM, heads: int = HEADS) -> UserCost:
    """Training FLOPs of an HSTU layer."""
    per_token, per_pair = LAYERS["hstu"](ModelConfig(dim=dim, heads=heads))
    return UserCost(GEMM_MULTIPLE * per_token, ATTENTION_MULTIPLE * per_pair)


def kuairand_lengths(data: Path, what: str) -> np.ndarray:
    """int64 [27285]: `clicks` or `exposures` of every user of KuaiRand-27K."""
    with (data / KUAIRAND).open() as file:
        return np.array([int(float(row[what])) for row in csv.DictReader(file)], np.int64)


def ml1m_lengths(data: Path, cap: int = 200) -> np.ndarray:
    """int64 [6040]: training tokens of every user, the last rating being a target only."""
    with zipfile.ZipFile(data / ML1M) as archive, archive.open("ml-1m/ratings.dat") as file:
        users = np.array([int(line.split(b"::", 1)[0]) for line in file])
    return np.minimum(np.bincount(users)[1:] - 1, cap)


def amazon_like_lengths(users: int = 100_000, seed: int = 0) -> np.ndarray:
    """int64: 5 + floor(lognormal(0.78, 1.2)), at most 200: five at least as after a 5-core filter, mean 9."""
    return np.minimum(5 + np.random.default_rng(seed).lognormal(0.78, 1.2, users).astype(np.int64), 200)


def waiting(per_rank: np.ndarray) -> float:
    """The paper's measure: the share of the step that ranks spend waiting for the slowest, on average."""
    return float((1 - per_rank / per_rank.max()).mean())


def on_core(call: Callable[[], Any]) -> float:
    """Seconds of this thread's own work: what else runs on the machine is not counted."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def draws(lengths: np.ndarray, ranks: int, users: int, cap: int) -> Iterator[np.ndarray]:
    for seed in SEEDS:
        yield np.minimum(np.random.default_rng(seed).choice(lengths, ranks * users), cap)


def check() -> None:
    """The compiled partition answers what the reference answers; raises where it does not."""
    cost = flops_cost()
    lengths = -np.sort(-np.random.default_rng(0).integers(1, 8192, 256))
    whole = np.rint(cost(lengths) * (2**36 / cost(lengths).max())).astype(np.int64)
    goal = Goal(int(whole.sum()) // 8 // 10_000, 1, 100_000, 100_000)
    answers = [partition_users(whole, lengths, 8, 0, goal, backend=name) for name in (None, "reference")]
    assert (answers[0] == answers[1]).all(), "the compiled partition differs from the reference"


def measure_rules(lengths: np.ndarray, ranks: int, cap: int, rules: Sequence[str]) -> dict[str, Any]:
    """Means over the draws: imbalance of cost, waiting, token gap, for every rule; the lower bound.

    Planning time is the processor's (it runs on one core), the best of seven for a draw, and the median of the draws.
    """
    cost = flops_cost()
    rows: dict[str, list[list[float]]] = {name: [] for name in rules}
    bounds, times = [], []
    for drawn in draws(lengths, ranks, USERS, cap):
        costs = cost(drawn)
        bounds.append(partitions.lower_bound(costs, ranks))
        for name in rules:
            part = RULES[name](drawn, costs, ranks)
            load, tokens = np.bincount(part, costs, ranks), np.bincount(part, drawn, ranks)
            rows[name].append([imbalance(load), waiting(load), float(tokens.max() - tokens.min())])
        times.append(min(on_core(lambda: partition(costs, drawn, ranks)) for _ in range(7)))  # noqa: B023
    table = {
        name: dict(zip(("imbalance", "waiting", "token_gap"), np.mean(values, 0).tolist(), strict=True))
        for name, values in rows.items()
    }
    bound = float(np.mean(bounds))
    return {
        "rules": table,
        "lower_bound": bound,
        "plan_ms": 1e3 * statistics.median(times),
        "bar": bar(table, bound, cap),
    }


def bar(table: dict[str, dict[str, float]], bound: float, cap: int) -> str:
    """What the imbalance had to be, and whether it is."""
    ours, plain = table["turbogr"]["imbalance"], table["largest-first"]["imbalance"]
    if cap >= 4096:
        most = 0.0005 if cap >= 8192 else 0.0015
        return f"{'met' if ours <= most else 'MISSED'}: {ours:.5f}, at most {most}"
    how = "half of largest-first" if ours <= plain / 2 else "1.1x of the lower bound" if ours <= 1.1 * bound else ""
    return f"met: {how}" if how else f"MISSED: {ours:.5f}, largest-first {plain:.5f}, lower bound {bound:.5f}"


def measure_filled(lengths: np.ndarray, users: int, seed: int = 0) -> dict[str, float]:
    """16 ranks fill batches of their own users: by count, or up to a token threshold of the same mean size."""
    order = np.random.default_rng(seed).permutation(lengths)
    shards = [order[r::FILLED_RANKS] for r in range(FILLED_RANKS)]
    threshold = round((users + 0.5) * float(lengths.mean()))  # a batch stops on average half a user below it
    answers: dict[str, float] = {}
    cost = flops_cost()
    for name in ("fixed", "filled"):
        bounds = [
            token_bounds(shard, threshold) if name == "filled" else np.arange(0, len(shard) + 1, users)
            for shard in shards
        ]
        steps = min(len(one) for one in bounds) - 2  # without the last batch, which is cut short
        sums = {}
        for what, measure in (("tokens", lambda x: x.astype(np.float64)), ("cost", cost)):
            sums[what] = np.array(
                [np.add.reduceat(measure(shard), one[:-1])[:steps] for shard, one in zip(shards, bounds, strict=True)]
            )  # [ranks, steps]
        answers[f"{name}_users"] = float(np.mean([np.diff(one)[:steps].mean() for one in bounds]))
        answers[f"{name}_max_gap"] = float((sums["tokens"].max(0) - sums["tokens"].min(0)).mean())
        for what, values in sums.items():
            answers[f"{name}_{what}_imbalance"] = float(np.mean([imbalance(step) for step in values.T]))
        answers[f"{name}_waiting"] = float(np.mean([waiting(step) for step in sums["cost"].T]))
        answers[f"{name}_steps"] = steps
    return answers


def measure_moves(lengths: np.ndarray, users: int, cap: int) -> dict[str, float]:
    """Means over the draws of an exchange between 4 ranks; ratio: moved tokens over their lower bound, summed."""
    cost, rows = flops_cost(), []
    owners = np.repeat(np.arange(MOVING_RANKS), users)
    for drawn in draws(lengths, MOVING_RANKS, users, cap):
        costs = cost(drawn)
        part = rebalance(costs, drawn, owners, MOVING_RANKS)
        loads = np.bincount(part, costs, MOVING_RANKS)
        bound = moved_tokens_bound(costs, drawn, owners, MOVING_RANKS, float(loads.max()))
        inherent = imbalance(np.bincount(partition(costs, drawn, MOVING_RANKS), costs, MOVING_RANKS))
        before = imbalance(np.bincount(owners, costs, MOVING_RANKS))
        seconds = on_core(lambda: rebalance(costs, drawn, owners, MOVING_RANKS))  # noqa: B023
        rows.append(
            [before, imbalance(loads), inherent, float(drawn[part != owners].sum()), bound, drawn.sum(), seconds]
        )
    before, after, inherent, moved, bound, total, seconds = np.mean(rows, 0).tolist()
    return {
        "before": before,
        "after": after,
        "inherent": inherent,
        "moved_share": moved / total,
        "moved_ratio": moved / bound if bound else 1.0,
        "ms": 1e3 * seconds,
    }


def run(data: Path | None, quick: bool) -> dict[str, Any]:
    """{"figures", "reasons", "details"}; a quick run takes clicks alone, and leaves out the SLOW rules at 512 ranks."""
    if data is None or not (data / KUAIRAND).exists():
        why = f"no KuaiRand-27K lengths: --data or TURBOGR_DATA must name a folder with {KUAIRAND}"
        return {"figures": dict.fromkeys(NAMES), "reasons": dict.fromkeys(NAMES, why), "details": {}}
    check()
    details: dict[str, Any] = {"seeds": SEEDS, "dim": DIM, "heads": HEADS, "users_per_rank": USERS}
    details["rules"], details["moves"] = {}, {}
    for what in ("clicks",) if quick else ("clicks", "exposures"):
        lengths = kuairand_lengths(data, what)
        for ranks, cap in product(RANKS, CAPS):
            rules = [name for name in RULES if not (quick and ranks == max(RANKS) and name in SLOW)]
            details["rules"][f"{what}_{cap}_{ranks}"] = measure_rules(lengths, ranks, cap, rules)
        for cap, users in product(MOVING_CAPS, MOVING_USERS):
            details["moves"][f"{what}_{cap}_{users}"] = measure_moves(lengths, users, cap)
    details["filled"] = {"amazon_like": measure_filled(amazon_like_lengths(), 512)}
    if (data / ML1M).exists():
        details["filled"]["ml_1m"] = measure_filled(ml1m_lengths(data), 32)
    return {"figures": _figures(details), "reasons": {}, "details": details}


def _figures(details: dict[str, Any]) -> dict[str, float]:
    rules, largest = details["rules"], max(CAPS)
    slowest = {n: max(row["plan_ms"] for key, row in rules.items() if key.endswith(f"_{n}")) for n in (64, 512)}
    figures = {
        "imbalance_8192_64": rules["clicks_8192_64"]["rules"]["turbogr"]["imbalance"],
        "imbalance_1024_64": rules["clicks_1024_64"]["rules"]["turbogr"]["imbalance"],
        f"imbalance_{largest}_512": rules[f"clicks_{largest}_512"]["rules"]["turbogr"]["imbalance"],
        "naive_8192_64": rules["clicks_8192_64"]["rules"]["naive"]["imbalance"],
        "waiting_8192_64": rules["clicks_8192_64"]["rules"]["turbogr"]["waiting"],
        "naive_waiting_8192_64": rules["clicks_8192_64"]["rules"]["naive"]["waiting"],
        "plan_ms_64": slowest[64],
        "plan_ms_512": slowest[512],
        "moved_ratio_8192_32": details["moves"]["clicks_8192_32"]["moved_ratio"],
        "moved_ratio_worst": max(row["moved_ratio"] for row in details["moves"].values()),
    }
    for name, row in details["filled"].items():
        figures |= {f"filled_{name}_gap_fixed": row["fixed_max_gap"], f"filled_{name}_gap": row["filled_max_gap"]}
    return figures


def print_tables(details: dict[str, Any]) -> None:
    names = list(RULES)
    print("imbalance (waiting) of the cost, mean of the draws")
    print(f"{'':20s}" + "".join(f"{name:>22s}" for name in names) + "  lower bound  plan ms  bar")
    for key, row in details["rules"].items():
        found = [row["rules"].get(name) for name in names]
        cells = "".join(f"{r['imbalance']:12.5f} ({r['waiting']:.5f})" if r else f"{'-':>22s}" for r in found)
        print(f"{key:20s}{cells}{row['lower_bound']:13.5f}{row['plan_ms']:9.2f}  {row['bar']}")
    for title in ("filled", "moves"):
        for key, row in details[title].items():
            print(f"{title} {key:20s}" + "  ".join(f"{name} {value:.4g}" for name, value in row.items()))


def plot(details: dict[str, Any], path: Path, what: str = "clicks") -> None:
    """Imbalance over the cap by every rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(RANKS), figsize=(4.2 * len(RANKS), 4.4), sharey=True, layout="constrained")
    for panel, ranks in zip(panels, RANKS, strict=True):
        rows = [details["rules"][f"{what}_{cap}_{ranks}"] for cap in CAPS]
        for name in RULES:
            wide = 2.5 if name == "turbogr" else 1.2
            found = [row["rules"].get(name, {}).get("imbalance", np.nan) for row in rows]
            panel.loglog(CAPS, found, "o-", lw=wide, ms=3, label=name)
        panel.loglog(CAPS, [row["lower_bound"] or np.nan for row in rows], "k:", label="lower bound (where above 0)")
        panel.set_title(f"{ranks} ranks x {USERS} users")
        panel.set_xticks(CAPS, [str(cap) for cap in CAPS])
        panel.set_xlabel("longest history taken")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"(max - min) / max of the cost, {what}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
