"""Targets, context and window of both attentions: against an oracle that goes pair by pair, and what may not leak."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import pairs
from tests.support.close import assert_close
from turbogr.jagged import offsets_of
from turbogr.ops.fuxi_attention import fuxi_attention
from turbogr.ops.hstu_attention import hstu_attention

MAX_LEN = 9
# (length, targets) of a row; every row has room for two tokens of context
ROWS = ((6, 2), (0, 0), (7, 0), (4, 1), (5, 3), (2, 0))
OFFSETS = offsets_of(torch.tensor([length for length, _ in ROWS]))
TARGETS = torch.tensor([targets for _, targets in ROWS])


@dataclass(frozen=True)
class Operator:
    """One attention, its oracle, and which time map its inputs have."""

    attend: Callable[..., Tensor]
    oracle: Callable[[pairs.Inputs, list[pairs.Row]], Tensor]
    names: tuple[str, str]
    """What it calls the position table and the time map."""
    decay: bool = False

    def inputs(self, seed: int = 0) -> pairs.Inputs:
        generator = torch.Generator().manual_seed(seed)
        tokens = int(OFFSETS[-1])

        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

        times = torch.randint(0, 500, (tokens,), generator=generator).tolist()
        decay = torch.tensor([0.7, 0.4, 0.8], dtype=torch.float64).requires_grad_() if self.decay else None
        return pairs.Inputs(
            q=leaf(tokens, 2, 3),
            k=leaf(tokens, 2, 3),
            v=leaf(tokens, 2, 4),
            times=times,
            next_times=[times[(3 * i + 1) % tokens] for i in range(tokens)],
            max_len=MAX_LEN,
            position=leaf(MAX_LEN),
            time=None if self.decay else leaf(17),
            decay=decay,
        )

    def run(self, inputs: pairs.Inputs, **mask: Any) -> Tensor:
        position, time = self.names
        return self.attend(
            inputs.q,
            inputs.k,
            inputs.v,
            OFFSETS,
            max_len=MAX_LEN,
            times=torch.tensor(inputs.times),
            next_times=torch.tensor(inputs.next_times),
            **{position: inputs.position, time: inputs.time if inputs.decay is None else inputs.decay},
            **mask,
            backend="reference",
        )


OPERATORS = {
    "hstu": Operator(hstu_attention, pairs.hstu, ("position_bias", "time_bias")),
    "fuxi": Operator(fuxi_attention, pairs.fuxi, ("position_table", "time_table")),
    "fuxi with a decay": Operator(fuxi_attention, pairs.fuxi, ("position_table", "time_decay"), decay=True),
}


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> Operator:
    return OPERATORS[request.param]


MASKS = [
    {"num_targets": targets, "num_context": context, "window": window, "context_sees_history": back}
    for targets, context, window, back in product((None, TARGETS), (0, 1, 2), (None, 1, 2, 4), (False, True))
    if context or not back
]
"""Every combination."""


def rows_of(mask: dict[str, Any]) -> list[pairs.Row]:
    return [
        pairs.Row(
            length,
            targets if mask["num_targets"] is not None else 0,
            mask["num_context"] if length else 0,
            mask["window"],
            mask["context_sees_history"],
        )
        for length, targets in ROWS
    ]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_combination_is_what_the_oracle_says_pair_by_pair(operator: Operator, mask: dict[str, Any]) -> None:
    """Catches: a target that sees another, a window that hides context, a bias between context and history, a position
    that counts context tokens or tells targets apart; in values and in every gradient."""
    inputs = operator.inputs()
    y, wanted = operator.run(inputs, **mask), operator.oracle(inputs, rows_of(mask))
    assert_close(y, wanted, 1e-12)
    leaves = [x for x in (inputs.q, inputs.k, inputs.v, inputs.position, inputs.time, inputs.decay) if x is not None]
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad((y * weights).sum(), leaves)
    for one, other in zip(got, torch.autograd.grad((wanted * weights).sum(), leaves), strict=True):
        assert_close(one, other, 1e-11, "gradient")


def two_layers(operator: Operator, x: Tensor, mask: dict[str, Any]) -> Tensor:
    """x [T, 2, 4] -> the same after two layers; every layer reads its q, k and v from the tokens."""
    inputs = operator.inputs()
    for _ in range(2):
        y = operator.run(pairs.Inputs(**(vars(inputs) | {"q": x[..., :3], "k": x[..., 1:], "v": x})), **mask)
        x = x + (y if y.dim() == 3 else y.sum(1))
    return x


def changed_by(operator: Operator, token: int, mask: dict[str, Any]) -> list[int]:
    """The tokens whose output after two layers is another when one token is."""
    x = torch.randn(int(OFFSETS[-1]), 2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    other = x.clone()
    other[token] += 1.0
    difference = two_layers(operator, x, mask) - two_layers(operator, other, mask)
    return difference.flatten(1).abs().amax(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("context", [0, 2])
def test_through_two_layers_a_later_token_changes_no_earlier_output(operator: Operator, context: int) -> None:
    """Catches: context that carries what comes later to what came before, which makes every metric too good."""
    # the third row is tokens 6 .. 12
    mask = {"num_context": context, "num_targets": None, "window": None}
    for token in range(6 + context, 13):
        assert changed_by(operator, token, mask) == list(range(token, 13))


def test_through_two_layers_context_that_sees_history_does_leak(operator: Operator) -> None:
    """Catches: a causality test that could not fail; this is why the switch is off."""
    mask = {"num_context": 2, "num_targets": None, "window": None, "context_sees_history": True}
    assert changed_by(operator, 12, mask) == list(range(6, 13))


def test_through_two_layers_targets_change_nothing_but_themselves(operator: Operator) -> None:
    """Catches: a candidate that history, context or another candidate has seen."""
    for back in (False, True):
        mask = {"num_context": 1, "num_targets": TARGETS, "window": None, "context_sees_history": back}
        # the first row's last two tokens, the fifth row's first of three
        assert [changed_by(operator, token, mask) for token in (4, 5, 19)] == [[4], [5], [19]]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ({"window": 0}, "window 0 at least 1"),
        ({"num_context": -1}, "num_context -1 must be at least 0"),
        ({"num_targets": TARGETS[:3]}, r"num_targets is int64 \[3\], wanted int64 \[6\]"),
        ({"num_targets": TARGETS.int()}, r"num_targets is int32 \[6\], wanted int64 \[6\]"),
        ({"num_targets": torch.tensor([7, 0, 0, 0, 0, 0])}, "row 0 has 6 tokens for 0 of context and 7 targets"),
        ({"num_targets": torch.tensor([0, 1, 0, 0, 0, 0])}, "row 1 has 0 tokens for 0 of context and 1 targets"),
        ({"num_targets": torch.tensor([0, 0, -1, 0, 0, 0])}, "row 2 has 7 tokens for 0 of context and -1 targets"),
        ({"num_targets": TARGETS, "num_context": 3}, "row 4 has 5 tokens for 3 of context and 3 targets"),
        ({"num_context": 3}, "row 5 has 2 tokens for 3 of context and 0 targets: give it all of them, or no token"),
    ],
    ids=str,
)
def test_rows_that_have_no_room_for_their_parts_are_named(operator: Operator, mask: dict[str, Any], said: str) -> None:
    """Catches: a target counted as context, or a row silently read as another kind."""
    with pytest.raises(ValueError, match=said):
        operator.run(operator.inputs(), **mask)


def test_a_row_of_context_or_of_targets_alone_is_taken(operator: Operator) -> None:
    """Catches: a row without history that is refused, or that divides by its length."""
    mask = {"num_context": 2, "num_targets": torch.tensor([4, 0, 5, 2, 3, 0])}
    lengths = [length for length, _ in ROWS]
    rows = [pairs.Row(n, t, 2 if n else 0) for n, t in zip(lengths, mask["num_targets"].tolist(), strict=True)]
    inputs = operator.inputs()
    assert_close(operator.run(inputs, **mask), operator.oracle(inputs, rows), 1e-12)
