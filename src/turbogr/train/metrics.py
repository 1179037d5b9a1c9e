"""Where a run's numbers go: JSONL always, TensorBoard by default, Weights & Biases by a switch."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from turbogr.config import Config, to_dict
from turbogr.errors import ConfigError
from turbogr.files import whole_file


class Sink(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One line per call, {"step": ..., ...}, flushed at once so that a killed run loses nothing it did."""

    def __init__(self, path: Path, keep_through: int | None = None) -> None:
        """`keep_through`: a resumed run drops lines of later steps, which it will repeat; None begins anew."""
        if keep_through is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            _drop_later(path, keep_through)
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
            project="turbogr", dir=str(folder), config=to_dict(config), resume="allow", id=folder.name
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
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", keep_through)]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tb", keep_through))
    if config.log.wandb:
        sinks.append(WeightsAndBiases(config, folder))
    return sinks


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file; a last line that was cut off is not one."""
    if not path.exists():
        return
    with path.open() as stream:
        for line in stream:
            if line.endswith("\n"):
                yield json.loads(line)


def _drop_later(path: Path, step: int) -> None:
    with whole_file(path) as partial, partial.open("w") as stream:
        for line in read_lines(path):
            if line["step"] <= step:
                stream.write(json.dumps(line) + "\n")
