"""What ranks tell one another, with real processes over gloo."""

import os
import time
from typing import Any

import pytest
import torch

from tests.support.ranks import on_ranks, try_ranks
from turbogr.errors import ConfigError, SaidByAll, TrainingError, UserError
from turbogr.ranks import ALONE, TIMEOUT, Ranks, joined, timeout_s


def speak(ranks: Ranks) -> dict[str, Any]:
    """Everything that can be said, with as many rows as the rank's number."""
    counts = [0, 3, 1][: ranks.world]
    own = torch.full((counts[ranks.rank], 2), float(ranks.rank))
    send = [ranks.rank + 1] * ranks.world
    arrived = ranks.swap(torch.full((sum(send),), ranks.rank), send, [r + 1 for r in range(ranks.world)])
    return {
        "gathered": ranks.gather(torch.tensor([ranks.rank, 7])).tolist(),
        "rows": [part.tolist() for part in ranks.gather_rows(own, counts)],
        "swapped": arrived.tolist(),
        "sum": ranks.sum(torch.tensor([1, ranks.rank])).tolist(),
        "texts": ranks.texts("é" * ranks.rank),
    }


def test_every_rank_hears_the_same() -> None:
    """Catches: uneven and empty parts cut wrongly, ranks in another order, a text that is not ASCII."""
    answers = on_ranks(3, speak)
    assert answers[0]["gathered"] == [[0, 7], [1, 7], [2, 7]]
    assert answers[0]["rows"] == [[], [[1.0, 1.0]] * 3, [[2.0, 2.0]]]
    assert answers[0]["swapped"] == [0, 1, 1, 2, 2, 2]
    assert answers[0]["sum"] == [3, 3] and answers[0]["texts"] == ["", "é", "éé"]
    assert answers[1] == answers[0] and answers[2] == answers[0]


def test_one_process_alone_says_and_hears_nothing() -> None:
    values = torch.arange(3)
    assert ALONE.gather(values).tolist() == [[0, 1, 2]] and ALONE.texts("x") == ["x"]
    assert ALONE.sum(torch.tensor([2])).tolist() == [2] and ALONE.swap(values, [3], [3]) is values
    with pytest.raises(ConfigError), ALONE.agreed():
        raise ConfigError("mine")
    with joined() as ranks:
        assert ranks is ALONE


def disagree(ranks: Ranks, failing: list[int], bug: bool) -> str:
    try:
        with ranks.agreed():
            if ranks.rank in failing:
                raise KeyError("ours") if bug else ConfigError("no store here.")
    except SaidByAll as error:
        return f"all: {error}"
    except KeyError:
        return "bug"
    return "well"


def test_a_rank_that_cannot_begin_ends_all_with_one_sentence() -> None:
    """Catches: ranks that go on, or hang, where one of them refused its arguments; a bug that loses its traceback."""
    assert on_ranks(2, disagree, [], False) == ["well", "well"]
    assert on_ranks(2, disagree, [1], False) == ["all: rank 1: no store here."] * 2
    assert on_ranks(2, disagree, [0, 1], False) == ["all: no store here."] * 2
    assert on_ranks(2, disagree, [1], True) == ["all: rank 1: 'ours'", "bug"]


def leave(ranks: Ranks) -> str:
    if ranks.rank == 1:
        os._exit(3)
    try:
        ranks.barrier()
    except TrainingError as error:
        return str(error)
    return "nothing noticed"


def test_a_rank_that_is_gone_is_a_sentence_on_the_others() -> None:
    """Catches: a hang, or a traceback of the transport."""
    (good, words), (alive, _) = try_ranks(2, leave, timeout_s=60)
    assert good and "rank 0 lost rank 1" in words and "--resume" in words and not alive


def sleep_past_the_limit(ranks: Ranks) -> str:
    try:
        if ranks.rank == 1:
            time.sleep(4.0)
        ranks.barrier()
    except TrainingError as error:
        return str(error)
    return "nothing noticed"


def test_a_rank_that_stays_silent_too_long_is_given_up() -> None:
    """Catches: a run that waits for ever for a rank that hangs."""
    answers = try_ranks(2, sleep_past_the_limit, timeout_s=60, variables={TIMEOUT: "1"})
    assert answers[0][0] and "lost another rank, which ended or did not answer within 1 s" in answers[0][1]


def test_the_timeout_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "2.5")
    assert timeout_s() == 2.5
    for wrong in ("soon", "0", "-3"):
        monkeypatch.setenv(TIMEOUT, wrong)
        with pytest.raises(UserError, match=f"{TIMEOUT} must be a number of seconds above 0, not '{wrong}'"):
            timeout_s()
