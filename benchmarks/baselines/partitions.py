"""Other rules that put users onto ranks, for benchmarks.balance: each takes lengths and answers the rank of every user.

n users in the order of the draw, R ranks; costs float64 [n]
"""

import heapq

import numpy as np


def naive(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """As they come, the same number for every rank: what a loader without balance does."""
    return np.arange(len(lengths)) * ranks // max(len(lengths), 1)


def sort_by_length(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """Sorted, then cut: users of like length together, which spares padding and gives one rank all long ones."""
    part = np.empty(len(lengths), np.int64)
    part[np.argsort(-lengths, kind="stable")] = naive(lengths, ranks)
    return part


def round_robin(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """Sorted, then dealt like cards."""
    part = np.empty(len(lengths), np.int64)
    part[np.argsort(-lengths, kind="stable")] = np.arange(len(lengths)) % ranks
    return part


def nvidia_cost(lengths: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """The workload formula of NVIDIA recsys-examples for an HSTU layer, forward only (their HSTUAttentionTask).

    2 L D (4 D) for the projections, 2 L D D for the output, and 2 * heads * (2 L L D) for QK and PV: all pairs, not
    the causal half, and the heads counted a second time though D = heads * head_dim holds them all.
    """
    dim, tokens = heads * head_dim, lengths.astype(np.float64)
    return 10.0 * tokens * dim * dim + 4.0 * heads * tokens * tokens * dim


def nvidia(lengths: np.ndarray, ranks: int, heads: int = 8, head_dim: int = 128) -> np.ndarray:
    """NVIDIA recsys-examples' balancer: its formula, Karmarkar-Karp, the same number of users for every rank."""
    return karmarkar_karp(nvidia_cost(lengths, heads, head_dim), ranks, equal_users=len(lengths) % ranks == 0)


def karmarkar_karp(costs: np.ndarray, ranks: int, equal_users: bool = False) -> np.ndarray:
    """Largest differencing: the two partial answers of the widest spread are joined, largest sums to smallest.

    A partial answer is R sums, in falling order; at first one user each, or (`equal_users`) R users in turn.
    """
    if not len(costs):
        return np.zeros(0, np.int64)
    order = np.argsort(-costs, kind="stable")
    share = ranks if equal_users else 1
    answers = []
    for k, begin in enumerate(range(0, len(order), share)):
        users = order[begin : begin + share]
        sums, nodes = np.zeros(ranks), np.full(ranks, -1, np.int64)
        sums[: len(users)], nodes[: len(users)] = costs[users], users
        answers.append((float(sums[-1] - sums[0]), k, sums, nodes))
    heapq.heapify(answers)
    children: list[tuple[int, int]] = []  # node n + i joins two nodes
    while len(answers) > 1:
        _, k, sums, nodes = heapq.heappop(answers)
        _, _, other_sums, other_nodes = heapq.heappop(answers)
        sums, nodes, other_nodes = sums + other_sums[::-1], nodes.copy(), other_nodes[::-1]
        both = np.flatnonzero((nodes >= 0) & (other_nodes >= 0))
        joined = len(costs) + len(children) + np.arange(len(both))
        children += zip(nodes[both].tolist(), other_nodes[both].tolist(), strict=True)
        nodes = np.maximum(nodes, other_nodes)
        nodes[both] = joined
        falling = np.argsort(-sums, kind="stable")
        sums, nodes = sums[falling], nodes[falling]
        heapq.heappush(answers, (float(sums[-1] - sums[0]), k, sums, nodes))
    return _leaves(answers[0][3], children, len(costs))


def _leaves(nodes: np.ndarray, children: list[tuple[int, int]], n: int) -> np.ndarray:
    part = np.empty(n, np.int64)
    for rank, root in enumerate(nodes.tolist()):
        stack = [root] if root >= 0 else []
        while stack:
            node = stack.pop()
            if node < n:
                part[node] = rank
            else:
                stack += children[node - n]
    return part


def lower_bound(costs: np.ndarray, ranks: int) -> float:
    """(max - min) / max that no assignment goes below.

    With q = ceil(n / R) places a rank (empty places count as users of cost 0) and C the largest cost, a rank with fewer
    than q users holds at most (q - 1) C, and if none has fewer, the rank of the cheapest user s holds at most
    (q - 1) C + s. So  min <= (q - 1) C + s  and the others' mean is  max >= (total - min) / (R - 1).

    If max <= q C - g with 0 < g < C, a rank of q users lacks at least g, a rank with j users more at least j C + g
    (for which j ranks may have one less and lack nothing). A user lacking g or more serves one rank; of the others,
    j + 1 ranks take at least as many as the largest of them that sum up to j C + g. The largest g for which there are
    enough users to serve R ranks bounds the max.
    """
    total, places = float(costs.sum()), -(-len(costs) // ranks)
    if total <= 0 or ranks == 1:
        return 0.0
    padded = np.append(costs, np.zeros(places * ranks - len(costs)))
    top = float(padded.max())
    low = min(total / ranks, (places - 1) * top + float(padded.min()))
    high = max(total / ranks, (total - low) / (ranks - 1))
    lacking = -np.sort(padded - top)
    lacking = -np.sort(-lacking[lacking > 0])
    reach = [0.0, top]
    if not _serves(lacking, top, ranks, top):
        for _ in range(60):
            middle = sum(reach) / 2
            reach[0 if _serves(lacking, middle, ranks, top) else 1] = middle
        high = max(high, places * top - reach[1])
    return max(0.0, (high - low) / high)


def _serves(lacking: np.ndarray, g: float, ranks: int, top: float) -> bool:
    large = int((lacking >= g).sum())
    sums, best = np.cumsum(lacking[large:]), 0.0
    for j in range(len(sums)):
        k = int(np.searchsorted(sums, j * top + g))
        if k == len(sums):
            break
        best = max(best, (j + 1) / (k + 1))
    return large + np.floor(best * len(sums) + 1e-9) >= ranks
