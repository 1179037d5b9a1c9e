"""What stands beside every metric: the protocol, the catalogue, the filter, the rules, and whom they leave out."""

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turbogr.data.split import Split, Targets, Which, ties_at_target
from turbogr.data.store import Store
from turbogr.evaluate.metrics import METRICS
from turbogr.evaluate.ranking import FILTERS, TIE_RULE, Filter


@dataclass(frozen=True)
class Evaluation:
    """Metrics by scorer, and the card that says what they mean."""

    metrics: dict[str, dict[str, float]]
    card: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "card": self.card}

    def render(self) -> RenderableType:
        """A table (one column per scorer) over the card, for a rich console."""
        table = Table("metric", *self.metrics, box=None, pad_edge=False, header_style="bold")
        for column in table.columns[1:]:
            column.justify = "right"
        for name in METRICS:
            values = [metrics.get(name) for metrics in self.metrics.values()]
            table.add_row(name, *("-" if value is None else f"{value:.4f}" for value in values))
        return Group(table, *(Text(line, style="dim") for line in card_lines(self.card)))


def make_card(
    store: Store, split: Split, which: Which, targets: Targets, *, max_history: int, filter: Filter, seed: int
) -> dict[str, Any]:
    """Everything known before ranking; `targets` are those evaluated, of the split's."""
    whole = split.targets(which)
    return {
        "protocol": split.protocol,
        "which": which,
        "split_time": split.config.time,
        "validation_time": split.config.validation_time,
        "time_units_per_second": store.manifest.time_units_per_second,
        "source": store.manifest.source,
        "catalogue_items": store.num_items,
        "catalogue": "every item of the store, also those without any event",
        "users_evaluated": len(targets),
        "users_with_target": len(whole),
        "users_drawn_by_seed": seed if len(targets) < len(whole) else None,
        "users_skipped": split.skipped[which],
        "filter": filter,
        "filter_rule": FILTERS[filter],
        "max_history": max_history,
        "tie_rule": TIE_RULE,
        "time_ties_at_target": ties_at_target(store, targets),
        "time_ties_order": store.manifest.ties,
        "next_time": "the model is told when the target happens, never what it is",
    }


def card_lines(card: dict[str, Any]) -> list[str]:
    """The card as a few plain sentences."""
    times = [f"{name} {card[key]}" for name, key in (("from", "split_time"), ("validation from", "validation_time"))
             if card[key] is not None]  # fmt: skip
    drawn = card["users_drawn_by_seed"]
    skipped = [f"{count:,} with {reason}" for reason, count in card["users_skipped"].items() if count]
    lines = [
        f"protocol {card['protocol']}, {card['which']} targets{''.join(f', {time}' for time in times)}",
        f"catalogue {card['catalogue_items']:,} items: {card['catalogue']}",
        f"users {card['users_evaluated']:,} of {card['users_with_target']:,} that have a target"
        + (f", drawn by seed {drawn}" if drawn is not None else "")
        + (f"; skipped {', '.join(skipped)}" if skipped else "; none skipped"),
        f"filter {card['filter']}: {card['filter_rule']}, with max_history {card['max_history']:,}; "
        f"the target stays, also the {card['repeat_targets']:,} that stand in their own visible history",
        f"ties in score: {card['tie_rule']}",
        f"ties in time: {card['time_ties_at_target']:,} targets share their time with the event before; "
        f"order of the store: {card['time_ties_order']}",
        f"next time: {card['next_time']}",
    ]
    if "predictions" in card:
        facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in card["predictions"].items())
        lines.append(f"predictions: {facts}")
    return lines
