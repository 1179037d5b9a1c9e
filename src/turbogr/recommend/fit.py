"""From a table in memory to a trained model, in one call."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from turbogr.config import Config, DataConfig, check, from_dict
from turbogr.data.prepare import prepare_frame
from turbogr.data.sources.table import TimeUnit
from turbogr.errors import ConfigError, UserError
from turbogr.recommend.model import Model
from turbogr.train.trainer import train


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
) -> Model:
    """Train a model on a log and answer the best checkpoint (the last one where none was selected).

    Args:
        frame: a pandas, Polars or Arrow table with one row per event; or the folder of a prepared store.
        user, item, time, title: names of its columns. Ids are integers or strings; times are timestamps, or numbers in
            `time_unit`.
        config: a Config, or what differs from the defaults: {"train.epochs": 5, "model.dim": 32}.
        store: where the prepared store is kept.
        out: where the run is kept, as `turbogr train` writes it.

    Without `store` or `out` a temporary folder holds them for as long as the model lives.
    """
    settings = config if isinstance(config, Config) else from_dict(Config, _nested(config or {}), "config")
    check(settings)
    scratch = TemporaryDirectory(prefix="turbogr-")
    run = Path(out or Path(scratch.name) / "run")
    if run.exists() and any(run.iterdir()):
        raise UserError(f"{run} exists already: choose another out.")
    if isinstance(frame, str | Path):
        if store is not None:
            raise UserError(f"{frame} is a prepared store already: leave out store.")
        store = frame
    else:
        store = store or Path(scratch.name) / "store"
        prepare_frame(frame, store, user=user, item=item, time=time, time_unit=time_unit, title=title)
    train(dataclasses.replace(settings, data=DataConfig(store=str(store))), run)
    model = Model.load(run)
    model.keep(scratch)
    return model


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
