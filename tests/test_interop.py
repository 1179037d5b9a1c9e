"""Jagged features as TorchRec has them."""

import builtins
from typing import Any

import pytest
import torch

from turbogr.errors import UserError
from turbogr.interop import from_keyed, to_keyed
from turbogr.jagged import Jagged


def features() -> dict[str, Jagged]:
    return {
        "item": Jagged(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 1, 4])),
        "shop": Jagged(torch.tensor([9, 1]), torch.tensor([0, 0, 2, 2])),
    }


def test_features_go_to_a_keyed_jagged_tensor_and_come_back() -> None:
    """Catches: values of one feature read with the lengths of another, empty rows lost."""
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    keyed = to_keyed(features())
    assert keyed.keys() == ["item", "shop"] and keyed.lengths().tolist() == [1, 0, 3, 0, 2, 0]
    back = from_keyed(keyed)
    for name, one in features().items():
        assert torch.equal(back[name].values, one.values) and torch.equal(back[name].offsets, one.offsets)


def test_features_of_different_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbogr.interop._torchrec", lambda: None)
    uneven = features() | {"tag": Jagged(torch.tensor([1]), torch.tensor([0, 1]))}
    with pytest.raises(ValueError, match="same number of rows, not {'item': 3, 'shop': 3, 'tag': 1}"):
        to_keyed(uneven)


def test_without_torchrec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("torchrec"):
            raise ImportError("No module named 'torchrec'")
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"torchrec is not installed .*turbogr\[torchrec\]"):
        to_keyed(features())
