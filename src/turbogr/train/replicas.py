"""Keeps the encoder and the table of every rank equal: gradients are summed over the ranks before they are applied.

Each rank sums the losses of its own tokens; the sum over ranks, divided by the step's tokens, is what one process
would have computed on the union. Dense gradients travel as one buffer, row gradients as (distinct id, sum) in the
order of the ranks, so that every rank adds the same numbers in the same order.

W ranks, D width, U distinct rows of a rank
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turbogr.data.balance import imbalance
from turbogr.ranks import Ranks, talked_s
from turbogr.tables import RowGradients
from turbogr.tables.exchange import Exchange

FACTS = ("users", "tokens", "pairs", "cost", "loss", "bad_rows", "compute_s", "busy_s")


@dataclass(frozen=True)
class StepFacts:
    """What every rank says of its part of a step; each fact is [W]."""

    users: np.ndarray
    tokens: np.ndarray
    pairs: np.ndarray
    """Causal (token, earlier token) pairs."""
    cost: np.ndarray
    """By the cost that the step was dealt by."""
    loss: np.ndarray
    bad_rows: np.ndarray
    """1 where a row's gradient is not finite."""
    compute_s: np.ndarray
    """Seconds from the step's begin until all ranks meet, less those in talks with other ranks."""
    busy_s: np.ndarray
    """The same from where the ranks met in the step before, which all leave together."""

    def balance(self) -> dict[str, float]:
        """How equal the ranks' work was: 0 is perfect. Waiting is what a rank works less than the slowest."""
        waits = self.busy_s.max() - self.busy_s
        return {
            "balance/token_imbalance": imbalance(self.tokens),
            "balance/cost_imbalance": imbalance(self.cost),
            "balance/time_imbalance": imbalance(self.compute_s),
            "balance/token_gap": float(self.tokens.max() - self.tokens.min()),
            "balance/wait_ms": 1e3 * float(waits.mean()),
            "balance/wait_share": float(waits.mean() / max(self.busy_s.max(), 1e-9)),
        }


class Replicas:
    """The exchange of one step, in the order of its calls."""

    def __init__(self, ranks: Ranks, copies: Ranks, parameters: list[nn.Parameter]) -> None:
        """`copies`: the ranks that hold the same rows of the table as this one. `parameters`: those that every rank has
        a whole copy of; what sums the gradients of others is not this."""
        self.ranks, self.copies, self.parameters = ranks, copies, parameters
        self._met = (0.0, 0.0)  # when the ranks last met, and what had been talked until then
        self._flat: Tensor | None = None
        self._work: Any = None

    def begin_dense(self) -> None:
        """Start to sum the dense gradients while other things are done."""
        if self.ranks.alone or not self.parameters:
            return
        parts = [zeros_or_gradient(parameter).flatten() for parameter in self.parameters]
        self._flat = torch.cat(parts)
        self._work = self.ranks.begin_sum(self._flat)

    def end_dense(self) -> None:
        if self._work is None:
            return
        assert self._flat is not None
        self.ranks.finish(self._work)
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, torch.split(self._flat, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._work = self._flat = None

    def tell(self, begun: tuple[float, float], **facts: float) -> StepFacts:
        """Where all ranks of a step meet; `begun` is when it began, and what had been talked until then."""
        now, talked = time.perf_counter(), talked_s()
        met = self._met if self._met[0] else begun
        facts |= {"compute_s": now - begun[0] - (talked - begun[1]), "busy_s": now - met[0] - (talked - met[1])}
        own = torch.tensor([facts[name] for name in FACTS], dtype=torch.float64)
        every = self.ranks.gather(own).numpy()
        self._met = (time.perf_counter(), talked_s())
        return StepFacts(**{name: every[:, place] for place, name in enumerate(FACTS)})

    def sum_rows(self, own: RowGradients, num_rows: int) -> RowGradients:
        """The sum over the copies of this rank's rows, in their order; indices and sums of touched rows travel."""
        if self.copies.alone:
            return own
        counts = self.copies.gather(torch.tensor([len(own.ids)])).flatten().tolist()
        if not any(counts):
            return own
        if owners_pay(counts, num_rows):
            return self._sum_by_owners(own, num_rows)
        ids, values = self.copies.gather_rows(own.ids, counts), self.copies.gather_rows(own.values, counts)
        parts = [RowGradients(*part) for part in zip(ids, values, strict=True) if len(part[0])]
        return RowGradients.merged(parts, num_rows)

    def _sum_by_owners(self, own: RowGradients, num_rows: int) -> RowGradients:
        """Every copy sums an equal run of the rows, and hands the sums round."""
        copies, run = self.copies, -(-num_rows // self.copies.world)
        exchange = Exchange(copies, [own.values.shape[1]])
        request = exchange.begin([own.ids], [(torch.arange(copies.world + 1) * run).clamp(max=num_rows)])
        exchange.wait(request)
        (parts,) = exchange.give_back(request, [own.values])
        sums = RowGradients.merged([RowGradients(*part) for part in zip(request.asked[0], parts, strict=True)], run)
        counts = copies.gather(torch.tensor([len(sums.ids)])).flatten().tolist()
        ids = copies.gather_rows(sums.ids + copies.rank * run, counts)
        return RowGradients(torch.cat(ids), torch.cat(copies.gather_rows(sums.values, counts)))


def owners_pay(counts: list[int], num_rows: int) -> bool:
    """Whether fewer rows travel by owners than where every copy gathers the lists of all, `counts` rows of `num_rows`.

    By owners a copy sends its list and then the sums, 1 / W of each at a time; the sums are as many as lists of rows
    drawn apart from one another have distinct ones, or fewer.
    """
    distinct = num_rows * (1 - math.prod(1 - count / num_rows for count in counts))
    return sum(counts) / len(counts) + distinct < len(counts) * max(counts)


def zeros_or_gradient(parameter: nn.Parameter) -> Tensor:
    """A rank without rows has no gradient, and adds nothing."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
