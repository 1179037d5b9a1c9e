"""Row optimizers: against torch's and against their formulas."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.close import assert_close
from turbogr.config import TablesConfig
from turbogr.ops.embedding import Gradients
from turbogr.tables.optimizer import ROW_OPTIMIZERS

ROWS, DIM = 12, 4
CONFIG = TablesConfig(betas=(0.8, 0.95), eps=1e-8)
STEPS = [[0, 3, 5], [3], [1, 3, 11], [5]]


def start() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


def gradients(number: int, ids: list[int]) -> Tensor:
    return torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(number + 1))


def run(name: str, config: TablesConfig, steps: list[list[int]] = STEPS) -> tuple[Tensor, dict[str, Tensor]]:
    weight = start()
    optimizer = ROW_OPTIMIZERS[name](config, ROWS, DIM, None)
    for number, ids in enumerate(steps):
        optimizer.update(weight, Gradients(torch.tensor(ids), gradients(number, ids)), 0.1 / (number + 1))
    return weight, optimizer.state()


def torchs(optimizer: type[torch.optim.Optimizer], sparse: bool, steps: list[list[int]], **options: object) -> Tensor:
    weight = torch.nn.Parameter(start())
    theirs = optimizer([weight], betas=CONFIG.betas, eps=CONFIG.eps, **options)  # type: ignore[call-arg]
    for number, ids in enumerate(steps):
        dense = torch.zeros(ROWS, DIM)
        dense[ids] = gradients(number, ids)
        weight.grad = dense.to_sparse(1) if sparse else dense
        theirs.param_groups[0]["lr"] = 0.1 / (number + 1)
        theirs.step()
    return weight.detach()


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_is_torchs_adamw_on_the_dense_gradient(weight_decay: float) -> None:
    """Catches: rows without a gradient that stand still, decay that the rate does not scale, a wrong correction."""
    got, _ = run("adamw", replace(CONFIG, weight_decay=weight_decay))
    assert_close(got, torchs(torch.optim.AdamW, False, STEPS, weight_decay=weight_decay), 1e-6)


def test_lazy_adam_is_torchs_sparse_adam() -> None:
    """Catches: moments that decay on untouched rows, a step counted per row."""
    got, _ = run("lazy-adam", CONFIG)
    assert_close(got, torchs(torch.optim.SparseAdam, True, STEPS), 1e-6)


def test_lazy_adam_is_adamw_where_every_row_is_touched() -> None:
    """Catches: a lazy update that differs from the dense one by more than the rows it leaves out."""
    everything = [list(range(ROWS))] * 4
    assert_close(run("lazy-adam", CONFIG, everything)[0], run("adamw", CONFIG, everything)[0], 1e-6)


def test_rowwise_adagrad_follows_its_formula() -> None:
    """Catches: an accumulator per element, a sum where the mean belongs, a root taken before the addition."""
    weight, total = start().double(), torch.zeros(ROWS).double()
    for number, ids in enumerate(STEPS):
        for row, gradient in zip(ids, gradients(number, ids).double(), strict=True):
            total[row] += gradient.square().mean()
            weight[row] -= 0.1 / (number + 1) * gradient / (total[row].sqrt() + CONFIG.eps)
    got, state = run("adagrad", CONFIG)
    assert_close(got, weight, 1e-6)
    assert_close(state["sum"], total, 1e-6)


@pytest.mark.parametrize("name", ["adagrad", "lazy-adam"])
def test_rows_that_no_step_touched_stay_as_they_were(name: str) -> None:
    """Catches: an update of the whole table, which would cost its size every step."""
    weight, state = run(name, CONFIG)
    untouched = sorted(set(range(ROWS)) - {row for ids in STEPS for row in ids})
    assert torch.equal(weight[untouched], start()[untouched])
    assert all(not value[untouched].any() for value in state.values() if value.dim())


@pytest.mark.parametrize("name", sorted(ROW_OPTIMIZERS))
def test_the_state_is_updated_in_place(name: str) -> None:
    """Catches: a state that a checkpoint loads into tensors which the optimizer no longer uses."""
    weight = start()
    optimizer = ROW_OPTIMIZERS[name](CONFIG, ROWS, DIM, None)
    before = optimizer.state()
    optimizer.update(weight, Gradients(torch.tensor([1]), torch.ones(1, DIM)), 0.1)
    assert all(value is before[key] and value.any() for key, value in optimizer.state().items())
