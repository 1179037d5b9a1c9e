"""`turbogr evaluate`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from turbogr.cli.arguments import parse
from turbogr.config import Config, SplitConfig, check
from turbogr.errors import ConfigError

if TYPE_CHECKING:  # loads torch, which --help does not need
    from turbogr.evaluate import Evaluation


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
    checkpoint: Annotated[str, arg(metavar="best|last|STEP")] = "best"
    baselines: bool = True
    """Also evaluate popularity and Markov, on the same targets."""
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
    max_history: Annotated[int, arg(metavar="N")] = 200
    """--predictions: the visible history, which is removed from the lists."""
    json: bool = False
    """Print metrics and card as JSON."""


def run(args: list[str]) -> None:
    chosen = parse("evaluate", EvaluateArgs, args)
    if (chosen.run is None) == (chosen.predictions is None):
        raise ConfigError("evaluate takes either the folder of a run or --predictions FILE.")
    # torch is loaded when there is something to do, so that --help is quick
    from turbogr.device import tune_allocator

    tune_allocator()
    evaluation = _predictions(chosen) if chosen.predictions else _model(chosen)
    if chosen.json:
        print(json.dumps(evaluation.to_json(), indent=2))
    else:
        Console().print(evaluation.render())


def _split(chosen: EvaluateArgs) -> SplitConfig | None:
    if chosen.protocol is None:
        if chosen.time is not None or chosen.validation_time is not None:
            raise ConfigError("--time and --validation-time go with --protocol global-time.")
        return None
    split = SplitConfig(protocol=chosen.protocol, time=chosen.time, validation_time=chosen.validation_time)
    check(Config(split=split))
    return split


def _model(chosen: EvaluateArgs) -> "Evaluation":
    from turbogr.recommend.model import Model

    assert chosen.run is not None
    model = Model.load(chosen.run, checkpoint=chosen.checkpoint, store=chosen.store)
    return model.evaluate(chosen.which, split=_split(chosen), beside_baselines=chosen.baselines)


def _predictions(chosen: EvaluateArgs) -> "Evaluation":
    from turbogr.data.split import make_split
    from turbogr.data.store import Store
    from turbogr.evaluate import evaluate_predictions

    assert chosen.predictions is not None
    if chosen.store is None:
        raise ConfigError("--predictions needs --store, whose targets the lists are compared with.")
    store, config = Store.open(chosen.store), Config()
    split = make_split(store, _split(chosen) or config.split)
    return evaluate_predictions(
        chosen.predictions, store, split, chosen.which, config=config.evaluate, max_history=chosen.max_history
    )
