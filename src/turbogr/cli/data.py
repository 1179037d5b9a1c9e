"""`turbogr data prepare | synth | stats`."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from turbogr.cli.arguments import parse
from turbogr.errors import UserError

SOURCE = arg(metavar="SOURCE")
PATH = arg(metavar="PATH")
STORE = arg(metavar="STORE")
COLUMN = arg(metavar="COLUMN")
NUMBER = arg(metavar="N")


@dataclass(frozen=True, kw_only=True)
class PrepareArgs:
    """Turn a raw log into a store: sorted by user and time, memory-mapped, written whole or not at all. Memory does not
    grow with the log.

    Examples:
      turbogr data prepare movielens ml-1m.zip --out stores/ml-1m
      turbogr data prepare kuairand KuaiRand-27K/ --out stores/27k --filter kuairand-paper --memory 4GiB
      turbogr data prepare amazon ratings_Books.csv --out stores/books --min-rating 4 --k-core 5
      turbogr data prepare table clicks.parquet --out stores/mine --user user_id --item sku --time ts --time-unit ms
    """

    source: Annotated[Positional[str], SOURCE]
    """movielens, kuairand, amazon, table (any CSV, Parquet or Arrow files), or a source that a package registers."""
    path: Annotated[Positional[Path], PATH]
    """File or folder; MovieLens also as the zip archive."""
    out: Annotated[Path, arg(metavar="STORE")]
    """Folder of the store to be written."""
    filter: Annotated[str, arg(metavar="NAME")] = "none"
    """none, or kuairand-paper: no disliked events, no users without a positive action, 5-core."""
    positive: Annotated[str, arg(metavar="ACTIONS")] = ""
    """Keep only events with one of these actions (comma-separated)."""
    min_rating: Annotated[float | None, NUMBER] = None
    """Keep only events with at least this rating."""
    k_core: Annotated[int | None, NUMBER] = None
    """Keep users and items with at least this many events, iterated until both hold; 0 is off."""
    ties: Literal["file", "shuffled"] = "file"
    """Order of a user's events with the same time: as in the files, or drawn by the seed."""
    seed: Annotated[int, NUMBER] = 0
    """For --ties shuffled."""
    skip_bad_rows: bool = False
    """Write rows that cannot be used to rejects.csv and count them, instead of stopping at the first."""
    memory: Annotated[str, arg(metavar="SIZE")] = "1GiB"
    """For DuckDB's buffers; what does not fit goes to the disk."""
    threads: Annotated[int, NUMBER] = 0
    """0 takes one per core. The store's bytes do not depend on it."""
    overwrite: bool = False
    """Replace a store that stands there already."""
    user: Annotated[str, COLUMN] = ""
    """table: column with the user's id."""
    item: Annotated[str, COLUMN] = ""
    """table: column with the item's id."""
    time: Annotated[str, COLUMN] = ""
    """table: column with the time."""
    time_unit: Literal["s", "ms", "us"] = "s"
    """table: unit of a numeric time column; timestamps need none."""
    actions: Annotated[str, arg(metavar="COLUMNS")] = ""
    """table: columns that are true or non-zero where the event had that action (comma-separated)."""
    title: Annotated[str, COLUMN] = ""
    """table: column with the item's title."""
    rating: Annotated[str, COLUMN] = ""
    """table: column with a rating, for --min-rating."""
    order: Literal["auto", "user-item", "item-user"] = "auto"
    """amazon: column order of a file without header."""


@dataclass(frozen=True, kw_only=True)
class SynthArgs:
    """Write a synthetic log in KuaiRand's own CSV format, with its distributions of history length, popularity and time
    gaps, and with structure that a model can learn.

    Examples:
      turbogr data synth --out logs/small --users 2000 --items 6000 --length-scale 0.02
      turbogr data synth --out logs/large --users 2000 --items 200000  24 million rows
      turbogr data prepare kuairand logs/small --out stores/small
    """

    out: Annotated[Path, arg(metavar="FOLDER")]
    """Folder of the log to be written."""
    users: Annotated[int, NUMBER]
    items: Annotated[int, NUMBER]
    like: Literal["kuairand-27k"] = "kuairand-27k"
    """Whose distributions the log has."""
    length_scale: Annotated[float, NUMBER] = 1.0
    """Length of a history in real ones, which have 11,812 events on average."""
    popularity: Annotated[float, NUMBER] = 1.0
    """The real popularity curve to this power: 1 is the real one, 0 is flat."""
    seed: Annotated[int, NUMBER] = 0
    overwrite: bool = False
    """Replace a log that stands there already."""


@dataclass(frozen=True, kw_only=True)
class StatsArgs:
    """What a store holds: counts, history lengths, popularity, ties, time span, action rates.

    Examples:
      turbogr data stats stores/ml-1m
      turbogr data stats stores/ml-1m --json
      turbogr data stats stores/ml-1m --verify    also compare every file with its checksum
    """

    store: Annotated[Positional[Path], STORE]
    """Folder that `turbogr data prepare` wrote."""
    json: bool = False
    """One JSON object instead of a table."""
    verify: bool = False
    """Compare every file with its checksum first."""


def prepare(args: list[str]) -> None:
    chosen = parse("data prepare", PrepareArgs, args)
    from turbogr.data import prepare as library
    from turbogr.data.filters import named_filters
    from turbogr.data.sources import open_source

    changes: dict[str, Any] = {}
    if chosen.positive:
        changes["positive"] = _names(chosen.positive)
    if chosen.min_rating is not None:
        changes["min_rating"] = chosen.min_rating
    if chosen.k_core is not None:
        changes |= {"user_core": chosen.k_core, "item_core": chosen.k_core}
    options = library.PrepareOptions(
        filters=dataclasses.replace(named_filters(chosen.filter), **changes),
        ties=chosen.ties,
        seed=chosen.seed,
        skip_bad_rows=chosen.skip_bad_rows,
        memory_limit=chosen.memory,
        threads=chosen.threads,
        overwrite=chosen.overwrite,
    )
    source = open_source(chosen.source, chosen.path, **_source_options(chosen))
    manifest = library.prepare(source, chosen.out, options)
    print(
        f"{chosen.out}: {manifest.users:,} users, {manifest.items:,} items, {manifest.events:,} events"
        + (f", {manifest.rejected_rows:,} rows rejected (rejects.csv)" if manifest.rejected_rows else "")
    )
    print(f"`turbogr data stats {chosen.out}` says more.", file=sys.stderr)


def synth(args: list[str]) -> None:
    chosen = parse("data synth", SynthArgs, args)
    from turbogr.data.sources.synthetic import synthesize

    report = synthesize(
        chosen.out,
        users=chosen.users,
        items=chosen.items,
        like=chosen.like,
        length_scale=chosen.length_scale,
        popularity=chosen.popularity,
        seed=chosen.seed,
        overwrite=chosen.overwrite,
    )
    print(
        f"{chosen.out}: {report.rows:,} rows of {report.users:,} users over {report.items:,} items, "
        f"{report.clicks:,} clicks"
    )
    for target, metrics in report.oracle.items():
        print(f"oracle, {target}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    print(f"`turbogr data prepare kuairand {chosen.out} --out STORE` makes a store of it.", file=sys.stderr)


def stats(args: list[str]) -> None:
    chosen = parse("data stats", StatsArgs, args)
    from turbogr.data.stats import stats as count
    from turbogr.data.store import Store

    store = Store.open(chosen.store)
    if chosen.verify:
        store.verify()
    found = dataclasses.asdict(count(store))
    manifest = store.manifest.to_json()
    found |= {name: manifest[name] for name in ("source", "ties", "filters", "rejected_rows")}
    if chosen.json:
        print(json.dumps(found, indent=2))
        return
    shown = Table.grid("", "", padding=(0, 2))
    for name, value in found.items():
        shown.add_row(name.replace("_", " "), _readable(value))
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(shown)


def _source_options(chosen: PrepareArgs) -> dict[str, Any]:
    """The column mapping of `table`, the column order of `amazon`; the others know their files."""
    given: dict[str, Any] = {
        "user": chosen.user,
        "item": chosen.item,
        "time": chosen.time,
        "actions": _names(chosen.actions),
        "title": chosen.title,
        "rating": chosen.rating,
    }
    table_only = [f"--{name}" for name, value in given.items() if value]
    table_only += ["--time-unit"] if chosen.time_unit != "s" else []
    if table_only and chosen.source != "table":
        raise UserError(f"{table_only[0]} belongs to the source table: leave it out for {chosen.source}.")
    if chosen.order != "auto" and chosen.source != "amazon":
        raise UserError(f"--order belongs to the source amazon: leave it out for {chosen.source}.")
    if chosen.source == "amazon":
        return {"order": chosen.order}
    if chosen.source != "table":
        return {}
    missing = [f"--{name}" for name in ("user", "item", "time") if not given[name]]
    if missing:
        raise UserError(f"the source table needs {', '.join(missing)}: the columns that hold them.")
    from turbogr.data.sources.table import Mapping

    return {"columns": Mapping(time_unit=chosen.time_unit, **given)}


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        parts = {name: part for name, part in value.items() if part not in (None, 0, [], ())}
        return ", ".join(f"{name} {_readable(part)}" for name, part in parts.items()) or "-"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
