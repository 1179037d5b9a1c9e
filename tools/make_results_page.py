"""Write docs/results.md and the curves from what lies in benchmarks/results: python -m tools.make_results_page"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: written by tools/make_results_page.py -->", "<!-- end of results -->"
METRICS = ("hr@10", "ndcg@10", "hr@50", "hr@200", "ndcg@200")
PUBLISHED = {
    "hstu": (0.3097, 0.1720, 0.5754, 0.7716, 0.2606),
    "sasrec": (0.2853, 0.1603, 0.5474, 0.7528, 0.2498),
    "hstu-large": (0.3294, 0.1893, 0.5935, 0.7839, 0.2771),
}
RECTOOLS = {"hstu": (0.3226, 0.1880), "sasrec": (0.2877, 0.1622), "hstu-large": (0.3642, 0.2164)}
"""What the public code and RecTools publish, in the order of METRICS."""
OPERATORS = {
    "attention_ml1m_1head_x": "HSTU attention, ML-1M, 1 head of 50: times padded eager",
    "attention_ml1m_2heads_x": "HSTU attention, ML-1M, 2 heads of 25: times padded eager",
    "attention_kuairand_x": "HSTU attention, KuaiRand, 4 heads of 64: times padded eager",
    "attention_kuairand_gemm_share": "HSTU attention, KuaiRand: share of the best GEMM's rate",
    "attention_kuairand_memory_ratio": "HSTU attention, KuaiRand: peak memory above the inputs / output and gradients",
    "attention_avx2_share": "HSTU attention, KuaiRand: AVX2 code's rate / AVX-512 code's",
    "attention_bf16_x": "HSTU attention, KuaiRand, bf16: times fp32",
    "attention_one_user_two_cores_x": "HSTU attention, one user of 32,768 tokens, two cores: times one",
    "fuxi_ml1m_x": "FuXi's channels, ML-1M: times padded eager",
    "fuxi_kuairand_x": "FuXi's channels, KuaiRand: times padded eager",
    "fuxi_kuairand_gemm_share": "FuXi's channels, KuaiRand: share of the best GEMM's rate",
    "loss_4k_x": "sampled softmax, 3,883 items: times the gathered form",
    "loss_4k_chunked_x": "sampled softmax, 3,883 items: times the best chunked torch form",
    "loss_1m_x": "sampled softmax, a million items: times the gathered form",
    "loss_1m_chunked_x": "sampled softmax, a million items: times the best chunked torch form",
    "loss_1m_copy_share": "sampled softmax, a million items: bytes moved a second / a copy's",
    "lookup_forward_x": "lookup in 8 tables, forward: times the padded loop",
    "lookup_forward_copy_share": "lookup in 8 tables, forward: bytes read and written a second / a copy's",
    "lookup_backward_x": "lookup in 8 tables, backward: times the padded loop",
    "table_step_x": "a step of a 10M x 64 table, as the trainer does it: times torch's sparse optimizers",
    "table_step_fused_x": "a step of a 10M x 64 table, sums and update fused: times torch's sparse optimizers",
    "layer_x": "an HSTU layer, D=512, KuaiRand: times its padded twin",
    "layer_gemm_share": "an HSTU layer, fp32: share of the best GEMM's rate",
    "layer_bf16_gemm_share": "an HSTU layer, bf16: share of the best GEMM's rate in bf16",
    "layer_memory_ratio": "an HSTU layer: memory / the padded twin's",
    "step_hstu_x": "a training step of hstu.toml, reading included: times the public padded step",
    "step_hstu_large_x": "a training step of hstu-large.toml: times the public padded step",
    "max_rel_error": "largest relative error against float64, fp32",
    "max_rel_error_bf16": "largest relative error against float64, bf16",
}
"""Figures of benchmarks.ops that are shown, and what they are."""


def newest(prefix: str) -> list[dict[str, Any]]:
    """The full (not quick) results whose benchmark's name begins so, the newest of each name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob(f"{prefix}*.json")):
        result = json.loads(path.read_text())
        known = found.get(result["benchmark"])
        if "-quick-" not in path.name and (known is None or known["date"] <= result["date"]):
            found[result["benchmark"]] = {**result, "file": path.name}
    return [found[name] for name in sorted(found)]


def made_by(result: dict[str, Any], command: str) -> str:
    machine = result["machine"]
    return (
        f"`{command}`, {machine['cores']} cores of {machine['cpu']}, torch {machine['versions']['torch']}, "
        f"{result['date']}, commit {machine['commit']}; raw result "
        f"[{result['file']}](../benchmarks/results/{result['file']})."
    )


def ml1m_runs() -> dict[str, list[dict[str, Any]]]:
    """The results of every recipe, by seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in newest("ml-1m"):
        groups.setdefault(re.sub(r"-seed\d+$", "", result["benchmark"].removeprefix("ml-1m-")), []).append(result)
    return groups


def mean_and_spread(results: list[dict[str, Any]], which: str, metric: str) -> str:
    """Of the best or the last epoch over the seeds, the standard deviation only where there are several."""
    values = [result["result"][which]["metrics"][metric] for result in results]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def highest(results: list[dict[str, Any]], metric: str) -> str:
    """Mean over the seeds of a metric's highest value at any epoch."""
    return f"{statistics.mean(max(line.get(metric, 0.0) for line in one['curve']) for one in results):.4f}"


def ml1m() -> list[str]:
    groups = ml1m_runs()
    if not groups:
        return []
    lines = [
        "## MovieLens-1M, the public recipes",
        "",
        "Full catalogue of 3,883 films, visible history removed; mean over seeds (of parameters, batches, negatives",
        "and order of ties) and their standard deviation. *shuffled* (ties in a random order) stands for the public",
        "code's unstable sort, *unstable* is numpy's unstable sort of the whole log, *file* keeps the order of",
        "`ratings.dat`: the last item is the test, the best epoch is that with the best NDCG@10 on the test target, as",
        "the published figures seem to be. *rectools-file*: ties in file order, last item test, last but one",
        "validation and not trained on, the best epoch of 100 by NDCG@10 on the validation target; published are",
        "RecTools' own figures. Most runs shared the machine with others, and took longer than they need alone.",
        "The highest values of any epoch (of rectools: on the validation target) stand beside them.",
        "",
        "| run | seeds | epoch | HR@10 | NDCG@10 | HR@50 | HR@200 | NDCG@200 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, results in groups.items():
        model = max((key for key in PUBLISHED if name.startswith(key)), key=len)
        for which in ("best", "last"):
            cells = [mean_and_spread(results, which, metric) for metric in METRICS]
            lines.append(f"| {name} | {len(results)} | {which} | {' | '.join(cells)} |")
        tops = [highest(results, metric) for metric in METRICS[:2]]
        lines.append(f"| {name} | {len(results)} | highest of any | {' | '.join(tops)} | | | |")
        public = RECTOOLS[model] if "rectools" in name else () if name.endswith("-file") else PUBLISHED[model]
        if public:
            cells = [f"{value:.4f}" for value in public] + [""] * (len(METRICS) - len(public))
            lines.append(f"| *{name}, published* | | | {' | '.join(cells)} |")
    lines += ["", "| run | seed | threads | training | evaluation of every epoch |", "|---|---|---|---|---|"]
    for name, results in groups.items():
        for one in results:
            seed = re.search(r"-seed(\d+)$", one["benchmark"])
            f = one["figures"]
            lines.append(
                f"| {name} | {seed[1] if seed else 0} | {one['threads']} | {f['train_seconds']:.0f} s | "
                f"{f['evaluate_seconds']:.0f} s |"
            )
    plot_curves(groups)
    command = "python -m benchmarks.ml1m --model MODEL --ties TIES --seed SEED"
    sources = [f"- {made_by(one, command)}" for results in groups.values() for one in results]
    return [*lines, "", "![NDCG@10 by epoch](ml-1m-curves.png)", "", *sources, ""]


def plot_curves(groups: dict[str, list[dict[str, Any]]]) -> None:
    figure, axes = figure_of(7, 3.6)
    for number, (name, results) in enumerate(groups.items()):
        for turn, result in enumerate(results):
            metric = "ndcg@10"
            points = [(line["epoch"], line[metric]) for line in result["curve"] if metric in line]
            axes.plot(*zip(*points, strict=True), color=f"C{number}", lw=0.8, label=None if turn else name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("NDCG@10 (rectools: validation)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "ml-1m-curves.png", dpi=110)


def figure_of(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height))


def operators_on_cpu() -> list[dict[str, Any]]:
    """The newest whole run, if there is one; runs of some parts and on a GPU have names of their own."""
    return [result for result in newest("ops") if result["benchmark"] == "ops"]


def ops() -> list[str]:
    lines: list[str] = []
    for result in operators_on_cpu():
        figures = result["figures"]
        rows = [f"| {text} | {show(figures.get(key))} |" for key, text in OPERATORS.items() if key in figures]
        plot_ratios(figures)
        lines += [
            "## Operators on the CPU",
            "",
            "fp32 unless it says bf16; every ratio is of medians of variants that took turns in one run, both sides",
            "with the tuned allocator. *Padded eager* is the public formulation, pinned by tests to its formula; *best",
            "GEMM* is the faster of MKL's and oneDNN's square product in the same rounds and the same type; operations",
            "are the causal count of [flops.md](flops.md). On a GPU: not measured.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            "![ratios to the baselines](operators.png)",
            "",
            made_by(result, "python -m benchmarks.ops"),
            "",
        ]
    return lines


def plot_ratios(figures: dict[str, Any]) -> None:
    shown = [(text, figures[key]) for key, text in OPERATORS.items() if key.endswith("_x") and figures.get(key)][::-1]
    figure, axes = figure_of(9, 0.3 * len(shown) + 0.8)
    places = range(len(shown))
    axes.barh(places, [value for _, value in shown], color="C0")
    axes.set_yticks(places, [text for text, _ in shown], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(1, 2 * max(value for _, value in shown))
    axes.set_xlabel("times as fast, logarithmic", fontsize=8)
    for place, (_, value) in enumerate(shown):
        axes.text(value, place, f" {value:.1f}", va="center", fontsize=7)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "operators.png", dpi=110)


def peers() -> list[str]:
    lines: list[str] = []
    for result in newest("peers"):
        f = result["figures"]
        rows = [
            f"| {name} | {f[f'{name}_tokens_per_s']:,.0f} | {f[f'peer_{name}_tokens_per_s']:,.0f} | "
            f"{f[f'peer_{name}_x']:.1f} | {f[f'peer_{name}_memory_ratio']:.2f} |"
            for name in ("hstu", "hstu_large", "sasrec")
            if f.get(f"peer_{name}_x") is not None
        ]
        lines += [
            "## Training against RecTools",
            "",
            "RecTools' HSTUModel and SASRecModel at the sizes of the ML-1M recipes, on the same events, loss,",
            "negatives, threads and tuned allocator, data loading included, the sides taking turns; real tokens,",
            "padding does not count. Memory is the peak of the process, ours / theirs.",
            "",
            "| recipe | ours, tokens/s | RecTools, tokens/s | times | memory |",
            "|---|---|---|---|---|",
            *rows,
            "",
            made_by(result, "python -m benchmarks.peers"),
            "",
        ]
    return lines


def plain(prefix: str, title: str, text: str, command: str) -> list[str]:
    lines: list[str] = []
    for result in newest(prefix):
        rows = [f"| `{name}` | {show(value)} |" for name, value in result["figures"].items() if name != "reasons"]
        lines += [f"## {title}", "", text, "", "| figure | |", "|---|---|", *rows, "", made_by(result, command), ""]
    return lines


def show(value: Any) -> str:
    if isinstance(value, float) and 0 < abs(value) < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def summary() -> list[str]:
    """What the README shows: one line per proof, each from its newest result."""
    lines = ["| measured | |", "|---|---|"]
    for result in operators_on_cpu():
        f = result["figures"]
        lines += [
            f"| {OPERATORS[key].split(': times')[0]}: faster than the public eager code | {f[key]:.1f}x |"
            for key in ("attention_ml1m_1head_x", "loss_4k_x", "step_hstu_x", "step_hstu_large_x")
            if f.get(key)
        ]
    for result in newest("peers"):
        f = result["figures"]
        for name in ("hstu", "hstu_large"):
            if f.get(f"peer_{name}_x"):
                lines.append(f"| training {name}, tokens per second against RecTools | {f[f'peer_{name}_x']:.1f}x |")
    for name, results in ml1m_runs().items():
        lines.append(
            f"| ML-1M, {name}, seeds: {len(results)}; HR@10 / NDCG@10 of the best epoch | "
            f"{mean_and_spread(results, 'best', 'hr@10')} / {mean_and_spread(results, 'best', 'ndcg@10')} |"
        )
    for result in newest("balance"):
        f = result["figures"]
        lines.append(
            "| 64 ranks, KuaiRand-27K's clicks up to 8192: imbalance of cost as drawn, dealt out; mean wait of two "
            f"real ranks | {f['naive_8192_64']:.2f}, {f['imbalance_8192_64']:.5f}; {f['wait_reduction_x']:.1f}x less |"
        )
    for result in newest("demo_quality"):
        f = result["figures"]
        lines.append(
            f"| the demo's log (synthetic): HR@10 of HSTU, Markov, popularity, the generator's oracle | "
            f"{f['hr10']:.3f}, {f['markov_hr10']:.3f}, {f['popularity_hr10']:.3f}, {f['oracle_hr10']:.3f} |"
        )
    for result in newest("prepare"):
        f = result["figures"]
        lines.append(
            f"| preparing {f['rows'] / 1e6:.0f} million rows: time against DuckDB's own stable sort; peak memory | "
            f"{f['time_ratio']:.2f}x; {f['peak_anon_gib']:.2f} GiB |"
        )
    for result in newest("kill"):
        f = result["figures"]
        lines.append(
            f"| a run killed {f['kills']} times ({f['kills_in_checkpoint']} inside a checkpoint's write) ends in the "
            f"same bits | {'yes' if f['equal'] else 'no'} |"
        )
    return [*lines, "", "Machines, commands, dates and curves: [docs/results.md](docs/results.md)."]


def put_into_readme(lines: list[str]) -> None:
    text = README.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(text[:begin] + "\n" + "\n".join(lines) + "\n" + text[end:])


def main() -> None:
    lines = [
        "# Measured results",
        "",
        "Written by `python -m tools.make_results_page` from `benchmarks/results/`; not by hand.",
        "",
        *ops(),
        *peers(),
        *ml1m(),
        *plain(
            "balance",
            "Every rank the same work",
            "`imbalance_CAP_RANKS` is (max - min) / max of the ranks' cost on KuaiRand-27K's real click histories cut "
            "at CAP, 32 users a rank, D=1024, mean of 8 draws; `naive` as drawn. `wait_...` and `step_...`: two gloo "
            "ranks, one pinned thread each, 4 users a rank cut at 8192, the two ways taking turns. "
            "[distributed.md](distributed.md) has the plot of all rules, the raw result all tables.",
            "python -m benchmarks.balance",
        ),
        *plain(
            "exchange",
            "Sharded tables over a slow link",
            "Hosts are network namespaces, the link between them is shaped to 1 Gbit/s; one group of all ranks (flat) "
            "against a group per host, the same batches, taking turns.",
            "python -m benchmarks.exchange",
        ),
        *plain(
            "table",
            "A large table in one process",
            "10 million x 64 rows, 100,000 ids a step (Zipf 1.05), forward, backward, update; like optimizers in turn.",
            "python -m benchmarks.table",
        ),
        *plain(
            "demo_quality",
            "The demo",
            "HR@10 of `make demo`'s model beside baselines and the generator's own oracle, mean over seeds 0, 1, "
            "2. The log was designed so that sequence models can learn it: it shows that the system "
            "works and says nothing about real data.",
            "python -m benchmarks.demo_quality",
        ),
        *plain(
            "prepare",
            "Preparing a log out of core",
            "A synthetic KuaiRand log, DuckDB's memory limit 1 GiB. `time_ratio` is ours / DuckDB's own stable sort of "
            "the same columns into Parquet; memory is the anonymous memory of the whole process.",
            "python -m benchmarks.prepare",
        ),
        *plain(
            "kill",
            "SIGKILL and resume",
            "A run killed at random moments, resumed each time, and compared with one that was not disturbed.",
            "python -m benchmarks.kill",
        ),
    ]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    put_into_readme(summary())
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
