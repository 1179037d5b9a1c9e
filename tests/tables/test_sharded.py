"""A table spread over ranks answers, learns, is saved and scores as one in a single process does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import on_ranks, try_ranks
from turbogr.config import TablesConfig
from turbogr.data.queries import Queries
from turbogr.errors import ConfigError
from turbogr.evaluate import Exclude, top_k
from turbogr.ranks import ALONE, Ranks
from turbogr.tables import LocalTable, RowGradients, ShardedTable, Table, groups_of, make_grid
from turbogr.tables.exchange import Exchange
from turbogr.tables.placement import Placement
from turbogr.tasks.retrieval import RetrievalScorer, ShardedScorer
from turbogr.train.dense_sharding import whole

ROWS, DIM = 37, 4
CPU = torch.device("cpu")


def table_of(ranks: Ranks, groups: int, **settings: Any) -> tuple[Table, Ranks]:
    """(a table, the ranks that hold the same rows)."""
    config = TablesConfig(**settings)
    if ranks.alone:
        return LocalTable(ROWS, DIM, config, seed=3), ranks
    grid = make_grid(ranks, groups, CPU)
    return ShardedTable(ROWS, DIM, config, seed=3, grid=grid), grid.across


def ids_of(rank: int, step: int) -> torch.Tensor:
    """Repeats, ids of all owners; rank 2 wants nothing."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS, (0 if rank == 2 else 12,), generator=generator)


def weights_of(ids: torch.Tensor, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(len(ids) * DIM).view(-1, DIM) + step)


def step_of(table: Table, wanted: list[torch.Tensor], step: int) -> list[RowGradients]:
    """Looks up each list of ids, gives its rows a gradient, and answers what came back."""
    collected = []
    for ids in wanted:
        lookup = table.request(ids)
        table.wait(lookup)
        rows = table.answer(lookup)
        (rows.weight[rows.inverse] * weights_of(ids, step)).sum().backward()
        collected.append(table.collect(lookup, rows))
    return collected


def learn(ranks: Ranks, groups: int, optimizer: str, wire: str) -> dict[str, Any]:
    """Five steps; rank r asks for its own ids, one process for everybody's."""
    table, copies = table_of(ranks, groups, optimizer=optimizer, wire=wire, lr=0.1)
    for step in range(5):
        asking = range(4) if ranks.alone else [ranks.rank]
        collected = step_of(table, [ids_of(rank, step) for rank in asking], step)
        own = RowGradients.merged(collected, table.local_rows)
        counts = copies.gather(torch.tensor([len(own.ids)])).flatten().tolist()
        parts = zip(copies.gather_rows(own.ids, counts), copies.gather_rows(own.values, counts), strict=True)
        table.apply(RowGradients.merged([RowGradients(*part) for part in parts], table.local_rows), 0.1)
    state = {name: whole(value) for name, value in table.state().items()}
    return {"state": state, "rows": table.rows(5, 20).clone(), "held": table.local_rows}


@pytest.mark.parametrize("optimizer", ["adagrad", "lazy-adam"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_sharded_table_learns_what_one_process_learns(groups: int, optimizer: str) -> None:
    """Catches: rows answered to the wrong rank, gradients lost or counted twice on their way, initial rows that depend
    on the number of ranks, a rank that asks for nothing and hangs, copies that drift apart."""
    alone = learn(ALONE, 1, optimizer, "fp32")
    every = on_ranks(4, learn, groups, optimizer, "fp32")
    assert [one["held"] for one in every[: 4 // groups]] == ([10, 10, 10, 7] if groups == 1 else [19, 18])
    for name, value in alone["state"].items():
        torch.testing.assert_close(every[0]["state"][name], value, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(every[0]["state"][name], one["state"][name]) for one in every)
    torch.testing.assert_close(every[1]["rows"], alone["state"]["weight"][5:20], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_half_as_many_bytes_on_the_wire_change_little(wire: str) -> None:
    """Catches: the option read and ignored, or rounding that adds up."""
    exact, rounded = (on_ranks(2, learn, 1, "adagrad", kind)[0]["state"]["weight"] for kind in ("fp32", wire))
    assert not torch.equal(exact, rounded)
    assert float((exact - rounded).norm() / exact.norm()) < 1e-2


def two_tables(ranks: Ranks) -> list[Any]:
    """Two tables of different width and height through one exchange."""
    heights, widths = (10, 23), (2, 5)
    places = [Placement(rows, ranks.rank, ranks.world) for rows in heights]
    every = [
        torch.arange(rows * width, dtype=torch.float32).view(rows, width)
        for rows, width in zip(heights, widths, strict=True)
    ]
    own = [whole[place.ids(torch.arange(place.begin, place.end))] for whole, place in zip(every, places, strict=True)]
    wanted = [torch.tensor([1, 4, 9][: ranks.rank + 1]), torch.tensor([22, 0, 7, 8])]
    positions = [place.positions(ids).sort() for place, ids in zip(places, wanted, strict=True)]
    exchange = Exchange(ranks, widths)
    request = exchange.begin([one.values for one in positions], [place.bounds() for place in places])
    exchange.wait(request)
    fetched = exchange.fetch(request, own)
    right = [
        torch.equal(rows, whole[ids[one.indices]])
        for rows, whole, ids, one in zip(fetched, every, wanted, positions, strict=True)
    ]
    returned = exchange.give_back(request, fetched)
    back = [
        torch.equal(part, mine[asked])
        for table, mine in enumerate(own)
        for part, asked in zip(returned[table], request.asked[table], strict=True)
    ]
    return [right, all(back)]


def test_several_tables_share_one_exchange() -> None:
    """Catches: rows of one table read with the width, or from the place, of another."""
    assert on_ranks(3, two_tables) == [[[True, True], True]] * 3


def save_state(ranks: Ranks, folder: Path) -> None:
    from turbogr.train import checkpoint

    table, _ = table_of(ranks, 2 if ranks.world == 4 else 1, optimizer="lazy-adam")
    for step in range(3):
        (own,) = step_of(table, [ids_of(ranks.rank, step)], step)
        table.apply(own, 0.1)
    checkpoint.save(folder, table.state(), checkpoint.Progress(), {}, 1, ranks)


def load_state(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    from turbogr.train import checkpoint

    newest = checkpoint.latest(folder)
    assert newest is not None
    table, _ = table_of(ranks, 1, optimizer="lazy-adam")
    state = table.state()
    checkpoint.load(newest, state, ranks)
    table.restored(state)
    rows = [whole(value) for value in table.state().values()]
    return {"weight": table.rows(0, ROWS).clone(), "moments": torch.cat([one.flatten() for one in rows])}


def test_a_saved_table_is_read_back_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Catches: a checkpoint tied to the ranks that wrote it, rows or moments given to other ids, a copy saved twice."""
    on_ranks(2, save_state, tmp_path / "two")
    wanted = load_state(ALONE, tmp_path / "two")
    for world in (2, 3, 5):
        for found in on_ranks(world, load_state, tmp_path / "two"):
            assert torch.equal(found["weight"], wanted["weight"])
            assert torch.equal(found["moments"], wanted["moments"])


class Given:
    """An encoder that answers the histories' last rows."""

    training = False

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...

    def __call__(self, x: torch.Tensor, sequences: Any) -> torch.Tensor:
        return x


def best_of(ranks: Ranks) -> list[Any]:
    table, _ = table_of(ranks, 1)
    local = table.own if isinstance(table, ShardedTable) else table
    assert isinstance(local, LocalTable)
    with torch.no_grad():
        local.weight.copy_(local.weight.sign())  # many equal scores
    kind = ShardedScorer if isinstance(table, ShardedTable) else RetrievalScorer
    scorer = kind(Given(), table, 9, CPU)  # type: ignore[arg-type]
    queries = Queries(np.array([0, 1]), np.array([0, 2, 5]), np.array([1, 2, 3, 4, 5]), np.arange(5), np.array([9, 9]))
    exclude = Exclude.of(np.array([0, 2, 5]), np.array([1, 2, 3, 4, 5]), [0, 36])
    found = top_k(scorer, queries, 8, exclude=exclude, item_chunk=5)
    return [found.items.tolist(), found.scores.tolist()]


def test_the_best_items_of_all_shards_are_those_of_the_whole_catalogue() -> None:
    """Catches: lists that are not merged, ties broken by the place in a shard, exclusions of another shard's items."""
    items, scores = best_of(ALONE)
    for found in on_ranks(3, best_of):
        assert found[0] == items
        np.testing.assert_allclose(found[1], scores, rtol=1e-5)


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    assert groups_of(8, 2) == 2 and groups_of(6, 6) == 6
    with pytest.raises(ConfigError, match="tables.groups 3 does not divide the 4 ranks"):
        groups_of(4, 3)


def per_machine(ranks: Ranks) -> int:
    return groups_of(ranks.world, 0)


def test_groups_are_machines_where_nothing_is_said() -> None:
    """Catches: a table sharded across slow links by default."""
    answers = try_ranks(4, per_machine, variables={"LOCAL_WORLD_SIZE": "2"})
    assert [answer for _, answer in answers] == [2] * 4
