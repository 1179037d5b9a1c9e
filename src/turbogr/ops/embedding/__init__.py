"""Embedding rows: looked up in several tables at once, their gradients summed by distinct id, and updated.

embedding_lookup    rows by id, with sparse gradients
take_rows           rows by place, with dense gradients
distinct, group     which ids occur, and where
sum_groups          gradients of occurrences -> one per distinct id
merge_rows          the sum of several such lists
round_rows          fp32 rows to bf16, up or down by chance
rowwise_adagrad, lazy_adam, dense_adamw
                    one optimizer step; fused with sum_groups where the gradients are given by occurrence
"""

from turbogr.ops.embedding.backends import OPERATOR, AdamStep, Gradients, Groups, Rounding
from turbogr.ops.embedding.lookup import embedding_lookup
from turbogr.ops.embedding.rows import all_finite, distinct, group, merge_rows, round_rows, sum_groups
from turbogr.ops.embedding.take import take_rows
from turbogr.ops.embedding.update import dense_adamw, lazy_adam, rowwise_adagrad

__all__ = [
    "OPERATOR",
    "AdamStep",
    "Gradients",
    "Groups",
    "Rounding",
    "all_finite",
    "dense_adamw",
    "distinct",
    "embedding_lookup",
    "group",
    "lazy_adam",
    "merge_rows",
    "round_rows",
    "rowwise_adagrad",
    "sum_groups",
    "take_rows",
]
