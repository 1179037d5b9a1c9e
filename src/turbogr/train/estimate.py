"""What a run would need, without training: parameters, FLOPs per step, memory. Behind `turbogr train --dry-run`.

T tokens of the largest batch, R negatives, D width, U distinct rows at most
"""

from dataclasses import dataclass

import numpy as np
import torch

from turbogr.config import Config
from turbogr.data.batching import plan_epoch, training_pairs
from turbogr.data.split import make_split
from turbogr.launch import world_size
from turbogr.models import build_encoder
from turbogr.train.flops import causal_pairs, paper_flops, table_bytes, training_flops
from turbogr.train.trainer import preflight

FLOAT = 4
ACTIVATIONS_PER_BLOCK = 18
"""Floats per token and channel that a block keeps for its backward: an estimate, SASRec's attention weights aside."""
CANDIDATE_BYTES = 40
"""Bytes per token and candidate around the loss: ids, their sorted order, scores and slopes."""


@dataclass(frozen=True)
class Estimate:
    users: int
    """Rows of an epoch: users, or their windows."""
    pairs: int
    """Training tokens of one epoch."""
    steps_per_epoch: int
    tokens_per_step: float
    encoder_parameters: int
    table_parameters: int
    gflop_per_step: float | None
    """Causal, over real tokens."""
    gflop_per_step_paper: float | None
    """As the TurboGR paper counts: full attention, every user at the maximal history."""
    model_bytes: int
    """Weights, gradients and optimizer state."""
    step_bytes: int
    """Activations, candidates and looked-up rows of the largest batch (an estimate)."""


def estimate(config: Config) -> Estimate:
    store = preflight(config)
    split = make_split(store, config.split)
    pairs = training_pairs(store, split, config.model.max_history)
    plan = plan_epoch(pairs, 0, config.train, config.balance)
    tokens = np.add.reduceat(plan.tokens, plan.bounds[:-1])
    with torch.device("meta"):
        encoder = build_encoder(config.model, config.train.seed)
    dense = sum(parameter.numel() for parameter in encoder.parameters())
    dim = config.model.dim
    rows = store.num_items * dim
    flops = training_flops(config.model, float(plan.tokens.sum()), causal_pairs(plan.tokens))
    paper = paper_flops(config.model, len(plan.users))
    steps = -(-len(plan) // (config.train.accumulate * (config.balance.batches or world_size())))
    largest = min(int(tokens.max()), config.balance.rank_tokens or int(tokens.max()))
    candidates = config.negatives.count + 1
    touched = min(store.num_items, largest * (candidates + 1))
    return Estimate(
        users=len(plan.users),
        pairs=int(tokens.sum()),
        steps_per_epoch=steps,
        tokens_per_step=float(tokens.sum()) / steps,
        encoder_parameters=dense,
        table_parameters=rows,
        gflop_per_step=None if flops is None else flops / steps / 1e9,
        gflop_per_step_paper=None if paper is None else paper / steps / 1e9,
        model_bytes=FLOAT * 4 * dense + table_bytes(config, store.num_items),
        step_bytes=FLOAT * dim * (largest * ACTIVATIONS_PER_BLOCK * config.model.blocks + 4 * touched)
        + CANDIDATE_BYTES * largest * candidates,
    )
