"""Writers of the store's files: `.npy` columns that grow by batches, Parquet whose bytes do not depend on threads."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HEADER_BYTES = 128
ROW_GROUP = 1 << 16


class NpyColumn:
    """A one-dimensional `.npy` file written without knowing its length beforehand."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._stream = path.open("wb", buffering=1 << 20)
        self._stream.write(bytes(HEADER_BYTES))

    def append(self, values: np.ndarray) -> None:
        self._stream.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.length += len(values)

    def close(self) -> None:
        """Write the header, now that the length is known."""
        facts = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': ({self.length},), }}"
        room = HEADER_BYTES - 10
        self._stream.seek(0)
        self._stream.write(b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + facts.ljust(room - 1).encode() + b"\n")
        self._stream.close()


def write_parquet(path: Path, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
    """Row groups have a fixed size whatever the size of the incoming batches."""
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(b.num_rows for b in held) >= ROW_GROUP:
                table = pa.Table.from_batches(held, schema)
                whole = table.num_rows // ROW_GROUP * ROW_GROUP
                writer.write_table(table.slice(0, whole), row_group_size=ROW_GROUP)
                held = table.slice(whole).combine_chunks().to_batches()
        if held:
            writer.write_table(pa.Table.from_batches(held, schema), row_group_size=ROW_GROUP)
