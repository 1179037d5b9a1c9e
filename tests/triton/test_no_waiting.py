"""The device path of attention and layer reads no value on the host: it can run ahead, and be captured as a graph."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.jagged_cases import noise_of
from tests.support.no_waiting import NoWaiting
from tests.support.triton_device import DEVICE
from turbogr.jagged import offsets_of
from turbogr.ops import hstu_attention
from turbogr.ops.dropout import mask_of
from turbogr.ops.hstu_attention import triton as attention
from turbogr.ops.hstu_attention.autograd import attend
from turbogr.ops.hstu_attention.reference import Bias, Mask
from turbogr.ops.hstu_layer import triton as passes
from turbogr.ops.hstu_layer.autograd import run_layer
from turbogr.ops.hstu_layer.layer import Layer, Weights

LENGTHS = [9, 0, 1, 40]
TOKENS, WIDTH, MAX_LEN = sum(LENGTHS), 32, 64


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


def biases() -> Bias:
    times = (torch.arange(TOKENS) ** 3).to(DEVICE)
    return Bias(leaf(MAX_LEN, seed=1), leaf(129, seed=2), times, times + 100, 0.301)


@pytest.mark.parametrize("num_targets", [None, [2, 0, 0, 3]])
def test_attention_waits_for_nothing(num_targets: list[int] | None) -> None:
    """Catches: a length, a number of blocks or a largest value that is read from the device."""
    q, k, v = leaf(TOKENS, 2, 48).split(16, dim=2)
    offsets, bias = offsets_of(torch.tensor(LENGTHS)).to(DEVICE), biases()
    mask = Mask(None if num_targets is None else torch.tensor(num_targets, device=DEVICE), 0, 7)
    with NoWaiting():
        y = attend(attention, q, k, v, offsets, MAX_LEN, bias, mask)
        y.backward(torch.ones_like(y))
    assert bias.time is not None and bias.time.grad is not None and bias.time.grad.isfinite().all()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_waits_for_nothing(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the same in a pass, or in the torch code around them."""
    monkeypatch.setattr(hstu_attention, "kernels", lambda device: attention)
    offsets = offsets_of(torch.tensor(LENGTHS))
    noise = noise_of(offsets)
    noise = replace(noise, users=noise.users.to(DEVICE), positions=noise.positions.to(DEVICE))
    weights = Weights(leaf(WIDTH, 4 * WIDTH, seed=3), leaf(WIDTH, WIDTH, seed=4), leaf(WIDTH, seed=5))
    layer = Layer(offsets.to(DEVICE), 2, MAX_LEN, biases(), mask_of(0.3, noise, 1), recompute)
    x = leaf(TOKENS, WIDTH)
    with NoWaiting():
        out = run_layer(passes, x, weights, layer, torch.float32)
        out.backward(torch.ones_like(out))
    assert x.grad is not None and x.grad.isfinite().all()


def test_the_stand_in_notices_what_waits() -> None:
    x = torch.ones(3, device=DEVICE)
    for reads in (lambda: x.sum().item(), lambda: x[0].tolist(), lambda: bool(x[0]), lambda: x[x > 0], x.nonzero):
        with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
            reads()


@pytest.mark.skipif(DEVICE is None or DEVICE.type != "cuda", reason="needs a GPU that captures graphs")
def test_a_captured_layer_follows_what_its_tensors_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: work that was planned for the batch of the warm-up, and one that cannot be captured at all."""
    monkeypatch.setattr(hstu_attention, "kernels", lambda device: attention)
    offsets, bias = offsets_of(torch.tensor(LENGTHS)).to(DEVICE), biases()
    weights = Weights(leaf(WIDTH, 4 * WIDTH, seed=3), leaf(WIDTH, WIDTH, seed=4), leaf(WIDTH, seed=5))
    layer, x = Layer(offsets, 2, MAX_LEN, bias), leaf(TOKENS, WIDTH)
    leaves = [x, *weights, bias.position, bias.time]

    def run() -> list[Tensor]:
        out = run_layer(passes, x, weights, layer, torch.float32)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for lengths in (LENGTHS, [20, 10, 15, 5]):
        offsets.copy_(offsets_of(torch.tensor(lengths)))
        assert bias.times is not None and bias.next_times is not None
        bias.times += 1000
        graph.replay()
        assert all(map(torch.equal, found, run()))
