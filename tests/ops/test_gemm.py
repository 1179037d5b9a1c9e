"""Matrix products: the same numbers from either library, which one by a fixed rule."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.support.close import assert_close
from turbogr.ops import gemm


@pytest.fixture(autouse=True)
def the_rule_afterwards() -> Iterator[None]:
    yield
    gemm.rule.cache_clear()
    gemm.take("auto")


@pytest.mark.parametrize("library", ["mkl", "onednn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_with_transposed_views_are_right(library: gemm.Library, dtype: torch.dtype) -> None:
    """Catches: a transpose too many on the way to oneDNN, which knows x W^T only."""
    gemm.take(library)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((37, 50), (50, 19)))
    wanted = a.double() @ b.double()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-14}[dtype]
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T):
            got = gemm.gemm(left, right)
            assert got.dtype == dtype
            assert_close(got, wanted, tolerance)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty_products_are_zeros(shape: tuple[int, int, int]) -> None:
    """Catches: oneDNN asked for a product without a token."""
    m, k, n = shape
    gemm.take("onednn")
    assert torch.equal(gemm.gemm(torch.ones(m, k), torch.ones(k, n)), torch.zeros(m, n))


@pytest.mark.parametrize(
    ("vendor", "avx512", "wanted"),
    [("AuthenticAMD", True, "onednn"), ("AuthenticAMD", False, "mkl"), ("GenuineIntel", True, "mkl")],
)
def test_the_rule_goes_by_the_processor(
    vendor: str, avx512: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a choice by anything that changes from run to run."""
    monkeypatch.setattr(gemm, "_vendor_and_family", lambda: (vendor, "26"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": avx512})
    gemm.rule.cache_clear()
    library, reason = gemm.rule()
    assert (library, gemm.take("auto")) == (wanted, wanted)
    assert vendor[-3:] in reason


STRICT = """
import torch
from turbogr.ops.gemm import gemm, take
take("mkl")
generator = torch.Generator().manual_seed(0)
for tokens, width in ((953, 50), (2000, 128), (37, 256)):
    a, b = torch.randn(tokens, width, generator=generator), torch.randn(tokens, 4 * width, generator=generator)
    weights = torch.randn(width, 4 * width, generator=generator)
    for left, right in ((a.T, b), (b, weights.T)):
        torch.set_num_threads(1)
        once = gemm(left, right)
        torch.set_num_threads(2)
        assert torch.equal(once, gemm(left, right)), (tokens, width)
"""


@pytest.mark.skipif(gemm.strict_mode() is None, reason="MKL has no such mode on this processor")
def test_threads_change_no_bit_of_mkls_products() -> None:
    """Catches: sums over tokens that MKL shares among its threads, and a variable that is set after it was read."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    subprocess.run([sys.executable, "-c", STRICT], env=environment, check=True)


@pytest.mark.parametrize(
    ("vendor", "able", "wanted"),
    [
        ("GenuineIntel", {"avx2": True, "avx512_f": True}, "AVX512,STRICT"),
        ("GenuineIntel", {"avx2": True, "avx512_f": False}, "AVX2,STRICT"),
        ("AuthenticAMD", {"avx2": True, "avx512_f": True}, None),
    ],
)
def test_the_strict_mode_goes_by_the_processor(
    vendor: str, able: dict[str, bool], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a mode that MKL answers with SSE2 code."""
    monkeypatch.setattr(gemm, "_vendor_and_family", lambda: (vendor, "6"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert gemm.strict_mode() == wanted


@pytest.mark.parametrize(
    ("vendor", "able", "mode", "wanted"),
    [
        ("GenuineIntel", {"amx_bf16": True}, "AVX512,STRICT", "bf16 (oneDNN's AMX code)"),
        ("GenuineIntel", {}, "AUTO", "fp32 (MKL, no strict MKL_CBWR)"),
        ("AuthenticAMD", {"avx512_f": True}, "", "none"),
    ],
)
def test_what_depends_on_threads_is_said(
    vendor: str, able: dict[str, bool], mode: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a promise of equal bits where somebody's own setting breaks it."""
    monkeypatch.setattr(gemm, "_vendor_and_family", lambda: (vendor, "6"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    monkeypatch.setenv("MKL_CBWR", mode)
    gemm.rule.cache_clear()
    assert gemm.bits_by_threads() == wanted


def test_a_choice_overrides_the_rule_and_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a setting that is reported and not followed."""
    called = []
    monkeypatch.setattr(gemm, "_linear", lambda *args: called.append("onednn") or torch.zeros(1))
    gemm.take("onednn")
    gemm.gemm(torch.ones(2, 2), torch.ones(2, 2))
    gemm.take("mkl")
    gemm.gemm(torch.ones(2, 2), torch.ones(2, 2))
    assert called == ["onednn"]
