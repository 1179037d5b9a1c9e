"""FLOPs of a training step by the named counts of the documentation (docs/flops.md).

    causal   real tokens, the causal half of the attention; what MFU means here
    full     the full L x L attention with every user at the maximal length, as the TurboGR paper counts

L length of a user, D width, hd heads * head dim (= D), F feed-forward width.
"""

from collections.abc import Callable

import numpy as np

from turbogr.config import Config, ModelConfig

# training = forward * these: attention has 2 products forward and 5 backward (its own QK included)
ATTENTION_MULTIPLE = 3.5
GEMM_MULTIPLE = 3.0


def _hstu(config: ModelConfig) -> tuple[float, float]:
    """(GEMM FLOPs per token, attention FLOPs per token pair) of one layer's forward."""
    return 2.0 * config.dim * 4 * config.dim + 2.0 * config.dim * config.dim, 4.0 * config.dim


def _sasrec(config: ModelConfig) -> tuple[float, float]:
    hidden = config.sasrec.ffn_dim or config.dim
    return 2.0 * config.dim * 4 * config.dim + 4.0 * config.dim * hidden, 4.0 * config.dim


LAYERS: dict[str, Callable[[ModelConfig], tuple[float, float]]] = {"hstu": _hstu, "sasrec": _sasrec}


def layer_flops(config: ModelConfig) -> tuple[float, float] | None:
    """(GEMM FLOPs per token, attention FLOPs per pair) of a layer's forward; None for an encoder without a formula."""
    return LAYERS[config.name](config) if config.name in LAYERS else None


def training_flops(config: ModelConfig, tokens: float, pairs: float) -> float | None:
    """Causal count of forward and backward over rows of `tokens` tokens and `pairs` causal pairs in all."""
    flops = layer_flops(config)
    if flops is None:
        return None
    per_token, per_pair = flops
    return config.blocks * (GEMM_MULTIPLE * per_token * tokens + ATTENTION_MULTIPLE * per_pair * pairs)


def causal_pairs(lengths: np.ndarray) -> float:
    """(token, token that it sees) pairs of rows of these lengths: L (L + 1) / 2 each."""
    lengths = lengths.astype(np.float64)
    return float((lengths * (lengths + 1) / 2).sum())


def paper_flops(config: ModelConfig, users: int) -> float | None:
    """The TurboGR paper's count: 3 x (2 P L + layers * m * 2 * L^2 * D) for every user at the maximal history."""
    flops = layer_flops(config)
    if flops is None:
        return None
    per_token, per_pair = flops
    length = config.max_history
    return 3.0 * users * config.blocks * (per_token * length + per_pair * length * length)


ROW_STATE = {"adagrad": 0, "lazy-adam": 2, "adamw": 2}
"""Optimizer floats per weight of a row (row-wise Adagrad keeps one per row)."""


def table_bytes(config: Config, num_rows: int) -> int:
    """Memory of a table with its optimizer state."""
    return 4 * (num_rows * config.model.dim * (1 + ROW_STATE[config.tables.optimizer]) + num_rows)
