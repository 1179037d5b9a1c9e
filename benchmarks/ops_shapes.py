"""The batches of `benchmarks.ops`: row lengths by the packaged quantiles of real logs, and tensors made for them.

T tokens, B users, H heads of width d
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turbogr.data.sources.shape import quantiles
from turbogr.jagged import offsets_of

DAY = 86400


@dataclass(frozen=True)
class Shape:
    log: str
    """ml-1m | kuairand-27k | full: every row at the cap"""
    cap: int
    users: int
    heads: int
    dim: int

    def lengths(self) -> Tensor:
        """int64 [B]: the quantiles at (b + 1/2) / B, cut at the cap, in a random but fixed order."""
        if self.log == "full":
            return torch.full((self.users,), self.cap, dtype=torch.int64)
        table = quantiles(self.log, "ratings" if self.log == "ml-1m" else "exposures")
        at = (np.arange(self.users) + 0.5) / self.users
        # the last event of a user is only a target
        lengths = np.minimum(np.interp(at, np.linspace(0, 1, len(table)), table).astype(np.int64) - 1, self.cap)
        return torch.from_numpy(np.random.default_rng(0).permutation(lengths))

    def attention_flops(self) -> float:
        """Forward and backward, the causal half only (docs/flops.md)."""
        lengths = self.lengths().double()
        return 3.5 * 4 * self.heads * self.dim * float((lengths * (lengths + 1) / 2).sum())

    def layer_flops(self) -> float:
        """Forward and backward of a whole HSTU layer with D = H d."""
        width = self.heads * self.dim
        return 3.0 * 2.0 * 5 * width * width * float(self.lengths().sum()) + self.attention_flops()


def event_times(lengths: Tensor, seed: int = 0, span: int = 60 * DAY) -> tuple[Tensor, Tensor]:
    """int64 [T] seconds of every event, ascending in a row, and of the one after it."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, span, (int(n) + 1,), generator=generator).sort().values + 10**9 for n in lengths]
    return torch.cat([row[:-1] for row in rows]), torch.cat([row[1:] for row in rows])


@dataclass(frozen=True)
class AttentionInputs:
    """Leaves of one attention call; q, k, v [T, H, d] are parts of one buffer [T, 4, H, d], as in a layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    times: Tensor
    next_times: Tensor
    position: Tensor  # [max_len]
    time: Tensor  # [129]
    weights: Tensor  # [T, H, d] gradient of the output
    max_len: int

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.position, self.time

    @property
    def answer_bytes(self) -> int:
        """The output and every gradient."""
        return self.weights.nbytes + sum(leaf.nbytes for leaf in self.leaves)


def attention_inputs(
    lengths: Tensor,
    max_len: int,
    heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    times: tuple[Tensor, Tensor] | None = None,
) -> AttentionInputs:
    generator = torch.Generator().manual_seed(1)
    tokens = int(lengths.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    fused = normal(tokens, 4, heads, dim).to(device, dtype)
    q, k, v = (fused[:, part].detach().requires_grad_() for part in (1, 2, 3))
    times, next_times = times if times is not None else event_times(lengths)
    return AttentionInputs(
        q=q,
        k=k,
        v=v,
        offsets=offsets_of(lengths).to(device),
        times=times.to(device),
        next_times=next_times.to(device),
        position=normal(max_len).to(device, _wide(dtype)).requires_grad_(),
        time=normal(129).to(device, _wide(dtype)).requires_grad_(),
        weights=normal(tokens, heads, dim).to(device, dtype),
        max_len=max_len,
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Bias tables are parameters: never below fp32."""
    return torch.promote_types(dtype, torch.float32)
