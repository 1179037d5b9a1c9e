"""Evaluate scorers side by side on the targets of a split, over the full catalogue."""

from collections.abc import Callable, Mapping

from turbogr.config import EvaluateConfig
from turbogr.data.split import Split, Which
from turbogr.data.store import Store
from turbogr.evaluate.baselines import MarkovScorer, PopularityScorer
from turbogr.evaluate.card import Evaluation, make_card
from turbogr.evaluate.metrics import retrieval_metrics
from turbogr.evaluate.ranking import Scorer, draw_targets, rank_targets
from turbogr.progress import bar
from turbogr.ranks import ALONE, Ranks


def evaluate(
    scorers: Mapping[str, Scorer],
    store: Store,
    split: Split,
    which: Which = "test",
    *,
    config: EvaluateConfig,
    max_history: int,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Metrics of every scorer on the same targets, with the card.

    `seed` draws the users where config.max_users asks for some only. `progress` is told a short note now and then, for
    a caller that shows progress already; without it a bar of its own is shown. Several `ranks` share the work and all
    answer the same.
    """
    targets = draw_targets(split.targets(which), config.max_users, seed)
    card = make_card(store, split, which, targets, max_history=max_history, filter=config.filter, seed=seed)
    metrics = {}
    with bar("evaluate", total=len(targets) * len(scorers)) as own:
        for number, (name, scorer) in enumerate(scorers.items()):

            def tell(done: int, number: int = number, name: str = name) -> None:
                if progress is None:
                    own.update(number * len(targets) + done, name)
                else:
                    progress(f"evaluate {name} {done:,}/{len(targets):,}")

            result = rank_targets(
                scorer,
                store,
                targets,
                max_history=max_history,
                batch_users=config.batch_users,
                item_chunk=config.item_chunk,
                filter=config.filter,
                progress=tell,
                ranks=ranks,
            )
            metrics[name] = retrieval_metrics(result.ranks)
            card["repeat_targets"] = result.repeat_targets
    return Evaluation(metrics, card)


def baselines(store: Store, split: Split) -> dict[str, Scorer]:
    """The baselines that every model stands beside."""
    return {"popularity": PopularityScorer(store, split), "markov": MarkovScorer(store, split)}
