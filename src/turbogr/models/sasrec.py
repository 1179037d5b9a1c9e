"""SASRec (Kang and McAuley, 2018) after the public recipe for sampled softmax.

A block on jagged x [T, D]:
    q = norm(x)
    x = q + attention(query = q, keys and values = x)         causal softmax, dropout on its weights
    n = norm(x)
    x = n + dropout(W2 dropout(relu(W1 n + b1)) + b2)
"""

import torch
from torch import Tensor, nn

from turbogr.config import ModelConfig
from turbogr.errors import ConfigError
from turbogr.models.layers import Initial, PositionInput, Sequences, norm
from turbogr.ops.dropout import dropout
from turbogr.ops.softmax_attention import softmax_attention

EPS = 1e-8
linear = torch.nn.functional.linear


class SasrecBlock(nn.Module):
    def __init__(self, config: ModelConfig, block: int, initial: Initial) -> None:
        super().__init__()
        dim, hidden = config.dim, config.sasrec.ffn_dim or config.dim
        # each block draws its masks from two layers of the generator
        self.layers = (2 * block + 1, 2 * block + 2)
        self.heads = config.heads
        self.rate = config.dropout
        self.qkv_weight = initial.xavier_normal(3 * dim, dim)
        self.qkv_bias = initial.zeros(3 * dim)
        self.out_weight = initial.xavier_normal(dim, dim)
        self.out_bias = initial.zeros(dim)
        self.ffn_in_weight = initial.xavier_normal(hidden, dim)
        self.ffn_in_bias = initial.uniform(hidden, edge=dim**-0.5)
        self.ffn_out_weight = initial.xavier_normal(dim, hidden)
        self.ffn_out_bias = initial.uniform(dim, edge=hidden**-0.5)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        query = norm(x, EPS)
        x = query + self._attend(query, x, sequences)
        x = norm(x, EPS)
        hidden = torch.relu(linear(x, self.ffn_in_weight, self.ffn_in_bias))
        hidden = dropout(hidden, self.rate, sequences.noise, self.layers[0])
        out = linear(hidden, self.ffn_out_weight, self.ffn_out_bias)
        return x + dropout(out, self.rate, sequences.noise, self.layers[1])

    def _attend(self, query: Tensor, x: Tensor, sequences: Sequences) -> Tensor:
        dim = x.shape[1]
        q = linear(query, self.qkv_weight[:dim], self.qkv_bias[:dim])
        k, v = linear(x, self.qkv_weight[dim:], self.qkv_bias[dim:]).chunk(2, dim=1)
        q, k, v = (part.view(len(x), self.heads, dim // self.heads) for part in (q, k, v))
        y = softmax_attention(
            q,
            k,
            v,
            sequences.offsets,
            dropout_rate=self.rate,
            noise=sequences.noise,
            layer=self.layers[0],
        )
        return linear(y.flatten(1), self.out_weight, self.out_bias)


class Sasrec(nn.Module):
    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        initial = Initial(seed)
        positions = initial.normal(config.max_len, config.dim, std=config.dim**-0.5, bound=2.0)
        self.input = PositionInput(positions, config.dropout)
        self.blocks = nn.ModuleList(SasrecBlock(config, block, initial) for block in range(config.blocks))

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        if not sequences.mask.causal_only:
            raise ConfigError(
                "model 'sasrec' is causal only, without targets, context or window: take 'hstu' for them."
            )
        x = self.input(x, sequences)
        for block in self.blocks:
            x = block(x, sequences)
        return x
