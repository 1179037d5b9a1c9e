"""device.py on a machine without an accelerator, and with a stand-in for one."""

import platform
import subprocess
import sys
import types

import pytest
import torch

from turbogr import device
from turbogr.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.usefixtures("no_accelerator")
def test_auto_without_an_accelerator_is_the_cpu() -> None:
    assert device.pick_device() == CPU


@pytest.mark.usefixtures("no_accelerator")
def test_a_device_that_is_absent_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'cuda' is not available .*no accelerator.*auto or cpu"):
        device.pick_device("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_auto_takes_the_accelerator_and_cpu_is_obeyed() -> None:
    assert device.pick_device() == torch.device("cuda", 0)
    assert device.pick_device("cpu") == CPU


@pytest.mark.usefixtures("two_gpus")
def test_another_accelerator_than_the_one_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="the accelerator here is cuda"):
        device.pick_device("npu")


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_of_a_machine_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device.pick_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="rank 2 of this machine has no device, there are 2"):
        device.pick_device()


def test_the_cpu_answers_where_torch_accelerator_would_raise() -> None:
    device.synchronize(CPU)
    stream = device.current_stream(CPU)
    assert hasattr(stream, "wait_stream")
    assert device.supports_bf16(CPU) in (True, False)
    assert device.device_name(CPU)


def test_peak_memory_on_a_cpu_grows_with_what_is_touched() -> None:
    before = device.memory_peak(CPU)
    held = bytearray(b"x" * (before + 64 * 2**20))
    assert device.memory_peak(CPU) >= before + 60 * 2**20
    assert held


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", 989e12),
        ("A card nobody knows", None),
    ],
)
def test_the_datasheet_peak_goes_by_the_device_name(
    monkeypatch: pytest.MonkeyPatch, name: str, bf16: float | None
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace(get_device_name=lambda _: name))
    assert device.peak_flops(torch.device("cuda", 0)) == bf16


def test_a_cpu_has_no_datasheet_peak() -> None:
    assert device.peak_flops(CPU) is None


def test_zero_threads_is_one_per_core() -> None:
    before = torch.get_num_threads()
    try:
        assert device.set_threads(1) == torch.get_num_threads() == 1
        assert device.set_threads(0) == torch.get_num_threads() == device.cores()
    finally:
        torch.set_num_threads(before)


STEP = """
import resource, sys, torch
from turbogr.device import tune_allocator
said = tune_allocator() if sys.argv[1] == "tuned" else "untuned"
def step():
    x = torch.ones(10 * 2**20)  # glibc learns to keep blocks up to 32 MiB by itself
    return ((x + 1) * 2).sum()
for _ in range(6): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, said)
"""


def faults(how: str) -> tuple[int, str]:
    said = subprocess.run([sys.executable, "-c", STEP, how], capture_output=True, text=True, check=True).stdout
    count, words = said.split(" ", 1)
    return int(count), words


def test_the_tuned_allocator_does_not_fault_large_blocks_in_again() -> None:
    tuned, said = faults("tuned")
    if not said.startswith("tuned"):
        pytest.skip(f"allocator {said}")
    assert tuned < faults("untuned")[0] / 4


def test_a_preloaded_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert device.tune_allocator() == "left alone: jemalloc is preloaded"


HOLES = """
import torch
from turbogr.device import return_freed_memory, tune_allocator
tune_allocator()
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
kept = []
for n in range(200):
    wide = torch.ones(2**18)
    kept.append(torch.ones(2**10))  # a small tensor behind every large one, so that no hole is at the heap's end
    del wide
    wide = [torch.ones(2**18) for _ in range(2)]
    kept.append(torch.ones(2**10))
    del wide
before = resident()
return_freed_memory()
print(before, resident())
"""


def test_freed_memory_between_live_tensors_goes_back_to_the_system() -> None:
    """Catches: a training that grows by gigabytes over its epochs, because no hole of its heap is ever given back."""
    said = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True).stdout
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("no glibc")
    before, after = map(int, said.split())
    assert after < before - 1024


def test_without_glibc_the_allocator_is_left_alone_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert device.tune_allocator().startswith("left alone: no glibc")
