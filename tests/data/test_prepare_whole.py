"""A store is whole or absent: SIGKILL, Ctrl-C and a full disk while `prepare` runs."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prepare import write_log
from turbogr.data.columns import NpyColumn
from turbogr.data.filters import Filters
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.sources.kuairand import KuaiRand
from turbogr.data.store import Store
from turbogr.errors import UserError

CHILD = """
import sys
from pathlib import Path
from tests.data.test_prepare_whole import prepare_a_core
prepare_a_core(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def prepare_a_core(log: Path, target: Path) -> None:
    """In a process of its own; says on stdout when it begins."""
    print("begin", flush=True)
    filters = Filters(user_core=2, item_core=2)
    prepare(KuaiRand(log), target, PrepareOptions(filters=filters, threads=2, memory_limit="200MiB", overwrite=True))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("raw") / "log_standard_1.csv"
    write_log(target, 200_000)
    return target


def test_ten_kills_leave_nothing_or_a_whole_store(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "store"
    # forked from a process that has everything imported: a kill then falls into `prepare`, not into its imports
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["tests.data.test_prepare_whole"])
    durations = []
    for _ in range(2):  # the first one starts the server
        begin = time.monotonic()
        child = forking.Process(target=prepare_a_core, args=(log, target))
        child.start()
        child.join()
        assert child.exitcode == 0
        durations.append(time.monotonic() - begin)
    shutil.rmtree(target)
    moments = random.Random(5)
    killed = 0
    for _ in range(10):
        child = forking.Process(target=prepare_a_core, args=(log, target))
        child.start()
        time.sleep(moments.uniform(0, durations[1]))
        child.kill()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        if target.exists():
            Store.open(target).verify()
            shutil.rmtree(target)
    assert killed >= 5, "the kills came too late to show anything"
    prepare_a_core(log, target)
    assert [path.name for path in tmp_path.iterdir()] == ["store"], "what killed processes left is not removed"


def test_ctrl_c_ends_soon_and_leaves_nothing(tmp_path: Path) -> None:
    raw = tmp_path / "raw" / "log_standard_1.csv"
    raw.parent.mkdir()
    write_log(raw, 1_000_000)
    command = [sys.executable, "-c", CHILD, str(raw), str(tmp_path / "store")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, errors = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and child.returncode != 0
    assert time.monotonic() - begin < 10
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(log: Path, small_disk: Path) -> None:
    with pytest.raises(UserError, match=f"No space left while writing {small_disk}/store: free some"):
        prepare(KuaiRand(log), small_disk / "store", PrepareOptions(threads=2))
    assert not list(small_disk.iterdir())


def test_a_disk_that_fills_while_columns_are_written_is_the_same_sentence(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: NpyColumn, values: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(NpyColumn, "append", full)
    with pytest.raises(UserError, match=f"No space left while writing {tmp_path}/store: free some"):
        prepare(KuaiRand(log), tmp_path / "store")
    assert not list(tmp_path.iterdir())
