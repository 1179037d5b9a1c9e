"""`turbogr recommend`."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from turbogr.cli.arguments import parse
from turbogr.errors import UserError

if TYPE_CHECKING:
    from turbogr.recommend.model import Model

NUMBER = arg(metavar="N")


@dataclass(frozen=True, kw_only=True)
class RecommendArgs:
    """The best items for users of the store, for a pasted history, or for everybody; with raw ids, and titles where the
    source has them. Items that a user has seen are left out.

    Examples:
      turbogr recommend runs/ml-1m-hstu --user 17 42
      turbogr recommend runs/ml-1m-hstu --history "1@978300019,2858@978300055,318@978300103" -k 20
      turbogr recommend models/ml-1m --history 1,2858,318 --json     an exported model needs no store
      turbogr recommend runs/ml-1m-hstu --all-users --out top.parquet
    """

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Folder of a run, or of an exported model."""
    user: Annotated[tuple[str, ...], arg(metavar="ID [ID ...]")] = ()
    """Raw ids of users of the store."""
    history: Annotated[str, arg(metavar="ITEM[@TIME],...")] = ""
    """Raw ids of items, oldest first; times in whole seconds for all of them, or for none."""
    all_users: bool = False
    """Every user of the store, in batches into --out."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write a .parquet or .csv file instead of printing."""
    k: Annotated[int, arg(metavar="N", aliases=["-k"])] = 10
    """Items per user."""
    exclude: Annotated[Path | None, arg(metavar="FILE")] = None
    """Items that nobody gets: a text file with one raw id a line."""
    allow_seen: bool = False
    """Also items of the user's own history."""
    now: Annotated[int | None, arg(metavar="SECONDS")] = None
    """The moment to recommend for; by default the latest time of the store."""
    checkpoint: Annotated[str, arg(metavar="best|last|STEP")] = "best"
    """Of a run; best: the last one where none was selected."""
    store: Annotated[Path | None, arg(metavar="STORE")] = None
    """The prepared store, where it has moved, or to ask an exported model about users."""
    batch_users: Annotated[int | None, NUMBER] = None
    """--all-users: users at a time; by default evaluate.batch_users of the run."""
    json: bool = False
    """One JSON array, an object per user, instead of a table."""


def run(args: list[str]) -> None:
    chosen = parse("recommend", RecommendArgs, args)
    _check(chosen)
    from turbogr.ops import gemm
    from turbogr.recommend.answers import check_ending, write_answers
    from turbogr.recommend.model import Model

    if chosen.out is not None:
        check_ending(chosen.out)
    model = Model.load(chosen.model, checkpoint=chosen.checkpoint, store=chosen.store)
    gemm.take(model.config.device.gemm)  # as in the run: sums depend on the library in the last bit
    tables = _answers(chosen, model)
    if chosen.out is not None:
        rows = write_answers(tables, chosen.out)
        print(f"{chosen.out}: {rows:,} rows")
        return
    lists = _lists([row for table in tables for row in table.to_pylist()])
    for user in sorted(set(chosen.user) - {str(one["user"]) for one in lists if "user" in one}):
        print(f"user {user}: no item is left to recommend.", file=sys.stderr)
    if chosen.json:
        print(json.dumps(lists, indent=2, ensure_ascii=False))
        return
    console = Console(file=sys.stdout, highlight=False)
    for one in lists:
        console.print(_shown(one))


def _check(chosen: RecommendArgs) -> None:
    asked = [bool(chosen.user), bool(chosen.history), chosen.all_users]
    if sum(asked) != 1:
        raise UserError("say whom to recommend for: exactly one of --user, --history and --all-users.")
    if chosen.all_users and chosen.out is None:
        raise UserError("--all-users needs --out FILE, a .parquet or .csv.")
    if chosen.json and chosen.out is not None:
        raise UserError("--json prints and --out writes: choose one.")
    if chosen.batch_users is not None and (not chosen.all_users or chosen.batch_users < 1):
        raise UserError("--batch-users belongs to --all-users and must be at least 1.")


def _answers(chosen: RecommendArgs, model: "Model") -> Iterator[Any]:
    options: dict[str, Any] = {"exclude": _excluded(chosen.exclude), "allow_seen": chosen.allow_seen, "now": chosen.now}
    if chosen.all_users:
        yield from model.recommend_all(chosen.k, batch_users=chosen.batch_users, **options)
    elif chosen.user:
        yield model.recommend(chosen.user, chosen.k, **options)
    else:
        items, times = _history(chosen.history)
        yield model.recommend_history(items, times, chosen.k, **options)


def _history(text: str) -> tuple[list[str], list[int] | None]:
    """`item@time,item@time` or `item,item` as items and times."""
    pairs = [re.fullmatch(r"(.*?)(?:@(-?\d+))?", event.strip()) for event in text.split(",")]
    items = [pair[1] for pair in pairs if pair]
    times = [int(pair[2]) for pair in pairs if pair and pair[2] is not None]
    if times and len(times) != len(items):
        raise UserError(f"--history gives {len(times)} times for {len(items)} items: give all of them or none.")
    return items, times or None


def _excluded(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--exclude {path} cannot be read ({error}): a text file with one raw id a line.") from None


def _lists(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object per list: {"user": ..., "items": [{"rank", "item", "title", "score"}, ...]}; rank 1 begins a list."""
    lists: list[dict[str, Any]] = []
    for row in rows:
        user = {"user": row.pop("user")} if "user" in row else {}
        if row["rank"] == 1:
            lists.append({**user, "items": []})
        lists[-1]["items"].append(row)
    return lists


def _shown(one: dict[str, Any]) -> Group:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in one["items"][0]:
        shown.add_column(name, justify="right" if name in ("rank", "score") else "left", overflow="fold")
    for row in one["items"]:
        cells = (f"{value:.4f}" if name == "score" else value for name, value in row.items())
        shown.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
    return Group(Text(f"user {one['user']}" if "user" in one else "after this history", style="bold"), shown)
