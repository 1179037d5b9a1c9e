"""HSTU (Zhai et al., 2024): pointwise SiLU attention with relative position and time bias.

A block on jagged x [T, D], with h heads of d = D / h:
    [u | v | q | k] = SiLU(norm(x) W)
    y = A v,  A as in `turbogr.ops.hstu_attention`
    x = x + dropout(u * norm(y)) W_o + b
all of it one operator, `turbogr.ops.hstu_layer`.
"""

from torch import Tensor, nn

from turbogr.config import ModelConfig
from turbogr.models.layers import Initial, PositionInput, Sequences
from turbogr.ops.hstu_layer import hstu_layer


class HstuBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, initial: Initial) -> None:
        super().__init__()
        dim = config.dim
        self.layer = layer
        self.heads = config.heads
        self.max_len = config.max_len
        self.bucket_width = config.hstu.bucket_width
        self.rate = config.dropout
        self.recompute = config.recompute
        self.uvqk = initial.normal(dim, 4 * dim, std=0.02)
        self.out_weight = initial.xavier_uniform(dim, dim)
        self.out_bias = initial.uniform(dim, edge=dim**-0.5)
        self.position_bias = initial.normal(config.max_len, std=0.02) if config.hstu.position_bias else None
        self.time_bias = initial.normal(config.hstu.time_buckets + 1, std=0.02) if config.hstu.time_bias else None

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        mask = sequences.mask
        return hstu_layer(
            x,
            sequences.offsets,
            self.uvqk,
            self.out_weight,
            self.out_bias,
            heads=self.heads,
            max_len=self.max_len,
            position_bias=self.position_bias,
            time_bias=self.time_bias,
            times=sequences.times,
            next_times=sequences.next_times,
            bucket_width=self.bucket_width,
            num_targets=mask.num_targets,
            num_context=mask.num_context,
            window=mask.window,
            context_sees_history=mask.context_sees_history,
            dropout=self.rate,
            noise=sequences.noise,
            layer=self.layer,
            recompute=self.recompute,
        )


class Hstu(nn.Module):
    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        initial = Initial(seed)
        self.input = PositionInput(initial.xavier_normal(config.max_len, config.dim), config.dropout)
        self.blocks = nn.ModuleList(HstuBlock(config, layer, initial) for layer in range(1, config.blocks + 1))

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        x = self.input(x, sequences)
        for block in self.blocks:
            x = block(x, sequences)
        return x
