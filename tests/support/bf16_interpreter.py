"""Makes Triton's CPU interpreter compute bf16 as a GPU does; what it would still get wrong, it refuses.

The interpreter keeps bf16 as 16-bit whole numbers. Loads, stores, selects and reshapes are right so; products, sums and
comparisons would be those of the whole numbers, and rounding from fp32 goes toward zero. Here the arithmetic happens in
fp32, and every result is rounded to the nearest, ties to even.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
IN_WHOLE_NUMBERS = {"create_fabs"}
"""Right on the 16 bits as they are."""


def widen(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bits."""
    return np.left_shift(bits.astype(np.uint32), 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bf16 bits of fp32 values, to the nearest, ties to even; NaN stays NaN."""
    bits = np.atleast_1d(np.asarray(values, dtype=np.float32)).view(np.uint32)
    to_even = (bits >> 16) & 1
    rounded = ((bits + np.uint32(0x7FFF) + to_even) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def mend() -> None:
    """Once per process, before a kernel runs."""
    if getattr(InterpreterBuilder, "computes_bf16", False):
        return
    for name, method in (("binary_op", _binary), ("create_dot", _dot), ("cast_impl", _cast), ("unary_op", _refuse)):
        setattr(InterpreterBuilder, name, method(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_fp_to_fp = _to_float(InterpreterBuilder.create_fp_to_fp)
    InterpreterBuilder.create_fma = _refuse(InterpreterBuilder.create_fma)
    InterpreterBuilder.get_bf16 = lambda self, value: TensorHandle(narrow(np.array([value])), tl.bfloat16)
    InterpreterBuilder.computes_bf16 = True


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _binary(plain: Any) -> Any:
    def binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        if not _is_bf16(lhs):
            return plain(self, lhs, rhs, op)
        result = op(widen(lhs.data), widen(rhs.data))
        if op in COMPARISONS:
            return TensorHandle(result, tl.int1)
        return TensorHandle(narrow(result), tl.bfloat16)

    return binary_op


def _dot(plain: Any) -> Any:
    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
        if _is_bf16(a) and _is_bf16(b):
            # a tensor core multiplies exactly and adds in fp32
            return TensorHandle(np.matmul(widen(a.data), widen(b.data)) + d.data, d.dtype.scalar)
        return plain(self, a, b, d, *rest)

    return create_dot


def _cast(plain: Any) -> Any:
    def cast_impl(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
        wanted = dst_type.scalar
        if tl.bfloat16 not in (src.dtype.scalar, wanted) or src.dtype.scalar == wanted:
            return plain(self, src, dst_type)
        if wanted == tl.bfloat16:
            return TensorHandle(narrow(src.data.astype(np.float32)), wanted)
        return plain(self, TensorHandle(widen(src.data), tl.float32), dst_type)

    return cast_impl


def _to_float(plain: Any) -> Any:
    def create_fp_to_fp(self: Any, src: TensorHandle, dst_type: Any, rounding: Any) -> TensorHandle:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return self.cast_impl(src, dst_type)
        return plain(self, src, dst_type, rounding)

    return create_fp_to_fp


def _refuse(plain: Any) -> Any:
    def checked(self: Any, first: TensorHandle, *rest: Any) -> TensorHandle:
        if _is_bf16(first):
            raise NotImplementedError("the interpreter has no such function of bf16: go through fp32 in the kernel")
        return plain(self, first, *rest)

    return checked
