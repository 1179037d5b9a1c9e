"""Where a run's numbers go: W&B under an id of the run's own, and JSONL files that were damaged."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.small_run import chained_store, small_config
from turbogr.errors import CheckpointError
from turbogr.train.metrics import read_lines
from turbogr.train.trainer import train


class FakeRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.steps, self.finished = options, [], 0

    def log(self, values: dict[str, Any], step: int) -> None:
        if "train/loss" in values:  # not the line of an epoch, which comes beside that of its last step
            self.steps.append(step)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    runs: list[FakeRun] = []
    fake = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    fake.init = lambda **options: runs.append(FakeRun(options)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return runs


def test_wandb_gets_every_step_under_an_id_of_the_folder_that_a_resume_goes_on_with(
    wandb_runs: list[FakeRun], tmp_path: Path
) -> None:
    store = chained_store(tmp_path / "store")
    one, two = tmp_path / "one" / "seed-0", tmp_path / "two" / "seed-0"
    train(small_config(store, log__wandb=True, train__epochs=1), one)
    train(small_config(store, log__wandb=True, train__epochs=2), one, resume=True)
    train(small_config(store, log__wandb=True, train__epochs=1), two)
    first, resumed, other = wandb_runs
    assert first.options["id"] == resumed.options["id"] != other.options["id"]
    assert first.options["resume"] == "allow" and first.options["config"]["train"]["epochs"] == 1
    assert first.steps + resumed.steps == [line["step"] for line in read_lines(one / "metrics.jsonl")]
    assert other.steps == first.steps and len(first.steps) > 1
    assert [run.finished for run in wandb_runs] == [1, 1, 1]


@pytest.mark.parametrize("damage", [b'{"step": 1, \n', b"\x00\xff\xfe\n", b"[1]\n", b"{}\n"])
def test_a_damaged_line_stops_a_resume_with_its_file_and_number(tmp_path: Path, damage: bytes) -> None:
    store = chained_store(tmp_path / "store")
    train(small_config(store, train__epochs=1), tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], damage, *lines[2:]]))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2 is damaged: remove that line"):
        train(small_config(store, train__epochs=2), tmp_path / "run", resume=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    train(small_config(store, train__epochs=2), tmp_path / "run", resume=True)


def test_a_last_line_that_was_cut_off_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert [line["step"] for line in read_lines(tmp_path / "lines.jsonl")] == [0, 1]
