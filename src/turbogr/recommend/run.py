"""The model of a training run: one of its checkpoints, and the vocabulary of its store.

Only this module and `fit` know the trainer.
"""

from pathlib import Path
from typing import Any

import torch

from turbogr.config import load
from turbogr.data.store import Store
from turbogr.errors import CheckpointError, DataError
from turbogr.files import sha256
from turbogr.models import build_encoder
from turbogr.recommend.answers import latest_seconds
from turbogr.recommend.parts import Parts
from turbogr.tables.storage import DTYPES
from turbogr.train import checkpoint as checkpoints


def load_run(folder: Path, checkpoint: str | int, store_path: str | Path | None) -> tuple[Parts, Store]:
    """`checkpoint` is "best" (the last one where none was selected), "last", or a step's number."""
    config = load(folder / "config.json")
    store = _store_of(folder, store_path or config.data.store)
    path = _find(folder, checkpoint)
    meta = checkpoints.read_meta(path)
    if meta["store"] != sha256(store.path / "manifest.json"):
        raise CheckpointError(f"{path} was trained on another store than {store.path}: say which one.")
    encoder = build_encoder(config.model, config.train.seed)
    weight = torch.empty(store.num_items, config.model.dim, dtype=DTYPES[config.tables.dtype])
    state = {f"encoder.{name}": parameter.data for name, parameter in encoder.named_parameters()}
    state |= {f"encoder.{name}": buffer for name, buffer in encoder.named_buffers()}
    checkpoints.load(path, {**state, "table.weight": weight})
    columns = [name for name in ("raw_id", "title") if name in store.items.column_names]
    parts = Parts(
        path=folder,
        config=config,
        encoder=encoder,
        weight=weight.float(),
        items=store.items.select(columns),
        latest=latest_seconds(store),
        origin={"step": meta["progress"]["step"], "epoch": meta["progress"]["epoch"]},
    )
    return parts, store


def _store_of(folder: Path, path: str | Path) -> Store:
    if not Path(path).exists():
        raise DataError(f"the store {path} of {folder} is not there: start where it was trained, or say --store.")
    return Store.open(path)


def _find(folder: Path, checkpoint: Any) -> Path:
    named = str(checkpoint)
    if named not in ("best", "last") and not named.isdigit():
        raise CheckpointError(f"checkpoint {named!r} is none: say best, last, or the number of a step.")
    found = checkpoints.best(folder) if named == "best" else checkpoints.latest(folder)
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint yet: wait for the end of the first epoch.")
    if named.isdigit():
        found = folder / "checkpoints" / f"step-{int(named):08d}"
        if not found.exists():
            steps = sorted(int(path.name[5:]) for path in found.parent.glob("step-*"))
            raise CheckpointError(f"{folder} holds no checkpoint of step {named}: it has {', '.join(map(str, steps))}.")
    return found
