"""Tables and the picture of `exchange`."""

from pathlib import Path
from typing import Any

PARTS = {"lookup": "lookup", "gradients": "row gradients", "copies": "sums over copies"}
Parts = dict[str, dict[str, dict[str, float]]]


def print_parts(parts: Parts, title: str) -> None:
    print(f"\n{title}: median ms, MB sent / received by a node")
    print(f"{'':14}" + "".join(f"{name:>26}" for name in [*PARTS.values(), "all"]))
    for name, found in parts.items():
        rows = [found[part] for part in PARTS]
        rows.append({key: sum(row[key] for row in rows) for key in rows[0]})
        cells = (f"{row['ms']:8.1f} {row['sent'] / 1e6:6.2f} / {row['received'] / 1e6:6.2f}" for row in rows)
        print(f"{name:14}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


def print_steps(steps: dict[str, dict[str, Any]]) -> None:
    print("\nthe trainer's step: median ms by stage of rank 0; of the whole step: the slowest rank's")
    stages = list(steps["flat"]["stages"])
    print(f"{'':18}" + "".join(f"{name:>14}" for name in steps))
    for stage in stages:
        print(f"{stage:18}" + "".join(f"{one['stages'][stage]:14.1f}" for one in steps.values()))
    print(f"{'step':18}" + "".join(f"{one['ms']:14.1f}" for one in steps.values()))
    print(f"{'MB sent':18}" + "".join(f"{one['sent'] / 1e6:14.2f}" for one in steps.values()), flush=True)


def print_sweep(sweep: list[dict[str, Any]]) -> None:
    print("\n2 nodes x 2 ranks by batch size: ms and MB sent by a node, the three parts together")
    print(f"{'tokens of a rank':>18}{'flat ms':>10}{'hier. ms':>10}{'ratio':>8}{'flat MB':>10}{'hier. MB':>10}")
    for row in sweep:
        flat, ours = (_sums(row["parts"][name]) for name in ("flat", "hierarchical"))
        print(
            f"{row['tokens']:18}{flat['ms']:10.1f}{ours['ms']:10.1f}{ours['ms'] / flat['ms']:8.2f}"
            f"{flat['sent'] / 1e6:10.2f}{ours['sent'] / 1e6:10.2f}",
            flush=True,
        )


def print_plan(rows: list[dict[str, float]], title: str) -> None:
    print(f"\n{title}, counted: MB that leave a node in a step (hierarchical / flat)")
    print(f"{'tokens of a rank':>18}{'rows of a rank':>16}{'flat':>10}{'hierarchical':>18}{'all gathered':>18}")
    for row in rows:
        print(
            f"{row['tokens']:18}{row['rank_rows']:16.0f}{row['flat'] / 1e6:10.1f}"
            f"{row['hierarchical'] / 1e6:10.1f} ({row['ratio']:5.2f})"
            f"{row['gathered'] / 1e6:10.1f} ({row['ratio_gathered']:5.2f})"
        )


def _sums(parts: dict[str, dict[str, float]]) -> dict[str, float]:
    return {key: sum(part[key] for part in parts.values()) for key in ("ms", "sent", "received")}


def plot(details: dict[str, Any], path: Path) -> None:
    """Parts of both topologies, the ratio over batch size, and the count for 16 x 8."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    bars = [(where, name) for where in ("2x2", "4x1") for name in details[where]["parts"]]
    bottom = [0.0] * len(bars)
    labels = [f"{name}\n{where}" for where, name in bars]
    for part, title in PARTS.items():
        heights = [details[where]["parts"][name][part]["ms"] for where, name in bars]
        panels[0].bar(labels, heights, 0.6, bottom=bottom, label=title)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    panels[0].set_ylabel(f"ms, links of {details['rate']}")
    panels[0].tick_params(axis="x", labelsize=7)
    panels[0].legend(fontsize=8)
    panels[0].set_title("nodes x ranks, nothing overlapped")

    sweep = details["2x2"]["sweep"]
    tokens = [row["tokens"] for row in sweep]
    sums = [[_sums(row["parts"][name]) for row in sweep] for name in ("hierarchical", "flat")]
    for key, title in (("ms", "time"), ("sent", "bytes on the link")):
        ratios = [ours[key] / flat[key] for ours, flat in zip(*sums, strict=True)]
        panels[1].semilogx(tokens, ratios, "o-", base=2, label=title)
    _ratio_axis(panels[1], "2 x 2, measured")

    planned = details["planned_16x8"]
    for key, title in (("ratio", "hierarchical"), ("ratio_gathered", "where copies gather all lists")):
        panels[2].loglog([row["tokens"] for row in planned], [row[key] for row in planned], "o-", label=title)
    _ratio_axis(panels[2], "16 x 8, counted bytes")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _ratio_axis(panel: Any, title: str) -> None:
    panel.axhline(1, color="k", ls=":", lw=1)
    panel.set_xlabel("tokens of a rank")
    panel.set_ylabel("hierarchical / flat")
    panel.set_title(title)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
