"""Operators inside torch.compile's graphs: no break, the eager call's numbers, and what torch.library wants to know."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support.close import assert_close
from tests.support.jagged_cases import make_case, noise_of
from tests.support.small_model import random_input, random_sequences, small_model
from turbogr.config import ModelConfig
from turbogr.hardware import compiler
from turbogr.jagged import offsets_of
from turbogr.models import Sequences, build_encoder
from turbogr.ops import (
    dropout,
    embedding,
    fuxi_attention,
    hstu_attention,
    hstu_layer,
    position_input,
    sampled_softmax,
)
from turbogr.ops.fuxi_attention.reference import Maps
from turbogr.ops.graph_operator import GraphOperator
from turbogr.ops.hstu_attention.reference import Bias, Mask
from turbogr.ops.hstu_layer.layer import Layer, Weights
from turbogr.ops.philox import Purpose
from turbogr.ops.sampled_softmax import UniformDraws

LENGTHS = [9, 0, 1, 20]
TOKENS, WIDTH, HEADS, MAX_LEN = sum(LENGTHS), 8, 2, 32
OFFSETS = offsets_of(torch.tensor(LENGTHS))
NOISE = noise_of(OFFSETS)
TIMES = torch.arange(TOKENS) ** 3
EVERY_OPTION = Mask(torch.tensor([2, 0, 0, 3]), 1, 5, True)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def biases() -> Bias:
    return Bias(leaf(MAX_LEN, seed=1), leaf(129, seed=2), TIMES, TIMES + 100, 0.301)


def attention_arguments(mask: Mask, bias: Bias) -> tuple[Any, ...]:
    q, k, v = leaf(TOKENS, HEADS, 12).split([4, 4, 4], dim=2)
    return q, k, v, OFFSETS, MAX_LEN, bias, mask, None


def fuxi_maps(position: bool = True, time: str = "table") -> Maps:
    decay = torch.tensor([0.75, 0.25, 0.875]).requires_grad_() if time == "decay" else None
    table = leaf(129, seed=2) if time == "table" else None
    return Maps(leaf(MAX_LEN, seed=1) if position else None, table, decay, TIMES, TIMES + 100, 0.301)


def fuxi_arguments(mask: Mask, maps: Maps, backend: str | None = None, offsets: Tensor = OFFSETS) -> tuple[Any, ...]:
    q, k, v = leaf(int(offsets[-1]), HEADS, 14).split([4, 4, 6], dim=2)
    return q, k, v, offsets, MAX_LEN, maps, mask, backend


def layer_arguments(dtype: torch.dtype = torch.float32, backend: str | None = None, **changed: Any) -> tuple[Any, ...]:
    weights = Weights(leaf(WIDTH, 4 * WIDTH, seed=3), leaf(WIDTH, WIDTH, seed=4), leaf(WIDTH, seed=5))
    layer = Layer(OFFSETS, HEADS, MAX_LEN, biases(), dropout.mask_of(0.3, NOISE, 2))
    return leaf(TOKENS, WIDTH), weights, replace(layer, **changed), dtype, backend


def input_arguments(noise: dropout.Noise | None) -> tuple[Any, ...]:
    mask = dropout.mask_of(0.3, noise, 0)
    return leaf(TOKENS, WIDTH), leaf(MAX_LEN, WIDTH, seed=1), NOISE.positions, 2.0, mask, None


DRAWS = UniformDraws(NOISE.key(Purpose.NEGATIVES, 0), NOISE.users, NOISE.positions, 7, 50)


def loss_arguments(given: Tensor | None, draws: UniformDraws | None) -> tuple[Any, ...]:
    wanted = given is not None
    query, rows = (x.detach().requires_grad_(wanted) for x in (leaf(TOKENS, WIDTH), leaf(50, WIDTH, seed=1)))
    return query, rows, torch.arange(TOKENS), given, draws, 0.5, None, 1e-6, wanted, None


CALLS: dict[str, tuple[GraphOperator, tuple[Any, ...]]] = {
    "attention": (hstu_attention.GRAPH_OPERATOR, attention_arguments(Mask(), biases())),
    "attention, every option": (
        hstu_attention.GRAPH_OPERATOR,
        attention_arguments(EVERY_OPTION, replace(biases(), position=None)),
    ),
    "fuxi": (fuxi_attention.GRAPH_OPERATOR, fuxi_arguments(Mask(), fuxi_maps())),
    "fuxi, every option": (
        fuxi_attention.GRAPH_OPERATOR,
        fuxi_arguments(EVERY_OPTION, fuxi_maps(position=False, time="decay")),
    ),
    "fuxi, semantic alone": (fuxi_attention.GRAPH_OPERATOR, fuxi_arguments(Mask(), fuxi_maps(False, "none"))),
    "fuxi, tiles": (fuxi_attention.GRAPH_OPERATOR, fuxi_arguments(Mask(), fuxi_maps(), "tiles")),
    "fuxi, reference": (fuxi_attention.GRAPH_OPERATOR, fuxi_arguments(EVERY_OPTION, fuxi_maps(), "reference")),
    "fuxi, tiles without a token": (
        fuxi_attention.GRAPH_OPERATOR,
        fuxi_arguments(Mask(), fuxi_maps(), "tiles", torch.tensor([0, 0, 0])),
    ),
    "layer": (hstu_layer.GRAPH_OPERATOR, layer_arguments()),
    "layer, bf16": (hstu_layer.GRAPH_OPERATOR, layer_arguments(torch.bfloat16)),
    "layer, recomputed": (hstu_layer.GRAPH_OPERATOR, layer_arguments(recompute=True)),
    "layer, without dropout": (hstu_layer.GRAPH_OPERATOR, layer_arguments(dropout=None)),
    "layer, every option": (hstu_layer.GRAPH_OPERATOR, layer_arguments(mask=EVERY_OPTION)),
    "layer, reference": (hstu_layer.GRAPH_OPERATOR, layer_arguments(backend="reference")),
    "dropout": (dropout.GRAPH_OPERATOR, (leaf(TOKENS, WIDTH), dropout.mask_of(0.3, NOISE, 2))),
    "lookup": (
        embedding.lookup.GRAPH_OPERATOR,
        (leaf(9, WIDTH), torch.tensor([8, 8, 2, 0]), torch.tensor([0, 4]), 0, 1, None),
    ),
    "loss": (sampled_softmax.GRAPH_OPERATOR, loss_arguments(torch.randint(0, 50, (TOKENS, 7)), None)),
    "loss, drawn": (sampled_softmax.GRAPH_OPERATOR, loss_arguments(None, DRAWS)),
    "input": (position_input.GRAPH_OPERATOR, input_arguments(NOISE)),
    "input, evaluated": (position_input.GRAPH_OPERATOR, input_arguments(None)),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_library_finds_nothing_to_mend(name: str) -> None:
    """Catches: a fake of another shape, type or stride, an argument that is changed or answered, a lost gradient."""
    operator, args = CALLS[name]
    torch.library.opcheck(operator.forward, operator.flat(*args))


def values_and_gradients(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = run()
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves, materialize_grads=True)]


def check_compiled(run: Callable[[], Tensor], leaves: list[Tensor], backend: str) -> None:
    """One graph without a break, and the same numbers to the last bit."""
    wanted = values_and_gradients(run, leaves)
    torch._dynamo.reset()
    got = values_and_gradients(torch.compile(run, backend=backend, fullgraph=True), leaves)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("backend", ["cpu", "tiles", "reference"])
def test_attention_is_one_node_of_a_graph(backend: str) -> None:
    """Catches: an argument that does not reach the operator, gradients in another order."""
    if hstu_attention.OPERATOR.pick(torch.device("cpu"))[0].name != "cpu" and backend == "cpu":
        pytest.skip("the CPU operators are not compiled here")
    case = make_case(LENGTHS, max_len=MAX_LEN).to(torch.float32)

    def run() -> Tensor:
        q, k, v = case.parts
        return hstu_attention.hstu_attention(
            q, k, v, case.offsets, max_len=MAX_LEN, position_bias=case.position, time_bias=case.time,
            times=case.times, next_times=case.next_times, num_targets=torch.tensor([2, 0, 0, 3]), window=7,
            backend=backend,
        )  # fmt: skip

    check_compiled(run, case.leaves(), "aot_eager")


@pytest.mark.parametrize("time", ["table", "decay"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "tiles", "reference"])
def test_fuxi_attention_is_one_node_of_a_graph(backend: str, bf16: bool, time: str) -> None:
    """Catches: a length that is read while the graph is traced, autocast that rounds maps, gradients out of order."""
    if fuxi_attention.OPERATOR.pick(torch.device("cpu"))[0].name != "cpu" and backend == "cpu":
        pytest.skip("the CPU operators are not compiled here")
    fused, maps = leaf(TOKENS, HEADS, 14), fuxi_maps(time=time)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return fuxi_attention.fuxi_attention(
                *fused.split([4, 4, 6], dim=2), OFFSETS, max_len=MAX_LEN, position_table=maps.position,
                time_table=maps.time, time_decay=maps.decay, times=maps.times, next_times=maps.next_times,
                num_targets=torch.tensor([2, 0, 0, 3]), window=7, backend=backend,
            )  # fmt: skip

    leaves = [one for one in (fused, maps.position, maps.time, maps.decay) if one is not None]
    check_compiled(run, leaves, "aot_eager")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_layer_is_one_node_of_a_graph(bf16: bool, recompute: bool) -> None:
    """Catches: a type of the GEMMs that is asked for when the graph runs, where autocast is no longer on."""
    x, weights, layer, *_ = layer_arguments()
    bias = layer.bias

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return hstu_layer.hstu_layer(
                x, OFFSETS, *weights, heads=HEADS, max_len=MAX_LEN, position_bias=bias.position, time_bias=bias.time,
                times=bias.times, next_times=bias.next_times, num_targets=EVERY_OPTION.num_targets, num_context=1,
                window=5, context_sees_history=True, dropout=0.3, noise=NOISE, layer=2, recompute=recompute,
            )  # fmt: skip

    check_compiled(run, [x, *weights, bias.position, bias.time], "aot_eager")


def encoder_run(config: ModelConfig, sequences: Sequences) -> tuple[Callable[[], Tensor], list[Tensor]]:
    encoder = build_encoder(config, 0)
    x = random_input(len(sequences.times), config.dim).requires_grad_()
    return lambda: encoder(x, sequences), [x, *encoder.parameters()]


def test_the_whole_encoder_is_one_graph() -> None:
    """Catches: a break between the operators."""
    check_compiled(*encoder_run(small_model("hstu"), random_sequences([5, 1, 12], noise=NOISE_OF_18)), "aot_eager")


def test_an_encoder_with_a_mask_is_one_graph() -> None:
    """Catches: a number of targets that is burnt into the graph, so that the first batch's stays."""
    targets = torch.tensor([2, 0, 3])
    sequences = replace(random_sequences([5, 1, 12], noise=NOISE_OF_18), mask=Mask(targets, 1, 3))
    run, leaves = encoder_run(small_model("hstu"), sequences)
    check_compiled(run, leaves, "aot_eager")
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    before = compiled()
    targets.copy_(torch.tensor([0, 0, 5]))
    assert torch.equal(compiled(), run()) and not torch.equal(compiled(), before)


def test_lookup_encoder_and_loss_are_one_graph() -> None:
    """Catches: a break between the operators of a training step."""
    config, tokens = small_model("hstu"), 18
    encoder, sequences = build_encoder(config, 0), random_sequences([5, 1, 12], noise=NOISE_OF_18)
    table, items = leaf(50, config.dim), torch.arange(tokens) % 7
    draws = UniformDraws(NOISE_OF_18.key(Purpose.NEGATIVES, 0), NOISE_OF_18.users, NOISE_OF_18.positions, 7, 50)

    def run() -> Tensor:
        (rows,) = embedding.embedding_lookup([table], items, torch.tensor([0, tokens]))
        encoded = encoder(rows, sequences)
        return sampled_softmax.sampled_softmax(encoded, table, (items + 1) % 50, draws, temperature=0.05)[0]

    leaves = [table, *encoder.parameters()]
    wanted = [found.to_dense() for found in torch.autograd.grad(run(), leaves)]
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(), leaves)
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-6)


NOISE_OF_18 = noise_of(torch.tensor([0, 5, 6, 18]))


@pytest.mark.parametrize("drawn", [False, True])
def test_the_loss_is_one_node_of_a_graph(drawn: bool) -> None:
    """Catches: losses that lead into the backward, a table's gradient that stays sparse."""
    query, rows, log_q = leaf(TOKENS, WIDTH), leaf(50, WIDTH, seed=1), torch.rand(50).log()
    positive = torch.arange(TOKENS)
    negatives = DRAWS if drawn else torch.randint(0, 50, (TOKENS, 7))

    def run() -> Tensor:
        total, losses = sampled_softmax.sampled_softmax(query, rows, positive, negatives, temperature=0.5, log_q=log_q)
        assert not losses.requires_grad
        return torch.cat((total.view(1), losses.detach()))

    out = run()
    wanted = [out, *(found.to_dense() for found in torch.autograd.grad(out.square().sum(), [query, rows]))]
    torch._dynamo.reset()
    got = values_and_gradients(torch.compile(run, backend="aot_eager", fullgraph=True), [query, rows])
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-6)


@pytest.mark.parametrize("tables", [1, 3])
def test_lookups_are_nodes_of_a_graph_with_dense_gradients(tables: int) -> None:
    """Catches: another table's rows, an id that is counted once though it occurs twice."""
    leaves = [leaf(6 + number, 3 + number, seed=number) for number in range(tables)]
    ids = torch.tensor([5, 5, 1, 0, 3, 3, 2])
    offsets = torch.tensor([0, 2, 4, 7] if tables > 1 else [0, 7])

    def run() -> Tensor:
        rows = embedding.embedding_lookup(leaves, ids, offsets)
        return torch.cat([own.flatten() for own in rows])

    out = run()
    wanted = [out, *(found.to_dense() for found in torch.autograd.grad(out.square().sum(), leaves))]
    torch._dynamo.reset()
    got = values_and_gradients(torch.compile(run, backend="aot_eager", fullgraph=True), leaves)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.skipif(compiler() is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_the_encoder_with_what_surrounds_it() -> None:
    """Catches: operands in strides that a generated kernel chose."""
    run, leaves = encoder_run(small_model("hstu"), random_sequences([5, 1, 12], noise=NOISE_OF_18))

    def surrounded() -> Tensor:
        return torch.nn.functional.gelu(run() * 2 + 1)

    wanted = values_and_gradients(surrounded, leaves)
    torch._dynamo.reset()
    got = values_and_gradients(torch.compile(surrounded, fullgraph=True), leaves)
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-5)


def test_another_batch_and_another_step_need_no_third_compilation() -> None:
    """Catches: a step or a number of tokens that is burnt into the graph: every step would compile anew."""
    encoder = build_encoder(small_model("hstu"), 0)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(encoder, backend=counter, fullgraph=True)
    for step, lengths in enumerate(([5, 1, 12], [7, 4, 3, 3], [2, 9], [11, 2, 3, 4, 2], [6, 6, 7])):
        noise = noise_of(offsets_of(torch.tensor(lengths)), step=step)
        x, sequences = random_input(sum(lengths)), random_sequences(lengths, noise=noise)
        assert torch.equal(compiled(x, sequences), encoder(x, sequences))
    assert counter.frame_count <= 2


def test_a_row_that_is_too_long_is_refused_in_a_graph_too() -> None:
    """Catches: checks of values that a graph leaves out."""
    x, weights, *_ = layer_arguments()

    def run() -> Tensor:
        return hstu_layer.hstu_layer(x, OFFSETS, *weights, heads=HEADS, max_len=19)

    with pytest.raises(ValueError, match="row 3, .*, has 20 tokens, more than max_len 19"):
        torch.compile(run, backend="aot_eager", fullgraph=True)()


def test_fake_tensors_pass_through_an_operator() -> None:
    """Catches: a kernel that is given an address where there is no memory."""
    with FakeTensorMode():
        x, offsets = torch.empty(TOKENS, WIDTH), torch.empty(5, dtype=torch.int64)
        weights = torch.empty(WIDTH, 4 * WIDTH), torch.empty(WIDTH, WIDTH), torch.empty(WIDTH)
        assert hstu_layer.hstu_layer(x, offsets, *weights, heads=HEADS, max_len=MAX_LEN).shape == x.shape


@pytest.mark.parametrize(("position", "time"), [(True, "table"), (True, "decay"), (True, "none"), (False, "none")])
def test_the_flop_counter_sees_every_channel_of_fuxi(position: bool, time: str) -> None:
    """Catches: channels that are not there, or one that costs nothing; values as wide as keys."""
    maps = fuxi_maps(position, time)
    q, k, v, *_ = fuxi_arguments(Mask(), maps)
    per_product = 2 * HEADS * sum(length * (length + 1) // 2 for length in LENGTHS)
    channels = 1 + position + (time != "none")
    with FlopCounterMode(display=False) as counter:
        out = fuxi_attention.fuxi_attention(
            q, k, v, OFFSETS, max_len=MAX_LEN, position_table=maps.position, time_table=maps.time,
            time_decay=maps.decay, times=maps.times, next_times=maps.next_times,
        )  # fmt: skip
        assert counter.get_total_flops() == per_product * (4 + 6 * channels)
        out.sum().backward()
    assert counter.get_total_flops() == per_product * (4 + 6 * channels + 3 * 4 + 2 * 6 * channels)


def test_the_flop_counter_sees_real_pairs() -> None:
    """Catches: an attention that costs nothing, or that is counted as if rows were padded."""
    x, weights, *_ = layer_arguments()
    pairs = sum(length * (length + 1) // 2 for length in LENGTHS)
    forward = 10 * TOKENS * WIDTH**2 + 4 * WIDTH * pairs
    with FlopCounterMode(display=False) as counter:
        out = hstu_layer.hstu_layer(x, OFFSETS, *weights, heads=HEADS, max_len=MAX_LEN)
        assert counter.get_total_flops() == forward
        out.sum().backward()
    assert counter.get_total_flops() == forward + 20 * TOKENS * WIDTH**2 + 10 * WIDTH * pairs
