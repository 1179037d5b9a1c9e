"""Write docs/results.md and the curves from what lies in benchmarks/results: python -m tools.make_results_page"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: written by tools/make_results_page.py -->", "<!-- end of results -->"
PUBLISHED = {"hstu": (0.3097, 0.1720), "sasrec": (0.2853, 0.1603), "hstu-large": (0.3294, 0.1893)}


def newest(prefix: str) -> list[dict[str, Any]]:
    """The full (not quick) results whose benchmark's name begins so, the newest of each name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob(f"{prefix}*.json"), key=lambda path: path.stat().st_mtime):
        result = json.loads(path.read_text())
        if "-quick-" not in path.name:
            found[result["benchmark"]] = {**result, "file": path.name}
    return [found[name] for name in sorted(found)]


def made_by(result: dict[str, Any], command: str) -> str:
    machine = result["machine"]
    return (
        f"`{command}`, {machine['cores']} cores of {machine['cpu']}, torch {machine['versions']['torch']}, "
        f"{result['date']}, commit {machine['commit']}; raw result "
        f"[{result['file']}](../benchmarks/results/{result['file']})."
    )


def ml1m() -> list[str]:
    results = newest("ml-1m")
    if not results:
        return []
    lines = [
        "## MovieLens-1M, the public recipes",
        "",
        "Leave-one-out, full catalogue of 3,883 films, visible history removed. Best epoch by NDCG@10 on the test",
        "target, as the published figures seem to be, and the last epoch. Ties *shuffled* stands for the public code's",
        "unstable sort.",
        "",
        "| run | best epoch | HR@10 | NDCG@10 | last HR@10 | last NDCG@10 | published, HR / NDCG | train, evaluate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        f, name = result["figures"], result["benchmark"].removeprefix("ml-1m-")
        model = max((key for key in PUBLISHED if name.startswith(key)), key=len)
        hr, ndcg = PUBLISHED[model]
        public = f"{hr:.4f} / {ndcg:.4f}" if "shuffled" in name else "-"
        lines.append(
            f"| {name} | {f['epoch_best']} | {f['hr10_best']:.4f} | {f['ndcg10_best']:.4f} | {f['hr10_last']:.4f} | "
            f"{f['ndcg10_last']:.4f} | {public} | {f['train_seconds']:.0f} s, {f['evaluate_seconds']:.0f} s |"
        )
    plot(results)
    command = "python -m benchmarks.ml1m --model MODEL --ties TIES"
    return [*lines, "", "![NDCG@10 by epoch](ml-1m-curves.png)", "", *(made_by(one, command) for one in results), ""]


def plot(results: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for result in results:
        points = [(line["epoch"], line["ndcg@10"]) for line in result["curve"] if "ndcg@10" in line]
        axes.plot(*zip(*points, strict=True), label=result["benchmark"].removeprefix("ml-1m-"))
    axes.set_xlabel("epoch")
    axes.set_ylabel("NDCG@10, test")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "ml-1m-curves.png", dpi=110)


def plain(prefix: str, title: str, text: str, command: str) -> list[str]:
    lines: list[str] = []
    for result in newest(prefix):
        rows = [f"| `{name}` | {show(value)} |" for name, value in result["figures"].items() if name != "reasons"]
        lines += [f"## {title}", "", text, "", "| figure | |", "|---|---|", *rows, "", made_by(result, command), ""]
    return lines


def show(value: Any) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def summary() -> list[str]:
    """What the README shows: one line per proof, each from its newest result."""
    lines = ["| measured | |", "|---|---|"]
    for result in newest("ml-1m"):
        f, name = result["figures"], result["benchmark"].removeprefix("ml-1m-")
        lines.append(
            f"| ML-1M, {name} ties, 101 epochs: HR@10 / NDCG@10, best (last) epoch | {f['hr10_best']:.4f} / "
            f"{f['ndcg10_best']:.4f} ({f['hr10_last']:.4f} / {f['ndcg10_last']:.4f}) |"
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
        *ml1m(),
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
