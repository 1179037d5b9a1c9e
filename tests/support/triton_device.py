"""Where the tests of Triton kernels run: an accelerator where there is one, else the CPU through the interpreter."""

import torch

from turbogr.ops.triton_support import interpreted

DEVICE = torch.device("cpu") if interpreted() else torch.accelerator.current_accelerator()

TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
"""Relative error against float64 on the same inputs, where sums are made in fp32 and results stored once."""
DTYPES = list(TOLERANCES)
