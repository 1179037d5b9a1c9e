"""`make demo`: from a synthetic raw log to a trained, evaluated, usable model, by the verbs that a user would type.

Everything lies in runs/demo and is made anew at every call; two calls give the same numbers.
"""

import json
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from turbogr.cli import main as turbogr
from turbogr.data.store import Store

FOLDER = Path("runs/demo")
CONFIG = "configs/demo.toml"
SIZES = "--users 3000 --items 6000 --length-scale .01 --popularity .6"
SHOWN = ("hr@10", "hr@50", "ndcg@10")
console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    begin = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    run, store, log = FOLDER / "run", FOLDER / "store", FOLDER / "log"
    step("A raw log in KuaiRand's format, with structure that can be learned", f"data synth {SIZES} --out {log}")
    step("Sorted by user and time, memory-mapped", f"data prepare kuairand {log} --out {store}")
    step("A small HSTU, trained on this machine", f"train {CONFIG} --out {run}")
    step("Ranked among all items, beside two baselines", f"evaluate {run}")
    say_oracle(log)
    user = str(Store.open(store).raw_users([7])[0])
    step(f"Ten items for user {user}", f"recommend {run} --user {user}")
    console.print(
        f"\n[bold]Done in {time.monotonic() - begin:.0f} s.[/bold] The log, the store and the run are in {FOLDER}/."
    )
    console.print(
        "What to type next (turbogr is in .venv/bin):\n"
        f"  turbogr doctor                              what this machine can do\n"
        f"  tensorboard --logdir {run}/tb        the curves\n"
        f"  turbogr train {CONFIG} --train.epochs 8 --out runs/longer\n"
        "  turbogr data prepare --help                 bring your own log"
    )


def step(title: str, command: str) -> None:
    """Say and run one verb; its failure is the demo's."""
    console.print(f"\n[bold]{title}[/bold]\n[cyan]$ turbogr {command}[/cyan]")
    code = turbogr(command.split())
    if code:
        sys.exit(code)


def say_oracle(log: Path) -> None:
    """What the generator itself, knowing every user's taste and session, would reach."""
    oracle = json.loads((log / "truth.json").read_text())["oracle"]["exposures"]
    shown = ", ".join(f"{name} {oracle[name.upper()]:.4f}" for name in SHOWN)
    console.print(f"The generator's own oracle, which knows how the log was drawn: {shown}")


if __name__ == "__main__":
    main()
