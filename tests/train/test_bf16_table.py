"""A run whose table is kept in bf16, from the first step to what recommends."""

from pathlib import Path

import pytest
import torch

from tests.support.small_run import chained_store, small_config
from turbogr.recommend.run import load_run
from turbogr.train import checkpoint
from turbogr.train.metrics import read_lines
from turbogr.train.trainer import train


@pytest.mark.parametrize("optimizer", ["lazy-adam", "adagrad"])
def test_a_bf16_table_trains_and_can_be_loaded(optimizer: str, tmp_path: Path) -> None:
    """Catches: a setting that nothing reads, halves that a loss kernel takes for floats, a checkpoint of one type read
    as the other."""
    store = chained_store(tmp_path / "store")
    changes = {"tables__dtype": "bf16", "tables__optimizer": optimizer, "tables__lr": 0.05}
    train(small_config(store, train__epochs=6, model__dropout=0.0, **changes), tmp_path / "run")
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "epochs.jsonl")]
    assert losses[-1] < losses[0] * 0.8
    parts, _ = load_run(tmp_path / "run", "last", store.path)
    assert parts.weight.dtype == torch.float32 and bool(parts.weight.isfinite().all())
    assert torch.equal(parts.weight, parts.weight.bfloat16().float())
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    from safetensors.torch import load_file

    saved = {name: value for path in newest.glob("*.safetensors") for name, value in load_file(path).items()}
    assert saved["table.weight"].dtype == torch.bfloat16 and int(saved["table.rounding.step"]) > 6
