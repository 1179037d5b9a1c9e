"""In a pipe progress is plain lines, not before ten seconds and not more often; in a terminal a live bar."""

import pytest

from turbogr import progress
from turbogr.progress import bar


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_pipe_gets_plain_lines_with_the_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with bar("count", total=100) as shown:
        for done in range(0, 40):
            shown.update(done, "note")
            clock.now += 1
    captured = capsys.readouterr()
    assert captured.out == ""  # results only
    assert captured.err.splitlines() == [
        "count: 11/100, about 89 s left, note",
        "count: 22/100, about 78 s left, note",
        "count: 33/100, about 67 s left, note",
        "count: done in 40 s",
    ]


def test_a_pipe_gets_nothing_about_what_is_quick(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with bar("count") as shown:
        for done in range(100):
            shown.update(done)
            clock.now += 0.09
    assert capsys.readouterr().err == ""


def test_without_a_total_it_counts(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with bar("count") as shown:
        clock.now += 11
        shown.update(12345)
        shown.write("a line that stays")
    assert capsys.readouterr().err.splitlines() == ["count: 12,345", "a line that stays", "count: done in 11 s"]
