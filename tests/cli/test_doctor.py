"""`turbogr doctor`: facts that match this machine, every operator with its reason, and figures that are measured."""

import json

import pytest
import torch

from tests.support.command_line import said as said_of
from turbogr import hardware
from turbogr.cli import main
from turbogr.cli.machine import gemm_facts, measured
from turbogr.ops import gemm
from turbogr.ops.native import build

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small things: the path is what is tested."""
    monkeypatch.setattr(hardware, "SIZES", (64, 128))
    monkeypatch.setattr(hardware, "COPY_BYTES", 2**20)
    hardware.gemm_ways.cache_clear()


def report(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["doctor", *flags]) == 0
    return str(capsys.readouterr().out)


def test_quick_json_is_one_object_with_this_machine_in_it(capsys) -> None:
    facts = json.loads(report(capsys, "--quick", "--json"))
    assert facts["software"]["torch"] == torch.__version__
    assert facts["cpu"]["threads"] == torch.get_num_threads()
    assert facts["cpu"]["memory_gib"] > 0.5
    assert facts["measured"] is None
    assert facts["libraries"]["pandas"]


def test_every_operator_says_which_backend_and_why(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(report(capsys, "--quick", "--json"))["operators"]
    assert {"hstu_attention", "sampled_softmax"} <= {row["operator"] for row in rows}
    assert all(row["backend"] and row["reason"] for row in rows)
    monkeypatch.setenv("TURBOGR_BACKEND", "reference")
    forced = json.loads(report(capsys, "--quick", "--json"))["operators"]
    assert {row["backend"] for row in forced} == {"reference"}
    assert {row["reason"] for row in forced} == {"TURBOGR_BACKEND"}


@pytest.mark.usefixtures("small")
def test_the_printed_report_holds_what_the_json_holds(capsys) -> None:
    text = report(capsys)
    for title in (
        "software",
        "CPU",
        "accelerators",
        "libraries",
        "matrix products",
        "operators",
        "measured on cpu",
    ):
        assert f"\n{title}" in text
    assert "GFLOP/s" in text
    assert "GB/s" in text


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"torch.mm": 200.0, "oneDNN": 450.0}, {"onednn": "agrees", "mkl": "onednn is faster here"}),
        ({"torch.mm": 440.0, "oneDNN": 450.0}, {"onednn": "agrees", "mkl": "agrees"}),
        ({"torch.mm": 450.0, "oneDNN": 200.0}, {"onednn": "mkl is faster here", "mkl": "agrees"}),
    ],
)
def test_the_measurement_checks_the_rule_for_matrix_products(
    rates: dict[str, float], said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a rule that nobody compares with the machine."""
    figures = {"cpu": {f"gemm_float32_{way}_gflops": rate for way, rate in rates.items()}}
    for library, sentence in said.items():
        monkeypatch.setattr(gemm, "rule", lambda library=library: (library, "because"))
        facts = gemm_facts(figures)
        assert (facts["library"], facts["reason"]) == (library, "because")
        assert facts["measured"].startswith(sentence)
        assert "measured" not in gemm_facts(None)


def test_build_compiles_the_operators_or_says_why_not(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a build that fails in silence."""
    built = []
    monkeypatch.setattr(build, "build", lambda: built.append(1) or {})
    report(capsys, "--build", "--quick")
    assert built == [1]
    monkeypatch.setattr(build, "build", lambda: {"reason": "no C++ compiler was found (c++)"})
    assert said_of(capsys, "doctor", "--build") == (
        "turbogr: the CPU operators were not compiled: no C++ compiler was found (c++).\n"
    )


@pytest.mark.usefixtures("small")
def test_the_measured_peak_is_the_best_of_all_ways() -> None:
    ways = hardware.gemm_ways(torch.float32, CPU, torch.get_num_threads())
    assert hardware.measured_gemm_gflops(torch.float32) == max(ways.values()) > 0
    assert "torch.mm" in ways


@pytest.mark.usefixtures("small")
def test_a_ceiling_is_measured_once_per_process_and_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    first = hardware.measured_gemm_gflops(torch.float32)
    monkeypatch.setattr(hardware, "_gflops", lambda *_: (1e9, 1e-9))
    assert hardware.measured_gemm_gflops(torch.float32) == first
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert hardware.measured_gemm_gflops(torch.float32) == 1e9
    finally:
        torch.set_num_threads(before)
        hardware.gemm_ways.cache_clear()


def test_a_rate_counts_two_operations_per_multiply_and_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_best_seconds", lambda call, device: 0.5)
    assert hardware._gflops(torch.mm, 1000, torch.float32, CPU) == (4.0, 0.5)


def test_a_copy_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "COPY_BYTES", 2**20)
    monkeypatch.setattr(hardware, "_best_seconds", lambda call, device: 1.0)
    assert hardware.copy_gb_per_s() == pytest.approx(2 * 2**20 / 1e9)


@pytest.mark.usefixtures("small")
def test_the_figures_are_named_with_their_unit() -> None:
    figures = measured(CPU)["cpu"]
    assert {"gemm_float32_torch.mm_gflops", "gemm_bfloat16_torch.mm_gflops", "copy_gb_per_s"} <= set(figures)
