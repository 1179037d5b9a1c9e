"""Several ranks train what one process trains on the same global steps, however users come to ranks."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import on_ranks
from tests.support.small_run import small_config
from tests.support.small_step import make_double
from tests.support.tiny_store import tiny_store
from turbogr.config import Config, check
from turbogr.data.batching import Selection
from turbogr.data.dealing import Dealer
from turbogr.data.store import Store
from turbogr.errors import ConfigError, SaidByAll
from turbogr.ranks import ALONE, Ranks
from turbogr.tables import RowGradients
from turbogr.train.dense_sharding import whole
from turbogr.train.metrics import read_lines
from turbogr.train.step import StepContext, StepSums
from turbogr.train.trainer import Trainer, train

WAYS: dict[str, dict[str, Any]] = {
    "none": {"balance__strategy": "none"},
    "token-aware": {"balance__strategy": "token-aware"},
    "global": {"balance__strategy": "global"},
    "exchanged": {"balance__users": "exchanged"},
    "accumulated": {"train__accumulate": 2},
    "in turns": {"balance__rank_tokens": 40},
    "windows": {"balance__window": 9},
    "2 groups": {"tables__groups": 2, "balance__rank_tokens": 40},
    "fsdp": {"dense__sharding": "fsdp", "dense__clip": 0.01},
    "1 group": {"tables__groups": 1, "tables__optimizer": "adagrad", "balance__strategy": "none"},
    "adagrad": {"tables__optimizer": "adagrad", "negatives__sampler": "popularity", "negatives__logq": True},
}
LONGEST = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """61 users of very different length: the last step of an epoch has rows for some ranks only."""
    generator = np.random.default_rng(0)
    lengths = np.concatenate(([LONGEST], generator.integers(3, 12, 50), generator.integers(20, LONGEST, 10)))
    items = [generator.integers(0, 80, length).tolist() for length in lengths]
    times = [np.sort(generator.integers(0, 10**7, length)).tolist() for length in lengths]
    return tiny_store(tmp_path_factory.mktemp("ranks") / "store", items, times, num_items=80)


def config_of(store: Store, batches: int, way: str, **changes: Any) -> Config:
    model = {"model__max_history": LONGEST, "train__batch_users": 3, "balance__batches": batches, "negatives__count": 8}
    return small_config(store, **(model | WAYS[way] | changes))


def double(trainer: Trainer) -> None:
    make_double(trainer.task.encoder, trainer.table)


def trained(ranks: Ranks, config: Config, steps: int, precise: bool) -> dict[str, Any]:
    """State and logged facts after that many steps, from one epoch into the next."""
    trainer = Trainer(config, Store.open(config.data.store), Path("unused"), ranks)
    if precise:
        double(trainer)
    seen = []
    while len(seen) < steps:
        for _ in trainer.steps(trainer.plan(trainer.progress.epoch)):
            seen.append(trainer.progress.epoch_loss)
            if len(seen) == steps:
                break
        trainer.progress.epoch += 1
        trainer.progress.batches = 0
    state = {name: whole(value).clone() for name, value in trainer.state().items()}
    return {"losses": seen, "state": state, "tokens": trainer.progress.epoch_tokens}


def trained_all(ranks: Ranks, configs: dict[str, Config], steps: int, precise: bool) -> dict[str, dict[str, Any]]:
    return {way: trained(ranks, config, steps, precise) for way, config in configs.items()}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest relative distance of any tensor."""
    assert one.keys() == other.keys()
    distances = [
        float((one[name].double() - other[name].double()).norm() / (other[name].double().norm() + 1e-30))
        for name in one
    ]
    return max(distances)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("precise", "steps", "tolerance"), [(True, 50, 1e-9), (False, 5, 1e-5)])
def test_ranks_equal_one_process_on_the_same_steps(
    store: Store, world: int, precise: bool, steps: int, tolerance: float
) -> None:
    """Catches: a gradient divided by the wrong count, rows lost or counted twice by a deal, draws that depend on the
    rank, ranks that drift apart, a rank without rows that hangs or adds something."""
    ways = list(WAYS)[: 4 if world == 2 else None]
    configs = {way: config_of(store, world, way) for way in ways}
    one_process = {way: config_of(store, world, way, tables__groups=0) for way in ways}
    alone = trained_all(ALONE, one_process, steps, precise)
    every = on_ranks(world, trained_all, configs, steps, precise)
    for way in ways:
        assert every[0][way]["tokens"] == alone[way]["tokens"], way
        assert furthest(every[0][way]["state"], alone[way]["state"]) < tolerance, way
        np.testing.assert_allclose(every[0][way]["losses"], alone[way]["losses"], rtol=tolerance)
        for other in every[1:]:
            assert all(torch.equal(every[0][way]["state"][name], value) for name, value in other[way]["state"].items())


def facts_of_steps(ranks: Ranks, configs: dict[str, Config]) -> dict[str, list[dict[str, Any]]]:
    """What the ranks said of every step of an epoch."""
    found: dict[str, list[dict[str, Any]]] = {}
    for way, config in configs.items():
        trainer = Trainer(config, Store.open(config.data.store), Path("unused"), ranks)
        contexts = trainer.feed.contexts(trainer.plan(0), 0, 0)
        found[way] = []
        while (sums := trainer.schedule.progress(contexts)) is not None:
            users = sorted(int(user) for text in ranks.texts(_users(sums.lengths)) for user in text.split(","))
            facts = sums.total
            found[way].append(
                {"lengths": users, "tokens": facts.tokens.tolist(), "cost": facts.cost.tolist()}
                | facts.balance()
                | {"moved": sums.moved_tokens}
            )
    return found


def _users(lengths: list[int]) -> str:
    return ",".join(map(str, lengths)) or "0"


@pytest.mark.slow
def test_balance_is_really_on(store: Store) -> None:
    """Catches: a strategy that is read and silently left off, or one that changes which users make up a step."""
    names = ("none", "global", "exchanged", "token-aware")
    configs = {way: config_of(store, 2, way, train__batch_users=10) for way in names}
    first, _ = on_ranks(2, facts_of_steps, configs)
    mean = {way: np.mean([step["balance/cost_imbalance"] for step in first[way][:-1]]) for way in configs}
    assert mean["global"] < 0.5 * mean["none"] and mean["exchanged"] < 0.5 * mean["none"]
    gap = {way: np.mean([step["balance/token_gap"] for step in first[way][:-1]]) for way in configs}
    assert gap["token-aware"] < 0.7 * gap["none"]
    for one, two, three in zip(first["none"], first["global"], first["exchanged"], strict=True):
        assert _without_empty(one) == _without_empty(two) == _without_empty(three)
    assert sum(step["moved"] for step in first["exchanged"]) > 0 == sum(step["moved"] for step in first["global"])


def _without_empty(step: dict[str, Any]) -> list[int]:
    return [length for length in step["lengths"] if length]


def test_an_epoch_covers_every_user_once_whatever_the_strategy(store: Store) -> None:
    """Catches: a user lost or repeated between ranks or at an epoch's end, by any strategy and number of ranks."""
    for way in ("none", "token-aware", "global", "in turns", "accumulated", "windows"):
        for world in (1, 2, 3, 5):
            trainer = Trainer(config_of(store, world, way), store, Path("unused"), ALONE)
            plan, met = trainer.plan(0), []
            for rank in range(world):
                trainer.feed.dealer = Dealer(trainer.config.balance, rank, world, trainer.cost)
                contexts = list(trainer.feed.contexts(plan, 0, 0))
                assert [context.step for context in contexts if context.completes] == list(
                    range(trainer.feed.steps_of(plan))
                )
                met += [
                    (user, skip, tokens)
                    for context in contexts
                    for user, skip, tokens in zip(
                        context.rows.users.tolist(),
                        context.rows.skips.tolist(),
                        context.rows.tokens.tolist(),
                        strict=True,
                    )
                ]
            wanted = sorted(zip(plan.users.tolist(), plan.skips.tolist(), plan.tokens.tolist(), strict=True))
            assert sorted(met) == wanted, (way, world)
            assert sum(tokens for _, _, tokens in met) == int(trainer.pairs.sum())


def trained_by_samples(ranks: Ranks, config: Config) -> dict[str, Any]:
    return trained(ranks, config, 4, True)


def test_weighting_by_samples_is_the_papers_formula(store: Store) -> None:
    """Catches: the option read and ignored; a rank's mean weighted by its tokens, or divided twice."""
    config = config_of(store, 2, "none", balance__weight="samples", tables__optimizer="adagrad")
    first, second = on_ranks(2, trained_by_samples, config)
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
    # one process that adds up (users of the batch / users of the step) * mean loss of the batch
    trainer = Trainer(config_of(store, 2, "none", tables__optimizer="adagrad"), store, Path("unused"), ALONE)
    double(trainer)
    plan, step = trainer.plan(0), trainer.step
    for number in range(4):
        sums, parts = (
            StepSums(),
            [plan.batches(2 * number, 2 * number + 1), plan.batches(2 * number + 1, 2 * number + 2, 3)],
        )
        for part in parts:
            context = StepContext(number, part, completes=False, sums=sums)
            held = [None if one.grad is None else one.grad.clone() for one in step.parameters]
            step.task.encoder.zero_grad(set_to_none=True)
            for stage in step.stages[:8]:
                stage.run(context)
            factor = len(part) / int(part.tokens.sum())
            for one, before in zip(step.parameters, held, strict=True):
                assert one.grad is not None
                one.grad = one.grad * factor + (0 if before is None else before)
            rows = sums.row_gradients.pop()
            sums.row_gradients.insert(0, RowGradients(rows.ids, rows.values * factor))
        users = sum(map(len, parts))
        merged = RowGradients.merged(sums.row_gradients[::-1], trainer.table.num_rows)
        trainer.table.apply(merged, trainer.config.tables.lr, scale=1 / users)
        for one in step.parameters:
            assert one.grad is not None
            one.grad /= users
        step.dense_optimizer.step()
        step.dense_optimizer.zero_grad(set_to_none=True)
    assert furthest(first["state"], trainer.state()) < 1e-9


def test_windows_are_users_of_their_own(store: Store, tmp_path: Path) -> None:
    """Catches: a window that sees the one before it, a token lost at its edge, positions that go on. The rule: the same
    gradients as users who have just that window's events."""
    cut = Trainer(config_of(store, 1, "windows", train__batch_users=200), store, Path("unused"), ALONE)
    plan = cut.plan(0)
    items, times = [], []
    for user, skip, tokens in zip(plan.users.tolist(), plan.skips.tolist(), plan.tokens.tolist(), strict=True):
        begin = int(store.offsets[user]) + skip
        events = slice(begin, begin + tokens + 1)
        # a test event, which nobody trains on
        items.append([*store.item[events].tolist(), 0])
        times.append([*store.time[events].tolist(), 10**8])
    apart_store = tiny_store(tmp_path / "store", items, times, num_items=80)
    apart = Trainer(config_of(apart_store, 1, "none", train__batch_users=200), apart_store, Path("unused"), ALONE)
    chosen = plan.batches(0, len(plan))
    rows = Selection.of(np.arange(len(chosen)), chosen.tokens)
    found = []
    for trainer, selection in ((cut, chosen), (apart, rows)):
        double(trainer)
        context = StepContext(0, selection, completes=True, sums=StepSums())
        for stage in trainer.step.stages:
            stage.run(context)
        found.append((context.sums.loss, {name: value.clone() for name, value in trainer.state().items()}))
    assert len(chosen) > len(np.unique(chosen.users)) and int(chosen.tokens.max()) <= 9
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert furthest(found[0][1], found[1][1]) < 1e-9


def refused(ranks: Ranks, configs: list[Config], folder: Path) -> str:
    try:
        train(configs[ranks.rank], folder, ranks=ranks)
    except SaidByAll as error:
        return str(error)
    return "trained"


def test_ranks_with_other_stores_or_settings_are_refused(store: Store, tmp_path: Path) -> None:
    """Catches: replicas that train on different data, or that hang because one of them was refused."""
    other = tiny_store(tmp_path / "other", [[1, 2, 3, 4]] * 70, num_items=80)
    config = config_of(store, 2, "none")
    stores = on_ranks(2, refused, [config, config_of(other, 2, "none")], tmp_path / "run")
    assert stores[0] == stores[1] and stores[0].startswith("rank 1 reads another store than rank 0: start every rank")
    settings = on_ranks(2, refused, [config, config_of(store, 2, "none", train__seed=7)], tmp_path / "run")
    assert settings[0].startswith("rank 1 has other settings than rank 0")
    assert not (tmp_path / "run").exists()


def not_finite(ranks: Ranks, config: Config) -> str:
    trainer = Trainer(config, Store.open(config.data.store), Path("unused"), ranks)
    trainer.table.weight[:] = float("nan")
    try:
        next(trainer.steps(trainer.plan(0)))
    except SaidByAll as error:
        return str(error)
    return "went on"


def test_a_loss_that_is_not_finite_stops_every_rank_and_names_users(store: Store) -> None:
    """Catches: one rank that stops while the others wait for it."""
    first, second = on_ranks(2, not_finite, config_of(store, 2, "global"))
    assert first == second and first.startswith("the loss of step 0 is not finite (users 10")


def late(ranks: Ranks, config: Config, wait_s: float) -> dict[str, Any]:
    """One step, for which rank 1 is late."""
    trainer = Trainer(config, Store.open(config.data.store), Path("unused"), ranks)
    contexts = trainer.feed.contexts(trainer.plan(0), 0, 0)
    context = next(contexts)
    if ranks.rank == 1:
        time.sleep(wait_s)
    sums = trainer.schedule.progress(iter([context]))
    assert sums is not None
    state = {name: whole(value) for name, value in trainer.state().items()}
    return {"state": state, "balance": sums.total.balance()}


@pytest.mark.parametrize("way", ["global", "1 group", "exchanged"])
def test_a_late_rank_changes_no_bit_and_is_seen_in_the_waiting(store: Store, way: str) -> None:
    """Catches: a sum that depends on who comes first; a waiting time that does not see it, also where ranks talk with
    one another before they have computed."""
    config = config_of(store, 2, way)
    calm, delayed = on_ranks(2, late, config, 0.0)[0], on_ranks(2, late, config, 0.5)[0]
    assert all(torch.equal(whole(value), whole(delayed["state"][name])) for name, value in calm["state"].items())
    assert delayed["balance"]["balance/wait_ms"] > 200


def measured_cost(ranks: Ranks, config: Config) -> tuple[bool, float, float]:
    trainer = Trainer(config, Store.open(config.data.store), Path("unused"), ranks)
    for epoch in range(3):
        trainer.progress.batches = 0
        for _ in trainer.steps(trainer.plan(epoch)):
            pass
    return trainer.cost.fitted, trainer.cost.now.linear, trainer.cost.now.pair


def test_measured_times_decide_the_deal_and_all_ranks_have_the_same(store: Store) -> None:
    """Catches: balance.cost read and ignored, or ranks that deal by costs of their own and so lose rows."""
    config = config_of(store, 2, "global", balance__cost="measured")
    first, second = on_ranks(2, measured_cost, config)
    assert first[0] and first == second
    assert not on_ranks(2, measured_cost, config_of(store, 2, "global"))[0][0]


def run_to_the_end(ranks: Ranks, config: Config, folder: Path, resume: bool) -> dict[str, Any]:
    return train(config, folder, resume=resume, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["token-aware", "exchanged", "windows"])
def test_a_run_goes_on_inside_an_epoch_on_other_ranks_and_finds_the_same_best(
    store: Store, tmp_path: Path, way: str
) -> None:
    """Catches: steps repeated, lost or otherwise made up after a resume on another number of ranks; a best checkpoint
    or an early stop that ranks do not agree on."""
    early = {"split__protocol": "leave-one-out-validation", "train__patience": 2, "train__checkpoint_every": 3}
    config = config_of(store, 2, way, train__epochs=3, **early)
    wanted = run_to_the_end(ALONE, config, tmp_path / "alone", False)
    on_ranks(2, run_to_the_end, replace(config, train=replace(config.train, epochs=1)), tmp_path / "run", False)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    shutil.rmtree(newest)  # the one before it lies inside the epoch
    found = on_ranks(3, run_to_the_end, config, tmp_path / "run", True)[0]
    lines = [list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("alone", "run")]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    losses = [[line["train/loss"] for line in one] for one in lines]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert found["selected_on"] == wanted["selected_on"] == "validation"
    assert found["best"]["metrics"]["hr@50"] == pytest.approx(wanted["best"]["metrics"]["hr@50"], abs=0.05)


def test_weighting_by_samples_is_refused_where_it_would_mean_something_else(store: Store) -> None:
    """Catches: a loss that depends on how many ranks a run was resumed on, or on a rank's memory."""
    with pytest.raises(ConfigError, match="a step has 2 batches for 1 ranks"):
        Trainer(config_of(store, 2, "none", balance__weight="samples"), store, Path("unused"), ALONE)
    with pytest.raises(ConfigError, match="balance.rank_tokens would cut into turns"):
        check(config_of(store, 1, "none", balance__weight="samples", balance__rank_tokens=50))
