"""`turbogr evaluate`."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from turbogr.cli.arguments import parse
from turbogr.config import Config, EvaluateConfig, SplitConfig, check
from turbogr.errors import ConfigError

if TYPE_CHECKING:  # loads torch, which --help does not need
    from turbogr.evaluate import Evaluation

NUMBER = arg(metavar="N")


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs:
    """Rank every user's target among the full catalogue: a trained model beside popularity and a first-order Markov
    chain, or the lists of any other library. A card beside the metrics says protocol, catalogue, filter and tie rule.

    Examples:
      turbogr evaluate runs/hstu                                     the best epoch's checkpoint, test targets
      turbogr evaluate runs/hstu --checkpoint last --json
      turbogr evaluate runs/hstu --which validation                  where the split has a validation
      turbogr evaluate --predictions top.csv --store stores/ml-1m    columns user, item and rank (or score)
    """

    run: Annotated[Positional[Path | None], arg(metavar="RUN")] = None
    """Folder of a run, or of an exported model with --store."""
    which: Literal["test", "validation"] = "test"
    checkpoint: Annotated[str | None, arg(metavar="best|last|STEP")] = None
    """Of a run; best without it: the last one where none was selected."""
    no_baselines: bool = False
    """Leave out popularity and Markov, which are evaluated on the same targets."""
    predictions: Annotated[Path | None, arg(metavar="FILE")] = None
    """Score these lists (.csv or .parquet with columns user, item and rank or score, raw ids) instead of a model."""
    store: Annotated[Path | None, arg(metavar="STORE")] = None
    """The store, for --predictions, or where a run's store has moved to."""
    protocol: Literal["leave-one-out", "leave-one-out-validation", "global-time"] | None = None
    """Another split than the run's; refused where the model was trained past it."""
    time: Annotated[int | None, arg(metavar="T")] = None
    """global-time: where the test begins, in the store's unit."""
    validation_time: Annotated[int | None, arg(metavar="T")] = None
    """global-time: where the validation begins."""
    max_history: Annotated[int | None, NUMBER] = None
    """--predictions: the visible history, which is removed from the lists; 200 without it. A run knows its own."""
    filter: Literal["visible", "history", "none"] | None = None
    """Remove the items of the visible history, of the whole one, or nothing; without it as the run's config says."""
    max_users: Annotated[int | None, NUMBER] = None
    """Evaluate this many users, drawn by the seed; 0 takes all."""
    batch_users: Annotated[int | None, NUMBER] = None
    """Users ranked at a time."""
    item_chunk: Annotated[int | None, NUMBER] = None
    """Items scored at a time."""
    json: bool = False
    """Print metrics and card as JSON."""


def run(args: list[str]) -> None:
    chosen = parse("evaluate", EvaluateArgs, args)
    if (chosen.run is None) == (chosen.predictions is None):
        raise ConfigError("evaluate takes either the folder of a run or --predictions FILE.")
    _refuse_ignored(chosen)
    # torch is loaded when there is something to do, so that --help is quick
    from turbogr.device import tune_allocator

    tune_allocator()
    evaluation = _predictions(chosen) if chosen.predictions else _model(chosen)
    if chosen.json:
        print(json.dumps(evaluation.to_json(), indent=2))
    else:
        Console().print(evaluation.render())


def _refuse_ignored(chosen: EvaluateArgs) -> None:
    """What means nothing for a run, or for lists, is refused rather than ignored."""
    if chosen.predictions is None:
        ignored, kind = ["max_history"], "--predictions: a run's visible history is its model.max_history"
    else:
        ignored, kind = ["checkpoint", "no_baselines", "batch_users", "item_chunk"], "a run, not to --predictions"
    for name in ignored:
        value = getattr(chosen, name)
        if value is not None and value is not False:  # 0 was typed, too
            raise ConfigError(f"--{name.replace('_', '-')} belongs to {kind}.")


def _settings(chosen: EvaluateArgs, base: EvaluateConfig) -> EvaluateConfig:
    """`base` with what the flags change."""
    flags = {name: getattr(chosen, name) for name in ("filter", "max_users", "batch_users", "item_chunk")}
    changes: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    changed = replace(base, **changes)
    check(Config(evaluate=changed))
    return changed


def _split(chosen: EvaluateArgs) -> SplitConfig | None:
    if chosen.protocol is None:
        if chosen.time is not None or chosen.validation_time is not None:
            raise ConfigError("--time and --validation-time go with --protocol global-time.")
        return None
    split = SplitConfig(protocol=chosen.protocol, time=chosen.time, validation_time=chosen.validation_time)
    check(Config(split=split))
    return split


def _model(chosen: EvaluateArgs) -> "Evaluation":
    from turbogr.ops import gemm
    from turbogr.recommend.model import Model

    assert chosen.run is not None
    model = Model.load(chosen.run, checkpoint=chosen.checkpoint or "best", store=chosen.store)
    gemm.take(model.config.device.gemm)  # as in the run: sums depend on the library in the last bit
    model.config = replace(model.config, evaluate=_settings(chosen, model.config.evaluate))
    return model.evaluate(chosen.which, split=_split(chosen), beside_baselines=not chosen.no_baselines)


def _predictions(chosen: EvaluateArgs) -> "Evaluation":
    from turbogr.data.split import make_split
    from turbogr.data.store import Store
    from turbogr.evaluate import evaluate_predictions

    assert chosen.predictions is not None
    if chosen.store is None:
        raise ConfigError("--predictions needs --store, whose targets the lists are compared with.")
    config = Config(evaluate=_settings(chosen, EvaluateConfig()))
    if chosen.max_history is not None:
        config = replace(config, model=replace(config.model, max_history=chosen.max_history))
        check(config)
    store = Store.open(chosen.store)
    return evaluate_predictions(
        chosen.predictions,
        store,
        make_split(store, _split(chosen) or config.split),
        chosen.which,
        config=config.evaluate,
        max_history=config.model.max_history,
    )
