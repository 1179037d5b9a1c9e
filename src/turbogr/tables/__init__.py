"""Embedding rows, outside of autograd's module tree."""

from turbogr.tables.table import LocalTable, RowGradients, Rows

__all__ = ["LocalTable", "RowGradients", "Rows"]
