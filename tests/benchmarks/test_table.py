"""`benchmarks.table`: like is compared with like, the ratios are the right way up, nothing is skipped in silence."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import table, table_steps
from benchmarks.environments import environment
from benchmarks.table_steps import Batches, config_of, errors, filled, hashed, nbytes
from turbogr.tables import LocalTable


def test_both_sides_end_with_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a step that leaves something out and is therefore fast."""
    monkeypatch.setattr(table_steps, "IDS", 500)
    found = errors(None, tmp_path, num_rows=300)
    assert set(found) == {"lazy Adam against SparseAdam", "unbounded against bounded"}
    assert max(found.values()) < table.TOLERANCE


def test_the_memory_of_a_table_is_its_weights_and_its_optimizer_state() -> None:
    """Catches: a ratio to more than what must be held."""
    assert nbytes(LocalTable(10, 64, config_of("lazy-adam"), seed=0)) == 3 * 10 * 64 * 4 + 8
    assert nbytes(LocalTable(10, 64, config_of("adagrad"), seed=0)) == 10 * 64 * 4 + 10 * 4


def test_an_unbounded_table_knows_every_id_of_the_batches() -> None:
    """Catches: a ratio for ids that are refused and cost nothing, or that are all drawn anew."""
    made, batches = filled(50, dim=4, capacity=60), Batches.make(50, ids=200, dim=4, count=2)
    for ids in batches.ids:
        assert bool((made.map.find(hashed(ids)) >= 0).all())
    step = table.in_turn_with_new_ids(made, [hashed(torch.zeros(table.IDS, dtype=torch.int64))], 50, torch.zeros(1))
    assert callable(step) and made.num_rows == 50


def test_figures_are_baseline_over_ours_and_ours_over_the_bounded_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a ratio upside down, a baseline's two code paths mixed up, a missing peer without its reason."""
    seconds = {
        "lazy_adam": [0.01], "sparse_adam": [0.07], "adagrad": [0.01], "unbounded": [0.015], "unbounded_new": [0.018],
        "tbe_none": [0.09], "tbe_bags": [0.08], "copy": [0.004],
    }  # fmt: skip

    class Side:
        def __init__(self, *_: Any) -> None:
            self.step = lambda number: 0.0

        def facts(self) -> dict[str, Any]:
            return {}

        def close(self) -> None: ...

    monkeypatch.setattr(table, "Tbe", Side)
    monkeypatch.setattr(table, "taken_in_turn", lambda *_, **__: seconds)
    assert table.adam_part(200, 1).figures == {"vs_sparse_adam_x": pytest.approx(7)}
    figures = table.adagrad_part(200, 1, Path("python")).figures
    assert figures["vs_tbe_x"] == pytest.approx(9) and figures["vs_tbe_bags_x"] == pytest.approx(8)
    assert figures["unbounded_ratio"] == pytest.approx(1.5)
    assert figures["unbounded_new_ratio"] == pytest.approx(1.8)
    part = table.adagrad_part(200, 1, "no environment")
    assert part.figures["vs_tbe_x"] is None and part.figures["vs_tbe_bags_x"] is None
    assert part.reasons == dict.fromkeys(table.PATHS, "no environment")


def test_a_side_that_times_itself_is_believed_and_batches_take_turns() -> None:
    """Catches: the time of asking another process counted as its step's, one batch that stays in the cache."""
    seen: list[int] = []
    steps = {"there": lambda number: 7.0, "here": lambda number: seen.append(number)}
    seconds = table.taken_in_turn(steps, 9, copy=lambda: None)  # type: ignore[arg-type]
    assert seconds["there"] == [7.0] * 9 and max(seconds["here"]) < 1
    assert seen == list(itertools.islice(itertools.cycle(range(table_steps.BATCHES)), 11))


def test_a_quick_run_makes_no_environment(tmp_path: Path) -> None:
    """Catches: a quick run that downloads for minutes, an environment of other versions taken for the right one."""
    installs = (("one==1",), ("--no-deps", "two==2"))
    with pytest.raises(OSError, match=r"no environment away with two==2: a full run makes it"):
        environment(tmp_path / "away", installs, make=False)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".installed").write_text("one==1\n--no-deps two==1")
    with pytest.raises(OSError, match="a full run makes it"):
        environment(tmp_path / "old", installs, make=False)
    (tmp_path / "old" / ".installed").write_text("one==1\n--no-deps two==2")
    assert environment(tmp_path / "old", installs, make=False) == tmp_path / "old" / "bin" / "python"
