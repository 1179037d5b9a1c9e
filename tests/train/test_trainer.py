"""A run from the first step to result.json, and how it stops when it must."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.no_torch_cuda import forbidden
from tests.support.small_run import chained_store, small_config
from turbogr.data.split import Which
from turbogr.data.store import Store
from turbogr.errors import ConfigError, TrainingError, UserError
from turbogr.evaluate import Evaluation
from turbogr.ops import gemm
from turbogr.train import checkpoint
from turbogr.train.metrics import read_lines
from turbogr.train.trainer import Trainer, rate_course, train


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return chained_store(tmp_path_factory.mktemp("store") / "chained")


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(run)
    assert newest is not None
    from safetensors.torch import load_file

    return {name: value for path in newest.glob("*.safetensors") for name, value in load_file(path).items()}


def test_a_run_lowers_the_loss_and_learns_the_chain(store: Store, tmp_path: Path) -> None:
    result = train(small_config(store, train__epochs=12, model__dropout=0.0), tmp_path / "run")
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "epochs.jsonl")]
    assert losses[-1] < losses[0] / 2
    assert result["last"]["metrics"]["hr@10"] > 0.7  # 10 of 40 items by chance is .25


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(store: Store, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small_config(store, train__seed=seed), tmp_path / name)
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["table.weight"], c["table.weight"])


def test_the_preflight_refuses_before_anything_is_written(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="negatives.count 99 is not below"):
        train(small_config(store, negatives__count=99), tmp_path / "run")
    with pytest.raises(ConfigError, match="hr@7"):
        train(small_config(store, train__select_by="hr@7"), tmp_path / "run")
    with pytest.raises(UserError, match="cannot be made"):
        (tmp_path / "file").write_text("")
        train(small_config(store), tmp_path / "file" / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("optimizer", ["adagrad", "lazy-adam", "adamw"])
def test_a_run_stopped_between_epochs_and_resumed_equals_one_that_was_not(
    store: Store, tmp_path: Path, optimizer: str
) -> None:
    """Catches optimizer state, data order or random numbers that a checkpoint leaves out."""
    changes = {"tables__optimizer": optimizer, "train__accumulate": 2}
    train(small_config(store, train__epochs=3, **changes), tmp_path / "whole")
    train(small_config(store, train__epochs=1, **changes), tmp_path / "parts")
    train(small_config(store, train__epochs=3, **changes), tmp_path / "parts", resume=True)
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_run_interrupted_inside_an_epoch_says_where_it_goes_on_and_does(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(store, train__epochs=2, train__checkpoint_every=2)
    train(config, tmp_path / "whole")
    log_step = Trainer._log_step

    def interrupt(self: Trainer, *args: object) -> dict[str, object]:
        if self.progress.step == 3:
            raise KeyboardInterrupt
        return log_step(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_log_step", interrupt)
        with pytest.raises(KeyboardInterrupt, match="stopped at step 3; --resume continues from step 2"):
            train(config, tmp_path / "run")
    train(config, tmp_path / "run", resume=True)
    whole, run = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert all(torch.equal(whole[name], run[name]) for name in whole)
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(len(steps)))


def test_a_resume_under_another_setting_is_refused_by_its_name(store: Store, tmp_path: Path) -> None:
    train(small_config(store, train__epochs=1), tmp_path / "run")
    with pytest.raises(UserError, match=r"model.dropout 0.1, this run says 0.3"):
        train(small_config(store, model__dropout=0.3), tmp_path / "run", resume=True)


def test_a_run_says_its_gemm_library_and_a_resume_stays_with_it(store: Store, tmp_path: Path) -> None:
    """Catches: a run whose last bits change when it is resumed where the rule says otherwise."""
    train(small_config(store, train__epochs=1, device__gemm="mkl"), tmp_path / "run")
    train(small_config(store), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["device"]["gemm"] == "mkl"
    with pytest.raises(UserError, match="was trained with device.gemm 'mkl', this run says 'onednn'"):
        train(small_config(store, train__epochs=3, device__gemm="onednn"), tmp_path / "run", resume=True)
    train(small_config(store, train__epochs=1), tmp_path / "by-rule")
    assert json.loads((tmp_path / "by-rule" / "config.json").read_text())["device"]["gemm"] == gemm.rule()[0]


def test_recomputation_changes_no_bit_of_a_run(store: Store, tmp_path: Path) -> None:
    """Catches: an activation that is recomputed differently; and a resume that refuses the setting."""
    train(small_config(store, train__epochs=1), tmp_path / "one")
    train(small_config(store, train__epochs=1, model__recompute=True), tmp_path / "two")
    assert all(map(torch.equal, tensors(tmp_path / "one").values(), tensors(tmp_path / "two").values()))
    train(small_config(store, model__recompute=True), tmp_path / "one", resume=True)


def test_a_resume_on_another_store_is_refused(store: Store, tmp_path: Path) -> None:
    train(small_config(store, train__epochs=1), tmp_path / "run")
    other = chained_store(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="another store"):
        train(small_config(other), tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_format_version_is_refused(store: Store, tmp_path: Path) -> None:
    train(small_config(store, train__epochs=1), tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    meta = json.loads((newest / "meta.json").read_text())
    (newest / "meta.json").write_text(json.dumps({**meta, "version": 99}))
    with pytest.raises(UserError, match="format version 99, this turbogr reads version 2"):
        train(small_config(store, train__epochs=2), tmp_path / "run", resume=True)


def test_a_damaged_checkpoint_is_refused_in_one_sentence(store: Store, tmp_path: Path) -> None:
    train(small_config(store, train__epochs=1), tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    for path in newest.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="damaged"):
        train(small_config(store, train__epochs=2), tmp_path / "run", resume=True)


def test_a_run_folder_is_not_overwritten(store: Store, tmp_path: Path) -> None:
    train(small_config(store, train__epochs=1), tmp_path / "run")
    with pytest.raises(UserError, match="--resume, or choose another --out"):
        train(small_config(store, train__epochs=1), tmp_path / "run")


def test_early_stop_keeps_the_best_epoch_and_reports_both(store: Store, tmp_path: Path) -> None:
    """Catches a best checkpoint that is pruned, or metrics of the last epoch reported as the best."""
    changes = {"train__epochs": 40, "train__patience": 2, "train__keep_checkpoints": 1}
    config = small_config(store, split__protocol="leave-one-out-validation", **changes)
    result = train(config, tmp_path / "run")
    epochs = list(read_lines(tmp_path / "run" / "epochs.jsonl"))
    best = max(epochs, key=lambda line: line["ndcg@10"])
    assert len(epochs) < 40
    assert result["best"]["epoch"] == best["epoch"] and result["last"]["epoch"] == epochs[-1]["epoch"]
    assert result["selected_on"] == "validation" and result["card"]["which"] == "test"
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(kept) == 2 and f"step-{best['step'] + 1:08d}" in kept


def test_a_kill_after_any_write_of_an_epochs_end_resumes_to_the_same_report(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a best epoch that is forgotten, or an epoch reported twice, when death falls between two files."""
    changes = {"split__protocol": "leave-one-out-validation", "train__epochs": 4, "train__keep_checkpoints": 1}
    config = small_config(store, train__checkpoint_every=4, **changes)  # an epoch has four steps
    whole = train(config, tmp_path / "whole")
    save, log = checkpoint.save, Trainer._save

    def die_after(*args: object) -> Path:
        save(*args)  # type: ignore[arg-type]
        raise SystemExit

    def die_before(self: Trainer) -> None:
        if self.progress.batches == 0:
            raise SystemExit
        log(self)

    for name, kill in (("after", (checkpoint, "save", die_after)), ("before", (Trainer, "_save", die_before))):
        run = tmp_path / name
        for _ in range(6):
            with monkeypatch.context() as patch, pytest.raises(SystemExit):
                patch.setattr(*kill)
                train(config, run, resume=(run / "config.json").exists())
            if name == "before":
                break
        resumed = train(config, run, resume=True)
        assert resumed["best"] == whole["best"] and resumed["last"] == whole["last"]
        assert [line["epoch"] for line in read_lines(run / "epochs.jsonl")] == [1, 2, 3, 4]


def test_the_last_epoch_is_not_ranked_again_for_the_result(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked, real = [], Trainer._metrics

    def metrics(self: Trainer, which: Which, *rest: Any) -> Evaluation:
        ranked.append(which)
        return real(self, which, *rest)

    monkeypatch.setattr(Trainer, "_metrics", metrics)
    result = train(small_config(store), tmp_path / "plain")
    assert ranked == ["test", "test"]  # two epochs
    *_, last = read_lines(tmp_path / "plain" / "epochs.jsonl")
    assert result["last"]["metrics"].items() <= last.items() and result["card"]["which"] == "test"
    ranked.clear()
    result = train(small_config(store, split__protocol="leave-one-out-validation"), tmp_path / "validated")
    assert ranked[:3] == ["validation", "validation", "test"] and result["card"]["which"] == "test"


def test_without_validation_nothing_is_selected_unless_asked(store: Store, tmp_path: Path) -> None:
    assert "best" not in train(small_config(store), tmp_path / "honest")
    assert train(small_config(store, train__select_on_test=True), tmp_path / "asked")["selected_on"] == "test"
    with pytest.raises(ConfigError, match="select_on_test"):
        train(small_config(store, train__patience=2), tmp_path / "refused")


def test_a_non_finite_loss_stops_the_run_and_updates_nothing(store: Store, tmp_path: Path) -> None:
    trainer = Trainer(small_config(store), store, tmp_path / "run")
    trainer.table.weight[7] = math.nan
    before = trainer.table.weight.clone()
    with pytest.raises(TrainingError, match=r"the loss of step 0 is not finite \(users \d+"):
        trainer.fit()
    assert torch.equal(before.nan_to_num(9.0), trainer.table.weight.nan_to_num(9.0))


def test_non_finite_steps_are_skipped_and_counted_by_choice(store: Store, tmp_path: Path) -> None:
    trainer = Trainer(small_config(store, train__on_nonfinite="skip"), store, tmp_path / "run")
    trainer.table.weight[7] = math.nan
    with pytest.raises(TrainingError, match="NaN"):  # the evaluation that follows cannot rank with it
        trainer.fit()
    assert trainer.progress.skipped_steps == 4


def test_the_rate_warms_up_and_ends_at_a_tenth(store: Store) -> None:
    course = rate_course(small_config(store, train__warmup_steps=4, train__rate="cosine"), 20)
    assert [course(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert course(12) == pytest.approx(0.55) and course(20) == pytest.approx(0.1)


def test_training_never_calls_torch_cuda(store: Store, tmp_path: Path) -> None:
    with forbidden():
        train(small_config(store, train__epochs=1), tmp_path / "run")


def test_several_seeds_report_mean_and_spread(store: Store, tmp_path: Path) -> None:
    from turbogr.train.seeds import train_seeds

    summary = train_seeds(small_config(store, train__epochs=1), tmp_path / "run", [3, 4], resume=False)
    values = [json.loads((tmp_path / "run" / f"seed-{s}" / "result.json").read_text()) for s in (3, 4)]
    hits = [value["last"]["metrics"]["mrr"] for value in values]
    assert summary["last"]["mrr"]["mean"] == pytest.approx(sum(hits) / 2)
    assert summary["last"]["mrr"]["std"] == pytest.approx(abs(hits[0] - hits[1]) / math.sqrt(2))


def test_tensorboard_gets_every_step(store: Store, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small_config(store, train__epochs=1, log__tensorboard=True), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2, 3]
    assert {"speed/mfu", "memory/peak_gib", "speed/read_share"} <= set(events.Tags()["scalars"])


def test_a_full_disk_while_writing_a_checkpoint_is_one_sentence_and_leaves_no_half(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, *args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(UserError, match="No space left while writing .*step-"):
        train(small_config(store, train__epochs=1), tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
