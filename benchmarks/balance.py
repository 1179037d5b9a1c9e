"""Load balance: how equal the ranks' work is, what planning costs, and what ranks really wait.

    python -m benchmarks.balance --data DIR            every rule on KuaiRand-27K's lengths; two ranks train 200 steps
    python -m benchmarks.balance --data DIR --quick    clicks and two ranks for 12 steps, under a minute

imbalance_CAP_RANKS   (max - min) / max of the ranks' cost by the causal count, D=1024, 8 heads, 32 users a rank, clicks
                      cut at CAP, mean of 8 draws, dealt out by `partition`; naive_CAP_RANKS as they were drawn
plan_ms_RANKS         milliseconds of one core to deal out RANKS x 32 users, the slowest cap
wait_reduction_x      mean waiting without / with balance: 2 gloo ranks, one pinned thread each, 4 users a rank cut at
                      8192; from a rank's own end of compute to the slower rank's
step_balanced_x       mean step without / with balance, beside step_predicted_x, what the cost says
cost_fit_error        median relative error of a fitted cost on the times of steps that it has not seen
moved_...             tokens that ranks swap in exchanged mode / a lower bound, 4 ranks
"""

from typing import Any

from benchmarks import balance_lengths, balance_ranks
from benchmarks.common import ROOT, finish, parser

STEPS, QUICK_STEPS = 200, 12
WAITING = ("wait_reduction_x", "step_balanced_x", "step_predicted_x", "cost_fit_error")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    planned = balance_lengths.run(arguments.data, arguments.quick)
    figures: dict[str, Any] = dict(planned["figures"])
    details: dict[str, Any] = dict(planned["details"])
    reasons: dict[str, str] = dict(planned["reasons"])
    if reasons:
        figures |= dict.fromkeys(WAITING)
        reasons |= dict.fromkeys(WAITING, next(iter(reasons.values())))
    else:
        balance_lengths.print_tables(details)
        measured, waiting = balance_ranks.run(arguments.data, steps=QUICK_STEPS if arguments.quick else STEPS)
        figures |= measured
        details |= waiting
        for name, value in measured.items():
            print(f"{name:24} {value:.4g}" if value is not None else f"{name:24} -")
        if measured["cost_fit_error"] is None:
            reasons["cost_fit_error"] = "too few steps to fit a cost"
        if not arguments.quick:
            balance_lengths.plot(details, ROOT / "docs" / "balance.png")
    if reasons:
        figures["reasons"] = reasons
    finish("balance", arguments, figures, details)


if __name__ == "__main__":
    main()
