"""Where the rows of a table lie when several ranks hold it.

Rows are put in an order that scatters neighbouring ids, and every rank holds an equal run of that order:

    position = id * multiplier mod N        rank = position // ceil(N / W)

The multiplier is close to N times the golden section, so that ids in any regular pattern (the most popular ones first,
every k-th one) fall on all ranks alike. The order depends on N only: a checkpoint holds the table in it, whatever the
number of ranks that wrote it.

N rows of the table, W ranks
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = (math.sqrt(5) - 1) / 2
MOST_ROWS = 1 << 31  # an id times the multiplier stays below 2^63


@dataclass(frozen=True)
class Placement:
    """Run `rank` of `ranks` of a table's order."""

    num_rows: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks and 0 < self.num_rows <= MOST_ROWS

    @property
    def multiplier(self) -> int:
        found = max(round(self.num_rows * GOLDEN), 1)
        while math.gcd(found, self.num_rows) != 1:
            found += 1
        return found

    @property
    def run(self) -> int:
        """Rows of every rank; the last ones may have fewer."""
        return -(-self.num_rows // self.ranks)

    @property
    def begin(self) -> int:
        return min(self.rank * self.run, self.num_rows)

    @property
    def end(self) -> int:
        return min(self.begin + self.run, self.num_rows)

    def positions(self, ids: Tensor) -> Tensor:
        """Where the rows of `ids` stand in the order."""
        return ids * self.multiplier % self.num_rows

    def ids(self, positions: Tensor) -> Tensor:
        """Whose rows stand at `positions`."""
        return positions * pow(self.multiplier, -1, self.num_rows) % self.num_rows if self.num_rows > 1 else positions

    def bounds(self) -> Tensor:
        """int64 [W + 1]: where the runs of the ranks begin and end."""
        return (torch.arange(self.ranks + 1) * self.run).clamp(max=self.num_rows)
