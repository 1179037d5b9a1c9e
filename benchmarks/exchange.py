"""Flat against hierarchical exchange of embedding rows, between nodes made of network namespaces.

    python -m benchmarks.exchange            2 nodes x 2 ranks and 4 x 1, each node behind a link of 1 Gbit/s
    python -m benchmarks.exchange --quick    2 x 2 and few rounds, under a minute

Needs Linux, root and iproute2.

flat is one group of all ranks, hierarchical one group per node. Batches are KuaiRand-like (exchange_load.py): a rank
looks up 512 tokens of a user, their targets and 128 uniform negatives a token among 65,536 items of 128 floats: 1.02
ids per item of the catalogue. (The paper's memory table has 8 x 8192 x 128 = 8.4 million ids a device; 5.9 million
of KuaiRand-27K's videos have five exposures or more.) Nothing overlaps; a part's time is the slowest rank's, a figure
the median over rounds.

lookup_latency_reduction    1 - hierarchical / flat, ids asked for until rows are there (2 x 2)
total_ratio                 hierarchical / flat, lookup + row gradients to owners + sums over copies
slow_link_bytes_reduction   1 - hierarchical / flat, bytes on the nodes' links, both directions, the three parts
step_x                      flat / hierarchical, a whole step of the trainer: HSTU, 2 blocks of D = 128, 8 heads
..._4x1                     the same on four nodes of one rank, hierarchical: every rank holds the whole table
planned_ratio_16x8          bytes on a node's link, hierarchical / flat, counted for 16 nodes x 8 ranks
planned_ratio_16x8_gathered the same if every copy gathered the lists of all
flat_wins_below_tokens      2 x 2, the largest batch of the sweep (tokens of a rank) where flat takes less time; 0: none
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import exchange_plan, exchange_steps
from benchmarks.common import ROOT, finish, parser
from benchmarks.exchange_load import Load
from benchmarks.exchange_plot import plot, print_parts, print_plan, print_steps, print_sweep
from benchmarks.exchange_ranks import PARTS, Job, launch
from benchmarks.network import unavailable

RATE = "1gbit"
MEASURED = ("lookup_latency_reduction", "total_ratio", "slow_link_bytes_reduction")
FULL_ONLY = (*(f"{name}_4x1" for name in MEASURED), "flat_wins_below_tokens")
SWEEP = [4, 16, 64, 256, 1024]
PLANNED_TOKENS = [1, 4, 16, 64, 128, 512, 2048]
PLANNED = Load()
SWEEP_ROUNDS = 20


def main() -> None:
    arguments = parser(__doc__).parse_args()
    quick: bool = arguments.quick
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {"rate": RATE}
    reasons: dict[str, str] = {}
    why = unavailable()
    if why:
        wanted = (*MEASURED, "step_x", *FULL_ONLY)
        figures |= dict.fromkeys(wanted)
        reasons |= dict.fromkeys(wanted, why)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            details |= measured(Path(scratch), quick)
        figures |= figures_of(details["2x2"]) | {"step_x": step_x(details["2x2"]["steps"])}
        if quick:
            figures |= dict.fromkeys(FULL_ONLY)
            reasons |= dict.fromkeys(FULL_ONLY, "measured by a full run only")
        else:
            figures |= {f"{name}_4x1": value for name, value in figures_of(details["4x1"]).items()}
            figures["flat_wins_below_tokens"] = flat_wins_below(details["2x2"]["sweep"])
    details["planned_2x2"] = exchange_plan.sweep(Load(), [Load().tokens], 2, 2)
    planned = [PLANNED.tokens] if quick else PLANNED_TOKENS
    details["planned_16x8"] = exchange_plan.sweep(PLANNED, planned, 16, 8)
    point = next(row for row in details["planned_16x8"] if row["tokens"] == PLANNED.tokens)
    figures |= {"planned_ratio_16x8": point["ratio"], "planned_ratio_16x8_gathered": point["ratio_gathered"]}
    print_plan(details["planned_2x2"], "2 nodes x 2 ranks")
    print_plan(details["planned_16x8"], "16 nodes x 8 ranks")
    if reasons:
        figures["reasons"] = reasons
    elif not quick:
        plot(details, ROOT / "docs" / "exchange.png")
    finish("exchange", arguments, figures, details)


def measured(scratch: Path, quick: bool) -> dict[str, Any]:
    """By topology: medians of every part, the sweep over batch sizes, the trainer's steps."""
    exchange_steps.make_store(scratch / "store")
    rounds, steps, limit = (5, 4, 300.0) if quick else (30, 24, 900.0)
    seconds = 8.0 if quick else 90.0
    job = Job({"flat": 1, "hierarchical": 2}, [Load()], rounds, seconds, steps, str(scratch / "store"))
    found = {"2x2": topology(launch(2, 2, job, scratch / "2x2", limit_s=limit, rate=RATE))}
    print_parts(found["2x2"]["parts"], "2 nodes x 2 ranks")
    print_steps(found["2x2"]["steps"])
    if quick:
        return found
    loads = [Load(tokens=tokens) for tokens in SWEEP]
    sweep = launch(
        2,
        2,
        Job({"flat": 1, "hierarchical": 2}, loads, SWEEP_ROUNDS, 40.0),
        scratch / "sweep",
        limit_s=limit,
        rate=RATE,
    )
    found["2x2"]["sweep"] = [
        {"tokens": load.tokens, "parts": _medians([one["loads"][at]["parts"] for one in sweep])}
        for at, load in enumerate(loads)
    ]
    print_sweep(found["2x2"]["sweep"])
    job = Job({"flat": 1, "hierarchical": 4, "pairs": 2}, [Load()], rounds, seconds)
    found["4x1"] = topology(launch(4, 1, job, scratch / "4x1", limit_s=limit, rate=RATE))
    print_parts(found["4x1"]["parts"], "4 nodes x 1 rank")
    return found


def topology(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of one launch say of its first load."""
    first = [one["loads"][0] for one in answers]
    found = {"load": first[0]["load"], "check": [one["check"] for one in first]}
    found |= {"parts": _medians([one["parts"] for one in first]), "rounds": first[0]["parts"]}
    if "steps" in answers[0]:
        found["steps"] = {name: _step_medians(one) for name, one in answers[0]["steps"].items()}
        found["step_ms"] = {name: one["ms"] for name, one in answers[0]["steps"].items()}
    return found


def _medians(of_ranks: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Variant -> part -> medians over rounds of ms, and of a node's bytes by direction, mean over the ranks' nodes."""
    return {
        name: {
            part: {
                key: statistics.mean(statistics.median(one[at] for one in rank[name][part]) for rank in of_ranks)
                for at, key in enumerate(("ms", "sent", "received"))
            }
            for part in PARTS
        }
        for name in of_ranks[0]
    }


def _step_medians(found: dict[str, list[Any]]) -> dict[str, Any]:
    stages = {name: statistics.median(one[name] for one in found["stages"]) for name in found["stages"][0]}
    return {key: statistics.median(found[key]) for key in ("ms", "sent", "received")} | {"stages": stages}


def figures_of(topology: dict[str, Any]) -> dict[str, float]:
    flat, ours = topology["parts"]["flat"], topology["parts"]["hierarchical"]
    return {
        "lookup_latency_reduction": 1 - ours["lookup"]["ms"] / flat["lookup"]["ms"],
        "total_ratio": total(ours, "ms") / total(flat, "ms"),
        "slow_link_bytes_reduction": 1 - total(ours, "sent", "received") / total(flat, "sent", "received"),
    }


def total(parts: dict[str, dict[str, float]], *keys: str) -> float:
    return sum(part[key] for part in parts.values() for key in keys)


def step_x(steps: dict[str, dict[str, Any]]) -> float:
    return float(steps["flat"]["ms"] / steps["hierarchical"]["ms"])


def flat_wins_below(sweep: list[dict[str, Any]]) -> int:
    wins = [
        row["tokens"] for row in sweep if total(row["parts"]["flat"], "ms") < total(row["parts"]["hierarchical"], "ms")
    ]
    return max(wins, default=0)


if __name__ == "__main__":
    main()
