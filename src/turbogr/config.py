"""One typed config: dataclass defaults, then a TOML file, then dotted overrides from the command line.

The resolved config is written with every run as `config.json`. An unknown key is an error that names the nearest known
one; `check` refuses impossible combinations before any work starts.
"""

import dataclasses
import json
import math
import operator
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from turbogr.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    store: str = ""
    """Folder of the prepared store (`turbogr data prepare` makes one)."""


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    protocol: Literal["leave-one-out", "leave-one-out-validation", "global-time"] = "leave-one-out"
    """leave-one-out: the last event is the test. leave-one-out-validation: the last is the test, the last but one the
    validation, neither is trained on. global-time: everything before `time` trains, each user's first event from `time`
    on is the test."""
    time: int | None = None
    """global-time: where the test begins, in the store's time unit."""
    validation_time: int | None = None
    """global-time: where the validation begins (training then ends there); none without it."""


@dataclass(frozen=True, kw_only=True)
class HstuConfig:
    time_bias: bool = True
    """Relative time bias between the next event and each earlier one."""
    position_bias: bool = True
    """Relative position bias."""
    time_buckets: int = 128
    """Time differences fall into buckets 0 .. time_buckets, on a logarithmic scale."""
    bucket_width: float = 0.301
    """Width of a bucket in ln(seconds)."""


@dataclass(frozen=True, kw_only=True)
class SasrecConfig:
    ffn_dim: int = 0
    """Hidden width of the feed-forward part; 0 takes `dim`."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = "hstu"
    """hstu, sasrec, or an encoder that a package registers under the entry point `turbogr.encoders`."""
    dim: int = 64
    """Width of the item embedding and of the encoder."""
    blocks: int = 2
    heads: int = 2
    max_history: int = 200
    """Latest events of a user that the model sees; older ones are cut."""
    length_margin: int = 11
    """The attention's divisor and the position table's length are max_history + length_margin (public recipe: 11)."""
    dropout: float = 0.2
    recompute: bool = False
    """Keep only the input of every block for the backward, which computes the block again: less memory, more time."""
    hstu: HstuConfig = field(default_factory=HstuConfig)
    sasrec: SasrecConfig = field(default_factory=SasrecConfig)

    @property
    def max_len(self) -> int:
        return self.max_history + self.length_margin


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    temperature: float = 0.05
    """Cosine similarities are divided by it before the softmax."""


@dataclass(frozen=True, kw_only=True)
class NegativesConfig:
    sampler: Literal["uniform", "popularity"] = "uniform"
    """uniform over the catalogue, or proportional to (training count + 1) ** power."""
    count: int = 128
    """Negatives per token, drawn with replacement."""
    power: float = 0.75
    """popularity: 0 is uniform, 1 the plain counts."""
    logq: bool = False
    """Subtract log q from the scores of the positive and of the negatives."""


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    optimizer: Literal["adagrad", "lazy-adam", "adamw"] = "lazy-adam"
    """adagrad: row-wise, one accumulator per row. lazy-adam: Adam on touched rows. adamw: every row, every step."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """adamw only."""
    row_clip: float = 0.0
    """Largest norm of one row's gradient; 0 is off."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the rows as they are kept; updates are computed in fp32, and bf16 rows rounded up or down by chance."""


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest global norm of the dense gradients; 0 is off."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 10
    batch_users: int = 0
    """Users in a batch; 0 fills batches by `batch_tokens` instead."""
    batch_tokens: int = 8192
    """Tokens in a batch (whole users; never more, unless one user alone is longer). Used where batch_users is 0."""
    accumulate: int = 1
    """Batches whose gradients are summed before one update."""
    rate: Literal["constant", "cosine"] = "constant"
    """Course of both learning rates after the warm-up; cosine ends at a tenth."""
    warmup_steps: int = 0
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast of the encoder, where the device has it."""
    evaluate_every: int = 1
    """Epochs between evaluations; 0 evaluates after the last only."""
    patience: int = 0
    """Stop when the metric has not improved for this many evaluations; 0 never stops early."""
    select_by: str = "ndcg@10"
    """The metric that names the best checkpoint and stops early."""
    select_on_test: bool = False
    """Select the best epoch on the test targets where the split has no validation (public tables do; it flatters)."""
    checkpoint_every: int = 0
    """Steps between checkpoints, beside the one at the end of every epoch; 0 is off."""
    keep_checkpoints: int = 2
    """Latest checkpoints kept, beside the best one."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a non-finite loss or gradient does: stop the run, or skip the update and count it."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    max_users: int = 0
    """Evaluate this many users, drawn by the seed; 0 takes all."""
    batch_users: int = 512
    item_chunk: int = 65536
    """Items scored at a time."""
    filter: Literal["visible", "history", "none"] = "visible"
    """What is removed from the ranking: the items that the model sees, of the whole history, or nothing."""


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    name: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    threads: int = 0
    """CPU threads; 0 takes one per core. Part of a run's identity: sums depend on it in the last bit."""
    gemm: Literal["auto", "mkl", "onednn"] = "auto"
    """Library of fp32 matrix products on a CPU; auto goes by the processor. Part of a run's identity, too."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: int = 10
    """Steps between progress lines (metrics.jsonl has every step)."""
    tensorboard: bool = True
    wandb: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    log: LogConfig = field(default_factory=LogConfig)


class Range(NamedTuple):
    """low <= value < high, or low < value < high; NaN and infinity lie in none."""

    low: float
    high: float = math.inf
    open: bool = False
    """`low` itself is refused too."""


_AT_LEAST_0, _AT_LEAST_1, _ABOVE_0 = Range(0), Range(1), Range(0, open=True)
_BELOW_1 = Range(0, 1)
_INT64 = Range(-(2**63), 2**63)

RANGES = {
    "split.time": _INT64,
    "split.validation_time": _INT64,
    "model.dim": _AT_LEAST_1,
    "model.blocks": _AT_LEAST_1,
    "model.heads": _AT_LEAST_1,
    "model.max_history": _AT_LEAST_1,
    "model.length_margin": _AT_LEAST_0,
    "model.dropout": _BELOW_1,
    "model.hstu.time_buckets": _AT_LEAST_1,
    "model.hstu.bucket_width": _ABOVE_0,
    "model.sasrec.ffn_dim": _AT_LEAST_0,
    "task.temperature": _ABOVE_0,
    "negatives.count": _AT_LEAST_1,
    "negatives.power": Range(0, 10),  # far beyond, count ** power leaves the floats
    "tables.lr": _ABOVE_0,
    "tables.betas": _BELOW_1,
    "tables.eps": _ABOVE_0,
    "tables.weight_decay": _AT_LEAST_0,
    "tables.row_clip": _AT_LEAST_0,
    "dense.lr": _ABOVE_0,
    "dense.betas": _BELOW_1,
    "dense.eps": _ABOVE_0,
    "dense.weight_decay": _AT_LEAST_0,
    "dense.clip": _AT_LEAST_0,
    "train.epochs": _AT_LEAST_1,
    "train.batch_users": _AT_LEAST_0,
    "train.batch_tokens": _AT_LEAST_0,
    "train.accumulate": _AT_LEAST_1,
    "train.warmup_steps": _AT_LEAST_0,
    "train.seed": Range(0, 2**63),
    "train.evaluate_every": _AT_LEAST_0,
    "train.patience": _AT_LEAST_0,
    "train.checkpoint_every": _AT_LEAST_0,
    "train.keep_checkpoints": _AT_LEAST_1,
    "evaluate.max_users": _AT_LEAST_0,
    "evaluate.batch_users": _AT_LEAST_1,
    "evaluate.item_chunk": _AT_LEAST_1,
    "device.threads": _AT_LEAST_0,
    "log.every": _AT_LEAST_1,
}
"""What every number of `Config` may be, by its dotted name; each of a pair; None always."""


def load(path: str | Path) -> Config:
    """The config of a TOML file (or of a run's config.json); what the file does not say keeps its default."""
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise ConfigError(f"{path} is not a config file: a TOML file is wanted, as in configs/.") from None
    try:
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    return from_dict(Config, raw, str(path))


def from_dict(cls: type[T], raw: Any, where: str) -> T:
    """Build dataclass `cls` from nested mappings; raises ConfigError naming place and key."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must be a table of settings, got {raw!r}.")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r}{did_you_mean(key, hints)}.")
        values[key] = _convert(hints[key], value, f"{where}: {key}")
    return cls(**values)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain mappings, as JSON and TOML hold them."""
    result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return result


def check(config: Config) -> None:
    """Refuse what cannot work, in one sentence, before any work starts."""
    for name, allowed in RANGES.items():
        _require_range(name, allowed, operator.attrgetter(name)(config))
    model, train, split = config.model, config.train, config.split
    _require(model.dim % model.heads == 0, f"model.dim {model.dim} is not a multiple of model.heads {model.heads}.")
    _require(model.max_len < 2**16, f"model.max_history + length_margin must stay below 65536, is {model.max_len}.")
    _require(
        train.batch_users > 0 or train.batch_tokens > 0,
        "one of train.batch_users and train.batch_tokens must be above 0.",
    )
    if split.protocol == "global-time":
        _require(
            split.time is not None, "split.protocol global-time needs split.time, the moment where the test begins."
        )
        if split.validation_time is not None and split.time is not None:
            _require(split.validation_time < split.time, "split.validation_time must lie before split.time.")
    else:
        _require(
            split.time is None and split.validation_time is None,
            f"split.time and split.validation_time belong to the protocol global-time, not to {split.protocol}.",
        )
    has_validation = split.protocol == "leave-one-out-validation" or split.validation_time is not None
    _require(
        train.patience == 0 or has_validation or train.select_on_test,
        f"train.patience stops early by a validation, which split.protocol {split.protocol} does not have: "
        "take leave-one-out-validation, or say train.select_on_test true.",
    )
    _require(
        config.tables.weight_decay == 0 or config.tables.optimizer == "adamw",
        "tables.weight_decay needs tables.optimizer adamw.",
    )
    _require(
        model.name == "hstu" or not model.recompute,
        f"model.recompute is not known to model.name {model.name}.",
    )
    _require(
        model.name == "hstu" or model.hstu == HstuConfig(),
        f"model.hstu settings mean nothing for model.name {model.name}.",
    )
    _require(
        model.name == "sasrec" or model.sasrec == SasrecConfig(),
        f"model.sasrec settings mean nothing for model.name {model.name}.",
    )


def _require_range(name: str, allowed: Range, value: Any) -> None:
    low, high, is_open = allowed
    for one in value if isinstance(value, tuple) else (value,):
        inside = one is None or (low < one < high if is_open else low <= one < high)
        bounds = f"{'above' if is_open else 'at least'} {low}" + ("" if math.isinf(high) else f" and below {high}")
        _require(inside, f"{name} must be {bounds}{'' if inside or math.isfinite(one) else ' and finite'}, not {one}.")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigError(sentence)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as type `hint`; only lossless steps (int to float, list to tuple)."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value, where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(
                f"{where} must be one of {', '.join(map(repr, choices))}, not {value!r}"
                f"{did_you_mean(str(value), map(str, choices))}."
            )
        return value
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return None if value is None else _convert(inner[0], value, where)
    if origin is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise ConfigError(f"{where} must be {len(kinds)} values, not {value!r}.")
        return tuple(_convert(kind, one, where) for kind, one in zip(kinds, value, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be {'an' if hint is int else 'a'} {hint.__name__}, not {value!r}.")
    return value
