"""The generating process of the synthetic log: topics, tastes, sessions, and the oracle that knows them.

M items are dealt to K topics of about equal mass; pi is the topics' share of all exposures. A user u has S favourite
topics (slots with falling weights) that drift; a session (a pause of five minutes begins one) has a dominant topic out
of them. Given the previous exposure's topic z, the next topic is

    P(k | state) = stay [k = z] + follow succ(k | z) + session [k = dominant] + taste fav_u(k) + any pi(k)

and the item is P(i | k) = w_i / pi_k. At the start of a session stay and follow fall to the dominant topic. A draw
that the user has seen before is drawn again (popular ones may come back, see `repeat`). All parts leave pi as it is:
items keep the popularity they were given. Everybody shares the successors of a topic, so order matters; the session's
topic and the taste need more than the last item.

Shapes: n users of a chunk, T their events (user after user), K topics, M items, S slots.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from turbogr.progress import bar

TOPICS = 24
STAY, FOLLOW, SESSION, TASTE, ANY = 0.05, 0.30, 0.45, 0.15, 0.05
PART_EDGES = np.cumsum([STAY, FOLLOW, SESSION, TASTE, ANY])
FIRST_SUCCESSOR = 0.75
"""A topic has two successors, this share goes to the first."""
SLOT_WEIGHTS = np.array([0.30, 0.22, 0.17, 0.13, 0.10, 0.08])
DRIFT = 0.25
"""Chance that a session's start replaces one favourite."""
SESSION_MATCH = 0.3
CLICK_SLOPE = 4.0
TRIES = 8
PILOT_EVENTS = 400_000
PILOT_LENGTH = 20_000
PILOT_ROUNDS = 4


@dataclass(frozen=True)
class Catalogue:
    """Item i is the i-th most popular one."""

    weight: np.ndarray
    """float64 [M], sums to 1; not quite the share of exposures, see make_catalogue."""
    repeat: np.ndarray
    """float64 [M]: the chance that a draw the user has seen already is shown again."""
    topic: np.ndarray
    """int16 [M]"""
    by_topic: np.ndarray
    """int64 [M]: items ordered by (topic, falling weight)."""
    edges: np.ndarray
    """float64 [M+1]: cumulative weight in that order."""
    starts: np.ndarray
    """int64 [K+1]: where each topic begins in that order."""
    successors: np.ndarray
    """int64 [2, K]"""
    flow: np.ndarray
    """float64 [K]: how often a step to the successor is taken, so that pi stays."""

    @property
    def mass(self) -> np.ndarray:
        """pi, float64 [K]."""
        return np.diff(self.edges[self.starts])


def make_catalogue(
    rng: np.random.Generator, shares: np.ndarray, lengths: np.ndarray, session_share: float
) -> Catalogue:
    """A world whose items are shown as `shares` [M] says to users of `lengths`; a share of the events begins a session.

    Because nobody is shown an item twice, the popular items of a favourite topic run out: weights equal to the shares
    would give too flat a curve. Pilot walks find by how much, rank by rank, and the weights are raised accordingly.
    """
    topics = int(np.clip(len(shares) // 20, 5, TOPICS))
    topic = _deal(rng, shares, topics)
    cycles = [rng.permutation(topics) for _ in range(2)]
    successors = np.empty((2, topics), np.int64)
    for row, cycle in zip(successors, cycles, strict=True):
        row[cycle] = np.roll(cycle, -1)
    # an item that is due more than once per user has to come back to reach its share
    repeat = np.clip(1.5 * shares * lengths.mean() - 0.5, 0, 1)
    pilot = np.minimum(lengths, PILOT_LENGTH)
    pilot = pilot[:: max(1, int(pilot.sum() / PILOT_EVENTS))]
    offsets = np.concatenate([[0], np.cumsum(pilot)])
    world = _with_weights(shares, repeat, topic, successors)
    with bar("fit the popularity", PILOT_ROUNDS) as progress:
        for done in range(PILOT_ROUNDS):
            begins = rng.random(offsets[-1]) < session_share
            shown = np.bincount(walk(rng, world, offsets, begins).item, minlength=len(shares))
            world = _with_weights(world.weight * _correction(shares, shown / shown.sum()), repeat, topic, successors)
            progress.update(done + 1)
    return world


def _with_weights(weight: np.ndarray, repeat: np.ndarray, topic: np.ndarray, successors: np.ndarray) -> Catalogue:
    # no two items weigh exactly the same, so that ranks by weight have no ties
    weight = weight * (1 - 1e-7 * np.arange(len(weight)) / len(weight))
    weight /= weight.sum()
    by_topic = np.lexsort((-weight, topic))
    starts = np.concatenate([[0], np.cumsum(np.bincount(topic))])
    edges = np.concatenate([[0], np.cumsum(weight[by_topic])])
    mass = np.diff(edges[starts])
    return Catalogue(weight, repeat, topic.astype(np.int16), by_topic, edges, starts, successors, mass.min() / mass)


def _correction(wanted: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """What to multiply the weights by, float64 [M]: wanted / shown by bands of rank, smooth between them."""
    bands = np.unique(np.geomspace(1, len(wanted), 25).astype(np.int64)) - 1
    ratio = np.add.reduceat(wanted, bands) / np.maximum(np.add.reduceat(shown, bands), 1e-9)
    middle = np.log((bands + 1 + np.append(bands[1:], len(wanted))) / 2)
    return np.exp(np.interp(np.log(np.arange(len(wanted)) + 1), middle, np.log(np.clip(ratio, 0.5, 2))))


def _deal(rng: np.random.Generator, weight: np.ndarray, topics: int) -> np.ndarray:
    """Topic of every item: the heaviest go to the lightest topic, the many light ones where something is lacking."""
    head = min(len(weight), 4096)
    topic = np.empty(len(weight), np.int64)
    heap = [(0.0, int(k)) for k in rng.permutation(topics)]
    for item in range(head):
        mass, k = heapq.heappop(heap)
        topic[item] = k
        heapq.heappush(heap, (mass + weight[item], k))
    filled = np.array([mass for mass, _ in sorted(heap, key=lambda pair: pair[1])])
    lack = np.maximum(1 / topics - filled, 1e-3 / topics)
    topic[head:] = rng.choice(topics, size=len(weight) - head, p=lack / lack.sum())
    return topic


@dataclass(frozen=True)
class Walk:
    """What a chunk of users was shown, and the state in which each event was drawn."""

    item: np.ndarray
    """int32 [T]"""
    dominant: np.ndarray
    """int16 [T]"""
    favourites: np.ndarray
    """int16 [T, S]"""
    repeats: int


def walk(
    rng: np.random.Generator,
    world: Catalogue,
    offsets: np.ndarray,
    session_start: np.ndarray,
    tick: Callable[[int], None] = lambda events: None,
) -> Walk:
    """Draw every event of users `offsets` [n+1]; step t draws event t of all that have one; `tick` hears of it."""
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")  # the users that still have events are always the first ones
    first = offsets[:-1][order]
    total = int(offsets[-1])
    walker = _Walker(rng, world, len(lengths))
    item, dominant = np.empty(total, np.int32), np.empty(total, np.int16)
    favourites = np.empty((total, len(SLOT_WEIGHTS)), np.int16)
    active = np.searchsorted(-lengths[order], -np.arange(1, lengths.max() + 1), side="right")
    done = 0
    for t, count in enumerate(active):
        at = first[:count] + t
        begins = session_start[at]
        walker.begin_sessions(np.flatnonzero(begins))
        item[at] = walker.next_items(count, begins)
        dominant[at] = walker.dominant[:count]
        favourites[at] = walker.favourites[:count]
        done += int(count)
        if t % 256 == 0:
            tick(done)
    return Walk(item, dominant, favourites, walker.repeats)


class _Walker:
    """State of n users, int64: previous topic [n], session's topic [n], favourites [n, S]; and what each has seen."""

    def __init__(self, rng: np.random.Generator, world: Catalogue, n: int) -> None:
        self.rng = rng
        self.world = world
        self.topic_edges = world.edges[world.starts[1:]]
        self.slot_edges = np.cumsum(SLOT_WEIGHTS)
        self.previous = self._any_topic(n)
        self.dominant = self._any_topic(n)
        self.favourites = self._any_topic(n * len(SLOT_WEIGHTS)).reshape(n, -1)
        self.seen = np.zeros((n, len(world.weight) // 8 + 1), np.uint8)  # one bit per item
        self.repeats = 0

    def begin_sessions(self, users: np.ndarray) -> None:
        if not len(users):
            return
        drifting = users[self.rng.random(len(users)) < DRIFT]
        self.favourites[drifting, self._any_slot(len(drifting))] = self._any_topic(len(drifting))
        self.dominant[users] = self.favourites[users, self._any_slot(len(users))]

    def next_items(self, count: int, begins: np.ndarray) -> np.ndarray:
        """The next item of users 0 .. count-1; what a user has seen is drawn again, up to TRIES times."""
        shown = np.empty(count, np.int64)
        users = np.arange(count)
        for attempt in range(TRIES):
            drawn = self._any_item(self._next_topic(users, begins[users]))
            shown[users] = drawn
            known = (self.seen[users, drawn >> 3] >> (drawn & 7)) & 1 == 1
            if not known.any():
                break
            again = known & (self.rng.random(len(users)) >= self.world.repeat[drawn]) & (attempt < TRIES - 1)
            self.repeats += int(known.sum() - again.sum())
            users = users[again]
        everybody = np.arange(count)
        self.seen[everybody, shown >> 3] |= (1 << (shown & 7)).astype(np.uint8)
        self.previous[:count] = self.world.topic[shown]
        return shown

    def _next_topic(self, users: np.ndarray, begins: np.ndarray) -> np.ndarray:
        u = self.rng.random((4, len(users)))
        dominant, previous = self.dominant[users], self.previous[users]
        follow = self.world.successors[(u[1] >= FIRST_SUCCESSOR).astype(np.int64), previous]
        follow = np.where(u[2] < self.world.flow[previous], follow, previous)
        taste = self.favourites[users, _class_of(self.slot_edges, u[3])]
        part = _class_of(PART_EDGES, u[0])
        part[begins & (part < 2)] = 2
        return np.choose(part, [previous, follow, dominant, taste, _class_of(self.topic_edges, u[3])])

    def _any_item(self, topic: np.ndarray) -> np.ndarray:
        low, high = self.world.starts[topic], self.world.starts[topic + 1]
        x = self.world.edges[low] + self.rng.random(len(topic)) * (self.world.edges[high] - self.world.edges[low])
        place = np.clip(np.searchsorted(self.world.edges, x, side="right") - 1, low, high - 1)
        return np.asarray(self.world.by_topic[place])

    def _any_topic(self, n: int) -> np.ndarray:
        return _class_of(self.topic_edges, self.rng.random(n))

    def _any_slot(self, n: int) -> np.ndarray:
        return _class_of(self.slot_edges, self.rng.random(n))


def _class_of(edges: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Which of the classes with cumulative shares `edges` (the last is about 1) the uniform `u` falls in."""
    return np.minimum(np.searchsorted(edges, u, side="right"), len(edges) - 1)


def next_topic_chances(
    world: Catalogue, previous: np.ndarray, dominant: np.ndarray, taste: np.ndarray, begins: np.ndarray
) -> np.ndarray:
    """P(k | state) for n events, float64 [n, K]. At a session's start its topic is not known yet: taste stands in."""
    rows = np.arange(len(previous))
    chances = TASTE * taste + ANY * world.mass
    inside = ~begins
    flow = world.flow[previous]
    chances[rows, previous] += inside * (STAY + FOLLOW * (1 - flow))
    for successor, share in zip(world.successors, (FIRST_SUCCESSOR, 1 - FIRST_SUCCESSOR), strict=True):
        chances[rows, successor[previous]] += inside * FOLLOW * flow * share
    chances[rows, dominant] += inside * SESSION
    return np.asarray(chances + begins[:, None] * (STAY + FOLLOW + SESSION) * taste)


def taste_of(favourites: np.ndarray, topics: int) -> np.ndarray:
    """fav_u(k), float64 [n, K], from slots [n, S]."""
    taste = np.zeros((len(favourites), topics))
    for slot, weight in enumerate(SLOT_WEIGHTS):
        taste[np.arange(len(favourites)), favourites[:, slot]] += weight
    return taste


def match(walked: Walk, topic: np.ndarray) -> np.ndarray:
    """How well each event fits its user, float64 [T], 0 to 1 + SESSION_MATCH: what clicks and likes depend on."""
    return np.asarray((walked.favourites == topic[:, None]) @ SLOT_WEIGHTS + SESSION_MATCH * (walked.dominant == topic))
