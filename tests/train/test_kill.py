"""SIGKILL at random moments: see benchmarks/kill.py, whose full run does it 20 times."""

from pathlib import Path

import pytest

from benchmarks.kill import CHECKPOINT_EVERY, compare, kill_until, make_config, start
from tests.support.small_run import chained_store


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits_and_logs_every_step_once(tmp_path: Path) -> None:
    """Catches state outside of checkpoints, half-written checkpoints taken for whole, and steps logged twice."""
    store = chained_store(tmp_path / "store", users=400)
    config = make_config(tmp_path, store.path, epochs=6)
    assert start(config, tmp_path / "undisturbed").wait() == 0
    done = kill_until(config, tmp_path / "killed", kills=3, in_checkpoint=1)
    result = compare(tmp_path / "killed", tmp_path / "undisturbed")
    assert result["equal"] and result["reports_equal"] and result["steps_once"]
    assert max(done.repeated) <= CHECKPOINT_EVERY
