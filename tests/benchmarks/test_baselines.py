"""The baselines of the benchmarks compute the public formulas: values and gradients agree with our references."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.baselines import padded_hstu, padded_lookup, sampled_softmax
from benchmarks.baselines.padded_step import PaddedBatch, PaddedHstu, PaddedRecipe
from tests.support.close import assert_close
from tests.support.jagged_cases import Case, make_case, values_and_gradients
from turbogr.config import ModelConfig
from turbogr.jagged import offsets_of, position_in_row
from turbogr.models import Sequences, build_encoder
from turbogr.ops import sampled_softmax as ours
from turbogr.ops.hstu_attention import hstu_attention

MAX_LEN = 80


def next_event_times(case: Case) -> None:
    """The public code knows no next time but the next event's, the target's behind the last."""
    ends = case.offsets[1:][case.offsets.diff() > 0] - 1
    own = torch.cat((case.times[1:], case.times[-1:]))
    own[ends] = case.next_times[ends]
    case.next_times.copy_(own)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    heads=st.integers(1, 2),
    in_order=st.booleans(),
    seed=st.integers(0, 99),
)
def test_padded_attention_is_the_reference(lengths: list[int], **facts: Any) -> None:
    """Catches: a baseline that is fast because it computes something else (mask, divisor, bias, bucket, next time)."""
    case = make_case(lengths, max_len=MAX_LEN, **facts)
    next_event_times(case)

    def reference(c: Case) -> Tensor:
        return hstu_attention(
            *c.parts,
            c.offsets,
            max_len=MAX_LEN,
            position_bias=c.position,
            time_bias=c.time,
            times=c.times,
            next_times=c.next_times,
            backend="reference",
        )

    def padded(c: Case) -> Tensor:
        assert c.position is not None and c.time is not None
        later = torch.full((MAX_LEN - 1,), 1e3, dtype=torch.float64)  # distances into the future are never seen
        return padded_hstu.jagged_attention(
            *c.parts,
            c.offsets,
            max_len=MAX_LEN,
            position=torch.cat((c.position.flip(0), later)),
            time=c.time,
            times=c.times,
            next_times=c.next_times,
        )

    for got, wanted in zip(values_and_gradients(padded, case), values_and_gradients(reference, case), strict=True):
        assert_close(got, wanted, 1e-10)


@pytest.mark.parametrize("rows", [1, 9, 300])
@pytest.mark.parametrize(
    "name", ["gathered", "gathered_in_chunks", "gathered_in_place_in_chunks", "multiplied_in_chunks"]
)
def test_every_form_of_the_sampled_softmax_is_the_reference(name: str, rows: int) -> None:
    """Catches: a chunk lost, a hit that counts, a gradient that misses the norm."""
    query, table = torch.randn(23, 6).double(), torch.randn(rows, 6).double()
    positive, negatives = torch.randint(0, rows, (23,)), torch.randint(0, rows, (23, 12))
    options = {} if name == "gathered" else {"chunk": 5}
    got = getattr(sampled_softmax, name)(query, table, positive, negatives, 0.05, **options)
    leaves = query.requires_grad_(), table.requires_grad_()
    total, _ = ours.sampled_softmax(
        query, table, positive, negatives, temperature=0.05, eps=sampled_softmax.EPS, backend="reference"
    )
    for one, wanted in zip(got, (total, *torch.autograd.grad(total, leaves)), strict=True):
        assert_close(one, wanted, 1e-9)


def test_the_gathered_sampled_softmax_has_the_same_gradient_as_a_sparse_one() -> None:
    """Catches: repeats that are counted once."""
    query, table = torch.randn(23, 6).double(), torch.randn(9, 6).double()
    positive, negatives = torch.randint(0, 9, (23,)), torch.randint(0, 9, (23, 12))
    *_, dense = sampled_softmax.gathered(query, table, positive, negatives, 0.05)
    *_, sparse = sampled_softmax.gathered(query, table, positive, negatives, 0.05, sparse=True)
    assert sparse.is_sparse and sparse.is_coalesced()
    assert_close(sparse.to_dense(), dense, 1e-12)


def small_model() -> tuple[ModelConfig, PaddedHstu]:
    config = ModelConfig(name="hstu", dim=8, blocks=2, heads=2, max_history=20, dropout=0.0)
    return config, PaddedHstu(30, 8, 2, 2, config.max_len, rate=0.0).double()


def small_batch(lengths: list[int]) -> dict[str, Tensor]:
    tokens = sum(lengths)
    times = torch.randint(0, 10**9, (tokens,)).sort().values
    return {
        "offsets": offsets_of(torch.tensor(lengths)),
        "items": torch.randint(0, 30, (tokens,)),
        "targets": torch.randint(0, 30, (tokens,)),
        "times": times,
        "next_times": torch.cat((times[1:], times[-1:] + 50)),
    }


def test_the_padded_step_has_our_loss_and_our_gradients() -> None:
    """Catches: a baseline step that leaves out work (a layer, a bias, the norm) or trains another model."""
    config, model = small_model()
    columns = small_batch([7, 1, 20, 3])
    ends = columns["offsets"][1:] - 1
    columns["next_times"][ends[:-1]] = columns["times"][ends[:-1]] + 50
    negatives = torch.randint(0, 30, (31, 5))
    recipe = PaddedRecipe(model, 5, 0.05, 1e-3, (0.9, 0.98))
    loss = recipe.loss(PaddedBatch.of(**columns), negatives + 1)
    loss.backward()

    encoder = build_encoder(config, 0).double()
    with torch.no_grad():
        encoder.input.table.copy_(model.positions.weight)
        for block, layer in zip(encoder.blocks, model.layers, strict=True):
            block.uvqk.copy_(layer.uvqk)
            block.out_weight.copy_(layer.out.weight)
            block.out_bias.copy_(layer.out.bias)
            block.position_bias.copy_(layer.position[: config.max_len].flip(0))
            block.time_bias.copy_(layer.time)
    table = model.items.weight.detach()[1:].clone().requires_grad_()
    positions = position_in_row(columns["offsets"], 31)
    sequences = Sequences(columns["offsets"], positions, columns["times"], columns["next_times"], None)
    total, _ = ours.sampled_softmax(
        encoder(table[columns["items"]], sequences),
        table,
        columns["targets"],
        negatives,
        temperature=0.05,
        backend="reference",
    )
    (total / 31).backward()
    assert_close(loss, total / 31, 1e-10)
    assert_close(model.items.weight.grad[1:], table.grad, 1e-9, "table")
    assert_close(model.positions.weight.grad, encoder.input.table.grad, 1e-9, "positions")
    for block, layer in zip(encoder.blocks, model.layers, strict=True):
        assert_close(layer.uvqk.grad, block.uvqk.grad, 1e-9, "uvqk")
        assert_close(layer.out.weight.grad, block.out_weight.grad, 1e-9, "out")
        assert_close(layer.time.grad, block.time_bias.grad, 1e-9, "time")
        assert_close(layer.position.grad[: config.max_len].flip(0), block.position_bias.grad, 1e-9, "position")


def test_the_padded_step_learns() -> None:
    """Catches: an optimizer that has no parameters, or a loss that has no graph."""
    torch.manual_seed(0)
    recipe = PaddedRecipe(small_model()[1], 5, 0.05, 1e-2, (0.9, 0.98))
    batch = PaddedBatch.of(**small_batch([7, 1, 20, 3]))
    losses = [recipe.step(batch) for _ in range(30)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert not recipe.model.items.weight[0].any()


def test_padded_lookups_and_their_backward_agree_with_autograd() -> None:
    """Catches: padding that gets a row or a gradient, or ids added to another table."""
    tables = [torch.randn(rows, 4).double().requires_grad_() for rows in (5, 9)]
    ids = [torch.randint(0, 5, (3, 6)), torch.randint(0, 9, (2, 6))]
    for table in tables:
        table.data[0] = 0.0
    out = padded_lookup.forward(tables, ids)
    gradients = [torch.randn_like(rows) for rows in out]
    wanted = torch.autograd.grad(out, tables, gradients)
    for form in (padded_lookup.backward, padded_lookup.backward_index_add):
        for got, one in zip(form(tables, ids, gradients), wanted, strict=True):
            assert_close(got, one, 1e-12)
    for rows, own in zip(out, ids, strict=True):
        assert not rows[own == 0].any()
