"""Groups of ranks that hold a whole table between them: tables are sharded inside a group and copied across groups.

    4 ranks as 2 groups:      group 0: ranks 0 1      group 1: ranks 2 3
    inside (lookups):         {0 1} {2 3}             fast links, where a group is a machine
    across (copies equal):    {0 2} {1 3}             indices and sums of touched rows only

One group is flat model parallelism, as many groups as ranks is data parallelism with a whole table on every rank.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from turbogr.errors import ConfigError
from turbogr.launch import local_ranks
from turbogr.ranks import Ranks


@dataclass(frozen=True)
class Grid:
    """Where this rank stands."""

    inside: Ranks
    """The ranks of its group."""
    across: Ranks
    """The ranks that hold the same rows, one of every group."""
    mesh: DeviceMesh
    """[groups, ranks of a group]"""


def groups_of(world: int, groups: int) -> int:
    """How many groups `world` ranks form; 0 asks for one per machine. Refuses what does not come out even."""
    if groups == 0:
        groups = world // local_ranks() if world % local_ranks() == 0 else 1
    if world % groups:
        raise ConfigError(
            f"tables.groups {groups} does not divide the {world} ranks: take a number that does, or start another "
            "number of ranks."
        )
    return groups


def make_grid(ranks: Ranks, groups: int, device: torch.device) -> Grid:
    """Neighbouring ranks form a group; every rank of the run makes the grid."""
    size = ranks.world // groups
    mesh = init_device_mesh(device.type, (groups, size), mesh_dim_names=("copies", "shards"))
    inside = Ranks(ranks.rank % size, size, mesh.get_group("shards"))
    return Grid(inside, Ranks(ranks.rank // size, groups, mesh.get_group("copies")), mesh)
