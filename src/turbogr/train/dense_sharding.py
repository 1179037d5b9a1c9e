"""Spreads the encoder over the ranks by torch's fully_shard, and gathers it again where it is asked as a whole."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from turbogr.config import Config
from turbogr.models import build_encoder
from turbogr.ranks import Ranks


def shard_encoder(encoder: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Every block is a unit that is gathered for its own forward and backward; gradients are sums over the ranks."""
    mesh = init_device_mesh(device.type, (ranks.world,))
    blocks = [block for module in encoder.modules() if isinstance(module, nn.ModuleList) for block in module]
    for module in [*blocks, encoder]:
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        # not the mean: the step divides by its tokens. And gloo has no mean.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def whole_encoder(sharded: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """A copy of the encoder as it is now, in this process; all ranks make one together."""
    with torch.device("meta"):
        copy = build_encoder(config.model, config.train.seed)
    copy.to_empty(device=device)
    with torch.no_grad():
        for own, other in zip(copy.parameters(), sharded.parameters(), strict=True):
            own.copy_(whole(other.detach()))
        for mine, theirs in zip(copy.buffers(), sharded.buffers(), strict=True):
            mine.copy_(theirs)
    return copy


def whole(value: Tensor) -> Tensor:
    """A sharded tensor gathered; any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value
