"""The code speaks torch.accelerator: nothing outside device.py names torch.cuda, and a CPU run calls nothing of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.no_torch_cuda import forbidden

SOURCE = Path(__file__).parents[1] / "src/turbogr"
NAMED = re.compile(r"torch\.cuda\b|from torch import .*\bcuda\b|\.(cuda|is_cuda)\b")


def test_no_file_outside_device_names_torch_cuda() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "device.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NAMED.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("line", ["torch.cuda.synchronize()", "from torch import cuda", "x.cuda()", "if x.is_cuda:"])
def test_the_search_would_find(line: str) -> None:
    assert NAMED.search(line)


def test_the_guard_raises_for_our_calls_and_not_for_those_of_torch() -> None:
    with forbidden():
        with pytest.raises(AssertionError, match="torch.cuda.is_available"):
            torch.cuda.is_available()
        with pytest.raises(AssertionError, match="torch.cuda.Stream"):
            torch.cuda.Stream()
        # torch asks itself whether there is a GPU in here
        torch.manual_seed(0)
    assert torch.cuda.is_available() in (True, False)


def test_the_command_line_runs_under_the_guard() -> None:
    code = (
        "import sys; from tests.support.no_torch_cuda import forbidden; from turbogr.cli import main\n"
        "with forbidden(): sys.exit(main(['doctor', '--quick']))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SOURCE.parents[1])
    assert outcome.returncode == 0, outcome.stderr
