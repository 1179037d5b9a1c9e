"""What a row of L tokens costs a rank, which decides how rows are dealt out."""

import numpy as np
import torch

from turbogr.config import Config
from turbogr.data.balance import UserCost
from turbogr.data.cost_fit import CostFit
from turbogr.train.flops import ATTENTION_MULTIPLE, GEMM_MULTIPLE, layer_flops
from turbogr.train.replicas import StepFacts

REFIT_EVERY = 8
"""Steps between fits to measured times."""
PAIR_WEIGHT = {"cpu": 1.0}
"""Time of one operation of attention in times of one of a matrix product, by device type."""
ACCELERATOR_PAIR_WEIGHT = 1.5


class WorkCost:
    """By the model's operations, or fitted to what recent steps took; by operations again where no fit is to be had."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.by_flops = flops_cost(config, device)
        self.now = self.by_flops
        self.fit = CostFit() if config.balance.cost == "measured" else None
        self._steps = 0

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        return self.now(lengths)

    def learn(self, facts: StepFacts) -> None:
        """From one step; every rank hears the same facts and so learns the same."""
        if self.fit is None:
            return
        self.fit.observe(facts.tokens, facts.pairs, facts.compute_s)
        self._steps += 1
        if self._steps % REFIT_EVERY == 0:
            self.now = self.fit.fitted() or self.by_flops


def flops_cost(config: Config, device: torch.device) -> UserCost:
    """Operations of one row's forward and backward, the loss included; by tokens for an encoder without a formula."""
    flops = layer_flops(config.model)
    if flops is None:
        return UserCost(1.0, 0.0)
    per_token, per_pair = flops
    loss = GEMM_MULTIPLE * 2.0 * (config.negatives.count + 1) * config.model.dim
    weight = PAIR_WEIGHT.get(device.type, ACCELERATOR_PAIR_WEIGHT)
    blocks = config.model.blocks
    return UserCost(blocks * GEMM_MULTIPLE * per_token + loss, blocks * ATTENTION_MULTIPLE * per_pair * weight)
