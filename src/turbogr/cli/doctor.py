"""`turbogr doctor`: what this machine has, which backend each operator takes and why, and what it can do at best."""

import json
from dataclasses import dataclass

from turbogr.cli.arguments import parse
from turbogr.errors import UserError
from turbogr.progress import bar


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """What this machine has, which backend each operator would take and why, and its measured ceilings.

    Examples:
      turbogr doctor                  everything, in about five seconds
      turbogr doctor --quick          without measuring
      turbogr doctor --json > m.json  for a bug report or a benchmark's machine record
      turbogr doctor --build          compile the CPU operators again, where installing could not
    """

    json: bool = False
    """One JSON object instead of tables."""
    quick: bool = False
    """Do not measure."""
    build: bool = False
    """Compile the CPU operators first; a reason why that cannot be is an error."""


def run(args: list[str]) -> None:
    chosen = parse("doctor", DoctorArgs, args)
    if chosen.build:
        _build()
    from turbogr.cli.machine import machine, show

    facts = machine(measure=not chosen.quick)
    if chosen.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)


def _build() -> None:
    from turbogr.ops.native import build

    with bar("compile", total=1) as progress:
        try:
            reason = build.build().get("reason")
        except OSError as problem:
            reason = f"{build.LIBRARIES} cannot be written ({problem.strerror})"
        progress.update(1)
    if reason:
        raise UserError(f"the CPU operators were not compiled: {reason}.")
