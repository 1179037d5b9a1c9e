"""The folder of an exported model, which answers without trainer and store.

config.json         format, version, the run's config, where it came from, the latest time of its store
model.safetensors   the encoder in the plain layout (turbogr.recommend.layout) and the item table, `items.weight` [N, D]
items.parquet       raw_id, and title where the source has one; row i is item i
items.faiss         the unit item vectors as a FAISS index for inner products
README.md           how to use it
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from turbogr.config import Config, from_dict, to_dict
from turbogr.errors import CheckpointError
from turbogr.files import read_json, read_versioned, whole_folder
from turbogr.models import build_encoder
from turbogr.recommend.index import write_index
from turbogr.recommend.layout import from_plain, to_plain
from turbogr.recommend.parts import Parts

FORMAT, VERSION = "turbogr-model", 1
ENCODER, TABLE = "encoder.", "items.weight"
INDEX = "items.faiss"
README = """\
A recommender ({name}) over {items:,} items, exported by turbogr (format version {version}).
Ask it: `turbogr.load(FOLDER).recommend_history([ITEM, ...], k=10)` or `turbogr recommend FOLDER --history ITEM,ITEM`.
Files: model.safetensors (encoder, item table), items.parquet (raw ids in row order), items.faiss (unit item vectors).
"""


def write_export(parts: Parts, vectors: Iterator[Tensor], out: Path, *, overwrite: bool = False) -> None:
    """Write the folder `out`, whole or not at all; `vectors` are the unit item vectors, piece by piece."""
    config = to_dict(parts.config)
    config["data"]["store"] = ""  # a path of the machine that trained
    name = parts.config.model.name
    with whole_folder(out, overwrite=overwrite) as folder:
        plain = to_plain(name, parts.encoder.state_dict())
        tensors = {ENCODER + key: tensor for key, tensor in plain.items()}
        _save_tensors({**tensors, TABLE: parts.weight}, folder / "model.safetensors")
        (folder / "model.safetensors").chmod(0o644)  # like the others; safetensors makes it private
        pq.write_table(parts.items, folder / "items.parquet")
        write_index(folder / INDEX, vectors, parts.weight.shape[1])
        described = {
            "format": FORMAT,
            "version": VERSION,
            "config": config,
            "latest_time": parts.latest,
            "origin": parts.origin,
        }
        (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
        (folder / "README.md").write_text(README.format(name=name, items=len(parts.items), version=VERSION))


def is_export(path: Path) -> bool:
    """Whether config.json describes an exported model; a run's holds its settings only."""
    described = read_json(path / "config.json")
    return isinstance(described, dict) and "format" in described


def load_export(path: Path) -> Parts:
    described = _described(path)
    config = from_dict(Config, described["config"], str(path / "config.json"))
    encoder = build_encoder(config.model, config.train.seed)
    tensors = _tensors(path / "model.safetensors")
    items = _items(path / "items.parquet")
    weight = tensors.pop(TABLE, torch.empty(0))
    if weight.shape != (len(items), config.model.dim):
        raise _damaged(path, f"{TABLE} is {list(weight.shape)}, not {[len(items), config.model.dim]}")
    _fill(encoder, from_plain(config.model.name, {n.removeprefix(ENCODER): t for n, t in tensors.items()}), path)
    return Parts(
        path=path,
        config=config,
        encoder=encoder,
        weight=weight,
        items=items,
        latest=described["latest_time"],
        origin=described["origin"],
    )


def _described(path: Path) -> dict[str, Any]:
    remedy = "export it again with this version, or use the turbogr that wrote it"
    return read_versioned(path / "config.json", FORMAT, VERSION, CheckpointError, remedy)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        # whole_folder says a full disk in a sentence, by the number that safetensors has only in its text
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from None
    return tensors


def _items(path: Path) -> pa.Table:
    try:
        items = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, str(error).splitlines()[0]) from None
    if "raw_id" not in items.column_names:
        raise _damaged(path, "no column raw_id")
    return items


def _fill(encoder: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    wanted = encoder.state_dict()
    for name in sorted(wanted.keys() | state.keys()):
        if name not in wanted or name not in state or wanted[name].shape != state[name].shape:
            raise _damaged(path, f"the tensor {name} is not what the config describes")
    encoder.load_state_dict(state)


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({reason}): export the model again.")
