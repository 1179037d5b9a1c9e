"""The FAISS index is FAISS's own file, and finds what a scan finds."""

from pathlib import Path

import faiss
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.evaluate import Exclude
from turbogr.recommend.index import ItemIndex, write_index
from turbogr.tasks.retrieval import unit


def test_pieces_give_the_bytes_that_faiss_writes(tmp_path: Path) -> None:
    vectors = torch.randn(23, 8)
    write_index(tmp_path / "ours", iter(vectors.split(5)), 8)
    index = faiss.IndexFlatIP(8)
    index.add(vectors.numpy())
    faiss.write_index(index, str(tmp_path / "theirs"))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), items=st.integers(1, 30), k=st.integers(1, 30), rows=st.integers(1, 4))
def test_it_finds_the_best_that_are_not_excluded(tmp_path_factory, seed: int, items: int, k: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = unit(torch.randn(items, 4, generator=generator))
    asked = unit(torch.randn(rows, 4, generator=generator))
    gone = torch.rand(rows, items, generator=generator) < 0.4
    path = tmp_path_factory.mktemp("index") / "items.faiss"
    write_index(path, iter([vectors]), 4)
    row, item = gone.nonzero(as_tuple=True)
    found = ItemIndex(path).top_k(asked, k, Exclude.pairs(row.numpy(), item.numpy(), [0]))
    gone[:, 0] = True
    for one in range(rows):
        wanted = [int(i) for i in np.argsort(-(asked[one] @ vectors.T).numpy(), kind="stable") if not gone[one, i]][:k]
        assert found.items[one].tolist() == wanted + [-1] * (k - len(wanted))
        torch.testing.assert_close(found.scores[one, : len(wanted)], asked[one] @ vectors[wanted].T, atol=1e-6, rtol=0)


def test_equal_scores_stand_in_order_of_item(tmp_path: Path) -> None:
    write_index(tmp_path / "index", iter([torch.ones(6, 2)]), 2)
    none = Exclude.of(np.array([0, 0]), np.array([], np.int64))
    assert ItemIndex(tmp_path / "index").top_k(torch.ones(1, 2), 6, none).items.tolist() == [[0, 1, 2, 3, 4, 5]]
