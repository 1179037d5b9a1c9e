"""Embedding rows, outside of autograd's module tree: in one process, or spread over ranks."""

from turbogr.tables.hierarchy import Grid, groups_of, make_grid
from turbogr.tables.sharded import ShardedTable
from turbogr.tables.table import LocalTable, Lookup, ReadableTable, RowGradients, Rows, Table
from turbogr.tables.unbounded import Counts, Limits, UnboundedTable

__all__ = [
    "Counts",
    "Grid",
    "Limits",
    "LocalTable",
    "Lookup",
    "ReadableTable",
    "RowGradients",
    "Rows",
    "ShardedTable",
    "Table",
    "UnboundedTable",
    "groups_of",
    "make_grid",
]
