"""Jagged features to and from TorchRec's KeyedJaggedTensor, where torchrec is installed (turbogr[torchrec]).

A KeyedJaggedTensor holds several features of the same rows: the values of one feature after the other's, and the
lengths of all their rows in that order.
"""

from collections.abc import Mapping
from typing import Any

import torch

from turbogr.errors import UserError
from turbogr.jagged import Jagged, offsets_of


def to_keyed(features: Mapping[str, Jagged]) -> Any:
    """The features as a KeyedJaggedTensor; all have the same number of rows."""
    keyed = _torchrec()
    rows = {name: len(one.offsets) - 1 for name, one in features.items()}
    if len(set(rows.values())) != 1:
        raise ValueError(f"features of one KeyedJaggedTensor have the same number of rows, not {rows}.")
    return keyed(
        keys=list(features),
        values=torch.cat([one.values for one in features.values()]),
        lengths=torch.cat([one.lengths for one in features.values()]),
    )


def from_keyed(keyed: Any) -> dict[str, Jagged]:
    """The features of a KeyedJaggedTensor, by name."""
    found = {}
    for name in keyed.keys():  # noqa: SIM118  (not a mapping: it cannot be iterated)
        feature = keyed[name]
        found[name] = Jagged(feature.values(), offsets_of(feature.lengths().to(torch.int64)))
    return found


def _torchrec() -> Any:
    try:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    except ImportError as error:
        raise UserError(f"torchrec is not installed ({error}): pip install 'turbogr[torchrec]'.") from None
    return KeyedJaggedTensor
