"""Checkpoints through torch.distributed.checkpoint in safetensors: nothing is ever unpickled.

    checkpoints/step-00000120/   meta.json and the tensors by name; the folder appears whole or not at all

The newest checkpoint's meta.json also says which one scored best: one file that appears whole is the only truth.
"""

import contextlib
import io
import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from turbogr.config import Config, to_dict
from turbogr.errors import CheckpointError
from turbogr.files import read_versioned, sha256, whole_folder
from turbogr.ranks import ALONE, Ranks

FORMAT, VERSION = "turbogr-checkpoint", 2
FREE = (
    "log",
    "train.epochs",
    "train.keep_checkpoints",
    "train.checkpoint_every",
    "data.store",
    "evaluate",
    "device.name",
    "model.recompute",
    "balance.rank_tokens",
    "tables.groups",
    "dense.sharding",
)
"""Settings that a resumed run may change, and the number of ranks; every other one changes the numbers."""


@dataclass
class Progress:
    """Where a run stands; with the tensors, all that its future depends on."""

    step: int = 0
    epoch: int = 0
    batches: int = 0
    """Batches of this epoch that are done."""
    epoch_loss: float = 0.0
    """Sum of token losses of this epoch so far."""
    epoch_tokens: int = 0
    skipped_steps: int = 0
    best_step: int = -1
    best_epoch: int = -1
    best_value: float = -1.0
    stale_evaluations: int = 0
    """Evaluations since the best one."""
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the latest evaluation."""


def save(
    folder: Path,
    state: dict[str, Tensor],
    progress: Progress,
    identity: dict[str, Any],
    keep: int,
    ranks: Ranks = ALONE,
) -> Path:
    """Write checkpoint `progress.step` of the run in `folder`, then remove all but the `keep` latest and the best.

    Several ranks each write their part of what is sharded; the first one opens the folder and makes it whole.
    """
    target = folder / "checkpoints" / f"step-{progress.step:08d}"
    with contextlib.ExitStack() as opened:
        with ranks.agreed():
            partial = opened.enter_context(whole_folder(target, overwrite=True)) if ranks.first else Path()
        partial = Path(ranks.texts(str(partial))[0])
        with ranks.agreed():
            try:
                with _quiet():
                    writer = HuggingFaceStorageWriter(str(partial), save_distributed=not ranks.alone)
                    dcp_save(dict(state), storage_writer=writer, no_dist=ranks.alone)
            except CheckpointException as error:
                raise _cause(error) from None
        with ranks.agreed():
            if ranks.first:
                meta = {"format": FORMAT, "version": VERSION, "progress": asdict(progress), **identity}
                (partial / "meta.json").write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
                opened.close()
                _prune(folder, keep, progress.best_step)
    return target


def load(path: Path, state: dict[str, Tensor], ranks: Ranks = ALONE) -> None:
    """Fill the tensors of `state` in place from the checkpoint at `path`, by however many ranks it was written."""
    try:
        with _quiet():
            dcp_load(dict(state), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=ranks.alone)
    except (Exception, CheckpointException) as error:
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        reason = (str(cause).strip().splitlines() or ["unreadable"])[-1]
        raise CheckpointError(f"{path} does not fit this model or is damaged ({reason}).") from error


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed; DCP wraps it in an exception that is not even an Exception."""
    wrapped = next(iter(error.failures.values()))[0]
    return wrapped.__context__ if isinstance(wrapped.__context__, OSError) else wrapped


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint, its format checked."""
    return read_versioned(path / "meta.json", FORMAT, VERSION, CheckpointError, "use the turbogr that wrote it")


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    found = _all(folder)
    return found[max(found)] if found else None


def best(folder: Path) -> Path | None:
    """The best checkpoint of a run; the newest where none was selected."""
    newest = latest(folder)
    if newest is None:
        return None
    step = read_meta(newest)["progress"]["best_step"]
    if step < 0:
        return newest
    path = newest.with_name(f"step-{step:08d}")
    if not path.exists():
        raise CheckpointError(f"{path}, the best checkpoint of {folder}, is missing: say --checkpoint last.")
    return path


def identity_of(config: Config, store_path: Path, threads: int) -> dict[str, Any]:
    """What a resumed run is compared with."""
    return {"config": to_dict(config), "store": sha256(store_path / "manifest.json"), "threads": threads}


def ensure_same(path: Path, meta: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume under another config or store, naming the first setting that differs."""
    if meta["store"] != now["store"]:
        raise CheckpointError(f"{path} was trained on another store: resume with that one, or start a new run.")
    before, after = _flat(meta["config"]), _flat(now["config"])
    for name in sorted(before.keys() | after.keys()):
        free = any(name == prefix or name.startswith(prefix + ".") for prefix in FREE)
        if name == "train.epochs" and after["train.rate"] != "constant":
            free = False  # the cosine's course depends on the number of epochs
        if not free and before.get(name) != after.get(name):
            raise CheckpointError(
                f"{path} was trained with {name} {before.get(name)!r}, this run says {after.get(name)!r}: "
                "resume with the same settings, or start a new run."
            )


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _all(folder: Path) -> dict[int, Path]:
    found = {}
    for path in (folder / "checkpoints").glob("step-*"):
        if re.fullmatch(r"step-\d{8}", path.name):
            found[int(path.name[5:])] = path
    return found


def _prune(folder: Path, keep: int, best_step: int) -> None:
    found = _all(folder)
    for step in sorted(found)[:-keep]:
        if step != best_step:
            # renamed first: a folder half removed must not look like a checkpoint
            doomed = found[step].rename(found[step].with_name(f".{found[step].name}.partial-old"))
            shutil.rmtree(doomed, ignore_errors=True)
    for leftover in (folder / "checkpoints").glob(".step-*.partial-old"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns that no process group exists, which is what one rank wants, and logs what it then raises."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def dense_state(encoder: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and AdamW moments by name; moments are made (as zeros) where no step was done yet."""
    state: dict[str, Tensor] = {}
    for name, parameter in encoder.named_parameters():
        moments = optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros(())
            moments["exp_avg"] = torch.zeros_like(parameter)
            moments["exp_avg_sq"] = torch.zeros_like(parameter)
        state[f"encoder.{name}"] = parameter.data
        state.update({f"dense.{name}.{key}": moments[key] for key in ("step", "exp_avg", "exp_avg_sq")})
    state.update({f"encoder.{name}": buffer for name, buffer in encoder.named_buffers()})
    return state
