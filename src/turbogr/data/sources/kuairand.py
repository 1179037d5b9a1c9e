"""KuaiRand (Pure, 1K, 27K): all standard logs of a folder in date order, with user and video features where present.

The catalogue is every video of the logs. Action bits, from the lowest: as in ACTIONS.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import (
    TIME_TYPE,
    Log,
    csv_header,
    csv_rows,
    feature_rows,
    require_columns,
    require_path,
    whole,
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
        types = {"user_id": "VARCHAR", "video_id": "VARCHAR", "time_ms": TIME_TYPE}
        types |= dict.fromkeys(ACTIONS.values(), "UTINYINT")
        names = csv_header(files)
        require_columns(names, types, files[0])
        return Log(
            rows=csv_rows(files, names, types),
            files=tuple(map(str, files)),
            first_line=2,
            user=whole("user_id"),
            item=whole("video_id"),
            id_columns=("user_id", "video_id"),
            time="time_ms",
            time_units_per_second=1000,
            actions={action: f"{column} <> 0" for action, column in ACTIONS.items()},
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
