"""The public HSTU recipe's training step: padded histories, gathered negatives, torch's dropout, AdamW on everything.

ids 1 .. items, 0 is padding
T tokens, B rows, N longest row, R negatives, D width
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baselines.padded_hstu import HstuLayer, Padding, extended_times
from benchmarks.baselines.sampled_softmax import gathered_loss


@dataclass(frozen=True)
class PaddedBatch:
    padding: Padding
    items: Tensor  # int64 [B, N]
    targets: Tensor  # int64 [T]
    extended: Tensor  # int64 [B, N + 1] seconds

    @classmethod
    def of(cls, offsets: Tensor, items: Tensor, targets: Tensor, times: Tensor, next_times: Tensor) -> "PaddedBatch":
        """From jagged columns [T] with items counted from 0."""
        padding = Padding.of(offsets)
        return cls(padding, padding.pad(items + 1), targets + 1, extended_times(padding, times, next_times))


class PaddedHstu(nn.Module):
    def __init__(self, items: int, dim: int, blocks: int, heads: int, max_len: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.items = nn.Embedding(items + 1, dim, padding_idx=0)
        nn.init.trunc_normal_(self.items.weight, std=0.02, a=-0.04, b=0.04)
        nn.init.zeros_(self.items.weight[0])
        self.positions = nn.Embedding(max_len, dim)
        nn.init.xavier_normal_(self.positions.weight)
        self.layers = nn.ModuleList(HstuLayer(dim, heads, max_len, rate) for _ in range(blocks))

    def forward(self, batch: PaddedBatch) -> Tensor:
        """[T, D], not normalised."""
        rows = self.items(batch.items)
        places = torch.arange(batch.padding.longest, device=rows.device)
        rows = F.dropout(rows * math.sqrt(rows.shape[2]) + self.positions(places), self.rate, self.training)
        rows = rows * (batch.items != 0).unsqueeze(2).to(rows.dtype)
        x = batch.padding.unpad(rows)
        for layer in self.layers:
            x = layer(x, batch.padding, batch.extended)
        return x


class PaddedRecipe:
    """A model and its optimizer; `step(batch)` trains once and answers the mean loss."""

    def __init__(
        self, model: PaddedHstu, negatives: int, temperature: float, lr: float, betas: tuple[float, float]
    ) -> None:
        self.model, self.negatives, self.temperature = model, negatives, temperature
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.0, fused=True)

    def step(self, batch: PaddedBatch) -> float:
        loss = self.loss(batch, torch.randint(1, len(self.model.items.weight), (len(batch.targets), self.negatives)))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def loss(self, batch: PaddedBatch, negatives: Tensor) -> Tensor:
        table = self.model.items.weight
        total = gathered_loss(self.model(batch), table, batch.targets, negatives, self.temperature)
        return total / len(batch.targets)
