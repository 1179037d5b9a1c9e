"""Tables of unbounded ids: against a plain model of the same rules, row by row."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turbogr.config import TablesConfig
from turbogr.errors import ConfigError
from turbogr.tables import Limits, LocalTable, RowGradients, Rows, UnboundedTable

DIM, LR, SEED = 4, 0.1, 3
Step = tuple[Tensor, Tensor]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make(capacity: int = 40, optimizer: str = "adagrad", dtype: str = "fp32", **limits: Any) -> UnboundedTable:
    config = TablesConfig(optimizer=optimizer, dtype=dtype, eps=1e-3)  # type: ignore[arg-type]
    return UnboundedTable(Limits(capacity=capacity, **limits), DIM, config, seed=SEED)


def stream(steps: int, ids: int, per_step: int, seed: int = 0) -> list[Step]:
    """Ids of all sizes, some hot ones among many that come once or twice."""
    generator = torch.Generator().manual_seed(seed)
    names = torch.randint(-(2**62), 2**62, (ids,), generator=generator)
    names[: ids // 4] = torch.arange(-5, ids // 4 - 5)
    made = []
    for _ in range(steps):
        drawn = (torch.rand(per_step, generator=generator).square() * ids).long()
        unique = names[drawn].unique()
        made.append((unique, torch.randn(len(unique), DIM, generator=generator)))
    return made


class Model:
    """The rules in Python: one small table for every id that has a row."""

    def __init__(self, limits: Limits, config: TablesConfig) -> None:
        self.limits, self.config = limits, config
        self.rows: dict[int, LocalTable] = {}
        self.last: dict[int, int] = {}
        self.score: dict[int, float] = {}
        self.seen: dict[int, int] = {}
        self.step = 0
        self.counts = dict.fromkeys(("unknown", "admitted", "refused_new", "refused_full", "evicted"), 0)

    def worth(self, one: int) -> float:
        if self.limits.evict == "age":
            return self.last[one]
        return self.score[one] * 0.5 ** ((self.step - self.last[one]) / self.limits.half_life)

    def touch(self, one: int) -> None:
        self.score[one] = (self.worth(one) if self.limits.evict == "score" and one in self.score else 0.0) + 1
        self.last[one] = self.step

    def apply(self, ids: list[int], gradients: Tensor) -> None:
        self.step += 1
        unknown = [one for one in ids if one not in self.rows]
        for one in set(ids) - set(unknown):
            self.touch(one)
        for one in unknown:
            self.seen[one] = self.seen.get(one, 0) + 1
        ready = [one for one in unknown if self.seen[one] >= self.limits.admit_after]
        missing = len(ready) + len(self.rows) - self.limits.capacity
        if missing > 0:
            old = sorted((self.worth(one), one) for one in self.rows if self.last[one] < self.step)
            for _, one in old[: max(missing, self.limits.capacity // 64)]:
                for kept in (self.rows, self.last, self.score):
                    del kept[one]  # type: ignore[attr-defined]
                self.counts["evicted"] += 1
        given_rows = ready[: self.limits.capacity - len(self.rows)]
        for one in given_rows:
            self.rows[one] = LocalTable(1, DIM, self.config, seed=SEED, names=torch.tensor([one]))
            self.touch(one)
        self.counts["unknown"] += len(unknown)
        self.counts["admitted"] += len(given_rows)
        self.counts["refused_new"] += len(unknown) - len(ready)
        self.counts["refused_full"] += len(ready) - len(given_rows)
        for one, gradient in zip(ids, gradients, strict=True):
            if one in self.rows:
                self._update(self.rows[one], gradient)

    def _update(self, row: LocalTable, gradient: Tensor) -> None:
        for counter in (row.rounding, row.optimizer):
            if getattr(counter, "step", None) is not None:
                counter.step.fill_(self.step - 1)  # type: ignore[union-attr]
        row.apply(RowGradients(torch.tensor([0]), gradient.view(1, DIM)), LR)


def assert_as_the_model(table: UnboundedTable, model: Model) -> None:
    assert dataclasses.asdict(table.counts()) == model.counts
    assert table.ids().tolist() == sorted(model.rows)
    counts = table.counts()
    assert counts.unknown == counts.admitted + counts.refused_new + counts.refused_full
    assert table.num_rows == counts.admitted - counts.evicted == len(model.rows)
    wanted = torch.cat([torch.empty(0, DIM), *(model.rows[one].weight for one in sorted(model.rows))])
    assert torch.equal(table.rows(0, table.num_rows), wanted)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adagrad", "lazy-adam"])
@pytest.mark.parametrize("limits", [{}, {"evict": "score", "half_life": 3}, {"admit_after": 3}])
def test_a_stream_of_five_times_more_ids_than_rows_adds_up_and_survivors_are_exact(
    limits: dict[str, Any], optimizer: str, dtype: str
) -> None:
    """Catches: an id that is neither counted as admitted nor as refused, a new row that inherits the optimizer state of
    an evicted one, an eviction that moves or touches a row that stays, rounding keyed by the slot."""
    table = make(optimizer=optimizer, dtype=dtype, **limits)
    config = TablesConfig(optimizer=optimizer, dtype=dtype, eps=1e-3)  # type: ignore[arg-type]
    model = Model(table.limits, config)
    steps = stream(60, 200, 16)
    assert len(torch.cat([ids for ids, _ in steps]).unique()) > 4 * table.limits.capacity
    for ids, gradients in steps:
        table.apply(RowGradients(ids, gradients), LR)
        model.apply(ids.tolist(), gradients)
        assert_as_the_model(table, model)
    counts = table.counts()
    assert counts.evicted > 50 and (counts.refused_new > 100) == ("admit_after" in limits)


@given(data=st.data())
def test_any_stream_follows_the_rules(data: st.DataObject) -> None:
    """Catches: an update of more ids than there are rows, an empty one, an id that comes back after its eviction."""
    evict, capacity = data.draw(st.sampled_from(("age", "score"))), data.draw(st.integers(1, 70))
    table = make(capacity, evict=evict, half_life=2)
    model = Model(table.limits, TablesConfig(optimizer="adagrad", eps=1e-3))
    for _ in range(data.draw(st.integers(1, 8))):
        ids = sorted(data.draw(st.sets(st.integers(-40, 40), max_size=40)))
        gradients = torch.randn(len(ids), DIM)
        table.apply(RowGradients(torch.tensor(ids, dtype=torch.int64), gradients), LR)
        model.apply(ids, gradients)
        assert dataclasses.asdict(table.counts()) == model.counts and table.ids().tolist() == sorted(model.rows)


def test_looking_up_changes_nothing_and_a_new_id_has_its_initial_row() -> None:
    """Catches: an evaluation that creates rows, a first answer that the row's creation changes."""
    table = make()
    ids = torch.tensor([2**62, -7, 2**62, 5])
    before = {name: value.clone() for name, value in table.state().items()}
    rows = table.lookup(ids)
    assert all(torch.equal(value, before[name]) for name, value in table.state().items())
    assert rows.unique_ids.tolist() == [-7, 5, 2**62] and rows.inverse.tolist() == [2, 0, 2, 1] and rows.whole is None
    table.apply(RowGradients(rows.unique_ids, torch.zeros(3, DIM)), LR)
    assert table.num_rows == 3 and torch.equal(table.rows(0, 3), rows.weight)
    assert torch.equal(table.lookup(ids).weight, rows.weight)
    whole = LocalTable(6, DIM, TablesConfig(optimizer="adagrad"), seed=SEED)
    assert torch.equal(rows.weight[1], whole.weight[5])


def test_a_step_through_the_rows_of_a_batch_is_that_of_a_bounded_table() -> None:
    """Catches: gradients that reach another id's row, repeats counted once."""
    config = TablesConfig(optimizer="lazy-adam", eps=1e-3)
    bounded = LocalTable(30, DIM, config, seed=SEED)
    unbounded = UnboundedTable(Limits(capacity=30), DIM, config, seed=SEED)

    def through(table: LocalTable | UnboundedTable, ids: Tensor, weights: Tensor) -> Rows:
        rows = table.lookup(ids)
        (rows.at(rows.inverse) * weights).sum().backward()
        table.apply(RowGradients.merged([rows.gradients(), rows.gradients()], table.id_bound), LR, scale=0.5)
        return rows

    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        ids = torch.randint(0, 30, (20,), generator=generator)
        weights = torch.randn(20, DIM, generator=generator)
        assert torch.equal(through(bounded, ids, weights).weight, through(unbounded, ids, weights).weight)
    assert torch.equal(unbounded.rows(0, 30), bounded.weight[unbounded.ids()])
    assert torch.equal(torch.cat([rows for _, rows in unbounded.scan(7)]), unbounded.rows(0, 30))
    occurrences = torch.tensor([3, 3, 29, 0])
    for table in (bounded, unbounded):
        table.apply_occurrences(occurrences, torch.ones(4, DIM), LR)
    assert torch.equal(unbounded.rows(0, 30), bounded.weight[unbounded.ids()])


@pytest.mark.parametrize("limits", [{}, {"evict": "score"}, {"admit_after": 2}])
def test_a_table_continues_from_its_state(limits: dict[str, Any]) -> None:
    """Catches: something that decides about rows and is not saved, an index that must be built again."""
    one, other = make(20, dtype="bf16", **limits), make(20, dtype="bf16", **limits)
    steps = stream(40, 100, 12, seed=1)
    for ids, gradients in steps[:25]:
        one.apply(RowGradients(ids, gradients), LR)
    for name, value in one.state().items():
        other.state()[name].copy_(value)
    for table in (one, other):
        for ids, gradients in steps[25:]:
            table.apply(RowGradients(ids, gradients), LR)
    assert one.counts() == other.counts()
    assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())


def test_any_backend_and_number_of_threads_gives_the_same_table(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: slots that go by thread, a map without a compiler that decides otherwise."""
    answers = []
    for count, backend in ((1, ""), (2, ""), (1, "reference")):
        threads(count)
        monkeypatch.setenv("TURBOGR_BACKEND", backend)
        table = make(20, admit_after=2)
        for ids, gradients in stream(25, 100, 30, seed=2):
            table.apply(RowGradients(ids, gradients), LR)
        answers.append({name: value for name, value in table.state().items() if name != "map.index"})
    for name, value in answers[0].items():
        assert torch.equal(value, answers[1][name]), name
        assert torch.allclose(value, answers[2][name], rtol=1e-5), name


def test_ids_are_admitted_when_they_were_seen_often_enough_and_never_later() -> None:
    """Catches: an admission that counts occurrences instead of updates, a first sighting that is not counted."""
    table = make(100, admit_after=3)
    for number in range(1, 5):
        table.apply_occurrences(torch.tensor([7, 7, 7, 7]), torch.ones(4, DIM), LR)
        assert table.num_rows == (number >= 3)
    assert dataclasses.asdict(table.counts()) | {"unknown": 3} == {
        "unknown": 3, "admitted": 1, "refused_new": 2, "refused_full": 0, "evicted": 0,
    }  # fmt: skip


def test_what_is_seen_rarely_stays_out_for_ever() -> None:
    """Catches: a sketch that only fills up, so that in the end everything is admitted at first sight."""
    table = make(64, admit_after=3)
    assert table.sightings is not None
    for number in range(60):
        table.apply(RowGradients(torch.arange(number * 100, number * 100 + 100), torch.ones(100, DIM)), LR)
    counts = table.counts()
    assert counts.refused_new > 0.98 * counts.unknown
    assert int(table.sightings.counts.max()) <= 3


def test_impossible_limits_are_refused() -> None:
    """Catches: a table without room, a sighting count that a byte does not hold, an optimizer of all rows."""
    for limits, message in (
        ({"capacity": 0}, "capacity 0"),
        ({"admit_after": 256}, "admit_after 256"),
        ({"half_life": 0}, "half_life 0"),
        ({"optimizer": "adamw"}, "moves every row"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(**limits)  # type: ignore[arg-type]
