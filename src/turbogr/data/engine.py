"""DuckDB for one `prepare`: on disk, within a memory limit, interruptible, with progress and errors in sentences."""

import contextlib
import errno
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from turbogr.errors import DataError, UserError
from turbogr.progress import Bar

T = TypeVar("T")
POLL_S = 0.1
BATCH_ROWS = 1 << 17
UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
DUCKDB_SHARE = 0.8
"""Of the memory limit; the rest is for what DuckDB does not count and for the batches on their way to the store."""


class Engine:
    """Statements run in a second thread, so that Ctrl-C reaches the first one and progress can be shown meanwhile."""

    def __init__(self, scratch: Path, progress: Bar, *, memory_limit: str, threads: int) -> None:
        self.scratch = scratch
        self._progress = progress
        self._phase = (0.0, 0.0, "")
        # what does not fit goes to files in `scratch`
        limit = f"{int(DUCKDB_SHARE * memory_bytes(memory_limit))}B"
        settings: dict[str, Any] = {"memory_limit": limit, "temp_directory": str(scratch / "spill")}
        if threads:
            settings["threads"] = threads
        with said():
            self.connection = duckdb.connect(str(scratch / "prepare.duckdb"), config=settings)
            # refused in a notebook without ipywidgets: the progress then moves by phases only
            with contextlib.suppress(duckdb.InvalidInputException):
                self.connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
            self.connection.execute("PRAGMA disable_checkpoint_on_shutdown")
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)  # first: a batch may still be on its way
        self.connection.close()

    def phase(self, note: str, begin: int, end: int) -> None:
        """The statements that follow take the progress from `begin` to `end` percent."""
        self._phase = (begin, end, note)

    def run(self, sql: str) -> None:
        self._wait(self._pool.submit(self.connection.execute, sql))

    def all(self, sql: str) -> list[tuple[Any, ...]]:
        return self._wait(self._pool.submit(lambda: self.connection.execute(sql).fetchall()))

    def one(self, sql: str) -> Any:
        """The first value of the first row."""
        return self.all(sql)[0][0]

    def columns(self, relation: str) -> dict[str, str]:
        """Name -> DuckDB type of the columns of a relation."""
        return {row[0]: row[1] for row in self.all(f"DESCRIBE SELECT * FROM {relation}")}

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        """The result of a query, batch by batch; the next one is on its way while one is used."""
        reader = self._wait(self._pool.submit(lambda: self.connection.sql(sql).to_arrow_reader(BATCH_ROWS)))

        def following() -> pa.RecordBatch | None:
            try:
                return reader.read_next_batch()
            except StopIteration:
                return None

        coming = self._pool.submit(following)
        while (batch := self._wait(coming)) is not None:
            coming = self._pool.submit(following)
            yield batch

    def _wait(self, future: Future[T]) -> T:
        try:
            while not wait([future], timeout=POLL_S).done:
                begin, end, note = self._phase
                share = max(self.connection.query_progress(), 0.0) / 100
                self._progress.update(int(begin + (end - begin) * share), note)
        except BaseException:
            while not wait([future], timeout=POLL_S).done:
                self.connection.interrupt()
            raise
        with said():
            return future.result()


def memory_bytes(text: str) -> int:
    """Bytes of `1GiB`, `512MB` or `1.5 GiB`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text.strip())
    if not found:
        raise UserError(f"{text!r} is no amount of memory: write it like 1GiB or 512MiB.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** UNITS[found[2]])


@contextlib.contextmanager
def said() -> Iterator[None]:
    """Turn DuckDB's errors into sentences; a full disk becomes the OSError that any writer would meet."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException) as error:
        text = str(error)
        if "No space left" in text or "max_temp_directory_size" in text or "disk is full" in text:
            raise OSError(errno.ENOSPC, text) from error
        if isinstance(error, duckdb.OutOfMemoryException):
            raise UserError("the memory limit is too small for this log: raise --memory or lower --threads.") from error
        raise DataError(_sentence(text)) from error


def _sentence(text: str) -> str:
    """What DuckDB says about a file, with its name, the line and the remedy."""
    if line := re.search(r"CSV Error on Line: (\d+)", text):
        path = re.search(r"^\s*file = (.*)$", text, re.MULTILINE)
        reason = "the line cannot be read"
        if found := re.search(r"Expected Number of Columns: (\d+) Found: (\d+)", text):
            reason = f"{found[2]} fields instead of {found[1]}"
        elif found := re.search(r'column "(.*)"\. Could not convert string "(.*)" to', text):
            reason = f"{found[1]} {found[2]!r} is not a number"
        return f"{path[1] if path else 'a CSV file'}, line {line[1]}: {reason}; mend that line."
    if found := re.search(r'Error when sniffing file "(.*)"', text):
        return f"{found[1]} does not have the same number of fields in every line: mend it."
    if found := re.search(r"""Failed to read file "(.*)": |at end of file '(.*)'|end of GZIP stream: (.*)""", text):
        return f"{found[1] or found[2] or found[3]} is damaged: fetch or write it again."
    return re.sub(r"^[A-Z][A-Za-z ]* Error: ", "", text.strip().splitlines()[0])
