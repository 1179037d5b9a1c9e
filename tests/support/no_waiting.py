"""A stand-in for a device that must not be waited for: whatever reads values of a tensor on the host is refused.

An accelerator's own check (`torch.cuda.set_sync_debug_mode`) needs the accelerator; this one needs none.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal",
    "allclose", "bincount", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__",
    "is_nonzero", "_local_scalar_dense",
}  # fmt: skip
"""By the name under which torch calls them; their answers, or the shapes of these, depend on values."""
HARMLESS_FILES = ("site-packages/triton/", "bf16_interpreter")
"""The interpreter stands for the device: it reads what it likes."""


class NoWaiting(TorchFunctionMode):
    """Raises where code under it reads values of a tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs) and not _by_the_device():
            raise AssertionError(f"{getattr(func, '__name__', func)} waits for the device")
        return func(*args, **kwargs)


def _waits(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in READS:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("__getitem__", "__setitem__") and isinstance(args[1], Tensor):
        return args[1].dtype == torch.bool
    return name == "where" and len(args) == 1


def _by_the_device() -> bool:
    frame = sys._getframe(2)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and any(part in frame.f_code.co_filename for part in HARMLESS_FILES)
