"""The partition in Python, step by step; src/partition.cpp of ops/native does the same, and gives the same answer.

1. Largest first: every user in turn to the lightest rank that has room for its tokens.
2. Sweeps: ranks in the order of their load, the heaviest with the lightest and so on inwards; each pair makes that
   exchange of gifts which leaves the smallest gap between the two. A gift is nothing or one user, later also two.
3. What stays too far off, the heaviest and the lightest rank, is mended with the partner that helps it most.
4. Sweeps in the order of tokens, with exchanges that keep every load in the range that was reached.

u, v users (costliest first), r ranks, i, j gifts of the heavier rank a and the lighter b
"""

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from turbogr.ops.partition import Goal

PAIRED = 10  # users of a rank that pairs are made of
PATIENCE = 4  # sweeps that gain little
OVERHEAD = 256  # of one exchange, in combinations of gifts
ANY = 1 << 61

Gifts = tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]  # cost, tokens, users
Found = tuple[int, int, int] | None  # gap, i, j


def partition_reference(
    cost: np.ndarray, tokens: np.ndarray, ranks: int, limit: int, goal: "Goal", start: np.ndarray | None
) -> np.ndarray:
    """See `turbogr.ops.partition.partition_users`."""
    part = _largest_first(cost.tolist(), tokens.tolist(), ranks, limit) if start is None else np.array(start, np.int64)
    if (part < 0).any():
        return part
    refiner = _Refiner(cost.tolist(), tokens.tolist(), part, ranks, limit, goal)
    refiner.sweep_loads(pairs=False)
    refiner.sweep_loads(pairs=True)
    refiner.mend_extremes()
    refiner.work = goal.token_work
    refiner.sweep_tokens(goal.tokens)
    for rank, users in enumerate(refiner.users):
        part[users] = rank
    return part


def _largest_first(cost: list[int], tokens: list[int], ranks: int, limit: int) -> np.ndarray:
    part = np.full(len(cost), -1, np.int64)
    lightest, filled = [(0, r) for r in range(ranks)], [0] * ranks
    for u in range(len(cost)):
        full = []
        while limit and lightest and filled[lightest[0][1]] + tokens[u] > limit:
            full.append(heapq.heappop(lightest))
        if not lightest:
            return part
        load, r = heapq.heappop(lightest)
        part[u] = r
        filled[r] += tokens[u]
        for one in [(load + cost[u], r), *full]:
            heapq.heappush(lightest, one)
    return part


class _Refiner:
    def __init__(
        self, cost: list[int], tokens: list[int], part: np.ndarray, ranks: int, limit: int, goal: "Goal"
    ) -> None:
        self.cost, self.size, self.limit, self.goal, self.work = cost, tokens, limit, goal.load, goal.load_work
        self.users: list[list[int]] = [[] for _ in range(ranks)]  # ascending
        for u, r in enumerate(part.tolist()):
            self.users[r].append(u)
        self.load = [sum(cost[u] for u in users) for users in self.users]
        self.tokens = [sum(tokens[u] for u in users) for users in self.users]
        self.mean = sum(cost) // ranks

    def order(self, sums: list[int]) -> list[int]:
        return sorted(range(len(sums)), key=lambda r: (sums[r], r))

    def gifts(self, r: int, pairs: bool, turn: int) -> Gifts:
        """Of users with the same cost and tokens only the first, and of pairs those of every so manieth kind."""
        kinds: list[list[int]] = []
        for u in self.users[r]:
            if kinds and (self.cost[u], self.size[u]) == (self.cost[kinds[-1][0]], self.size[kinds[-1][0]]):
                kinds[-1].append(u)
            else:
                kinds.append([u])
        gifts: list[tuple[int, ...]] = [(), *((kind[0],) for kind in kinds)]
        if pairs and kinds:
            step = -(-len(kinds) // PAIRED)
            gifts += _pairs(kinds[turn % step :: step])
        sums = [[sum(measure[u] for u in gift) for gift in gifts] for measure in (self.cost, self.size)]
        return np.array(sums[0], np.int64), np.array(sums[1], np.int64), gifts

    def best_load(self, a: int, b: int, high: Gifts, low: Gifts) -> Found:
        least, most = -ANY, ANY
        if self.limit:
            least, most = self.tokens[a] - self.limit, self.limit - self.tokens[b]
        self.work -= OVERHEAD + len(high[2]) * len(low[2])
        return _best(high[0], high[1], low[0], low[1], self.load[a] - self.load[b], least, most)

    def best_tokens(self, a: int, b: int, high: Gifts, low: Gifts, lightest: int, heaviest: int) -> Found:
        least = max(self.load[a] - heaviest, lightest - self.load[b])
        most = min(self.load[a] - lightest, heaviest - self.load[b])
        self.work -= OVERHEAD + len(high[2]) * len(low[2])
        return _best(high[1], high[0], low[1], low[0], self.tokens[a] - self.tokens[b], least, most)

    def apply(self, a: int, b: int, high: Gifts, low: Gifts, found: tuple[int, int, int]) -> None:
        for giver, taker, gift in ((a, b, high[2][found[1]]), (b, a, low[2][found[2]])):
            for u in gift:
                self.users[giver].remove(u)
                self.users[taker] = sorted([*self.users[taker], u])
                self.load[giver] -= self.cost[u]
                self.load[taker] += self.cost[u]
                self.tokens[giver] -= self.size[u]
                self.tokens[taker] += self.size[u]

    def sweep_loads(self, pairs: bool) -> None:
        half, idle, before, turn = len(self.users) // 2, 0, ANY, 0
        while True:
            order = self.order(self.load)
            spread = self.load[order[-1]] - self.load[order[0]]
            idle = idle + 1 if spread >= before - before // 16 else 0
            if spread <= self.goal or idle >= PATIENCE:
                return
            before = spread
            for k in range(half):
                a, b = order[-1 - (k + idle) % half], order[k]
                if self.work < 0:
                    return
                if self.load[a] > self.load[b]:
                    high, low = self.gifts(a, pairs, turn), self.gifts(b, pairs, turn)
                    found = self.best_load(a, b, high, low)
                    if found:
                        self.apply(a, b, high, low, found)
            turn += 1

    def mend_extremes(self) -> None:
        turn = 0
        while self.work >= 0:
            order = self.order(self.load)
            if self.load[order[-1]] - self.load[order[0]] <= self.goal:
                return
            mended = [self.mend(heaviest, turn) for heaviest in (True, False)]
            if not any(mended):
                return
            turn += 1

    def mend(self, heaviest: bool, turn: int) -> bool:
        order = self.order(self.load)
        if heaviest:
            order.reverse()
        self_, chosen, nearest = order[0], None, ANY
        enough = max(self.goal, abs(self.load[self_] - self.mean) // 2)  # doubled: a quarter of what it is off
        own = self.gifts(self_, True, turn)
        for other in order[:0:-1]:
            a, b = (self_, other) if heaviest else (other, self_)
            if self.load[a] <= self.load[b] or self.work < 0:
                break
            theirs = self.gifts(other, True, turn)
            high, low = (own, theirs) if heaviest else (theirs, own)
            found = self.best_load(a, b, high, low)
            if not found:
                continue
            off = self.load[a] + self.load[b] - 2 * self.mean
            twice = (off if heaviest else -off) + found[0]
            if twice >= nearest:
                continue
            nearest, chosen = twice, (a, b, high, low, found)
            if twice <= enough:
                break
        if chosen:
            self.apply(*chosen)
        return chosen is not None

    def sweep_tokens(self, enough: int) -> None:
        lightest, heaviest = min(*self.load, self.mean - self.goal), max(*self.load, self.mean + self.goal)
        turn = 0
        while True:
            order, moved = self.order(self.tokens), False
            for k in range(len(order) // 2):
                a, b = order[-1 - k], order[k]
                if self.work < 0:
                    return
                if self.tokens[a] - self.tokens[b] <= enough:
                    break
                high, low = self.gifts(a, True, turn), self.gifts(b, True, turn)
                found = self.best_tokens(a, b, high, low, lightest, heaviest)
                if found:
                    self.apply(a, b, high, low, found)
                    moved = True
            if not moved:
                return
            turn += 1


def _pairs(kinds: list[list[int]]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for i, kind in enumerate(kinds):
        found += [(kind[0], kind[1])] if len(kind) > 1 else []
        found += [(kind[0], other[0]) for other in kinds[i + 1 :]]
    return found


def _best(
    give: np.ndarray,
    give_other: np.ndarray,
    get: np.ndarray,
    get_other: np.ndarray,
    gap: int,
    least: int,
    most: int,
) -> Found:
    """The first of the exchanges that leave the smallest |gap - 2 (given - got)|, below the gap of now.

    What it moves of the other measure lies in [least, most].
    """
    left = np.abs(gap - 2 * (give[:, None] - get))
    other = give_other[:, None] - get_other
    left = np.where((other >= least) & (other <= most), left, ANY)
    i, j = divmod(int(left.argmin()), len(get))
    return (int(left[i, j]), i, j) if left[i, j] < gap else None
