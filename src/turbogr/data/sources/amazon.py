"""Amazon review ratings as CSV, one row per rating, in the three published layouts:

    2014  ratings_*.csv, no header: user, item, rating, seconds
    2018  *.csv, no header:         item, user, rating, seconds
    2023  *.csv, header:            user_id, parent_asin (or asin), rating, timestamp in milliseconds

Without a header the column whose first values all have an ASIN's ten characters is the item.
"""

import csv
import gzip
import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import (
    CsvRows,
    Log,
    first_fields,
    integer,
    number,
    require_columns,
    require_path,
    string,
)
from turbogr.errors import DataError

SAMPLE_ROWS = 1000
ASIN_CHARACTERS = 10


@dataclass(frozen=True)
class Amazon:
    path: Path
    order: Literal["auto", "user-item", "item-user"] = "auto"
    """Column order of a file without header."""
    name: str = "amazon"

    def open(self, engine: Engine) -> Log:
        require_path(self.path)
        if self.path.is_dir():
            raise DataError(f"{self.path} is a folder: give one ratings CSV file.")
        names = first_fields(self.path)
        header = any(n in ("user_id", "rating", "timestamp") for n in names)
        if header:
            item = "asin" if "asin" in names and "parent_asin" not in names else "parent_asin"
            user, units = "user_id", 1000
            require_columns(names, (user, item, "rating", "timestamp"), self.path)
        else:
            names, user, item, units = self._headerless(names), "user", "item", 1
        return Log(
            rows=CsvRows([self.path], names, header=header),
            user=string(user),
            item=string(item),
            time=integer("timestamp"),
            time_units_per_second=units,
            rating=number("rating"),
        )

    def _headerless(self, fields: list[str]) -> list[str]:
        if len(fields) != 4:
            raise DataError(
                f"{self.path} has {len(fields)} columns where Amazon ratings have 4 (user, item, rating, time)."
            )
        order = self.order if self.order != "auto" else self._detected_order()
        return [*order.split("-"), "rating", "timestamp"]

    def _detected_order(self) -> str:
        with gzip.open(self.path, "rb") if self.path.suffix == ".gz" else self.path.open("rb") as raw:
            lines = io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
            sample = [row for row in itertools.islice(csv.reader(lines), SAMPLE_ROWS) if len(row) == 4]
        first, second = (all(len(row[column]) == ASIN_CHARACTERS for row in sample) for column in (0, 1))
        if first == second:
            raise DataError(f"{self.path}: cannot tell users from items; pass --order user-item or --order item-user.")
        return "item-user" if first else "user-item"
