"""`turbogr doctor`: what this machine has, which backend each operator takes and why, and what it can do at best."""

import json
from dataclasses import dataclass

from turbogr.cli.arguments import parse


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """What this machine has, which backend each operator would take and why, and its measured ceilings.

    Examples:
      turbogr doctor                  everything, in about five seconds
      turbogr doctor --quick          without measuring
      turbogr doctor --json > m.json  for a bug report or a benchmark's machine record
    """

    json: bool = False
    """One JSON object instead of tables."""
    quick: bool = False
    """Do not measure."""


def run(args: list[str]) -> None:
    chosen = parse("doctor", DoctorArgs, args)
    from turbogr.cli.machine import machine, show

    facts = machine(measure=not chosen.quick)
    if chosen.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
