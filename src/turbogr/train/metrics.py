"""Where a run's numbers go: JSONL always, TensorBoard by default, Weights & Biases by a switch."""

import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from turbogr.config import Config, to_dict
from turbogr.errors import CheckpointError, ConfigError
from turbogr.files import whole_file


class Sink(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One line per call, {"step": ..., ...}, flushed at once so that a killed run loses nothing it did."""

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        """`keep`: which lines stand when a run is resumed, which will repeat the others; None begins anew."""
        if keep is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            _drop_others(path, keep)
        self._stream = path.open("a")

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._stream.write(json.dumps({"step": step, **values}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        os.fsync(self._stream.fileno())
        self._stream.close()


class TensorBoard:
    def __init__(self, folder: Path, keep_through: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge = None if keep_through is None else keep_through + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project="turbogr", dir=str(folder), config=to_dict(config), resume="allow", id=_wandb_id(folder)
        )

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def ensure_sinks(config: Config) -> None:
    """Refuse a sink whose package is missing, before any work starts."""
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("log.wandb needs the package wandb: pip install 'turbogr[wandb]'.")


def open_sinks(config: Config, folder: Path, keep_through: int | None) -> list[Sink]:
    """The sinks of a run's steps in `folder`."""
    keep = None if keep_through is None else (lambda line: line["step"] <= keep_through)
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", keep)]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tb", keep_through))
    if config.log.wandb:
        sinks.append(WeightsAndBiases(config, folder))
    return sinks


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file; a last line that was cut off is not one."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.endswith(b"\n"):
                yield _values(line, f"{path}, line {number}")


def _values(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict) or "step" not in values:
        raise CheckpointError(f"{where} is damaged: remove that line, or start a new run.")
    return values


def _wandb_id(folder: Path) -> str:
    """Drawn once per run and kept in its folder, whose own name (seed-0) other runs have too."""
    path = folder / "wandb_id.txt"
    if not path.exists():
        with whole_file(path) as partial:
            partial.write_text(secrets.token_hex(8) + "\n")
    return path.read_text().strip()


def _drop_others(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    with whole_file(path) as partial, partial.open("w") as stream:
        for line in read_lines(path):
            if keep(line):
                stream.write(json.dumps(line) + "\n")
