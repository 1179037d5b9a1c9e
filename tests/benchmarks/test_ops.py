"""The operator benchmark: a part that is off stops it, a part that cannot run says why."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import ops
from benchmarks.ops_measure import Part


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ops", "--quick", "--out", str(tmp_path), *arguments])
    return ops.main()


def one_part(monkeypatch: pytest.MonkeyPatch, errors: dict[str, float]) -> list[str]:
    """A benchmark of one part that measures when it is asked; what was asked of it."""
    asked: list[str] = []

    def measure(settings: Any) -> Part:
        asked.append("measure")
        return Part({"part_x": 2.0})

    part = SimpleNamespace(check=lambda settings: errors, measure=measure)
    monkeypatch.setattr(ops, "PARTS", {"cpu": {"part": part}})
    return asked


def test_figures_come_with_the_largest_error_of_each_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_part(monkeypatch, {"a": 1e-6, f"b {torch.float32}": 3e-6, f"c {torch.bfloat16}": 4e-3})
    assert run(monkeypatch, tmp_path) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures == {"part_x": 2.0, "max_rel_error": 3e-6, "max_rel_error_bf16": 4e-3, "reasons": {}}
    assert len(list(tmp_path.glob("ops-quick-*.json"))) == 1


@pytest.mark.parametrize("error", [2e-5, float("nan"), float("inf")])
def test_nothing_is_timed_where_an_operator_is_off(
    error: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a speed-up printed for a wrong result, and a NaN that no comparison sees."""
    asked = one_part(monkeypatch, {"good": 1e-7, f"bad {torch.float32}": error})
    assert run(monkeypatch, tmp_path) == 1
    assert asked == [] and not list(tmp_path.iterdir())
    assert "bad torch.float32" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_figures_are_null_and_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "--device", "cuda") == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    reasons = figures.pop("reasons")
    assert set(reasons) == set(figures) and set(figures.values()) == {None}
    assert reasons["cuda_attention_full_d128_biases_forward_tflops"] == "no CUDA device here"


def test_an_unknown_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--only", "nothing")
