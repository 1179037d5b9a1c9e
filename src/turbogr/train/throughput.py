"""How fast a run is: tokens and users per second, FLOP/s and MFU, what reading costs, memory."""

import time
from typing import Any

import torch

from turbogr.config import Config
from turbogr.device import memory_peak, peak_flops, synchronize
from turbogr.hardware import measured_gemm_gflops
from turbogr.train.flops import training_flops
from turbogr.train.step import StepSums


class Throughput:
    """Measures from one step's end to the next one's."""

    def __init__(self, config: Config, device: torch.device, world: int = 1) -> None:
        self.model = config.model
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        # a CPU has no datasheet: its best measured GEMM stands for the peak
        self.peak = peak_flops(device) or measured_gemm_gflops(dtype, device) * 1e9
        self.peak *= world
        self._last = time.perf_counter()

    def measure(self, sums: StepSums, spans: dict[str, float], device: torch.device) -> dict[str, Any]:
        synchronize(device)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        facts = sums.total
        values = {
            "speed/tokens_per_s": float(facts.tokens.sum()) / seconds,
            "speed/users_per_s": float(facts.users.sum()) / seconds,
            "speed/step_ms": 1e3 * seconds,
            "speed/read_share": spans.get("read", 0.0) / seconds,
            "memory/peak_gib": memory_peak(device) / 2**30,
            **{f"span_ms/{name}": 1e3 * value for name, value in spans.items()},
        }
        flops = training_flops(self.model, float(facts.tokens.sum()), float(facts.pairs.sum()))
        if flops is not None:
            values |= {"speed/gflop_per_s": flops / seconds / 1e9, "speed/mfu": flops / seconds / self.peak}
        return values

    @staticmethod
    def line(step: int, values: dict[str, Any]) -> str:
        """One line for a person."""
        speed = f"{values['speed/tokens_per_s']:,.0f} tok/s, {values['speed/users_per_s']:,.0f} users/s"
        if "speed/mfu" in values:
            speed += f", {values['speed/gflop_per_s']:.0f} GFLOP/s, mfu {values['speed/mfu']:.1%}"
        ranks = ""
        if "balance/wait_share" in values:
            unequal = (f"{name} {values[f'balance/{name}_imbalance']:.1%}" for name in ("token", "cost", "time"))
            ranks = f" | imbalance {', '.join(unequal)}; waiting {values['balance/wait_share']:.0%}"
            if values["balance/oversized_rows"]:
                ranks += f"; {values['balance/oversized_rows']} rows above a fair share"
        return (
            f"step {step} loss {values['train/loss']:.4f} grad {values['train/grad_norm']:.2f} | {speed} | "
            f"{values['memory/peak_gib']:.1f} GiB | data {values['speed/read_share']:.0%}{ranks}"
        )
