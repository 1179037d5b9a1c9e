"""Does `prepare` keep up with DuckDB's own sort, and does its memory stay where it is when the log doubles?

A synthetic log in KuaiRand's CSV format (19 columns, most neighbouring events of a user tied in time), 2 threads,
DuckDB memory limit 1 GiB. Every variant runs in a process of its own, interleaved:

    ours          prepare, no filter
    ours_kcore    prepare, iterative 5-core
    sort_window   DuckDB alone: read the same columns, row_number() over (), sort by (user, time, row) into Parquet
    sort_rowid    the same with the rows staged in a table first, whose row number then is free
    sort_plain    DuckDB alone: sort by (user, time), which neither keeps ties nor repeats its bytes

`time_ratio` is ours / the faster of sort_window and sort_rowid. Memory is the largest anonymous memory of a process.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from benchmarks import common
from turbogr.data.filters import Filters
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.sources.kuairand import ACTIONS, KuaiRand
from turbogr.data.store import Store

THREADS = 2
MEMORY_LIMIT = "1GiB"
FULL_ROWS = 20_000_000
SORTS = ("sort_window", "sort_rowid", "sort_plain")
CORE = Filters(user_core=5, item_core=5)


def main() -> None:
    arguments = parse()
    if arguments.worker:
        print(json.dumps(work(arguments.worker, arguments.log, arguments.scratch)))
        return
    rows = arguments.rows or (1_000_000 if arguments.quick else FULL_ROWS)
    rounds = 1 if arguments.quick else 3
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prepare-", dir=arguments.scratch) as name:
        scratch = Path(name)
        check(scratch)
        log = scratch / f"log_standard_{rows}.csv"
        write_log(log, rows)
        runs: dict[str, list[dict[str, Any]]] = {v: [] for v in ("ours", *SORTS, "ours_kcore")}
        seconds = common.interleaved({v: partial(measure, v, log, scratch, runs[v]) for v in runs}, rounds)
        log.unlink()
        double = scratch / f"log_standard_{2 * rows}.csv"
        write_log(double, 2 * rows)
        measure("ours", double, scratch, runs.setdefault("ours_double", []))
        measure("ours_kcore", double, scratch, runs.setdefault("ours_kcore_double", []))
    report(arguments, rows, seconds, runs)


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, default=0, help="rows of the log (20 million; quick: 1 million)")
    parser.add_argument("--scratch", type=Path, default=None, help="where the logs and stores are written meanwhile")
    parser.add_argument("--worker", choices=("ours", "ours_kcore", *SORTS), help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def report(
    arguments: argparse.Namespace, rows: int, seconds: dict[str, list[float]], runs: dict[str, list[dict[str, Any]]]
) -> None:
    best = {variant: min(values) for variant, values in seconds.items()}
    peak = {variant: max(run["peak"] for run in found) for variant, found in runs.items()}
    cpu = {variant: min(run["cpu_seconds"] for run in found) for variant, found in runs.items()}
    stable = min(best["sort_window"], best["sort_rowid"])
    figures: dict[str, Any] = {
        "rows": rows,
        "time_ratio": best["ours"] / stable,
        "time_plain_ratio": best["ours"] / best["sort_plain"],
        "kcore_time_ratio": best["ours_kcore"] / stable,
        "cpu_time_ratio": cpu["ours"] / min(cpu["sort_window"], cpu["sort_rowid"]),
        "rows_per_s": rows / best["ours"],
        "peak_anon_gib": peak["ours"] / common.GIB,
        "peak_anon_double_gib": peak["ours_double"] / common.GIB,
        "memory_growth_ratio": peak["ours_double"] / peak["ours"],
        "kcore_peak_anon_gib": peak["ours_kcore"] / common.GIB,
        "kcore_memory_growth_ratio": peak["ours_kcore_double"] / peak["ours_kcore"],
        "reasons": {},
    }
    if rows < FULL_ROWS:
        for name in ("memory_growth_ratio", "kcore_memory_growth_ratio"):
            figures |= {name: None, "reasons": figures["reasons"] | {name: f"{rows:,} rows fit the memory limit"}}
    for variant, values in seconds.items():
        print(f"{variant:12} {min(values):8.2f} s   {peak[variant] / common.GIB:5.2f} GiB")
    details = {
        "threads": THREADS,
        "memory_limit": MEMORY_LIMIT,
        "seconds": {variant: common.summary(values) for variant, values in seconds.items()},
        "runs": runs,
    }
    common.finish("prepare", arguments, figures, details)


def measure(variant: str, log: Path, scratch: Path, runs: list[dict[str, Any]]) -> float:
    """Run one variant in a process of its own; returns its seconds."""
    command = [sys.executable, "-m", "benchmarks.prepare", "--worker", variant, "--log", log, "--scratch", scratch]
    answer = subprocess.run(list(map(str, command)), cwd=common.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    runs.append(json.loads(answer.stdout.splitlines()[-1]))
    print(f"{variant:12} {log.stem}: {runs[-1]['seconds']:.2f} s", flush=True)
    return float(runs[-1]["seconds"])


def work(variant: str, log: Path, scratch: Path) -> dict[str, Any]:
    target = scratch / "target"
    before = sum(os.times()[:2])
    with common.PeakMemory() as memory:
        if variant in SORTS:
            seconds = common.timed(lambda: duckdb_sort(variant, log, scratch))
        else:
            seconds = common.timed(lambda: ours(variant, log, target))
    shutil.rmtree(target, ignore_errors=True)
    return {"seconds": seconds, "cpu_seconds": sum(os.times()[:2]) - before, "peak": memory.peak}


def ours(variant: str, log: Path, target: Path, threads: int = THREADS) -> None:
    filters = CORE if variant == "ours_kcore" else Filters()
    prepare(KuaiRand(log), target, PrepareOptions(filters=filters, memory_limit=MEMORY_LIMIT, threads=threads))


def duckdb_sort(variant: str, log: Path, scratch: Path) -> None:
    """The baseline: the same columns of the same file, sorted into one Parquet file."""
    target = scratch / "sorted.parquet"
    staged = scratch / "baseline.duckdb"
    connection = connect(scratch, staged if variant == "sort_rowid" else ":memory:")
    bits = " + ".join(f"CAST({column} AS USMALLINT) * {1 << bit}" for bit, column in enumerate(ACTIONS.values()))
    columns = f"user_id, video_id, time_ms, CAST({bits} AS USMALLINT) AS actions"
    kinds = dict.fromkeys(header(), "VARCHAR") | dict.fromkeys(("user_id", "video_id", "time_ms"), "BIGINT")
    kinds |= dict.fromkeys(ACTIONS.values(), "UTINYINT")
    read = f"read_csv('{log}', header = true, auto_detect = false, delim = ',', columns = {kinds!r})"
    if variant == "sort_plain":
        query = f"SELECT {columns} FROM {read} ORDER BY user_id, time_ms"
    elif variant == "sort_window":
        numbered = f"SELECT {columns}, row_number() OVER () AS row FROM {read}"
        query = f"SELECT * EXCLUDE (row) FROM ({numbered}) ORDER BY user_id, time_ms, row"
    else:
        connection.execute("PRAGMA disable_checkpoint_on_shutdown")
        connection.execute(f"CREATE TABLE log AS SELECT {columns} FROM {read}")
        query = "SELECT * FROM log ORDER BY user_id, time_ms, rowid"
    connection.execute(f"COPY ({query}) TO '{target}' (FORMAT parquet)")
    connection.close()
    target.unlink()
    staged.unlink(missing_ok=True)


def connect(scratch: Path, database: Path | str = ":memory:") -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(str(database), config={"threads": THREADS, "memory_limit": MEMORY_LIMIT})
    connection.execute(f"SET temp_directory = '{scratch / 'spill'}'; SET enable_progress_bar = false")
    return connection


def header() -> list[str]:
    before = ["user_id", "video_id", "date", "hourmin", "time_ms"]
    actions = ["is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view"]
    after = [
        "play_time_ms",
        "duration_ms",
        "profile_stay_time",
        "comment_stay_time",
        "is_profile_enter",
        "is_rand",
        "tab",
    ]
    return before + actions + after


def write_log(target: Path, rows: int) -> None:
    """A deterministic log: batches of 6 exposures at one moment, users interleaved in time, few items very popular."""
    users, items = max(rows // 4000, 50), max(rows // 10, 100)
    draw = "(hash(i * 32 + {}) % 1000003) / 1000003.0"
    shares = {"is_click": 0.4, "is_like": 0.02, "is_follow": 0.01, "is_comment": 0.01, "is_forward": 0.01}
    shares |= {"is_hate": 0.01, "long_view": 0.3, "is_profile_enter": 0.01}
    columns = {
        "user_id": f"hash(i // 6) % {users}",
        "video_id": f"CAST(floor(pow({draw.format(1)}, 3) * {items}) AS BIGINT)",
        "date": "20220408 + i * 30 // " + str(rows),
        "hourmin": "(i // 1000 % 24) * 100",
        "time_ms": f"1649352000000 + (i // 6) * {max(2_000_000_000 // rows, 1)}",
        "play_time_ms": f"CAST({draw.format(2)} * 60000 AS INTEGER)",
        "duration_ms": f"CAST({draw.format(3)} * 120000 AS INTEGER)",
        "tab": "hash(i) % 15",
    }
    columns |= {n: f"CAST({draw.format(4 + k)} < {share} AS INTEGER)" for k, (n, share) in enumerate(shares.items())}
    listed = ", ".join(f"{columns.get(n, '0')} AS {n}" for n in header())
    connection = connect(target.parent)
    connection.execute(f"COPY (SELECT {listed} FROM range({rows}) r(i)) TO '{target}' (HEADER)")
    connection.close()


def check(scratch: Path) -> None:
    """The store equals NumPy's stable sort, and its bytes do not depend on the number of threads."""
    log = scratch / "log_standard_check.csv"
    write_log(log, 200_000)
    stores = [scratch / f"check-{threads}" for threads in (1, 2)]
    for threads, target in enumerate(stores, 1):
        ours("ours", log, target, threads)
    table = connect(scratch).execute(f"SELECT user_id, video_id, time_ms FROM read_csv('{log}')").fetchnumpy()
    order = np.lexsort((np.arange(len(table["user_id"])), table["time_ms"], table["user_id"]))
    store = Store.open(stores[0])
    assert np.array_equal(store.time, table["time_ms"][order]), "times differ from NumPy's stable sort"
    raw = np.unique(table["video_id"])
    assert np.array_equal(raw[store.item], table["video_id"][order]), "items differ from NumPy's stable sort"
    assert store.manifest.tied_gaps > store.num_events / 2, "the log must be mostly ties"
    one, two = (Store.open(path).manifest.files for path in stores)
    assert one == two, "1 and 2 threads give different bytes"
    print("check: equal to NumPy's stable sort, and the same bytes with 1 and 2 threads")


if __name__ == "__main__":
    main()
