"""A FAISS index of the unit item vectors (IndexFlatIP: exact inner product), written and searched piece by piece.

The file is FAISS's own: a header of 45 bytes, then the vectors as float32. `faiss.read_index` opens it anywhere.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import torch
from torch import Tensor

from turbogr.errors import CheckpointError
from turbogr.evaluate import Exclude, TopK

COUNT_AT, FLOATS_AT, HEADER = 8, 37, 45
"""Where FAISS holds the number of vectors and of floats (both int64), and where the floats begin."""


def write_index(path: Path, pieces: Iterator[Tensor], dim: int) -> None:
    """An IndexFlatIP of the vectors [c, D] of all `pieces`, in order, never holding more than one of them."""
    header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(dim)).tobytes())
    assert len(header) == HEADER, "the header of a FAISS flat index has changed"
    count = 0
    with path.open("wb") as stream:
        stream.write(header)
        for piece in pieces:
            vectors = piece.cpu().numpy().astype("<f4", copy=False)
            if not np.isfinite(vectors).all():
                raise CheckpointError(
                    "the item vectors are not finite: the model diverged, take an earlier checkpoint."
                )
            stream.write(vectors.tobytes())
            count += len(vectors)
        struct.pack_into("<q", header, COUNT_AT, count)
        struct.pack_into("<q", header, FLOATS_AT, count * dim)
        stream.seek(0)
        stream.write(header)


class ItemIndex:
    """The index of an exported model, mapped from its file."""

    def __init__(self, path: Path) -> None:
        try:
            self._index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise CheckpointError(f"{path} cannot be read by FAISS ({_reason(error)}): export it again.") from None

    @property
    def shape(self) -> tuple[int, int]:
        return self._index.ntotal, self._index.d

    def top_k(self, encoded: Tensor, k: int, exclude: Exclude) -> TopK:
        """As `turbogr.evaluate.top_k`, for unit vectors [B, D] of histories."""
        vectors = encoded.cpu().numpy()
        items = np.full((len(vectors), k), -1, np.int64)
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        for row, vector in enumerate(vectors):
            gone = torch.cat((exclude.items[exclude.rows == row], exclude.everywhere)).numpy()
            kept = faiss.IDSelectorNot(faiss.IDSelectorBatch(gone))
            search = faiss.SearchParameters(sel=kept)  # type: ignore[call-arg]  # added by its Python layer
            found, named = self._index.search(vector[None], k, params=search)
            order = np.lexsort((named[0], -found[0]))
            order = order[named[0][order] >= 0]
            items[row, : len(order)], scores[row, : len(order)] = named[0][order], found[0][order]
        return TopK(torch.from_numpy(items), torch.from_numpy(scores))


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].split("Error: ")[-1][:200]
