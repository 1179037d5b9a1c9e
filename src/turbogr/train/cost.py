"""What a row of L tokens costs a rank, which decides how rows are dealt out."""

import numpy as np
import torch

from turbogr.config import Config
from turbogr.data.balance import UserCost
from turbogr.data.cost_fit import CostFit
from turbogr.ranks import ALONE, Ranks
from turbogr.train.flops import ATTENTION_MULTIPLE, GEMM_MULTIPLE, layer_flops
from turbogr.train.replicas import StepFacts

REFIT_EVERY = 8
"""Steps between fits to measured times."""
FITTED_STEPS = 64
"""Latest steps that a fit looks at."""
PAIR_WEIGHT = {"cpu": 1.0}
"""Time of one operation of attention in times of one of a matrix product, by device type."""
ACCELERATOR_PAIR_WEIGHT = 1.5


class WorkCost:
    """By the model's operations, or fitted to what recent steps took, as soon as a fit is to be had."""

    def __init__(self, config: Config, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.by_flops = flops_cost(config, device)
        self.now = self.by_flops
        self.fit = CostFit(FITTED_STEPS * ranks.world) if config.balance.cost == "measured" else None
        self._steps = 0

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        return self.now(lengths)

    def learn(self, facts: StepFacts) -> None:
        """From one step, the same on every rank: a deal that differed in one row would lose it."""
        if self.fit is None:
            return
        self.fit.observe(facts.tokens, facts.pairs, facts.compute_s)
        self._steps += 1
        if self._steps % REFIT_EVERY == 0:
            found = self.fit.fitted()
            own = (0.0, 0.0) if found is None else (found.linear, found.pair)
            # rank 0's: other processors solve the same equations to other last bits
            linear, pair = self.ranks.gather(torch.tensor(own, dtype=torch.float64))[0].tolist()
            if linear > 0 or pair > 0:  # else the last fit stands: equal steps tell nothing new
                self.now = UserCost(linear, pair)

    @property
    def fitted(self) -> bool:
        """Whether rows are dealt out by measured times by now."""
        return self.now is not self.by_flops


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
