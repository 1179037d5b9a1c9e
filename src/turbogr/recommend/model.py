"""A trained model that is asked in raw ids: by a user of its store, by a pasted history, or for everybody.

B users of a batch, N items, k places
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from turbogr.config import SplitConfig
from turbogr.data.queries import Queries, read_queries
from turbogr.data.split import Which, ensure_not_trained_past, make_split
from turbogr.data.store import Store, indices_of
from turbogr.device import pick_device
from turbogr.errors import CheckpointError, ConfigError, DataError, UserError
from turbogr.evaluate import Evaluation, Exclude, Scorer, TopK, baselines, evaluate, top_k
from turbogr.progress import bar, console
from turbogr.recommend.answers import answer_table, check_now, latest_seconds, pasted_query
from turbogr.recommend.exported import INDEX, is_export, load_export, write_export
from turbogr.recommend.index import ItemIndex
from turbogr.recommend.parts import FrozenTable, Parts
from turbogr.tasks.retrieval import RetrievalScorer


class Model:
    """Load one with `Model.load`; `fit` answers one. Every answer is an Arrow table, best items first."""

    def __init__(self, parts: Parts, store: Store | None, index: ItemIndex | None = None) -> None:
        self.parts, self.store = parts, store
        self.config = parts.config
        self._index = index
        device = _device_of(self.config.device.name)
        table = FrozenTable(parts.weight.to(device))
        self._scorer = RetrievalScorer(parts.encoder.to(device).eval(), table, self.config.model.max_history, device)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        checkpoint: str | int = "best",
        store: str | Path | None = None,
        search: Literal["scan", "index"] = "scan",
    ) -> "Model":
        """The model of a run's folder, or of one that `save` or `turbogr export` wrote.

        Args:
            checkpoint: of a run: "best" (the last one where none was selected), "last", or a step's number.
            store: the prepared store, where it has moved, or to ask an exported model about users of a store.
            search: how the best items are found: by a scan over the item table, or, of an exported model, in its FAISS
                index. Both are exact.
        """
        path = Path(path)
        if not (path / "config.json").exists():
            raise CheckpointError(f"{path} holds no model: name the folder of a run or of an exported model.")
        if not is_export(path):
            if search == "index":
                raise UserError(f"{path} is a run and has no index: export it first, or search by scan.")
            from turbogr.recommend.run import load_run  # an exported model needs no trainer

            return cls(*load_run(path, checkpoint, store))
        if checkpoint != "best":
            raise UserError(f"{path} is an exported model and has no checkpoints: leave out checkpoint {checkpoint!r}.")
        parts, opened = load_export(path), None
        if store is not None:
            opened = _same_items(Store.open(store), parts)
            parts = dataclasses.replace(parts, latest=max(parts.latest, latest_seconds(opened)))
        return cls(parts, opened, _same_shape(ItemIndex(path / INDEX), parts) if search == "index" else None)

    def keep(self, folder: TemporaryDirectory[str]) -> None:
        """Hold on to a temporary folder that run or store lie in."""
        self._kept = folder

    def __repr__(self) -> str:
        model = self.config.model
        return f"Model({model.name}, dim {model.dim}, {len(self.parts.items):,} items, from {self.parts.path})"

    def recommend(
        self,
        users: Any,
        k: int = 10,
        *,
        exclude: Sequence[Any] = (),
        allow_seen: bool = False,
        now: int | None = None,
    ) -> pa.Table:
        """The k best items of each user: columns user, rank, item, title (where there is one), score.

        Args:
            users: one raw id or several, of the store. A user's whole history counts, also what evaluation held out;
                the model sees its latest max_history events.
            exclude: raw ids of items that nobody gets.
            allow_seen: also items of the user's own history.
            now: the moment to recommend for, in seconds; by default the latest time of the store, so that an answer
                can be repeated.
        """
        store = self._needed_store()
        users = [users] if isinstance(users, str | int | np.integer) else list(users)
        tables = self._answers(store, store.user_indices(users), k, exclude, allow_seen, now, None)
        return pa.concat_tables(tables)

    def recommend_all(
        self,
        k: int = 10,
        *,
        exclude: Sequence[Any] = (),
        allow_seen: bool = False,
        now: int | None = None,
        batch_users: int | None = None,
    ) -> Iterator[pa.Table]:
        """`recommend` for every user of the store, one table per `batch_users` (default: evaluate.batch_users)."""
        store = self._needed_store()
        return self._answers(store, np.arange(store.num_users), k, exclude, allow_seen, now, batch_users)

    def recommend_history(
        self,
        items: Sequence[Any],
        times: Sequence[int] | None = None,
        k: int = 10,
        *,
        exclude: Sequence[Any] = (),
        allow_seen: bool = False,
        now: int | None = None,
    ) -> pa.Table:
        """The k best items after a history: columns rank, item, title (where there is one), score.

        Args:
            items: raw ids, oldest first.
            times: whole seconds, one per item; without them every event counts as having happened at `now`.
            now: the moment to recommend for; by default the latest time of the store, or the last of `times` where
                that is later.
        """
        seen = self._items(list(items))
        queries = pasted_query(seen, times, now, self.parts.latest, self.config.model.max_history)
        offsets, shown = (np.array([0, len(seen)]), seen) if not allow_seen else _nothing(1)
        best = self._best(queries, self._places(k), Exclude.of(offsets, shown, self._items(exclude)))
        return answer_table(best, self.parts.items, None)

    def evaluate(
        self, which: Which = "test", *, split: SplitConfig | None = None, beside_baselines: bool = False
    ) -> Evaluation:
        """Metrics on the store's targets, under the split that it was trained with or another one that it may be
        asked about; with popularity and Markov beside it if wanted."""
        store, trained = self._needed_store(), self.config.split
        split = split or trained
        if split != trained:
            ensure_not_trained_past(trained, split, which)
        made = make_split(store, split)
        scorers: dict[str, Scorer] = {"model": self._scorer}
        if beside_baselines:
            scorers |= baselines(store, made)
        return evaluate(
            scorers,
            store,
            made,
            which,
            config=self.config.evaluate,
            max_history=self.config.model.max_history,
            seed=self.config.train.seed,
        )

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that answers without this run, its store and the trainer: what `turbogr export` writes."""
        vectors = self._scorer.scan(self.config.evaluate.item_chunk)
        write_export(self.parts, vectors, Path(folder), overwrite=overwrite)

    def _answers(
        self,
        store: Store,
        users: np.ndarray,
        k: int,
        exclude: Sequence[Any],
        allow_seen: bool,
        now: int | None,
        batch_users: int | None,
    ) -> Iterator[pa.Table]:
        everywhere = self._items(exclude)
        k, batch = self._places(k), batch_users or self.config.evaluate.batch_users
        raw_ids = store.users["raw_id"]
        with bar("recommend", total=len(users)) as shown:
            yield answer_table(_no_one(k), self.parts.items, raw_ids)  # the columns, also where there are no users
            for begin in range(0, len(users), batch):
                chosen = users[begin : begin + batch]
                whole, queries = self._histories(store, chosen, now)
                offsets, seen = _nothing(len(chosen)) if allow_seen else (whole.offsets, whole.item)
                best = self._best(queries, k, Exclude.of(offsets, seen, everywhere))
                yield answer_table(best, self.parts.items, raw_ids.take(pa.array(chosen)))
                shown.update(begin + len(chosen))

    def _histories(self, store: Store, users: np.ndarray, now: int | None) -> tuple[Queries, Queries]:
        """(whole histories, what the model sees of them)."""
        ends = np.asarray(store.offsets[users + 1])
        last = int(store.time[ends - 1].max()) // store.manifest.time_units_per_second
        moment = self.parts.latest if now is None else now
        check_now(moment, last)
        return (
            read_queries(store, users, ends, None, moment),
            read_queries(store, users, ends, self.config.model.max_history, moment),
        )

    def _best(self, queries: Queries, k: int, exclude: Exclude) -> TopK:
        if self._index is not None:
            return self._index.top_k(self._scorer.encode(queries), k, exclude)
        return top_k(self._scorer, queries, k, exclude=exclude, item_chunk=self.config.evaluate.item_chunk)

    def _items(self, raw_ids: Sequence[Any]) -> np.ndarray:
        return indices_of(self.parts.items, list(raw_ids), "item", self.parts.path)

    def _places(self, k: int) -> int:
        if k < 1:
            raise UserError(f"k must be at least 1, not {k}.")
        return min(k, len(self.parts.items))

    def _needed_store(self) -> Store:
        if self.store is None:
            raise UserError(
                f"{self.parts.path} was loaded without a store and knows no users: name the store, or give a history."
            )
        return self.store


def _device_of(name: str) -> torch.device:
    """The device that the config names; where this machine has none such, what it has."""
    try:
        return pick_device(name)
    except ConfigError:
        found = pick_device("auto")
        console().print(
            f"device.name {name} is not available here: the model answers on {found.type}.", highlight=False
        )
        return found


def _nothing(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(rows + 1, np.int64), np.zeros(0, np.int64)


def _no_one(k: int) -> TopK:
    return TopK(torch.zeros(0, k, dtype=torch.int64), torch.zeros(0, k))


def _same_items(store: Store, parts: Parts) -> Store:
    if not store.items["raw_id"].equals(parts.items["raw_id"]):
        raise DataError(f"{store.path} does not have the items of {parts.path}: take the store that it was trained on.")
    return store


def _same_shape(index: ItemIndex, parts: Parts) -> ItemIndex:
    if index.shape != tuple(parts.weight.shape):
        raise CheckpointError(
            f"{parts.path / INDEX} holds {list(index.shape)} floats where the model has {list(parts.weight.shape)}: "
            "export it again."
        )
    return index
