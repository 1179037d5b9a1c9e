"""KuaiRand (Pure, 1K, 27K): all standard logs of a folder in date order, with user and video features where present.

The catalogue is every video of the logs. Action bits, from the lowest: as in ACTIONS.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import (
    CsvRows,
    Log,
    csv_header,
    feature_rows,
    flag,
    integer,
    require_columns,
    require_path,
)
from turbogr.errors import DataError

ACTIONS = {
    "click": "is_click",
    "like": "is_like",
    "follow": "is_follow",
    "comment": "is_comment",
    "forward": "is_forward",
    "hate": "is_hate",
    "long_view": "long_view",
    "profile_enter": "is_profile_enter",
}


@dataclass(frozen=True)
class KuaiRand:
    path: Path
    name: str = "kuairand"

    def open(self, engine: Engine) -> Log:
        files = _files(self.path, "log_standard_*.csv*")
        if not files:
            raise DataError(f"{self.path} holds no log_standard_*.csv: give the folder with KuaiRand's CSV files.")
        names = csv_header(files)
        require_columns(names, ("user_id", "video_id", "time_ms", *ACTIONS.values()), files[0])
        return Log(
            rows=CsvRows(files, names),
            user=integer("user_id"),
            item=integer("video_id"),
            time=integer("time_ms"),
            time_units_per_second=1000,
            actions={action: flag(column) for action, column in ACTIONS.items()},
            users=_features(engine, _files(self.path, "user_features*.csv*"), "user_id"),
            items=_features(engine, _files(self.path, "video_features_basic*.csv*"), "video_id"),
        )


def _files(path: Path, pattern: str) -> list[Path]:
    """Matching files of the folder or of its `data` folder, by the numbers in their names, which are dates."""
    require_path(path)
    if path.is_file():
        return [path] if path.match(pattern) else []
    found = list(path.glob(pattern)) or list(path.glob(f"data/{pattern}"))
    return sorted(found, key=lambda p: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", p.name)])


def _features(engine: Engine, files: list[Path], key: str) -> str:
    if not files:
        return ""
    require_columns(csv_header(files), [key], files[0])
    return feature_rows(engine, files, key)
