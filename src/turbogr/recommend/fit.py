"""From a table in memory to a trained model, in one call."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from turbogr.config import Config, DataConfig, NegativesConfig, from_dict
from turbogr.data.prepare import PrepareOptions, prepare_frame
from turbogr.data.sources.table import TimeUnit
from turbogr.data.store import Store
from turbogr.errors import ConfigError, UserError
from turbogr.progress import console
from turbogr.recommend.model import Model
from turbogr.train.trainer import check_run, preflight, train


def fit(
    frame: Any,
    *,
    user: str = "user_id",
    item: str = "item_id",
    time: str = "ts",
    time_unit: TimeUnit = "s",
    title: str = "",
    config: Config | Mapping[str, Any] | None = None,
    store: str | Path | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    skip_bad_rows: bool = False,
) -> Model:
    """Train a model on a log and answer the best checkpoint (the last one where none was selected).

    Args:
        frame: a pandas, Polars or Arrow table with one row per event; or the folder of a prepared store.
        user, item, time, title: names of its columns. Ids are integers or strings; times are timestamps, or numbers in
            `time_unit`.
        config: a Config, or what differs from the defaults: {"train.epochs": 5, "model.dim": 32}. On a catalogue that
            is too small for the default of negatives.count, fewer are drawn.
        store: where the prepared store is kept.
        out: where the run is kept, as `turbogr train` writes it.
        overwrite: replace a store and a run that stand there already.
        skip_bad_rows: set rows that cannot be used aside (rejects.csv in the store), instead of stopping.

    Without `store` or `out` a temporary folder holds them for as long as the model lives.
    """
    given = config if isinstance(config, Config) else _nested(config or {})
    settings = given if isinstance(given, Config) else from_dict(Config, given, "config")
    check_run(settings)
    scratch = TemporaryDirectory(prefix="turbogr-")
    run = Path(out or Path(scratch.name) / "run")
    made = not isinstance(frame, str | Path)
    if not made and (store is not None or skip_bad_rows):
        raise UserError(f"{frame} is a prepared store already: leave out store and skip_bad_rows.")
    place = Path((store or Path(scratch.name) / "store") if made else frame)
    _ensure_free(run, place, overwrite)
    if made:
        if place.exists() and not overwrite:
            raise UserError(f"{place} exists already: choose another store, or pass overwrite=True.")
        options = PrepareOptions(overwrite=overwrite, skip_bad_rows=skip_bad_rows)
        prepare_frame(frame, place, user=user, item=item, time=time, time_unit=time_unit, title=title, options=options)
    settings = dataclasses.replace(settings, data=DataConfig(store=str(place)))
    if not _says_count(given):
        settings = _with_fewer_negatives(settings, Store.open(place).num_items)
    try:
        preflight(settings)
    except UserError:
        if made and not overwrite:
            shutil.rmtree(place)  # or the mended call would find it in its way
        raise
    if run.exists():
        shutil.rmtree(run)  # empty, or a run that may be overwritten
    train(settings, run)
    model = Model.load(run)
    model.keep(scratch)
    return model


def _ensure_free(run: Path, store: Path, overwrite: bool) -> None:
    """`run` may be written, and be removed first."""
    inside = store.resolve()
    if run.resolve() in (inside, *inside.parents):
        raise UserError(f"the store {store} lies in the run {run}: choose another store or another out.")
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return
    if not (run / "config.json").exists() or not (run / "metrics.jsonl").exists():
        raise UserError(f"{run} exists already and is no run: choose another out.")
    if not overwrite:
        raise UserError(f"{run} exists already: choose another out, or pass overwrite=True.")


def _says_count(given: Config | Mapping[str, Any]) -> bool:
    if isinstance(given, Config):
        return given.negatives.count != NegativesConfig().count
    return "count" in given.get("negatives", {})


def _with_fewer_negatives(settings: Config, items: int) -> Config:
    """The default count where the catalogue has more items, and all items but one where it has not."""
    negatives = settings.negatives
    if items < 2 or negatives.count < items:
        return settings
    console().print(f"{items} items: negatives.count is {items - 1} instead of {negatives.count}.", highlight=False)
    return dataclasses.replace(settings, negatives=dataclasses.replace(negatives, count=items - 1))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"train.epochs": 5} as {"train": {"epochs": 5}}."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, last = key.split(".")
        place = nested
        for table in tables:
            place = place.setdefault(table, {})
        if last in place:
            raise ConfigError(f"config says {key} twice: once as a table, once with dots.")
        place[last] = value
    return nested
