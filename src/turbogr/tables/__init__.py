"""Embedding rows, outside of autograd's module tree."""

from turbogr.tables.table import LocalTable, ReadableTable, RowGradients, Rows

__all__ = ["LocalTable", "ReadableTable", "RowGradients", "Rows"]
