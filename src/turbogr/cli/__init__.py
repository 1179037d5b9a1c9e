"""The command line: which verbs there are, and the one place where errors become a sentence and an exit code.

A verb is a function `run(args: list[str]) -> None` in a small module of this package; it only reads its arguments and
calls the library. Modules are imported when their verb is typed, so that `turbogr --help` does not load torch.
Results go to stdout, notes and progress to stderr.

Exit codes: 0 done, 1 a bug (with traceback), 2 something the user can mend (one sentence), 130 interrupted.
"""

import errno
import importlib
import importlib.metadata
import os
import sys
import time
import traceback
from typing import NamedTuple

from turbogr.errors import SaidByAll, UserError, did_you_mean
from turbogr.launch import rank, world_size


class Verb(NamedTuple):
    module: str
    function: str
    summary: str
    memory_knob: str = ""
    """What to lower when this verb runs out of memory: its flags."""


VERBS = {
    "data prepare": Verb("turbogr.cli.data", "prepare", "turn a raw log into a store", "--memory"),
    "data synth": Verb(
        "turbogr.cli.data", "synth", "write a synthetic log with learnable structure", "--users or --items"
    ),
    "data stats": Verb("turbogr.cli.data", "stats", "what a store holds"),
    "train": Verb(
        "turbogr.cli.train",
        "run",
        "train a model on a store",
        "--train.batch-tokens or --train.batch-users (evaluating: --evaluate.batch-users or --evaluate.item-chunk)",
    ),
    "evaluate": Verb("turbogr.cli.evaluate", "run", "rank the full catalogue", "--item-chunk or --batch-users"),
    "recommend": Verb("turbogr.cli.recommend", "run", "top-k items for users", "--batch-users"),
    "export": Verb("turbogr.cli.export", "run", "a model that answers without the trainer"),
    "config show": Verb("turbogr.cli.config", "show", "print the resolved config, explained"),
    "doctor": Verb("turbogr.cli.doctor", "run", "what this machine has and which code paths it takes"),
}

SPIN = "3000"
"""How long OpenMP's threads spin for one another, read when torch is loaded. By default it is so long that a busy
neighbour on one core makes training many times slower; this short it costs a few percent on a calm machine."""

SPEAK_S = 1.0
"""How long the other ranks wait before they end: torchrun ends all when one has, and rank 0 is to speak first."""

QUICK_START = """\
Quick start:
  turbogr data prepare movielens ml-1m.zip --out stores/ml-1m
  turbogr train configs/ml-1m/hstu.toml
"""


def main(args: list[str] | None = None) -> int:
    """Run the command line; answers the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    verb = None
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            print(_overview())
        elif args[0] in ("--version", "-V"):
            print(f"turbogr {importlib.metadata.version('turbogr')}")
        else:
            name, rest = _split(args)
            verb = VERBS.get(name)
            if verb is None:
                print(_overview(name))
            else:
                _ensure_ranks(name)
                getattr(importlib.import_module(verb.module), verb.function)(rest)
        sys.stdout.flush()
        return 0
    except Exception as error:
        return _failed(error, verb)
    except KeyboardInterrupt as error:
        return _interrupted(error)


def _split(args: list[str]) -> tuple[str, list[str]]:
    """The verb's name and its arguments; a group alone (`turbogr data`) is its own name."""
    for words in (2, 1):
        name = " ".join(args[:words])
        if name in VERBS:
            return name, args[words:]
    groups = {name.split()[0] for name in VERBS if " " in name}
    if args[0] in groups and (len(args) == 1 or args[1] in ("-h", "--help")):
        return args[0], []
    typed = " ".join(args[:2]) if args[0] in groups else args[0]
    raise UserError(f"there is no verb {typed!r}{did_you_mean(typed, [*VERBS, *groups])}: `turbogr` alone lists them.")


def _ensure_ranks(verb: str) -> None:
    if verb != "train" and world_size() > 1:
        raise SaidByAll(f"`turbogr {verb}` runs as one process: start it without torchrun.")


def _overview(group: str = "") -> str:
    listed = {name: verb.summary for name, verb in VERBS.items() if name.startswith(group)}
    lines = [f"  turbogr {name:<14}{summary}" for name, summary in listed.items()]
    head = "TurboGR: training for generative recommendation.\n" if not group else f"turbogr {group}:\n"
    tail = "`turbogr VERB --help` explains a verb by examples; `turbogr --version` says which this is."
    return "\n".join([head, *lines, "", *([] if group else [QUICK_START]), tail])


def _failed(error: Exception, verb: Verb | None) -> int:
    if isinstance(error, BrokenPipeError):
        # Whoever read stdout has left (`| head`); python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    sentence = _sentence(error, verb)
    if isinstance(error, SaidByAll) and rank() > 0:
        time.sleep(SPEAK_S)
        return 2
    if sentence is None or os.environ.get("TURBOGR_TRACEBACK") == "1":
        traceback.print_exception(error)
    if sentence is None:
        print("turbogr: this is a bug; please report it with the lines above.", file=sys.stderr)
        return 1
    print(f"turbogr: {sentence}", file=sys.stderr)
    return 2


def _sentence(error: Exception, verb: Verb | None) -> str | None:
    """What the user is told; None where the error is ours."""
    if isinstance(error, UserError):
        return str(error)
    if _out_of_memory(error):
        knob = verb.memory_knob if verb else ""
        return f"out of memory: lower {knob}." if knob else "out of memory: free some, or take a smaller input."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the disk of {error.filename or 'the output'}: free some or choose another disk."
    return None


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # The CPU allocator of torch raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _interrupted(error: KeyboardInterrupt) -> int:
    if os.environ.get("TURBOGR_TRACEBACK") == "1":
        traceback.print_exception(error)
    if rank() > 0:
        return 130
    print(f"turbogr: interrupted; {str(error) or 'nothing half-written is left'}.", file=sys.stderr)
    return 130
