"""Operators as torch.library knows them: what torch.compile, fake tensors and torch's FLOP counter see.

Called eagerly an operator runs its own autograd.Function, which costs a third of a registered operator's call. Where a
graph is traced, or a dispatch mode looks on, `watched()` is true and the public function calls its GraphOperator: two
registered operators, turbogr::NAME and turbogr::NAME_backward, over the same kernels.

Arguments may be dataclasses and named tuples of tensors and numbers; the registered operators take their fields, flat.
"""

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_SCHEMA = {
    Tensor: "Tensor",
    list[Tensor]: "Tensor[]",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
}


def watched() -> bool:
    """Whether a call must be a registered operator's to be seen for what it is."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


class GraphOperator:
    """One operator over a functional pair.

    forward(...) -> [answer, *kept]         kept: what the backward wants beside the arguments
    backward(dout, kept, ...) -> gradients  its further parameters are those of the forward that it wants, by name
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., list[Tensor]],
        backward: Callable[..., list[Tensor | None]],
        *,
        fake: Callable[..., list[Tensor]],
        gradients: Sequence[str],
        flops: Callable[..., float] | None = None,
        backward_flops: Callable[..., float] | None = None,
    ) -> None:
        """Register it.

        Args:
            fake: what `forward` answers, as empty tensors; it takes the same arguments.
            gradients: the tensors that `backward` answers for, in its order; "bias.position" is a field of `bias`.
            flops, backward_flops: from the arguments that they name.
        """
        self._forward, self._backward = _Flat(forward), _Flat(backward)
        answer, back = f"turbogr::{name}", f"turbogr::{name}_backward"
        define = torch.library.custom_op
        made = define(answer, _apart(self._forward.call), mutates_args=(), schema=self._forward.schema)
        made.register_fake(_Flat(forward, fake).call)
        made.register_autograd(self._gradients, setup_context=self._keep)
        self._gradient_paths = [tuple(path.split(".")) for path in gradients]
        made = define(back, _apart(self._present), mutates_args=(), schema=self._backward.schema)
        made.register_fake(self._fake_gradients)
        self.forward = getattr(torch.ops.turbogr, name).default
        self.backward = getattr(torch.ops.turbogr, f"{name}_backward").default
        # where the backward's arguments lie among the forward's
        self._taken = [self._forward.paths.index(path) for path in self._backward.paths[2:]]
        if flops is not None:
            _count(name, self._forward, flops)
        if backward_flops is not None:
            _count(f"{name}_backward", self._backward, backward_flops)

    def __call__(self, *args: Any) -> Tensor:
        return self.answers(*args)[0]

    def answers(self, *args: Any) -> list[Tensor]:
        """The answer and all that is kept for the backward."""
        found: list[Tensor] = self.forward(*self._forward.flatten(args))
        return found

    def flat(self, *args: Any) -> list[Any]:
        """The registered operator's arguments."""
        return self._forward.flatten(args)

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        wanted = [inputs[place] for place in self._taken]
        ctx.save_for_backward(*(one for one in wanted if isinstance(one, Tensor)), *output[1:])
        ctx.wanted = [_SAVED if isinstance(one, Tensor) else one for one in wanted]
        ctx.types = {place: one.dtype for place, one in enumerate(inputs) if isinstance(one, Tensor)}

    def _gradients(self, ctx: Any, douts: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        answers: list[Tensor | None] = [None] * len(self._forward.paths)
        if douts[0] is None:
            return tuple(answers)
        saved = iter(ctx.saved_tensors)
        wanted = [next(saved) if one is _SAVED else one for one in ctx.wanted]
        found = iter(self.backward(douts[0], list(saved), *wanted))
        for path in self._gradient_paths:
            place = self._forward.paths.index(path)
            if place in ctx.types:
                answers[place] = next(found).to(ctx.types[place])
        return tuple(answers)

    def _present(self, *flat: Any) -> list[Tensor]:
        return [gradient for gradient in self._backward.call(*flat) if gradient is not None]

    def _fake_gradients(self, dout: Tensor, kept: list[Tensor], *wanted: Any) -> list[Tensor]:
        by_path = dict(zip(self._backward.paths[2:], wanted, strict=True))
        like = [by_path.get(path, dout) for path in self._gradient_paths]
        return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in like if one is not None]


def _apart(run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Without a graph of the call, but with autograd at hand, which torch takes away there: some backends differentiate
    a reference."""

    def call(*flat: Any) -> list[Tensor]:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.no_grad():
            return run(*flat)

    return call


_SAVED = object()
"""Stands for a tensor that save_for_backward keeps."""


class _Flat:
    """A function's arguments and their fields, one after the other; `call` takes them so."""

    def __init__(self, typed: Callable[..., Any], run: Callable[..., Any] | None = None) -> None:
        self.run = run or typed
        hints = typing.get_type_hints(typed)
        self.names = list(inspect.signature(typed).parameters)
        self.hints = [hints[name] for name in self.names]
        parts = [part for name, hint in zip(self.names, self.hints, strict=True) for part in _parts((name,), hint)]
        self.paths = [path for path, _ in parts]
        self._places = [(self.names.index(path[0]), path[1:]) for path in self.paths]
        arguments = (f"{kind} {'_'.join(path)}" for path, kind in parts)
        self.schema = f"({', '.join(arguments)}) -> Tensor[]"

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        flat = []
        for place, fields in self._places:
            value = args[place]
            for field in fields:
                value = None if value is None else getattr(value, field)
            flat.append(int(value) if isinstance(value, enum.IntEnum) else value)
        return flat

    def whole(self, flat: Sequence[Any]) -> list[Any]:
        rest = iter(flat)
        return [_whole(hint, rest) for hint in self.hints]

    def call(self, *flat: Any) -> Any:
        return self.run(*self.whole(flat))


def _parts(path: tuple[str, ...], hint: Any, optional: bool = False) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, type in a schema) of an argument, or of each of its fields."""
    kind, may_lack = _without_none(hint)
    optional |= may_lack
    if _has_fields(kind):
        for name, inner in typing.get_type_hints(kind).items():
            yield from _parts((*path, name), inner, optional)
    else:
        is_enum = isinstance(kind, type) and issubclass(kind, enum.IntEnum)
        yield path, _SCHEMA[int if is_enum else kind] + ("?" if optional else "")


def _whole(hint: Any, flat: Iterator[Any], optional: bool = False) -> Any:
    kind, may_lack = _without_none(hint)
    optional |= may_lack
    if not _has_fields(kind):
        value = next(flat)
        return kind(value) if value is not None and isinstance(kind, type) and issubclass(kind, enum.Enum) else value
    values = [_whole(inner, flat, optional) for inner in typing.get_type_hints(kind).values()]
    return None if optional and all(value is None for value in values) else kind(*values)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    (kind,) = (one for one in typing.get_args(hint) if one is not type(None))
    return kind, True


def _has_fields(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


def _count(name: str, flat: _Flat, flops: Callable[..., float]) -> None:
    """Tell torch.utils.flop_counter what a registered operator costs."""
    wanted = list(inspect.signature(flops).parameters)

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = dict(zip(flat.names, flat.whole(args), strict=True))
        return int(flops(**{name: given[name] for name in wanted}))

    register_flop_formula(getattr(torch.ops.turbogr, name), get_raw=True)(formula)
