"""Users that already lie on ranks: equal cost again with as few tokens moved as possible.

Rank a, above the allowed cost, and the lightest rank b exchange users so that a loses (or b gains) just what it must:
of all subsets of a's users that go and b's that come back, the one that moves the fewest tokens. With D(x) the fewest
tokens that shift a cost of x buckets from a to b, user by user:

    D(x) = min(D(x), D(x - cost_u) + tokens_u)        u of a;  x + cost_u for u of b

and tokens_u is negative for a user that comes home.

n users, R ranks, `owners` int64 [n] the rank where a user lies
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

TOLERANCES = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)  # shares of the allowed imbalance, a rank's distance from the mean
NEAR = 1.1  # moved tokens over their lower bound: a wider tolerance is not worth trying
BUCKETS = 12  # per tolerance
NODES = 2000  # of the search for the exact cheapest users
FAR = np.int64(1 << 50)


def fewest_moves(
    costs: np.ndarray, tokens: np.ndarray, owners: np.ndarray, ranks: int, limit: int, allowed: float
) -> np.ndarray | None:
    """int64 [n]: new owners with (max - min) / max of the costs at most `allowed`, or as near to it as was found.

    Tolerances are tried from narrow to wide; of the answers that are equal enough the one whose moved tokens are
    nearest to their lower bound is taken. None where no answer holds the token limit.
    """
    found = []
    for share in TOLERANCES:
        state = _State(costs.astype(np.float64), tokens, owners, owners.copy(), ranks, limit)
        state.level(share * allowed)
        if not state.holds_limit():
            continue
        loads = state.loads()
        uneven = float((loads.max() - loads.min()) / loads.max()) if loads.max() else 0.0
        least = moved_tokens_bound(costs, tokens, owners, ranks, float(loads.max()), exact=False)
        moved = int(tokens[state.part != owners].sum())
        found.append((max(uneven, allowed), moved / max(least, 1), state.part))
        if uneven <= allowed and moved <= NEAR * least:
            break
    return min(found, key=lambda one: one[:2])[2] if found else None


def moved_tokens_bound(
    costs: np.ndarray, tokens: np.ndarray, owners: np.ndarray, ranks: int, most: float, exact: bool = True
) -> int:
    """Tokens that any assignment moves whose heaviest rank costs at most `most`.

    A rank above `most` sends whole users that cost at least the excess: the fewest tokens of such users are counted
    (a knapsack). As the others hold at most (R - 1) `most`, a rank below total - (R - 1) `most` receives at least the
    rest of that, from all other users. Both sums are bounds, and the larger is the answer. Not `exact`: with a part of
    the last user (fractional knapsack), quicker and lower.
    """
    loads = np.bincount(owners, costs, ranks)
    slack = 1e-9 * float(loads.sum())  # rounding of sums must not lift the bound above the truth
    floor = float(loads.sum()) - (ranks - 1) * most
    sent = [(owners == r, loads[r] - most - slack) for r in np.flatnonzero(loads > most + slack)]
    received = [(owners != r, floor - loads[r] - slack) for r in np.flatnonzero(loads < floor - slack)]
    sums = [sum(_cheapest(costs[who], tokens[who], amount, exact) for who, amount in side) for side in (sent, received)]
    return int(np.ceil(max(sums) - 1e-6))


def _cheapest(costs: np.ndarray, tokens: np.ndarray, amount: float, exact: bool) -> float:
    """A lower bound of the tokens of users that together cost at least `amount`; if `exact` mostly the least itself."""
    useful = costs > 0
    order = np.argsort(tokens[useful] / costs[useful], kind="stable")
    cost, size = costs[useful][order].astype(np.float64), tokens[useful][order].astype(np.float64)
    spent, reached = np.append(0.0, np.cumsum(size)), np.append(0.0, np.cumsum(cost))

    def fractional(first: int, amount: float) -> float:
        """Of the users from `first` on."""
        goal = reached[first] + amount
        k = int(np.searchsorted(reached, goal))
        if k > len(cost):
            return np.inf
        if k <= first:
            return 0.0
        return float(spent[k - 1] - spent[first] + size[k - 1] * (goal - reached[k - 1]) / cost[k - 1])

    bound = fractional(0, amount)
    if not exact or not np.isfinite(bound):
        return bound if np.isfinite(bound) else float(size.sum())
    best, nodes, stack = np.inf, 0, [(0, amount, 0.0)]
    while stack:
        first, left, used = stack.pop()
        nodes += 1
        if nodes > NODES:
            return bound
        if left <= 0:
            best = min(best, used)
        elif used + fractional(first, left) < best:
            same = first + 1
            while same < len(cost) and cost[same] == cost[first] and size[same] == size[first]:
                same += 1
            stack += [(same, left, used), (first + 1, left - cost[first], used + size[first])]
    return best


@dataclass
class _State:
    costs: np.ndarray
    tokens: np.ndarray
    owners: np.ndarray
    part: np.ndarray
    ranks: int
    limit: int

    def loads(self) -> np.ndarray:
        return np.bincount(self.part, self.costs, self.ranks)

    def holds_limit(self) -> bool:
        return not self.limit or float(np.bincount(self.part, self.tokens, self.ranks).max()) <= self.limit

    def level(self, tolerance: float) -> None:
        """Exchanges until every rank is within `tolerance` of the mean, or none helps any more."""
        mean = float(self.costs.sum()) / self.ranks
        low, high = mean * (1 - tolerance), mean * (1 + tolerance)
        for _ in range(4 * self.ranks):
            loads = self.loads()
            if loads.max() <= high and loads.min() >= low:
                return
            if not any(self.exchange(a, b, loads, low, high) for a, b in _couples(loads, low, high)):
                return

    def exchange(self, a: int, b: int, loads: np.ndarray, low: float, high: float) -> bool:
        """Whether ranks a and b are nearer to the mean by the exchange that moves the fewest tokens."""
        most = min(high - loads[b], loads[a] - low)
        least = min(max(loads[a] - high, 0.0) or low - loads[b], most)
        if most < loads[a] - high:  # a has more than b may take: as much as fits
            least = low - loads[b]
        going, coming = np.flatnonzero(self.part == a), np.flatnonzero(self.part == b)
        users = self._shift(going, coming, a, b, max(least, 0.0), max(most, 0.0), (high - low) / 2, loads[a] - high)
        if users is None:
            return False
        before = self.part.copy()
        self.part[users] = a + b - self.part[users]
        now = self.loads()
        mean = (low + high) / 2
        off = max(abs(loads[a] - mean), abs(loads[b] - mean))
        if max(abs(now[a] - mean), abs(now[b] - mean)) >= off * (1 - 1e-9) or not self._fits(a, b, before):
            self.part = before
            return False
        return True

    def _fits(self, a: int, b: int, before: np.ndarray) -> bool:
        """The limit holds on both ranks, or is passed by no more than before."""
        if not self.limit:
            return True
        was, now = (np.bincount(part, self.tokens, self.ranks)[[a, b]] for part in (before, self.part))
        return bool((now <= np.maximum(was, self.limit)).all())

    def _shift(
        self,
        going: np.ndarray,
        coming: np.ndarray,
        a: int,
        b: int,
        least: float,
        most: float,
        tolerance: float,
        excess: float,
    ) -> np.ndarray | None:
        """Users that change sides so that a cost in [least, most], or the nearest one to it, goes from a to b."""
        users = np.concatenate([going, coming])
        width = tolerance / BUCKETS
        cost = np.rint(self.costs[users] / width).astype(np.int64)
        reach = int(np.rint(most / width)) + 2 * int(cost.max(initial=1)) + 1
        home, to = self.owners[users], np.where(np.arange(len(users)) < len(going), b, a)
        change = self.tokens[users] * ((self.part[users] == home).astype(np.int64) - (to == home))
        fewest = np.full((len(users) + 1, reach), FAR)
        fewest[0, 0] = 0
        for k in range(len(users)):
            old, new, c = fewest[k], fewest[k + 1], int(cost[k])
            new[:] = old
            if c < reach:
                here, there = (slice(c, None), slice(None, reach - c))
                if k >= len(going):
                    here, there = there, here
                np.minimum(new[here], old[there] + change[k], out=new[here])
        at = np.arange(reach) * width
        outside = np.maximum(np.maximum(least - at, at - most), 0.0)
        final = fewest[-1]
        reached = final < FAR // 2
        reached[0] = False
        if not reached.any():
            return None
        price = float((self.tokens[going] / np.maximum(self.costs[going], 1e-300)).min()) if len(going) else 0.0
        score = final - price * np.minimum(at, max(excess, 0.0))
        nearest = outside[reached].min()
        x = int(np.argmin(np.where(reached & (outside <= nearest), score, np.inf)))
        shifted: np.ndarray = users[_trace(fewest, cost, len(going), x)]
        return shifted


def _trace(fewest: np.ndarray, cost: np.ndarray, going: int, x: int) -> np.ndarray:
    """The users behind D(x)."""
    taken = []
    for k in range(len(cost) - 1, -1, -1):
        if fewest[k + 1, x] != fewest[k, x]:
            taken.append(k)
            x += -int(cost[k]) if k < going else int(cost[k])
    return np.array(taken, np.int64)


def _couples(loads: np.ndarray, low: float, high: float) -> Iterator[tuple[int, int]]:
    """The heaviest rank with the lightest ones, then the lightest with the heaviest ones."""
    order = np.argsort(loads, kind="stable").tolist()
    if loads[order[-1]] > high:
        yield from ((order[-1], b) for b in order[:-1])
    if loads[order[0]] < low:
        yield from ((a, order[0]) for a in order[:0:-1])
