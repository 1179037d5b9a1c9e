"""Triton kernels against the references: through the interpreter (TRITON_INTERPRET=1), or on a GPU.

In an environment without Triton, or with neither of the two, nothing here is collected: `make test` runs these tests in
an environment and a process of their own.
"""

import importlib.util
import os

import torch

from turbogr.ops.triton_support import interpreted

RUNS = importlib.util.find_spec("triton") is not None and (interpreted() or torch.accelerator.is_available())

if not RUNS:
    collect_ignore_glob = ["test_*.py"]
elif interpreted():
    from tests.support.bf16_interpreter import mend

    mend()
else:
    # matrix products of torch on CUDA are deterministic only so
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
