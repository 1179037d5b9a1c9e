"""Kill a training run at random moments and resume it, until it ends; compare with a run that nobody disturbed.

    python -m benchmarks.kill            20 kills, at least 5 of them inside a checkpoint's write
    python -m benchmarks.kill --quick    5 kills, 2 of them so

Figures: kills, kills_in_checkpoint, equal (every parameter, bit for bit), reports_equal (result.json and epochs.jsonl),
most_repeated_steps (per kill, of at most `checkpoint_every`), steps_once (every step stands once in metrics.jsonl).
"""

import dataclasses
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.common import finish, parser
from turbogr.config import Config, to_dict
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.sources import open_source
from turbogr.data.sources.synthetic import synthesize

CHECKPOINT_EVERY = 3


@dataclasses.dataclass
class Kills:
    total: int = 0
    in_checkpoint: int = 0
    repeated: list[int] = dataclasses.field(default_factory=list)


def make_store(folder: Path) -> Path:
    synthesize(folder / "raw", users=300, items=800, length_scale=0.02, seed=0)
    prepare(open_source("kuairand", folder / "raw"), folder / "store", PrepareOptions())
    return folder / "store"


def make_config(folder: Path, store: Path, epochs: int) -> Path:
    base = Config()
    config = dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, store=str(store)),
        model=dataclasses.replace(base.model, dim=32, max_history=50),
        negatives=dataclasses.replace(base.negatives, count=32),
        train=dataclasses.replace(
            base.train, epochs=epochs, batch_users=32, checkpoint_every=CHECKPOINT_EVERY, select_on_test=True
        ),
        device=dataclasses.replace(base.device, threads=1),
        log=dataclasses.replace(base.log, tensorboard=False),
    )
    path = folder / "config.json"
    path.write_text(json.dumps(to_dict(config)))
    return path


def start(config: Path, run: Path) -> subprocess.Popen[bytes]:
    resume = ["--resume"] if (run / "config.json").exists() else []
    command = [sys.executable, "-m", "turbogr", "train", str(config), "--out", str(run), *resume]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def kill_until(config: Path, run: Path, kills: int, in_checkpoint: int, seed: int = 0) -> Kills:
    """Kill `kills` times, `in_checkpoint` of them while a checkpoint is being written, then let the run end."""
    chance, done = random.Random(seed), Kills()
    while done.total < kills:
        process = start(config, run)
        before = _last_step(run)
        aim = done.in_checkpoint < in_checkpoint and chance.random() < 0.7
        inside = _wait_for_write(process, run) if aim else _wait_for_steps(process, run, before, chance)
        if process.poll() is not None:
            _ended_well(process)
            raise RuntimeError(f"the run ended after {done.total} kills: give it more epochs")
        process.send_signal(signal.SIGKILL)
        process.wait()
        inside = inside or bool(_partials(run))
        done.total, done.in_checkpoint = done.total + 1, done.in_checkpoint + inside
        done.repeated.append(_last_step(run) - _newest_checkpoint(run) + 1)
    process = start(config, run)
    process.wait()
    _ended_well(process)
    return done


def _ended_well(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None
    if process.wait() != 0:
        raise RuntimeError(process.stderr.read().decode())


def _partials(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(".step-*.partial-*"))


def _wait_for_write(process: subprocess.Popen[bytes], run: Path) -> bool:
    """Until a checkpoint of this process is half written."""
    before = set(_partials(run))
    while process.poll() is None:
        if set(_partials(run)) - before:
            return True
        time.sleep(0.0002)
    return False


def _wait_for_steps(process: subprocess.Popen[bytes], run: Path, before: int, chance: random.Random) -> bool:
    """Until one step more was logged, and a random moment longer."""
    while process.poll() is None and _last_step(run) <= before:
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 0.3))
    return False


def _steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["step"] for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _last_step(run: Path) -> int:
    return max(_steps(run), default=-1)


def _newest_checkpoint(run: Path) -> int:
    """The step that a resumed run does next."""
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    tensors: dict[str, torch.Tensor] = {}
    for path in newest.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def compare(run: Path, undisturbed: Path) -> dict[str, Any]:
    ours, theirs = final_tensors(run), final_tensors(undisturbed)
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    steps = _steps(run)
    return {
        "equal": equal,
        "reports_equal": _told(run) == _told(undisturbed),
        "steps_once": steps == list(range(len(_steps(undisturbed)))),
        "tensors": len(ours),
    }


def _told(run: Path) -> list[Any]:
    """What a run reports, times aside: result.json and the epochs, each once."""
    result = json.loads((run / "result.json").read_text())
    epochs = [json.loads(line) for line in (run / "epochs.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key != "seconds"} for line in epochs]
    return [{key: value for key, value in result.items() if not key.endswith("_seconds")}, kept]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    kills, inside = (5, 2) if arguments.quick else (20, 6)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make_config(folder, make_store(folder), epochs=8 if arguments.quick else 24)
        undisturbed, run = folder / "undisturbed", folder / "killed"
        _ended_well(start(config, undisturbed))
        done = kill_until(config, run, kills, inside)
        result = compare(run, undisturbed)
    figures = {
        "kills": done.total,
        "kills_in_checkpoint": done.in_checkpoint,
        "equal": result["equal"],
        "reports_equal": result["reports_equal"],
        "steps_once": result["steps_once"],
        "most_repeated_steps": max(done.repeated),
        "checkpoint_every": CHECKPOINT_EVERY,
    }
    finish("kill", arguments, figures, {"repeated_steps": done.repeated, **result})


if __name__ == "__main__":
    main()
