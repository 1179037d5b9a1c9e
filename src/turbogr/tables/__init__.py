"""Embedding rows, outside of autograd's module tree."""

from turbogr.tables.table import LocalTable, ReadableTable, RowGradients, Rows
from turbogr.tables.unbounded import Counts, Limits, UnboundedTable

__all__ = ["Counts", "Limits", "LocalTable", "ReadableTable", "RowGradients", "Rows", "UnboundedTable"]
