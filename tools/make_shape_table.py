"""Builds the packaged shape table from published aggregates: what real logs look like, without one row of them.

    python tools/make_shape_table.py --data $TURBOGR_DATA

reads `kuairand-27k-stats/`, `kuairand-pure-subset/` and `movielens-1m/ml-1m.zip` under the data folder and writes
src/turbogr/data/sources/kuairand_27k_shape.json. Quantiles, shares and histograms only.
"""

import argparse
import csv
import gzip
import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

TARGET = Path(__file__).resolve().parents[1] / "src/turbogr/data/sources/kuairand_27k_shape.json"
PROBABILITIES = np.linspace(0, 1, 1001)
CTR_PROBABILITIES = np.linspace(0, 1, 41)
KUAIRAND = "KuaiRand (Gao et al., CIKM 2022), CC BY-SA 4.0, https://kuairand.com"
MASK_BITS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the three sources")
    data = parser.parse_args().data
    table = {"kuairand-27k": _kuairand(data), "ml-1m": _movielens(data / "movielens-1m/ml-1m.zip")}
    lines = json.dumps(table, separators=(",", ":")).replace('],"', '],\n"').replace('},"', '},\n"')
    TARGET.write_text(lines + "\n")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


def _kuairand(data: Path) -> dict[str, Any]:
    stats = data / "kuairand-27k-stats"
    users = np.loadtxt(stats / "user_exposures_clicks.csv", delimiter=",", skiprows=1)
    totals = _rows(stats / "basic_stats.csv")[0]
    gaps = _rows(stats / "time_gap_bins.csv")
    pairs = sum(int(row["cnt"]) for row in gaps)
    return {
        "source": "Aggregates of the KuaiRand-27K standard log, published in the reports of "
        "https://github.com/limings02/kuairand (commit 38358e69); actions, tabs, play times from a part of its Pure.",
        "licence": f"{KUAIRAND}. This table is shared under the same licence.",
        "totals": {name: int(totals[name + "_cnt"]) for name in ("exposure", "user", "video")},
        "quantiles": {
            "exposures": _quantiles(users[:, 0]),
            "clicks": _quantiles(users[:, 1]),
        },
        "ctr_by_exposures": _ctr_by_exposures(users[:, 0], users[:, 1] / users[:, 0]),
        "popularity": _popularity(stats / "video_exposure_freq.csv"),
        "gap_shares": {row["gap_bin"]: _short(int(row["cnt"]) / pairs) for row in gaps},
        "gap_mean_s": _short(float(_rows(stats / "time_gap_summary.csv")[0]["gap_mean_s"])),
        **_pure(data / "kuairand-pure-subset"),
    }


def _popularity(path: Path) -> dict[str, list[float]]:
    """Share of exposures that falls on the most popular share of the videos, on a grid of logarithmic steps."""
    rows = sorted(np.loadtxt(path, delimiter=",", skiprows=1), key=lambda row: -row[0])
    times, videos = np.array(rows).T
    of_items = np.concatenate([[0], np.cumsum(videos) / videos.sum()])
    of_exposures = np.concatenate([[0], np.cumsum(times * videos) / (times * videos).sum()])
    grid = np.unique(np.concatenate([[0], np.geomspace(of_items[1], 1, 400), of_items[-20:]]))
    return {"items": _shorts(grid), "exposures": _shorts(np.interp(grid, of_items, of_exposures))}


def _ctr_by_exposures(exposures: np.ndarray, ctr: np.ndarray) -> list[list[float]]:
    """Quantiles of click-through for each twentieth of the users by number of exposures (heavy users click less)."""
    order = np.argsort(exposures, kind="stable")
    return [_shorts(np.quantile(ctr[part], CTR_PROBABILITIES)) for part in np.array_split(order, 20)]


def _pure(folder: Path) -> dict[str, Any]:
    masks = {row["action_mask"]: int(row["count"]) for row in _rows(folder / "action_mask_histogram.csv")}
    with gzip.open(folder / "log_standard_4_25_to_5_08_pure.csv.gz", "rt") as stream:
        log = list(csv.DictReader(stream))
    tabs = Counter(int(row["tab"]) for row in log)
    duration = np.array([int(row["duration_ms"]) for row in log])
    play = {
        name: np.array([int(row["play_time_ms"]) for row in log if row["is_click"] == flag])
        for name, flag in (("clicked", "1"), ("passed", "0"))
    }
    return {
        "action_bits": MASK_BITS,
        "action_masks": {mask: _short(count / len(log)) for mask, count in masks.items()},
        "tabs": {str(tab): _short(count / len(log)) for tab, count in sorted(tabs.items())},
        "log_ms": {name: [_short(np.log(x[x > 0]).mean()), _short(np.log(x[x > 0]).std())]
                   for name, x in {"duration": duration, **play}.items()},
    }  # fmt: skip


def _movielens(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        ratings = archive.read("ml-1m/ratings.dat").decode("latin-1").splitlines()
    counts = Counter(line.split("::", 1)[0] for line in ratings)
    return {
        "source": "Quantiles of ratings per user in MovieLens-1M (GroupLens), counted on the original archive.",
        "licence": "Aggregates only; MovieLens-1M itself may not be redistributed and is not part of this package.",
        "totals": {"rating": len(ratings), "user": len(counts)},
        "quantiles": {"ratings": _quantiles(np.array(list(counts.values())))},
    }


def _quantiles(values: np.ndarray) -> list[float]:
    return [int(round(value)) for value in np.quantile(values, PROBABILITIES)]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _shorts(values: np.ndarray) -> list[float]:
    return [_short(value) for value in values]


if __name__ == "__main__":
    main()
