"""Which checkpoints a run holds, and that one is seen whole or not at all."""

from pathlib import Path
from typing import Any

import pytest
import torch

from turbogr.train import checkpoint
from turbogr.train.checkpoint import Progress

IDENTITY: dict[str, Any] = {"config": {}, "store": "", "threads": 1}


def save(run: Path, step: int, best: int, keep: int) -> None:
    checkpoint.save(run, {"x": torch.full((3,), float(step))}, Progress(step=step, best_step=best), IDENTITY, keep)


def kept(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def test_the_latest_are_kept_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, best=min(step, 2), keep=3)
        assert kept(tmp_path) == sorted({min(step, 2), *range(max(1, step - 2), step + 1)})
    assert checkpoint.best(tmp_path).name == "step-00000002"
    assert checkpoint.latest(tmp_path).name == "step-00000006"
    assert [path.name[0] for path in (tmp_path / "checkpoints").iterdir()] == ["s"] * 4  # nothing hidden stays


def test_without_a_best_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, best=-1, keep=1)
    assert kept(tmp_path) == [3]


def test_while_a_checkpoint_is_written_the_one_before_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a checkpoint that is written under its own name, which a kill would leave there in half."""
    save(tmp_path, 1, best=-1, keep=2)
    write, seen = checkpoint.dcp_save, []

    def watched(*args: Any, **options: Any) -> None:
        write(*args, **options)
        seen.append(checkpoint.latest(tmp_path).name)

    monkeypatch.setattr(checkpoint, "dcp_save", watched)
    save(tmp_path, 2, best=-1, keep=2)
    assert seen == ["step-00000001"] and checkpoint.latest(tmp_path).name == "step-00000002"
