"""Rows of several tables fetched from the ranks that hold them, and their gradients brought back: one exchange for all.

    begin       how many rows this rank wants of every other one, by table      (all-to-all of counts)
    wait        which ones                                                      (all-to-all of places)
    fetch       the owners gather and send them                                 (all-to-all of rows)
    give_back   the mirror: summed gradients to the owners                      (all-to-all of rows)

Each rank asks for a row at most once. What travels lies rank by rank, and table by table within a rank. `wire` is the
type in which rows and gradients travel; they are fp32 at both ends.

W ranks, U distinct rows wanted of a table, V rows that others want of it, D its width
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turbogr.ranks import Ranks

WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Request:
    """What this rank wants, and once `wait` is over what the others want of it."""

    wanted: list[Tensor]
    """By table: places [U] in their owners' runs, owner by owner, ascending within one."""
    send: list[list[int]]
    """[W][tables] rows wanted of every rank."""
    receive: list[list[int]] = field(default_factory=list)
    """[W][tables] rows that every rank wants."""
    asked: list[list[Tensor]] = field(default_factory=list)
    """[tables][W] places of this rank's rows that every rank wants, ascending."""


class Exchange:
    def __init__(self, ranks: Ranks, widths: Sequence[int], wire: str = "fp32") -> None:
        self.ranks, self.widths, self.wire = ranks, list(widths), WIRES[wire]

    def begin(self, positions: Sequence[Tensor], bounds: Sequence[Tensor]) -> Request:
        """Ask for the rows at `positions` [U] of every table, ascending; rank r holds bounds[r] to bounds[r+1]."""
        wanted, counts = [], []
        for own, edges in zip(positions, bounds, strict=True):
            cuts = torch.searchsorted(own, edges.to(own.device))
            sizes = cuts.diff()
            wanted.append(own - torch.repeat_interleave(edges[:-1].to(own.device), sizes, output_size=len(own)))
            counts.append(sizes.cpu())
        send = torch.stack(counts, 1)  # [W, tables]
        tables = [len(wanted)] * self.ranks.world
        received = self.ranks.swap(send.flatten(), tables, tables).view(self.ranks.world, -1)
        return Request(wanted, send.tolist(), received.tolist())

    def wait(self, request: Request) -> None:
        send, receive = request.send, request.receive
        by_rank = _by_rank(request.wanted, send)
        arrived = self.ranks.swap(torch.cat(by_rank), [sum(one) for one in send], [sum(one) for one in receive])
        request.asked = _by_table(arrived, receive)

    def fetch(self, request: Request, weights: Sequence[Tensor]) -> list[Tensor]:
        """By table: the wanted rows [U, D]."""
        rows = [
            [weight.index_select(0, place).to(torch.promote_types(weight.dtype, torch.float32)) for place in asked]
            for weight, asked in zip(weights, request.asked, strict=True)
        ]
        return [torch.cat(parts) for parts in self._swap_rows(rows, request.receive, request.send)]

    def give_back(self, request: Request, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """[tables][W]: what every rank's gradients [V, D] of this rank's rows `request.asked` are."""
        parts = [list(torch.split(own, [one[table] for one in request.send])) for table, own in enumerate(gradients)]
        return self._swap_rows(parts, request.send, request.receive)

    def _swap_rows(
        self, parts: list[list[Tensor]], send: list[list[int]], receive: list[list[int]]
    ) -> list[list[Tensor]]:
        """parts[table][rank] [rows, D] to every rank; the same of what arrives."""
        kind = parts[0][0].dtype
        wire = self.wire or kind
        flat = torch.cat(
            [parts[table][rank].flatten() for rank in range(self.ranks.world) for table in range(len(parts))]
        )
        sizes = [
            [sum(n * width for n, width in zip(one, self.widths, strict=True)) for one in way]
            for way in (send, receive)
        ]
        arrived = self.ranks.swap(flat.to(wire), *sizes).to(kind)
        pieces = torch.split(arrived, [n * width for one in receive for n, width in zip(one, self.widths, strict=True)])
        tables = len(parts)
        return [
            [pieces[rank * tables + table].view(-1, self.widths[table]) for rank in range(self.ranks.world)]
            for table in range(tables)
        ]


def _by_rank(columns: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
    """The pieces of every table's column in the order in which they travel."""
    pieces = [torch.split(column, [one[table] for one in counts]) for table, column in enumerate(columns)]
    return [pieces[table][rank] for rank in range(len(counts)) for table in range(len(columns))]


def _by_table(arrived: Tensor, counts: list[list[int]]) -> list[list[Tensor]]:
    """[tables][W] of what travelled in that order."""
    pieces = torch.split(arrived, [n for one in counts for n in one])
    tables = len(counts[0])
    return [[pieces[rank * tables + table] for rank in range(len(counts))] for table in range(tables)]
