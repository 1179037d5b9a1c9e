"""Retrieval: the loss of a case worked out by hand, and the scorer that evaluation and recommendation ask."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.close import assert_close
from tests.support.small_model import small_config
from tests.support.small_step import ITEMS, SmallRun, random_store, whole_users
from tests.support.tiny_store import tiny_store
from turbogr.config import Config, NegativesConfig, TablesConfig, TaskConfig, TrainConfig
from turbogr.data.loader import read_batch
from turbogr.data.queries import Queries, read_queries
from turbogr.data.split import make_split
from turbogr.errors import ConfigError, DataError
from turbogr.models import Sequences
from turbogr.negatives.sampler import PopularitySampler, UniformSampler
from turbogr.ops.dropout import Noise
from turbogr.ops.hstu_attention.reference import Mask
from turbogr.tables import LocalTable
from turbogr.tasks import retrieval
from turbogr.tasks.retrieval import RetrievalScorer, RetrievalTask, build_retrieval, build_table

CPU = torch.device("cpu")


class Echo(nn.Module):
    """The item's own row is the prediction."""

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        return x


def hand_made(folder: Path, logq: bool) -> float:
    """Summed loss of one user with the events 0, 1, 2 and 3, of which the last is the test.

    The items' rows are unit vectors at 0, 60, 90 and 180 degrees. Tokens: 0 -> 1 with the negatives 2 and 1 (a hit),
    1 -> 2 with the negatives 3 and 0.
    """
    store = tiny_store(folder / "s", [[0, 1, 2, 3]])
    split = make_split(store, Config().split)
    batch = read_batch(store, split, whole_users(store, split, [0], 10), 10)
    sampler = PopularitySampler(np.array([2, 5, 1, 0]), 1.0)  # q = 3/12, 6/12, 2/12, 1/12
    config = Config(negatives=NegativesConfig(count=2, logq=logq), task=TaskConfig(temperature=0.5))
    task = RetrievalTask(config, Echo(), sampler, CPU)
    table = LocalTable(4, 2, TablesConfig(), seed=0)
    angles = torch.tensor([0.0, torch.pi / 3, torch.pi / 2, torch.pi])
    table.weight = torch.stack((angles.cos(), angles.sin()), dim=1) * torch.tensor([[1.0], [2.0], [0.5], [7.0]])
    noise = Noise(0, 0, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    negatives = torch.tensor([[2, 1], [3, 0]])
    rows = table.lookup(task.ids(batch, negatives))
    total, losses = task.loss(batch, noise, negatives, rows)
    assert losses.shape == (2,)
    return float(total.detach())


def test_the_loss_of_a_tiny_case_is_what_the_formula_says_by_hand(tmp_path: Path) -> None:
    """Catches: target and history swapped, negatives of another token, a hit that counts, lengths that matter."""
    first = np.array([0.5, 0.0]) / 0.5  # cosines of item 0 with 1 and 2
    second = np.array([3**0.5 / 2, -0.5, 0.5]) / 0.5  # of item 1 with 2, 3 and 0
    wanted = sum(np.log(np.exp(scores).sum()) - scores[0] for scores in (first, second))
    assert hand_made(tmp_path, logq=False) == pytest.approx(wanted, rel=1e-6)


def test_the_correction_takes_the_samplers_probabilities_of_the_right_items(tmp_path: Path) -> None:
    """Catches: log q looked up by place among the batch's rows in another order than theirs."""
    first = np.array([0.5, 0.0]) / 0.5 - np.log([6 / 12, 2 / 12])
    second = np.array([3**0.5 / 2, -0.5, 0.5]) / 0.5 - np.log([2 / 12, 1 / 12, 3 / 12])
    wanted = sum(np.log(np.exp(scores).sum()) - scores[0] for scores in (first, second))
    assert hand_made(tmp_path, logq=True) == pytest.approx(wanted, rel=1e-5)


def test_the_config_builds_sampler_encoder_and_table() -> None:
    config = small_config("sasrec", negatives=NegativesConfig(count=3), train=TrainConfig(seed=4))
    task = build_retrieval(config, 20, np.ones(20, np.int64), CPU)
    assert isinstance(task.sampler, UniformSampler) and type(task.encoder).__name__ == "Sasrec"
    table = build_table(config, 20, CPU)
    assert table.weight.shape == (20, 8)
    assert torch.equal(table.weight, LocalTable(20, 8, config.tables, seed=4).weight)


@pytest.fixture(params=["hstu", "sasrec"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> SmallRun:
    run = SmallRun(small_config(request.param), random_store(tmp_path / "s", [6, 3, 15, 2, 9]))
    for _ in range(3):
        run.step([0, 1, 2, 4])
    return run


def scorer_of(run: SmallRun) -> RetrievalScorer:
    return RetrievalScorer(run.task.encoder, run.table, 12, CPU)


def test_the_scorer_sees_what_training_saw_but_for_dropout(trained: SmallRun) -> None:
    """Catches: other positions or times in evaluation than in training, dropout left on, the wrong token answered."""
    queries = read_queries(trained.store, np.array([2, 4]), trained.split.train_end[[2, 4]] - 1, 12)
    both = whole_users(trained.store, trained.split, [2, 4], 12)
    batch = read_batch(trained.store, trained.split, both, 12)
    rows = trained.table.lookup(batch.items)
    positions = torch.cat([torch.arange(length) for length in batch.lengths])
    sequences = Sequences(batch.offsets, positions, batch.times, batch.next_times, None)
    encoded = trained.task.encoder(rows.weight[rows.inverse], sequences).detach()[batch.offsets[1:] - 1]
    got = scorer_of(trained).encode(queries)
    assert_close(got, encoded / encoded.norm(dim=1, keepdim=True), 1e-6)


def test_scores_are_cosines_with_every_item(trained: SmallRun) -> None:
    """Catches: rows that are not normalised, a chunk that answers for other items."""
    scorer = scorer_of(trained)
    queries = read_queries(trained.store, np.array([0, 1]), trained.split.train_end[:2], 12)
    encoded = scorer.encode(queries)
    wanted = torch.nn.functional.cosine_similarity(encoded[:, None], trained.table.weight[None], dim=2)
    chunks = [scorer.scores(encoded, begin, min(begin + 7, ITEMS)) for begin in range(0, ITEMS, 7)]
    assert_close(torch.cat(chunks, dim=1), wanted, 1e-6)
    assert_close(torch.cat(list(scorer.scan(7))), scorer.item_vectors(0, ITEMS), 0.0)
    assert scorer.num_items == ITEMS and not encoded.requires_grad


def test_a_history_is_encoded_alike_alone_and_among_others(trained: SmallRun) -> None:
    """Catches: metrics that depend on evaluate.batch_users."""
    scorer, users = scorer_of(trained), np.array([2, 0, 4])
    together = scorer.encode(read_queries(trained.store, users, trained.split.train_end[users], 12))
    for row, user in enumerate(users):
        one = np.array([user])
        alone = scorer.encode(read_queries(trained.store, one, trained.split.train_end[one], 12))
        assert_close(alone[0], together[row], 1e-5)


def test_the_moment_of_the_question_counts(trained: SmallRun) -> None:
    """Catches: a next time that is the last event's own, or the next user's first."""
    scorer, users = scorer_of(trained), np.array([2, 0])
    queries = read_queries(trained.store, users, trained.split.train_end[users], 12)
    later = replace(queries, next_time=queries.next_time + np.array([10**8, 0]))
    same = [torch.equal(a, b) for a, b in zip(scorer.encode(queries), scorer.encode(later), strict=True)]
    assert same == [type(trained.task.encoder).__name__ == "Sasrec", True]


def test_encoding_leaves_the_training_mode_as_it_was(trained: SmallRun) -> None:
    """Catches: an evaluation after which a module that asks for its mode trains as if evaluated."""
    queries = read_queries(trained.store, np.array([0]), trained.split.train_end[:1], 12)
    for training in (True, False):
        trained.task.encoder.train(training)
        scorer_of(trained).encode(queries)
        assert trained.task.encoder.training is training


def question(*lengths: int) -> Queries:
    total = sum(lengths)
    return Queries(
        users=np.full(len(lengths), -1),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        item=np.zeros(total, np.int64),
        time=np.arange(total),
        next_time=np.full(len(lengths), total),
    )


def test_a_history_that_is_empty_or_too_long_is_named(trained: SmallRun) -> None:
    """Catches: an empty row that takes its neighbour's last token for its own."""
    with pytest.raises(DataError, match="history 1 is empty: a model needs one event at least"):
        scorer_of(trained).encode(question(2, 0, 1))
    with pytest.raises(DataError, match="history 1 has 13 events, the model sees 12: cut it to the latest ones"):
        scorer_of(trained).encode(question(2, 13))


@pytest.mark.parametrize("num_context", [0, 1])
def test_a_mask_that_leaks_the_future_is_refused_in_training_and_in_evaluation(
    trained: SmallRun, num_context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a model that reads through the context the event that it is to predict: every metric too good."""
    leaking = Mask(num_context=num_context, context_sees_history=True)
    monkeypatch.setattr(retrieval, "Sequences", functools.partial(Sequences, mask=leaking))
    with pytest.raises(ConfigError, match="context_sees_history leaks the future from the second layer on"):
        trained.step([0, 1])
    with pytest.raises(ConfigError, match="context_sees_history leaks the future from the second layer on"):
        scorer_of(trained).encode(question(2, 3))


def test_nobody_asks_and_nobody_is_answered(trained: SmallRun) -> None:
    assert scorer_of(trained).encode(question()).shape == (0, 8)
