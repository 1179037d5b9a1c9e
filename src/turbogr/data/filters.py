"""What part of a raw log is kept. Recorded in the manifest."""

import math
from dataclasses import dataclass

from turbogr.errors import ConfigError, DataError, UserError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Applied in this order; the iterative k-core last."""

    drop: tuple[str, ...] = ()
    """Events with one of these actions are dropped."""
    positive: tuple[str, ...] = ()
    """Only events with one of these actions are kept."""
    min_rating: float | None = None
    """Only events with at least this rating are kept (sources with ratings)."""
    users_with: tuple[str, ...] = ()
    """Users without any event that has one of these actions are dropped."""
    user_core: int = 0
    """Users keep at least this many events ..."""
    item_core: int = 0
    """... and items too, iterated until both hold; 0 is off."""

    def __post_init__(self) -> None:
        for name in ("user_core", "item_core"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"a k-core of {getattr(self, name)} ({name}) is impossible: give the least number of events, or 0 "
                    "to leave it off."
                )
        if self.min_rating is not None and not math.isfinite(self.min_rating):
            raise ConfigError(f"min_rating is {self.min_rating}: give a number, or leave it out.")

    def words(self) -> str:
        """As an error says them."""
        terms = []
        if self.drop:
            terms.append(f"events with {' or '.join(self.drop)} dropped")
        if self.positive:
            terms.append(f"only events with {' or '.join(self.positive)}")
        if self.min_rating is not None:
            terms.append(f"only ratings of at least {self.min_rating:g}")
        if self.users_with:
            terms.append(f"only users with {' or '.join(self.users_with)}")
        for who, core in (("user", self.user_core), ("item", self.item_core)):
            if core > 1:
                terms.append(f"at least {core} events per {who}")
        return "; ".join(terms)

    def event_condition(self, actions: tuple[str, ...], has_rating: bool) -> str:
        """SQL over the columns `actions` and `rating`."""
        terms = ["true"]
        if self.drop:
            terms.append(f"actions & {action_mask(self.drop, actions)} = 0")
        if self.positive:
            terms.append(f"actions & {action_mask(self.positive, actions)} <> 0")
        if self.min_rating is not None:
            if not has_rating:
                raise DataError("min_rating needs a source with ratings, and this one has none: leave it out.")
            terms.append(f"rating >= {self.min_rating!r}")
        return " AND ".join(terms)


FILTERS = {
    "none": Filters(),
    # arXiv 2605.13433: no disliked events, no users without a positive action, 5-core
    "kuairand-paper": Filters(
        drop=("hate",),
        users_with=("click", "like", "follow", "comment", "forward", "long_view"),
        user_core=5,
        item_core=5,
    ),
}


def named_filters(name: str) -> Filters:
    if name not in FILTERS:
        raise UserError(f"unknown filter {name!r}{did_you_mean(name, FILTERS)}; known: {', '.join(FILTERS)}.")
    return FILTERS[name]


def action_mask(wanted: tuple[str, ...], actions: tuple[str, ...]) -> int:
    """The bits of the named actions."""
    mask = 0
    for name in wanted:
        if name not in actions:
            known = f"; it has {', '.join(actions)}" if actions else " (it has none)"
            raise DataError(f"the log has no action {name!r}{did_you_mean(name, actions)}{known}.")
        mask |= 1 << actions.index(name)
    return mask
