"""Bytes that would cross the links between nodes, counted from ids by the table's own placement; part of `exchange`.

Nothing is sent: every rank's distinct ids, who owns them, and who stands on another node. Per node, one direction,
mean over the nodes. Copies are summed in two ways: every copy gathers the lists of all, or by owners, where each copy
sums an equal run of the rows and hands the sums round.

K nodes of I ranks, W = K * I, N rows
"""

import dataclasses
from dataclasses import dataclass
from functools import reduce

import numpy as np

from benchmarks.exchange_load import Load
from turbogr.ops.embedding import distinct
from turbogr.tables.placement import Placement
from turbogr.train.replicas import owners_pay

ID_BYTES = 8


@dataclass(frozen=True)
class Planned:
    flat: float
    """Ids, rows and gradients of one group of all ranks."""
    hierarchical: float
    """Ids and sums between copies, a group per node, in the way that the replicas choose."""
    gathered: float
    """The same where every copy gathers the lists of all."""
    by_owners: float
    """The same where each copy sums an equal run of the rows."""
    rank_rows: float
    """Distinct rows of a rank, mean."""
    node_rows: float
    """Distinct rows of a node, mean."""
    all_rows: int
    """Distinct rows of the whole step."""
    mb_flat_lookup: float
    """The part of `flat` that a lookup has to wait for, in 10^6 bytes."""

    @property
    def ratio(self) -> float:
        return self.hierarchical / self.flat

    @property
    def ratio_gathered(self) -> float:
        return self.gathered / self.flat


def plan(load: Load, nodes: int, per_node: int, step: int = 0) -> Planned:
    """Of one step; every group of the hierarchy is a node."""
    placement = Placement(load.items)
    of_rank = [
        distinct(placement.positions(load.ids(rank, step)), load.items)[0].numpy() for rank in range(nodes * per_node)
    ]
    of_node = [reduce(np.union1d, of_rank[node * per_node : (node + 1) * per_node]) for node in range(nodes)]
    everything = reduce(np.union1d, of_node)
    row = 4 * load.dim
    lookup, gradients = _flat(load, of_rank, nodes, per_node)
    chosen, gathered, by_owners = _copies(load, of_node, everything, per_node)
    return Planned(
        flat=lookup + gradients,
        hierarchical=chosen * (ID_BYTES + row),
        gathered=gathered * (ID_BYTES + row),
        by_owners=by_owners * (ID_BYTES + row),
        rank_rows=float(np.mean([len(own) for own in of_rank])),
        node_rows=float(np.mean([len(own) for own in of_node])),
        all_rows=len(everything),
        mb_flat_lookup=lookup / 1e6,
    )


def _flat(load: Load, of_rank: list[np.ndarray], nodes: int, per_node: int) -> tuple[float, float]:
    """(bytes of lookups, of gradients) that leave a node where all ranks form one group."""
    bounds = Placement(load.items, 0, len(of_rank)).bounds().numpy()
    wanted = np.array([np.diff(np.searchsorted(own, bounds)) for own in of_rank])  # [asking rank, owner]
    node = np.arange(len(of_rank)) // per_node
    rows = wanted[node[:, None] != node].sum() / nodes
    return float(rows * (ID_BYTES + 4 * load.dim)), float(rows * 4 * load.dim)


def _copies(load: Load, of_node: list[np.ndarray], everything: np.ndarray, per_node: int) -> tuple[float, float, float]:
    """Rows that leave a node between copies: (in the way chosen, gathered, by owners)."""
    nodes = len(of_node)
    bounds = Placement(load.items, 0, per_node).bounds().numpy()
    touched = np.array([np.diff(np.searchsorted(own, bounds)) for own in of_node])  # [node, shard]
    gathered = (nodes - 1) * touched.max(0).sum()  # every list as long as the longest
    to_owners = touched.sum(1).mean() * (nodes - 1) / nodes
    sums = len(everything) / nodes * (nodes - 1)
    by_owners = to_owners + sums
    pays = owners_pay(touched[:, 0].tolist(), -(-load.items // per_node))
    return float(by_owners if pays else gathered), float(gathered), float(by_owners)


def sweep(load: Load, tokens: list[int], nodes: int, per_node: int) -> list[dict[str, float]]:
    """By tokens of a rank."""
    found = []
    for count in tokens:
        one = plan(dataclasses.replace(load, tokens=count), nodes, per_node)
        ratios = {"ratio": one.ratio, "ratio_gathered": one.ratio_gathered}
        found.append({"tokens": count, **dataclasses.asdict(one), **ratios})
    return found
