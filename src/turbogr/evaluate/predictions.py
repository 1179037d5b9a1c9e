"""Score another library's top-k by the same protocol: a CSV or Parquet file with columns user, item and rank or score.

Ids are raw ids. `rank` (1 is best) or else `score` (greater is better) orders each user's list; items of the history
are taken out of it as the protocol does; the target's rank is its place among what is left, by the same tie rule, and
infinity where the list lacks it.

Legend: R rows of the file, n targets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from turbogr.config import EvaluateConfig
from turbogr.data.queries import read_queries
from turbogr.data.split import Split, Targets, Which
from turbogr.data.store import Store
from turbogr.errors import DataError
from turbogr.evaluate.card import Evaluation, make_card
from turbogr.evaluate.metrics import retrieval_metrics
from turbogr.evaluate.ranking import Filter, draw_targets

BATCH_USERS = 4096


@dataclass(frozen=True)
class Predictions:
    """Lists of recommended items, grouped by user."""

    user: np.ndarray
    """int64 [R], ascending"""
    item: np.ndarray
    """int64 [R]"""
    score: np.ndarray
    """float64 [R], greater is better"""


def evaluate_predictions(
    path: Path,
    store: Store,
    split: Split,
    which: Which = "test",
    *,
    config: EvaluateConfig,
    max_history: int,
    seed: int = 0,
) -> Evaluation:
    """Metrics of the lists in `path` on the targets of the split; a cutoff beyond the longest list is left out."""
    predictions = read_predictions(path, store)
    whole = split.targets(which)
    targets = draw_targets(whole, config.max_users, seed)
    card = make_card(store, split, which, targets, max_history=max_history, filter=config.filter, seed=seed)
    ranks = np.full(len(targets), np.inf)
    kept = np.zeros(len(targets), np.int64)
    removed = repeats = 0
    for start in range(0, len(targets), BATCH_USERS):
        part = targets.take(np.arange(start, min(start + BATCH_USERS, len(targets))))
        place = slice(start, start + len(part))
        ranks[place], kept[place], taken, again = _rank_lists(predictions, store, part, config.filter, max_history)
        removed, repeats = removed + taken, repeats + again
    lengths = np.bincount(predictions.user, minlength=store.num_users)
    longest = int(lengths[targets.user].max())
    card["repeat_targets"] = repeats
    card["next_time"] = "unknown: the file does not say what its lists were made from"
    card["predictions"] = {
        "file": path.name,
        "longest_list": longest,
        "shorter_lists_after_the_filter": int(np.count_nonzero((kept < longest) & (lengths[targets.user] > 0))),
        "users_missing_counted_as_misses": int(np.count_nonzero(lengths[targets.user] == 0)),
        "users_without_target_ignored": int(np.count_nonzero(lengths) - np.count_nonzero(lengths[whole.user])),
        "history_items_removed": removed,
    }
    metrics = {
        name: value
        for name, value in retrieval_metrics(ranks).items()
        if "@" not in name or int(name.split("@")[1]) <= longest
    }
    return Evaluation({path.stem: metrics}, card)


def read_predictions(path: Path, store: Store) -> Predictions:
    """The file's rows as indices of the store; raises DataError naming what is wrong."""
    table = _read_table(path, store)
    order_by = next((name for name in ("rank", "score") if name in table.column_names), None)
    missing = [name for name in ("user", "item") if name not in table.column_names]
    if missing or order_by is None:
        wanted = f"column {missing[0]!r}" if missing else "a column 'rank' or 'score'"
        raise DataError(f"{path} lacks {wanted}: its columns are {', '.join(table.column_names)}.")
    if table.num_rows == 0:
        raise DataError(f"{path} holds no predictions.")
    user = _indices(table["user"], store.user_indices)
    item = _indices(table["item"], store.item_indices)
    try:
        value = table[order_by].cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: column {order_by!r} is not a number everywhere ({error}).") from None
    if np.isnan(value).any():
        raise DataError(f"{path}: row {int(np.isnan(value).argmax()) + 1} has no {order_by}.")
    score = -value if order_by == "rank" else value
    order = np.lexsort((item, user))
    user, item, score = user[order], item[order], score[order]
    again = np.flatnonzero((np.diff(user) == 0) & (np.diff(item) == 0))
    if len(again):
        raise DataError(f"{path}: {_named(store, user[again[0]], item[again[0]])} stands there twice.")
    if order_by == "rank":
        _refuse_shared_rank(path, store, user, item, score)
    return Predictions(user, item, score)


def _rank_lists(
    predictions: Predictions, store: Store, targets: Targets, filter: Filter, max_history: int
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """(ranks float64 [n], items left in each list [n], items removed, targets in their own visible history)."""
    goal = store.item[targets.event].astype(np.int64)
    visible = read_queries(store, targets.user, targets.event, max_history)
    seen = visible if filter == "visible" else read_queries(store, targets.user, targets.event, None)
    first = np.searchsorted(predictions.user, targets.user, side="left")
    lengths = np.searchsorted(predictions.user, targets.user, side="right") - first
    rows = np.repeat(np.arange(len(targets)), lengths)
    place = np.repeat(first - np.cumsum(lengths) + lengths, lengths) + np.arange(len(rows))
    item, score = predictions.item[place], predictions.score[place]
    if filter == "none":
        left = np.ones(len(rows), bool)
    else:
        history = np.repeat(np.arange(len(targets)), np.diff(seen.offsets)) * store.num_items + seen.item
        left = ~np.isin(rows * store.num_items + item, history) | (item == goal[rows])
    rows_left, item, score = rows[left], item[left], score[left]
    own = np.full(len(targets), np.nan)
    hit = item == goal[rows_left]
    own[rows_left[hit]] = score[hit]
    greater = np.bincount(rows_left[score > own[rows_left]], minlength=len(targets))
    equal = np.bincount(rows_left[score == own[rows_left]], minlength=len(targets))
    ranks = np.where(np.isnan(own), np.inf, 1 + greater + equal // 2)  # as in ranking: `equal` counts the target too
    again = np.repeat(np.arange(len(targets)), np.diff(visible.offsets))
    repeats = len(np.unique(again[visible.item == goal[again]]))
    return ranks, np.bincount(rows_left, minlength=len(targets)), int(np.count_nonzero(~left)), repeats


def _read_table(path: Path, store: Store) -> pa.Table:
    if path.suffix not in (".csv", ".parquet"):
        raise DataError(f"{path} is neither .csv nor .parquet, the two kinds of predictions that can be read.")
    if path.is_dir():
        raise DataError(f"{path} is a folder: name one file of predictions.")
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path)
        types = {"user": store.users.schema.field("raw_id").type, "item": store.items.schema.field("raw_id").type}
        return pa.csv.read_csv(path, convert_options=pa.csv.ConvertOptions(column_types=types))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} cannot be read: {error}.") from None


def _indices(column: pa.ChunkedArray, look_up: Callable[[list[Any]], np.ndarray]) -> np.ndarray:
    """int64 [R]: every distinct raw id is looked up once."""
    distinct: pa.Array = pc.unique(column)
    found = look_up(distinct.to_pylist())
    rows: np.ndarray = found[pc.index_in(column, value_set=distinct).to_numpy()]
    return rows


def _refuse_shared_rank(path: Path, store: Store, user: np.ndarray, item: np.ndarray, score: np.ndarray) -> None:
    order = np.lexsort((score, user))
    again = np.flatnonzero((np.diff(user[order]) == 0) & (np.diff(score[order]) == 0))
    if len(again):
        row = order[again[0]]
        named = _named(store, user[row], item[row])
        raise DataError(f"{path}: {named} shares rank {-score[row]:g} with another item of that user.")


def _named(store: Store, user: int, item: int) -> str:
    return f"user {store.raw_users([int(user)])[0]!r} with item {store.raw_items([int(item)])[0]!r}"
