"""MovieLens: 1M (`.dat` files, latin-1) and 20M, 25M, 32M (`.csv`), as a zip archive or a folder.

The catalogue is every film of the films file, rated or not.
"""

from dataclasses import dataclass
from pathlib import Path

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import (
    CsvRows,
    Log,
    csv_header,
    feature_rows,
    integer,
    members,
    number,
    require_columns,
    text,
)
from turbogr.errors import DataError

NAMES = ("ratings.dat", "movies.dat", "users.dat", "ratings.csv", "movies.csv")


@dataclass(frozen=True)
class MovieLens:
    path: Path
    name: str = "movielens"

    def open(self, engine: Engine) -> Log:
        found = members(self.path, NAMES, engine.scratch)
        if "ratings.dat" in found:
            return _dat(found)
        if "ratings.csv" in found:
            return _csv(engine, found)
        raise DataError(
            f"{self.path} holds neither ratings.dat nor ratings.csv: give the unpacked folder or the zip archive."
        )


def _dat(found: dict[str, Path]) -> Log:
    users = _features(found, "users.dat", ("raw_id", "gender", "age", "occupation", "zip_code"))
    items = _features(found, "movies.dat", ("raw_id", "title", "genres"))
    columns = ("user", "item", "rating", "time")
    return Log(
        rows=CsvRows([found["ratings.dat"]], columns, delimiter="::", header=False, quote=""),
        user=integer("user"),
        item=integer("item"),
        time=integer("time"),
        time_units_per_second=1,
        rating=number("rating"),
        users=users,
        items=items,
        whole_catalogue=bool(items),
    )


def _features(found: dict[str, Path], name: str, columns: tuple[str, ...]) -> str:
    if name not in found:
        return ""
    types = {"raw_id": "BIGINT", "age": "INTEGER", "occupation": "INTEGER"}
    listed = ", ".join(f"{text(c)}: {text(types.get(c, 'VARCHAR'))}" for c in columns)
    return (
        f"read_csv({text(str(found[name]))}, columns = {{{listed}}}, auto_detect = false, header = false, "
        "delim = '::', quote = '', escape = '', encoding = 'latin-1')"
    )


def _csv(engine: Engine, found: dict[str, Path]) -> Log:
    ratings = found["ratings.csv"]
    names = csv_header([ratings])
    require_columns(names, ("userId", "movieId", "rating", "timestamp"), ratings)
    items = ""
    if "movies.csv" in found:
        require_columns(csv_header([found["movies.csv"]]), ("movieId", "title"), found["movies.csv"])
        items = feature_rows(engine, [found["movies.csv"]], "movieId")
    return Log(
        rows=CsvRows([ratings], names),
        user=integer("userId"),
        item=integer("movieId"),
        time=integer("timestamp"),
        time_units_per_second=1,
        rating=number("rating"),
        items=items,
        whole_catalogue=bool(items),
    )
