"""From a raw log to a store, out of core: memory does not grow with the log, and the same input gives the same bytes.

1. stage   the log's rows go once into a DuckDB table on disk; its row number is the order in the files
2. filter  a view of that table, then the iterative k-core over (user, item) pairs
3. index   users and items are numbered by their raw ids, ascending
4. write   one sort by (user, time, row), streamed into the store's columns

Everything temporary lies inside the unfinished store, so that a killed process leaves nothing but that folder.
"""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from turbogr.data.columns import NpyColumn, write_parquet
from turbogr.data.engine import Engine, memory_bytes
from turbogr.data.filters import Filters, action_mask
from turbogr.data.kcore import PairFiles
from turbogr.data.rejects import Rejects
from turbogr.data.sources import Source
from turbogr.data.sources.reading import Log, name
from turbogr.data.sources.table import UNITS_PER_SECOND, Frame, Mapping, TimeUnit
from turbogr.data.staging import stage
from turbogr.data.store import COLUMNS, Manifest
from turbogr.errors import ConfigError, DataError
from turbogr.files import sha256, whole_folder, write_json
from turbogr.progress import bar

MAX_ACTIONS = 16
END_OF_TIME_S = 7_258_118_400
"""2200-01-01, a fixed bound: the same log must always be read alike."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    filters: Filters = dataclasses.field(default_factory=Filters)
    ties: Literal["file", "shuffled"] = "file"
    """Order of a user's events with the same time: as in the files, or drawn by the seed."""
    seed: int = 0
    """For ties = shuffled."""
    skip_bad_rows: bool = False
    """Write rows that cannot be used to rejects.csv and count them, instead of stopping."""
    memory_limit: str = "1GiB"
    """What the process keeps to, about; what does not fit goes to the disk."""
    threads: int = 0
    """0 takes one per core. The store's bytes do not depend on it."""
    overwrite: bool = False
    """Replace a store that stands there already."""

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}: give a number of threads, or 0 for one per core.")
        if self.ties not in ("file", "shuffled"):
            raise ConfigError(f"ties is {self.ties!r}: take file or shuffled.")
        memory_bytes(self.memory_limit)


def prepare(source: Source, out: str | Path, options: PrepareOptions | None = None) -> Manifest:
    """Write the store `out` from a raw log; it appears whole or not at all."""
    options = options or PrepareOptions()
    with whole_folder(Path(out), overwrite=options.overwrite) as folder, bar(f"prepare {out}", 100) as progress:
        scratch = folder / "scratch"
        scratch.mkdir()
        with Engine(scratch, progress, memory_limit=options.memory_limit, threads=options.threads) as engine:
            manifest = _Preparation(source, engine, options, folder).manifest()
        shutil.rmtree(scratch)
        manifest = dataclasses.replace(manifest, files=_facts(folder))
        write_json(folder / "manifest.json", manifest.to_json())
    return manifest


def prepare_frame(
    frame: Any,
    out: str | Path,
    *,
    user: str,
    item: str,
    time: str,
    time_unit: TimeUnit = "s",
    actions: tuple[str, ...] = (),
    title: str = "",
    options: PrepareOptions | None = None,
) -> Manifest:
    """`prepare` for a pandas, Polars or Arrow table in memory."""
    columns = Mapping(user=user, item=item, time=time, time_unit=time_unit, actions=actions, title=title)
    return prepare(Frame(frame, columns), out, options)


class _Preparation:
    """The steps, over one engine whose tables they hand on: log -> kept -> user_index, item_index -> files."""

    def __init__(self, source: Source, engine: Engine, options: PrepareOptions, folder: Path) -> None:
        self.source = source
        self.engine = engine
        self.options = options
        self.folder = folder
        self.log: Log = source.open(engine)
        self.actions = tuple(self.log.actions)

    def manifest(self) -> Manifest:
        self.engine.phase("reading", 0, 55)
        rejects = self.stage()
        staged = self.engine.one("SELECT count(*) FROM log")
        if not staged:
            raise DataError(
                f"{', '.join(self.log.rows.files)}: an empty log, not one usable row: check the path and the format"
                f"{rejects.words()}."
            )
        self.require_possible_times()
        self.engine.phase("numbering users and items", 55, 65)
        self.filter()
        self.index()
        users, items = (self.engine.one(f"SELECT count(*) FROM {t}_index") for t in ("user", "item"))
        if not users:
            raise DataError(
                f"the filters leave none of {staged:,} events: choose weaker ones than {self.options.filters.words()}."
            )
        self.engine.phase("sorting", 65, 95)
        single, ties, events = self.write_events(users)
        if single == users:
            raise DataError(
                f"no user has two events ({users:,} users, {events:,} events): nothing could be predicted, check which "
                f"column is the user{rejects.words()}."
            )
        self.engine.phase("writing users and items", 95, 100)
        self.write_features()
        options = self.options
        return Manifest(
            source=self.source.name,
            time_units_per_second=self.log.time_units_per_second,
            users=users,
            items=items,
            events=events,
            single_event_users=single,
            tied_gaps=ties,
            ties="file" if options.ties == "file" else f"shuffled-{options.seed}",
            rejected_rows=rejects.rows,
            actions=self.actions,
            filters=dataclasses.asdict(options.filters) | {"removed_events": staged - events},
        )

    def stage(self) -> Rejects:
        """Read the raw log into the table `log`, in file order; returns what could not be used."""
        if len(self.actions) > MAX_ACTIONS:
            raise DataError(f"{len(self.actions)} actions, and a store holds {MAX_ACTIONS}: name fewer.")
        return stage(self.engine, self.log, self.folder / "rejects.csv" if self.options.skip_bad_rows else None)

    def require_possible_times(self) -> None:
        """A numeric time in the wrong unit shows as a date in the far future."""
        log = self.log
        if not log.time_unit:
            return
        latest = self.engine.one('SELECT max("time") FROM log')
        if latest < END_OF_TIME_S * log.time_units_per_second:
            return
        seconds = latest / log.time_units_per_second * UNITS_PER_SECOND[log.time_unit]
        fitting = [u for u, n in UNITS_PER_SECOND.items() if seconds / n < END_OF_TIME_S]
        meant = f"did you mean --time-unit {fitting[0]}?" if fitting else "convert it to s, ms or us."
        raise DataError(
            f"the latest time of {log.rows.files[0]} lies after the year 2200 when it is read as {log.time_unit} "
            f"({seconds:.0f} {log.time_unit}): {meant}"
        )

    def filter(self) -> None:
        """The view `kept`: the events that the filters leave, before the k-core."""
        filters = self.options.filters
        condition = filters.event_condition(self.actions, bool(self.log.rating))
        if filters.users_with:
            mask = action_mask(filters.users_with, self.actions)
            self.engine.run(
                f'CREATE TABLE active AS SELECT DISTINCT "user" FROM log WHERE {condition} AND actions & {mask} <> 0'
            )
            condition += ' AND "user" IN (SELECT "user" FROM active)'
        self.engine.run(f"CREATE VIEW kept AS SELECT rowid AS row, * FROM log WHERE {condition}")

    def index(self) -> None:
        """The tables user_index and item_index (raw, index): who stays, numbered by raw id."""
        filters = self.options.filters
        for table, column in (("user_index", '"user"'), ("item_index", "item")):
            self._number(table, f"SELECT DISTINCT {column} AS raw FROM kept")
        if filters.user_core > 1 or filters.item_core > 1:
            self._core()
        if self.log.whole_catalogue and filters.item_core <= 1:
            raw = f"SELECT raw FROM item_index UNION SELECT raw_id FROM {self.log.items}"
            self._number("item_index", raw)

    def _core(self) -> None:
        filters = self.options.filters
        users, items = (self.engine.one(f"SELECT count(*) FROM {t}_index") for t in ("user", "item"))
        pairs = PairFiles(self.engine.scratch)
        for batch in self.engine.stream(f"SELECT u.index AS user, i.index AS item FROM {_INDEXED}"):
            pairs.append(batch["user"].to_numpy(), batch["item"].to_numpy())
        for table, alive in zip(
            ("user_index", "item_index"), pairs.core(users, items, filters.user_core, filters.item_core), strict=True
        ):
            self.engine.connection.register("survivors", pa.table({"index": np.flatnonzero(alive).astype(np.int32)}))
            self._number(table, f"SELECT raw FROM {table} SEMI JOIN survivors USING (index)")
            self.engine.connection.unregister("survivors")

    def _number(self, table: str, raw: str) -> None:
        """(Re)make an index table from a query of distinct raw ids."""
        self.engine.run(
            "CREATE TABLE numbered AS "
            f"SELECT raw, CAST(row_number() OVER (ORDER BY raw) - 1 AS INTEGER) AS index FROM ({raw})"
        )
        self.engine.run(f"DROP TABLE IF EXISTS {table}; ALTER TABLE numbered RENAME TO {table}")

    def write_events(self, users: int) -> tuple[int, int, int]:
        """Sort the kept events and write the columns; returns (users with one event, tied gaps, events)."""
        # item and actions decide nothing behind the row: rows that are all key sort faster than keys with a payload
        order = "row, i.index, actions"
        if self.options.ties == "shuffled":
            order = f"md5_number_lower('{self.options.seed}:' || row), {order}"
        names = ["item.npy", "time.npy", *(["actions.npy"] if self.actions else [])]
        columns = {n.removesuffix(".npy"): NpyColumn(self.folder / n, COLUMNS[n]) for n in names}
        lengths = np.zeros(users, np.int64)
        ties, last = 0, (-1, -1)
        for batch in self.engine.stream(
            f'SELECT u.index AS "user", i.index AS item, "time", actions FROM {_INDEXED} '
            f'ORDER BY u.index, "time", {order}',
        ):
            user, time = batch["user"].to_numpy(), batch["time"].to_numpy()
            lengths[user[0] : user[-1] + 1] += np.bincount(user - user[0])
            ties += int(np.count_nonzero((user[1:] == user[:-1]) & (time[1:] == time[:-1]))) + (
                last == (user[0], time[0])
            )
            last = (user[-1], time[-1])
            for column, writer in columns.items():
                writer.append(batch[column].to_numpy())
        for writer in columns.values():
            writer.close()
        offsets = NpyColumn(self.folder / "offsets.npy", COLUMNS["offsets.npy"])
        offsets.append(np.concatenate([[0], np.cumsum(lengths)]))
        offsets.close()
        return int(np.count_nonzero(lengths == 1)), int(ties), columns["item"].length

    def write_features(self) -> None:
        """users.parquet and items.parquet, row i being index i."""
        log = self.log
        titles = ""
        if log.title:
            titles = (
                "(SELECT item AS raw_id, arg_min(title, row) AS title FROM kept WHERE title IS NOT NULL GROUP BY item)"
            )
        for table, features in (("user", log.users), ("item", log.items or titles)):
            columns, join = "x.raw AS raw_id", ""
            if features:
                self._require_unique(features, table)
                columns += "".join(f", f.{name(c)}" for c in self.engine.columns(features) if c != "raw_id")
                join = f"LEFT JOIN {features} f ON x.raw = f.raw_id"
            query = f"SELECT {columns} FROM {table}_index x {join} ORDER BY x.index"
            schema = self.engine.connection.sql(query).limit(0).to_arrow_table().schema
            write_parquet(self.folder / f"{table}s.parquet", self.engine.stream(query), schema)

    def _require_unique(self, features: str, what: str) -> None:
        twice = self.engine.all(
            f"SELECT raw_id FROM {features} GROUP BY raw_id HAVING count(*) > 1 ORDER BY raw_id LIMIT 1"
        )
        if twice:
            raise DataError(f"the {what} features have more than one row for {twice[0][0]!r}: keep one.")


_INDEXED = 'kept JOIN user_index u ON kept."user" = u.raw JOIN item_index i ON kept.item = i.raw'


def _facts(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())}
