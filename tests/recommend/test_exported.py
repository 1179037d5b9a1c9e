"""An exported model: whole, readable elsewhere, and equal to the run it came from."""

import json
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.recommend.test_model import history_of
from tests.support.tiny_store import tiny_store
from turbogr.errors import CheckpointError, DataError, UserError
from turbogr.recommend.model import Model


@pytest.mark.parametrize("search", ["scan", "index"])
def test_an_exported_model_answers_like_the_run(model: Model, exported: Path, search) -> None:
    loaded = Model.load(exported, search=search)
    for user in ("u0", "u1", "u2", "u9"):
        items, times = history_of(model, user)
        wanted = model.recommend(user, exclude=[100, 117])
        answer = loaded.recommend_history(items, times, exclude=[100, 117])
        assert answer["item"].to_pylist() == wanted["item"].to_pylist()
        assert answer["title"].to_pylist() == wanted["title"].to_pylist()
        np.testing.assert_allclose(answer["score"].to_numpy(), wanted["score"].to_numpy(), atol=1e-6)


@pytest.mark.parametrize("search", ["scan", "index"])
def test_with_a_store_it_answers_users(model: Model, exported: Path, search) -> None:
    loaded = Model.load(exported, store=model.store.path, search=search)
    users = model.store.users["raw_id"].to_pylist()
    answer, wanted = loaded.recommend(users, k=60), model.recommend(users, k=60)
    for column in ("user", "rank", "item", "title"):
        assert answer[column].to_pylist() == wanted[column].to_pylist()
    np.testing.assert_allclose(answer["score"].to_numpy(), wanted["score"].to_numpy(), atol=1e-6)
    assert loaded.evaluate().metrics == model.evaluate().metrics


def test_it_needs_neither_trainer_nor_store(exported: Path) -> None:
    code = f"""
import sys, turbogr
print(turbogr.load({str(exported)!r}, search="index").recommend_history([101, 102], k=3)["item"].to_pylist())
print([name for name in sys.modules if name.startswith("turbogr.train")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer, trainer = map(json.loads, done.stdout.splitlines())
    assert len(answer) == 3 and trainer == []


def test_saving_a_loaded_model_gives_the_same_bytes(exported: Path, tmp_path: Path) -> None:
    Model.load(exported).save(tmp_path / "again")
    names = sorted(path.name for path in exported.iterdir())
    assert names == ["README.md", "config.json", "items.faiss", "items.parquet", "model.safetensors"]
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes(), name


def test_any_faiss_opens_the_index_and_finds_unit_vectors(model: Model, exported: Path) -> None:
    index = faiss.read_index(str(exported / "items.faiss"))
    assert isinstance(index, faiss.IndexFlatIP)
    weight = model.parts.weight
    np.testing.assert_allclose(
        index.reconstruct_n(0, 60), (weight / weight.norm(dim=1, keepdim=True)).numpy(), atol=1e-6
    )


def test_the_machine_that_trained_is_not_named(exported: Path, run: Path) -> None:
    assert str(run.parent) not in (exported / "config.json").read_text()
    assert len((exported / "README.md").read_text().splitlines()) == 3


def test_whoever_may_read_one_file_may_read_all(exported: Path) -> None:
    assert {path.stat().st_mode & 0o444 for path in exported.iterdir()} == {0o444}


def test_another_format_version_is_refused(spoiled: Path) -> None:
    config = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps({**config, "version": 2}))
    with pytest.raises(CheckpointError, match="format version 2, this turbogr reads version 1: export it again"):
        Model.load(spoiled)


@pytest.mark.parametrize("name", ["model.safetensors", "items.parquet", "items.faiss"])
def test_a_cut_off_file_is_named(spoiled: Path, name: str) -> None:
    whole = (spoiled / name).read_bytes()
    (spoiled / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=name):
        Model.load(spoiled, search="index")


@pytest.mark.parametrize("name", ["encoder.blocks.0.u.weight", "encoder.blocks.0.out_bias", "items.weight"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused(spoiled: Path, name: str) -> None:
    tensors = load_file(spoiled / "model.safetensors")
    save_file({**tensors, name: tensors[name][1:].clone()}, spoiled / "model.safetensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        Model.load(spoiled)
    del tensors[name]
    save_file(tensors, spoiled / "model.safetensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        Model.load(spoiled)


def test_an_index_of_another_model_is_refused(spoiled: Path) -> None:
    faiss.write_index(faiss.IndexFlatIP(16), str(spoiled / "items.faiss"))
    with pytest.raises(CheckpointError, match=r"holds \[0, 16\]"):
        Model.load(spoiled, search="index")


def test_a_model_that_diverged_is_not_exported_and_leaves_nothing(exported: Path, tmp_path: Path) -> None:
    broken = Model.load(exported)
    broken.parts.weight[7, 3] = torch.nan
    with pytest.raises(CheckpointError, match="not finite"):
        broken.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_told(exported: Path, spoiled: Path) -> None:
    loaded = Model.load(exported)
    with pytest.raises(UserError, match="exists already"):
        loaded.save(spoiled)
    (spoiled / "items.faiss").unlink()
    loaded.save(spoiled, overwrite=True)
    assert (spoiled / "items.faiss").exists()


def test_users_without_a_store_and_a_store_with_other_items_are_refused(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without a store"):
        Model.load(exported).recommend("u1")
    tiny_store(tmp_path / "other", [[0, 1, 2]])
    with pytest.raises(DataError, match="does not have the items"):
        Model.load(exported, store=tmp_path / "other")


def test_what_belongs_to_a_run_only_is_refused_for_an_export_and_the_other_way(exported: Path, run: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoints"):
        Model.load(exported, checkpoint="last")
    with pytest.raises(UserError, match="has no index"):
        Model.load(run, search="index")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    loaded = Model.load(exported)
    monkeypatch.setattr("turbogr.recommend.exported.save_file", full)
    with pytest.raises(UserError, match="No space left while writing .*out"):
        loaded.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_of_garbage_is_named(spoiled: Path) -> None:
    size = (spoiled / "items.parquet").stat().st_size
    for garbage in (b"", b"garbage" * 100, b"PAR1" + bytes(size - 8) + b"PAR1"):
        (spoiled / "items.parquet").write_bytes(garbage)
        with pytest.raises(CheckpointError, match="items.parquet is damaged .*: export the model again"):
            Model.load(spoiled)
    pq.write_table(pa.table({"id": range(60)}), spoiled / "items.parquet")
    with pytest.raises(CheckpointError, match="no column raw_id"):
        Model.load(spoiled)
