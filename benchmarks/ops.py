"""The operators against the public eager formulations and this machine's ceilings; correctness first.

    python -m benchmarks.ops [--quick] [--device cpu|cuda] [--only PART ...] [--data DIR] [--out DIR]

On a CPU (see the parts' own files): attention, fuxi, loss, lookup, layer, step. On a GPU: attention and layer, absolute
rates. Every operator is compared with its float64 reference before anything is timed; where one is off, there are no
figures and the exit status is 1. `max_rel_error` and `max_rel_error_bf16` are the largest of these errors.
"""

import sys
from collections.abc import Callable
from types import ModuleType

import torch

from benchmarks import ops_attention, ops_cuda, ops_fuxi, ops_layer, ops_lookup, ops_loss, ops_step
from benchmarks.common import finish, parser, timed
from benchmarks.ops_measure import TOLERANCE, Part, Settings
from turbogr.device import tune_allocator

PARTS: dict[str, dict[str, ModuleType]] = {
    "cpu": {
        "attention": ops_attention,
        "loss": ops_loss,
        "lookup": ops_lookup,
        "layer": ops_layer,
        "step": ops_step,
        "fuxi": ops_fuxi,
    },
    "cuda": {"cuda": ops_cuda},
}


def type_of(check: str) -> torch.dtype:
    """A check's name ends with the type that it computed in; fp32 where it says none."""
    return torch.bfloat16 if check.endswith(str(torch.bfloat16)) else torch.float32


def faults(errors: dict[str, float]) -> list[str]:
    """The checks that are off."""
    return [
        f"{name}: relative error {error:.2e}, {TOLERANCE[type_of(name)]:.0e} is allowed"
        for name, error in errors.items()
        if not error <= TOLERANCE[type_of(name)]
    ]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", metavar="PART", help="some of the parts")
    arguments = made.parse_args()
    parts = PARTS[arguments.device]
    unknown = set(arguments.only or ()) - set(parts)
    if unknown:
        made.error(f"no part {', '.join(sorted(unknown))}: take some of {', '.join(parts)}")
    chosen = {name: part for name, part in parts.items() if not arguments.only or name in arguments.only}
    settings = Settings(quick=arguments.quick, data=arguments.data)
    tune_allocator()
    errors: dict[str, float] = {}
    for name, part in chosen.items():
        _said(f"{name}: checked", lambda part=part: errors.update(part.check(settings)))
    off = faults(errors)
    if off:
        print("\n".join(off), file=sys.stderr)
        return 1
    whole = Part()
    for name, part in chosen.items():
        _said(f"{name}: measured", lambda part=part: whole.add(part.measure(settings)))
    for key, dtype in (("max_rel_error", torch.float32), ("max_rel_error_bf16", torch.bfloat16)):
        if errors:
            whole.figures[key] = max((error for name, error in errors.items() if type_of(name) == dtype), default=0.0)
        else:
            whole.missing(key, "nothing could be run")
    whole_run = {"cpu": "ops", "cuda": "ops-cuda"}[arguments.device]
    name = "-".join(["ops", *chosen]) if arguments.only else whole_run
    figures = {**whole.figures, "reasons": whole.reasons}
    finish(name, arguments, figures, {"details": whole.details, "errors": errors, "threads": torch.get_num_threads()})
    return 0


def _said(what: str, call: Callable[[], object]) -> None:
    seconds = timed(call)
    print(f"{what} in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
