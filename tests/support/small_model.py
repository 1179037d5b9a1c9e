"""A small config, and random histories for encoders that are tested without a store."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turbogr.config import Config, ModelConfig, NegativesConfig, TrainConfig
from turbogr.jagged import offsets_of, position_in_row
from turbogr.models import Sequences
from turbogr.ops.dropout import Noise


def small_model(name: str, **changed: Any) -> ModelConfig:
    """Width 8, two heads, two blocks, rows up to 15."""
    return replace(ModelConfig(name=name, dim=8, blocks=2, heads=2, max_history=12, length_margin=3), **changed)


def small_config(name: str = "hstu", model: dict[str, Any] | None = None, **parts: Any) -> Config:
    """`parts` replaces sections: tables=TablesConfig(...), train=TrainConfig(...)."""
    sections = {"negatives": NegativesConfig(count=5), "train": TrainConfig(seed=11)} | parts
    return Config(model=small_model(name, **(model or {})), **sections)


def random_sequences(lengths: list[int], *, noise: Noise | None = None, seed: int = 0) -> Sequences:
    """Times in order within a row; the last token's next time is a day later."""
    generator = torch.Generator().manual_seed(seed)
    offsets = offsets_of(torch.tensor(lengths))
    tokens = int(offsets[-1])
    rows = [torch.randint(0, 10**7, (length + 1,), generator=generator).sort().values for length in lengths]
    times = torch.cat([row[:-1] for row in rows])
    next_times = torch.cat([row[1:] for row in rows])
    return Sequences(offsets, position_in_row(offsets, tokens), times, next_times, noise)


def random_input(tokens: int, dim: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(tokens, dim, generator=torch.Generator().manual_seed(seed)) * 0.1
