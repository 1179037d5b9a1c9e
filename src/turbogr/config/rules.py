"""What settings may be: ranges of numbers, and combinations that cannot work."""

import math
import operator
from typing import Any, NamedTuple

from turbogr.config.settings import Config, HstuConfig, SasrecConfig
from turbogr.errors import ConfigError


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
    "tables.groups": _AT_LEAST_0,
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
    "balance.batches": _AT_LEAST_0,
    "balance.rank_tokens": _AT_LEAST_0,
    "balance.window": _AT_LEAST_0,
    "evaluate.max_users": _AT_LEAST_0,
    "evaluate.batch_users": _AT_LEAST_1,
    "evaluate.item_chunk": _AT_LEAST_1,
    "device.threads": _AT_LEAST_0,
    "log.every": _AT_LEAST_1,
}
"""What every number of `Config` may be, by its dotted name; each of a pair; None always."""


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
    _check_balance(config)
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


def _check_balance(config: Config) -> None:
    balance, train = config.balance, config.train
    limit = balance.rank_tokens
    _require(
        balance.users == "planned" or balance.strategy == "global",
        f"balance.users exchanged belongs to balance.strategy global, not to {balance.strategy}.",
    )
    _require(
        balance.weight == "tokens" or limit == 0,
        "balance.weight samples weights a rank's mean by its users, which balance.rank_tokens would cut into turns: "
        "leave one of them out.",
    )
    _require(
        balance.cost == "flops" or config.dense.sharding == "replicated",
        "balance.cost measured cannot tell work from waiting with dense.sharding fsdp: take flops.",
    )
    _require(
        balance.users == "planned" or limit == 0 or (not train.batch_users and train.batch_tokens <= limit),
        f"balance.users exchanged holds balance.rank_tokens {limit} where batches are filled to no more than that: "
        f"take train.batch_users 0 and train.batch_tokens {limit} or less.",
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
