"""The training step: what it sums, what it updates, what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.close import assert_close
from tests.support.small_model import small_config
from tests.support.small_step import ITEMS, SmallRun, random_store
from turbogr.config import Config, DenseConfig, NegativesConfig, TablesConfig, TrainConfig
from turbogr.errors import TrainingError
from turbogr.tables import Lookup, Rows

LENGTHS = [6, 3, 15, 2, 9, 4]
USERS = [4, 0, 2, 5, 1]
MICRO_BATCHES = ([4, 0], [2, 5, 1])
ONE_NEGATIVE = NegativesConfig(count=1)


def run_of(folder: Path, config: Config, name: str = "store") -> SmallRun:
    return SmallRun(config, random_store(folder / name, LENGTHS))


@pytest.mark.parametrize("model", ["hstu", "sasrec"])
@pytest.mark.parametrize("optimizer", ["adagrad", "lazy-adam", "adamw"])
@pytest.mark.parametrize("sampler", ["uniform", "popularity"])
def test_two_micro_batches_train_as_their_union_does(tmp_path: Path, model: str, optimizer: Any, sampler: Any) -> None:
    """Catches: negatives or masks drawn by place in the micro-batch, gradients divided by the wrong count, rows updated
    twice."""
    config = small_config(
        model,
        tables=TablesConfig(optimizer=optimizer, eps=1e-3),
        dense=DenseConfig(clip=0.05, eps=1e-3),
        negatives=NegativesConfig(count=7, sampler=sampler, logq=True),
    )
    # the sampler's log q is fp32 whatever the rest is, and the same on both ways
    for double, tolerance in ((False, 1e-5), (True, 1e-12)):
        runs = [run_of(tmp_path, config, f"{double}-{way}") for way in range(2)]
        for run in runs if double else []:
            run.double()
        for _ in range(3):
            one, other = runs[0].step(USERS), runs[1].step(USERS[:2], USERS[2:])
        assert one.tokens == other.tokens and one.lengths == other.lengths and one.users == other.users == 5
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=10 * tolerance)
        wanted = runs[1].state()
        for name, value in runs[0].state().items():
            assert_close(value, wanted[name], tolerance, name)


@pytest.mark.parametrize("micro_batches", [[USERS], MICRO_BATCHES])
def test_negatives_drawn_in_the_loss_train_as_looked_up_ones_do(tmp_path: Path, micro_batches: Any) -> None:
    """Catches: another draw, a table that is read after its update, a row's gradient from history or loss lost."""
    config = small_config(negatives=NegativesConfig(count=7, logq=True))
    for double, tolerance in ((False, 1e-5), (True, 1e-12)):
        inside, before = (run_of(tmp_path, config, f"{double}-{way}") for way in range(2))
        before.task.in_place = False
        for run in (inside, before) if double else ():
            run.double()
        for run in (inside, before):
            run.step(USERS)
        one, dense, rows = inside.gradients(*micro_batches)
        other, wanted_dense, wanted_rows = before.gradients(*micro_batches)
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert_close(rows, wanted_rows, tolerance, "rows")
        for name, value in wanted_dense.items():
            assert_close(dense[name], value, 10 * tolerance, name)
        for part, same in zip(one.row_gradients, other.row_gradients, strict=True):
            assert torch.equal(part.ids, same.ids)


def test_drawn_negatives_are_not_looked_up(tmp_path: Path) -> None:
    """Catches: rows of every negative copied although the table lies beside the loss."""
    for sampler, candidates in (("uniform", 0), ("popularity", 1 + 7)):
        run = run_of(tmp_path, small_config(negatives=NegativesConfig(count=7, sampler=sampler)), sampler)
        (context,) = run.contexts(USERS)
        for stage in run.train.stages[:6]:
            stage.run(context)
        assert context.ids is not None and len(context.ids) == context.sums.tokens * (1 + candidates)


def test_a_users_part_of_the_gradient_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """Catches: a gradient that is no sum over users, so that ranks and balance would matter."""
    run = run_of(tmp_path, small_config()).double()
    _, dense, rows = run.gradients([4, 0], [2, 5, 1])
    _, dense_same, rows_same = run.gradients([4], [0, 2, 5], [1])
    assert_close(rows, rows_same, 1e-12)
    for name, value in dense.items():
        assert_close(value, dense_same[name], 1e-12, name)


@pytest.mark.parametrize("model", ["hstu", "sasrec"])
def test_row_gradients_are_those_of_finite_differences(tmp_path: Path, model: str) -> None:
    """Catches: a path from a row to the loss (history, positive, negative, norm) that the gradient misses."""
    run = run_of(tmp_path, small_config(model)).double()
    with torch.no_grad():
        run.table.weight.mul_(20)  # rows of an ordinary size: tiny ones make the cosine too steep for differences
    _, _, rows = run.gradients(USERS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        direction = torch.randn(rows.shape, generator=generator).double()
        losses = []
        for sign in (1, -1):
            run.table.weight += sign * 1e-6 * direction
            losses.append(run.gradients(USERS)[0].loss)
            run.table.weight -= sign * 1e-6 * direction
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(float((rows * direction).sum()), rel=1e-4, abs=1e-5)


def test_gradients_are_means_over_the_tokens_of_the_step(tmp_path: Path) -> None:
    """Catches: a mean over micro-batches or users, under which short histories weigh more."""
    config = small_config(tables=TablesConfig(optimizer="adagrad", lr=0.1, eps=1e-8))
    run = run_of(tmp_path, config)
    sums, dense, rows = run.gradients(USERS)
    before = run.table.weight.clone()
    norm = torch.cat([value.flatten() for value in dense.values()]).norm() / sums.tokens
    assert run.step(USERS[:1], USERS[1:]).grad_norm == pytest.approx(float(norm), rel=1e-4)
    mean = rows / sums.tokens
    touched = rows.any(1)
    wanted = before - 0.1 * mean / (mean.square().mean(1, keepdim=True).sqrt() + 1e-8)
    assert_close(run.table.weight[touched], wanted[touched], 1e-4)
    assert torch.equal(run.table.weight[~touched], before[~touched])


def test_every_step_learns(tmp_path: Path) -> None:
    """Catches: an update with the wrong sign, or one that is never applied."""
    config = small_config(model={"dropout": 0.0}, tables=TablesConfig(lr=0.02), dense=DenseConfig(lr=0.02))
    run = run_of(tmp_path, config)
    losses = [run.step(USERS).loss for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_clipping_knows_the_dense_gradients_only(tmp_path: Path) -> None:
    """Catches: rows in the norm, or rows scaled by it; a clip that is applied and then undone by the division."""
    plain = run_of(tmp_path, small_config(), "plain")
    norm = plain.step(USERS).grad_norm
    clipped = run_of(tmp_path, small_config(dense=DenseConfig(clip=norm / 4)), "clipped")
    seen: list[torch.Tensor] = []
    step = clipped.train.dense_optimizer.step
    clipped.train.dense_optimizer.step = lambda: seen.extend(  # type: ignore[method-assign,assignment]
        [torch.cat([p.grad.flatten() for p in clipped.train.parameters if p.grad is not None]), step()]
    )
    assert clipped.step(USERS).grad_norm == pytest.approx(norm)
    assert float(seen[0].norm()) == pytest.approx(norm / 4, rel=1e-4)
    assert torch.equal(clipped.table.weight, plain.table.weight)


def test_rates_scale_both_optimizers(tmp_path: Path) -> None:
    """Catches: a warm-up that reaches only one of them."""
    config = small_config(tables=TablesConfig(optimizer="adagrad"))
    whole, half, none = (run_of(tmp_path, config, name) for name in ("1", "2", "3"))
    half.train.rates, none.train.rates = lambda step: 0.5, lambda step: 0.0
    start = none.state()
    for run in (whole, half, none):
        run.step(USERS)
    moved = [{name: run.state()[name] - start[name] for name in ("weight", "blocks.0.uvqk")} for run in (whole, half)]
    for name, value in moved[0].items():
        assert value.any()
        assert_close(moved[1][name], value / 2, 1e-3, name)
    assert torch.equal(none.table.weight, start["weight"])


def poison(run: SmallRun, user: int) -> None:
    """An infinite embedding for an item that only this user's history has, and no negative of the next two steps."""
    store, ends = run.store, run.split.train_end
    histories = [store.item[store.offsets[u] : ends[u]].tolist() for u in range(store.num_users)]
    others = {item for u, history in enumerate(histories) if u != user for item in history}
    for step in (run.done, run.done + 1):
        for context in run.contexts(*MICRO_BATCHES):
            context.step = step
            for stage in run.train.stages[:3]:
                stage.run(context)
            others |= set(run.task.sampler.negative_ids(context.noise, 1).flatten().tolist())
    only = [item for item in histories[user][:-1] if item not in others]
    run.table.weight[only[0]] = torch.inf


def test_a_non_finite_loss_stops_and_names_step_and_user(tmp_path: Path) -> None:
    """Catches: a run that goes on with NaN, one that updates before it stops, or one that blames the whole batch."""
    run = run_of(tmp_path, small_config(negatives=ONE_NEGATIVE))
    run.step(USERS)
    poison(run, 2)
    before = run.state()
    with pytest.raises(TrainingError, match=r"the loss of step 1 is not finite \(users 1002\): lower tables\.lr"):
        run.step(*MICRO_BATCHES)
    after = run.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_non_finite_step_can_be_skipped_and_counted(tmp_path: Path) -> None:
    """Catches: a skipped step that leaves its gradients behind, or one that updates half of the model."""
    config = small_config(negatives=ONE_NEGATIVE, train=TrainConfig(seed=11, on_nonfinite="skip"))
    run = run_of(tmp_path, config)
    poison(run, 2)
    before = run.state()
    assert run.step(*MICRO_BATCHES).skipped
    assert all(torch.equal(before[name], value) for name, value in run.state().items())
    assert all(parameter.grad is None for parameter in run.train.parameters)
    assert not run.step([4, 0]).skipped


def test_a_gradient_that_is_not_finite_is_refused_too(tmp_path: Path) -> None:
    """Catches: a finite loss whose gradient overflows into the parameters."""
    run = run_of(tmp_path, small_config())
    parameter = run.train.parameters[0]
    parameter.register_hook(lambda gradient: gradient * torch.inf)
    before = run.state()
    with pytest.raises(TrainingError, match="the gradient of step 0 is not finite"):
        run.step(USERS)
    assert all(torch.equal(before[name], value) for name, value in run.state().items())


def test_a_row_gradient_that_is_not_finite_is_refused_too(tmp_path: Path) -> None:
    """Catches: a table poisoned while loss and dense gradients are fine."""
    run = run_of(tmp_path, small_config())
    answer = run.table.answer

    def overflowing(wanted: Lookup) -> Rows:
        rows = answer(wanted)
        rows.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.inf))
        return rows

    run.table.answer = overflowing  # type: ignore[method-assign]
    before = run.state()
    with pytest.raises(TrainingError, match="the gradient of step 0 is not finite"):
        run.step(USERS)
    assert all(torch.equal(before[name], value) for name, value in run.state().items())


def test_the_stages_stand_in_their_order_and_updates_run_once(tmp_path: Path) -> None:
    """Catches: a stage renamed or moved, which schedules, spans and documents rely on."""
    run = run_of(tmp_path, small_config())
    names = [stage.name for stage in run.train.stages]
    assert names[:6] == ["read", "balance", "sample", "exchange_ids", "wait_unique", "lookup"]
    assert names[6:8] == ["forward_backward", "exchange_grads"]
    assert names[8:] == ["sync_replicas", "update_rows", "update_dense"]
    assert [stage.name for stage in run.train.stages if stage.once] == names[-3:]


def test_in_half_precision_the_step_stays_near_the_single_one(tmp_path: Path) -> None:
    """Catches: autocast that reaches the loss or the rows, or one that is never switched on."""
    single, half = (
        run_of(tmp_path, small_config(train=TrainConfig(seed=11, precision=precision)), precision)
        for precision in ("fp32", "bf16")
    )
    one, other = single.step(USERS), half.step(USERS)
    assert one.loss != other.loss and one.loss == pytest.approx(other.loss, rel=0.01)
    assert half.table.weight.dtype == torch.float32


def test_two_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    """Catches: any sum whose order depends on chance, any draw from a global generator."""
    runs = [run_of(tmp_path, small_config(), str(number)) for number in range(2)]
    for number, run in enumerate(runs):
        torch.manual_seed(number)
        np.random.seed(number)
        for _ in range(3):
            run.step(USERS[:2], USERS[2:])
    wanted = runs[1].state()
    assert all(torch.equal(value, wanted[name]) for name, value in runs[0].state().items())


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    """Catches: a seed that only some of the draws know."""
    config = small_config(model={"dropout": 0.0})
    one = run_of(tmp_path, config, "one")
    other = run_of(tmp_path, config, "other")
    other.train.config = replace(config, train=replace(config.train, seed=12))
    losses = [run.gradients(USERS)[0].loss for run in (one, other)]
    assert losses[0] != losses[1]
    assert one.table.weight.shape == (ITEMS, 8)
