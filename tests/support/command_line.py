"""What a refused call of the command line says."""

import pytest

from turbogr.cli import main


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The sentence of a refused call."""
    assert main(list(args)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err
