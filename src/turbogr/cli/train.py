"""`turbogr train`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from turbogr.cli.arguments import config_from
from turbogr.cli.config import to_toml
from turbogr.config import Config
from turbogr.errors import ConfigError
from turbogr.launch import restarted, world_size
from turbogr.progress import console

if TYPE_CHECKING:
    from turbogr.ranks import Ranks

SHOWN = ("hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "mrr")


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Train a model on a store. The run's folder holds its config, metrics, checkpoints and result.

    Examples:
      turbogr train configs/ml-1m/hstu.toml                                into runs/hstu
      turbogr train configs/ml-1m/hstu.toml --train.epochs 5 --out runs/short
      turbogr train configs/ml-1m/hstu.toml --dry-run                      parameters, FLOPs and memory, then stop
      turbogr train runs/hstu --resume                                     continue, bit for bit as if never stopped
      turbogr train configs/ml-1m/hstu.toml --seeds 0,1,2                  three runs, mean and spread
      torchrun --nproc-per-node 4 -m turbogr train configs/demo.toml       four ranks, every one with the same work
      torchrun --nproc-per-node 4 -m turbogr train configs/demo.toml --balance.strategy token-aware
    """

    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """Folder of the run; runs/ and the config's name without it."""
    resume: bool = False
    """Continue the run in the folder from its newest checkpoint."""
    seeds: Annotated[str, arg(metavar="N,N,..")] = ""
    """Train once per seed, into RUN/seed-N."""
    dry_run: bool = False
    """Print the resolved config, parameters, FLOPs per step and memory, and stop."""


def run(args: list[str]) -> None:
    if world_size() == 1:
        _run(args, *config_from("train", TrainArgs, args), None)
        return
    from turbogr.ranks import joined

    with joined() as ranks:
        with ranks.agreed():
            config, chosen = config_from("train", TrainArgs, args)
        _run(args, config, chosen, ranks)


def _run(args: list[str], config: Config, chosen: TrainArgs, ranks: "Ranks | None") -> None:
    if chosen.dry_run:
        if ranks is None or ranks.first:
            _print_estimate(config)
        return
    # torch is loaded when there is something to do, so that --help is quick
    from turbogr.device import tune_allocator
    from turbogr.ranks import ALONE
    from turbogr.train.seeds import train_seeds
    from turbogr.train.trainer import train

    tune_allocator()
    ranks = ranks or ALONE
    folder = chosen.out or _default_folder(args)
    if chosen.seeds:
        with ranks.agreed():
            seeds = _seeds(chosen.seeds)
        summary = train_seeds(config, folder, seeds, resume=chosen.resume, ranks=ranks)
        if ranks.first:
            _print_seeds(summary)
            console().print(f"{folder} holds a run per seed, and seeds.json.", highlight=False)
            _print_next(folder / f"seed-{seeds[0]}")
        return
    result = train(config, folder, resume=chosen.resume or restarted(folder), ranks=ranks)
    if ranks.first:
        _print_result(result)
        _print_next(folder)


def _print_next(run_folder: Path) -> None:
    console().print(
        f"The run is in {run_folder} (config, metrics.jsonl, epochs.jsonl, tb, checkpoints, result).\n"
        f"Next: turbogr evaluate {run_folder}, or turbogr recommend {run_folder} --user ID",
        highlight=False,
    )


def _default_folder(args: list[str]) -> Path:
    if not args or args[0].startswith("-"):
        return Path("runs/default")
    given = Path(args[0])
    if given.is_dir() or given.name == "config.json":
        return given if given.is_dir() else given.parent
    return Path("runs") / given.stem


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds takes whole numbers with commas between them, as in 0,1,2, not {text!r}.") from None


def _print_estimate(config: Config) -> None:
    from turbogr.train.estimate import estimate

    print(to_toml(config))
    facts = asdict(estimate(config))
    table = Table(title="Dry run", show_header=False)
    units = {"model_bytes": 2**30, "step_bytes": 2**30}
    for name, value in facts.items():
        if value is None:
            shown = "no formula for this encoder"
        elif name in units:
            shown = f"{value / units[name]:.3f} GiB"
        else:
            shown = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(name.replace("_bytes", " memory").replace("_", " "), shown)
    Console().print(table)


def _print_result(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['card']['protocol']}, test, {result['card']['catalogue_items']:,} items")
    for column in ("", "epoch", *SHOWN):
        table.add_column(column, justify="right")
    for which in ("best", "last"):
        if which in result:
            metrics = result[which]["metrics"]
            name = f"best by {result['selected_on']} {result['selected_by']}" if which == "best" else "last"
            table.add_row(name, str(result[which]["epoch"]), *(f"{metrics[key]:.4f}" for key in SHOWN))
    Console().print(table)


def _print_seeds(summary: dict[str, Any]) -> None:
    table = Table(title=f"{summary['card']['protocol']}, test, seeds {summary['seeds']}: mean ± standard deviation")
    for column in ("", *SHOWN):
        table.add_column(column, justify="right")
    for which in ("best", "last"):
        if which in summary:
            cells = (f"{summary[which][key]['mean']:.4f} ± {summary[which][key]['std']:.4f}" for key in SHOWN)
            table.add_row(which, *cells)
    Console().print(table)
