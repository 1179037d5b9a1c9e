"""`turbogr export`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from turbogr.cli.arguments import parse


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Write a model that answers without its run, its store and the trainer: safetensors, JSON, the vocabulary and a
    FAISS index of the item vectors.

    Examples:
      turbogr export runs/ml-1m-hstu --out models/ml-1m
      turbogr export runs/ml-1m-hstu --out models/last --checkpoint last
      turbogr recommend models/ml-1m --history 1,2858,318
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder that `turbogr train` wrote."""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """Folder to be written."""
    checkpoint: Annotated[str, arg(metavar="best|last|STEP")] = "best"
    """best: the last one where none was selected."""
    store: Annotated[Path | None, arg(metavar="STORE")] = None
    """The prepared store, where it has moved."""
    overwrite: bool = False
    """Replace what stands there already."""


def run(args: list[str]) -> None:
    chosen = parse("export", ExportArgs, args)
    from turbogr.recommend.model import Model

    model = Model.load(chosen.run, checkpoint=chosen.checkpoint, store=chosen.store)
    model.save(chosen.out, overwrite=chosen.overwrite)
    origin = model.parts.origin
    size = sum(path.stat().st_size for path in chosen.out.iterdir())
    trained = f"epoch {origin['epoch']}, step {origin['step']}"
    print(f"{chosen.out}: {len(model.parts.items):,} items, {trained}, {size:,} bytes")
    print(f"`turbogr recommend {chosen.out} --history ITEM,ITEM` asks it.", file=sys.stderr)
