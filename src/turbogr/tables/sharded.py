"""A table whose rows are spread over the ranks of a group; the calls of `LocalTable`, made by all of them together.

Every group of ranks holds a whole copy (see hierarchy.py). Lookups stay inside the group; gradients are summed by their
owner, over the group's ranks in order, and then across groups in order, so that the copies stay equal bit for bit.

N rows of the table, n ids of a batch, U distinct ones, D width
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from turbogr.config import TablesConfig
from turbogr.ops.embedding import distinct
from turbogr.tables.exchange import Exchange, Request
from turbogr.tables.hierarchy import Grid
from turbogr.tables.placement import Placement
from turbogr.tables.table import LocalTable, Lookup, RowGradients, Rows

CHECKPOINT_CHUNK = 1 << 18  # rows exchanged at a time on their way to or from a checkpoint


class ShardedTable:
    in_place = False
    """The loss cannot read rows where they lie."""

    def __init__(
        self,
        num_rows: int,
        dim: int,
        config: TablesConfig,
        *,
        seed: int,
        grid: Grid,
        number: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.num_rows, self.dim, self.grid = num_rows, dim, grid
        self.placement = Placement(num_rows, grid.inside.rank, grid.inside.world)
        names = self.placement.ids(torch.arange(self.placement.begin, self.placement.end, device=device))
        self.own = LocalTable(len(names), dim, config, seed=seed, number=number, device=device, names=names)
        self.exchange = Exchange(grid.inside, [dim], config.wire)
        self._bounds = self.placement.bounds()

    @property
    def local_rows(self) -> int:
        return self.own.local_rows

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.own.weight

    def request(self, ids: Tensor) -> Lookup:
        """Says how many rows of every rank are wanted."""
        positions, inverse = distinct(self.placement.positions(ids), self.num_rows)
        return Lookup(positions, inverse, self.exchange.begin([positions], [self._bounds]))

    def wait(self, lookup: Lookup) -> None:
        self.exchange.wait(_sent(lookup))

    def answer(self, lookup: Lookup) -> Rows:
        (rows,) = self.exchange.fetch(_sent(lookup), [self.own.weight])
        return Rows(self.placement.ids(lookup.places), lookup.inverse, rows.requires_grad_())

    def lookup(self, ids: Tensor) -> Rows:
        """The rows of `ids` [n], which each rank of the group may choose for itself."""
        lookup = self.request(ids)
        self.wait(lookup)
        return self.answer(lookup)

    def collect(self, lookup: Lookup, rows: Rows) -> RowGradients:
        """Brings gradients to their owners: the sums over the group of this rank's rows, by their place here."""
        grad = torch.zeros_like(rows.weight) if rows.weight.grad is None else rows.weight.grad
        request = _sent(lookup)
        (parts,) = self.exchange.give_back(request, [grad])
        asked = [RowGradients(*part) for part in zip(request.asked[0], parts, strict=True)]
        return RowGradients.merged(asked, self.local_rows)

    def apply(self, gradients: RowGradients, lr: float, *, scale: float = 1.0) -> None:
        """One optimizer step on this rank's rows."""
        self.own.apply(gradients, lr, scale=scale)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of ids start .. stop, [stop - start, D]; every rank of the group asks for some."""
        looked_up = self.lookup(torch.arange(start, stop, device=self.own.weight.device))
        return looked_up.weight.detach()[looked_up.inverse]

    def scan(self, chunk: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first id, rows [c, D]) over the whole table, in order, on every rank of the group."""
        for begin in range(0, self.num_rows, chunk):
            yield begin, self.rows(begin, min(begin + chunk, self.num_rows))

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer state in the order of ids, as tensors of the whole table of which every rank of the
        group holds an equal run. What is not by row is the same on every rank."""
        return {name: self._by_id(value) if value.dim() else value for name, value in self.own.state().items()}

    def restored(self, state: dict[str, Tensor]) -> None:
        for name, own in self.own.state().items():
            if own.dim():
                self._from_ids(own, state[name])

    def _by_id(self, own: Tensor) -> Tensor:
        """Rows in the order of ids: fetched from their owners, a chunk at a time."""
        flat, run = _flat(own), torch.empty_like(own)
        exchange = Exchange(self.grid.inside, [flat.shape[1]])
        for places, request in self._requests(exchange):
            (rows,) = exchange.fetch(request, [flat])
            run[places] = rows.view(-1, *own.shape[1:]).to(run.dtype)
        from torch.distributed.tensor import DTensor, Replicate, Shard  # a second to import, of use here only

        shape = torch.Size((self.num_rows, *own.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        kinds = [Replicate(), Shard(0)]
        return DTensor.from_local(run, self.grid.mesh, kinds, run_check=False, shape=shape, stride=stride)

    def _from_ids(self, own: Tensor, saved: Tensor) -> None:
        """The mirror: this rank's run of ids goes to the owners of its rows."""
        run: Tensor = saved.to_local()  # type: ignore[attr-defined]
        exchange = Exchange(self.grid.inside, [_flat(own).shape[1]])
        for places, request in self._requests(exchange):
            (parts,) = exchange.give_back(request, [_flat(run[places])])
            for asked, rows in zip(request.asked[0], parts, strict=True):
                own[asked] = rows.view(-1, *own.shape[1:])

    def _requests(self, exchange: Exchange) -> Iterator[tuple[Tensor, Request]]:
        """This rank's run of ids, chunk by chunk: (their places in the run in the order of owners, the request)."""
        here = self.placement
        for chunk in range(0, here.run, CHECKPOINT_CHUNK):
            first = min(here.begin + chunk, here.end)
            ids = torch.arange(first, min(first + CHECKPOINT_CHUNK, here.end), device=self.own.weight.device)
            positions, order = here.positions(ids).sort()
            request = exchange.begin([positions], [self._bounds])
            exchange.wait(request)
            yield ids[order] - here.begin, request


def _flat(rows: Tensor) -> Tensor:
    """[rows, numbers of a row]"""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _sent(lookup: Lookup) -> Request:
    assert lookup.request is not None, "a sharded table makes its own lookups"
    return lookup.request
