"""A synthetic log in KuaiRand's own CSV format: real lengths, popularity and pauses, and a structure to be learned.

`synthesize` writes a folder:

    log_standard_4_08_to_5_08_synthetic.csv   KuaiRand's 19 columns, user after user, in time order
    video_features_basic_synthetic.csv        video_id, video_type, video_duration, tag (the topic) and a made-up title
    user_features_synthetic.csv               user_id, user_active_degree
    truth.json                                the arguments and what the generator's own oracle reaches

The process itself is in synthetic_world.py, its oracle in synthetic_oracle.py, the real distributions in shape.py.
Equal arguments give equal bytes.

Shapes: n users of a chunk, T their events (user after user).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from turbogr.data.sources import synthetic_oracle as oracle
from turbogr.data.sources import synthetic_world as worlds
from turbogr.data.sources.shape import load_shape, popularity_shares, quantiles
from turbogr.data.sources.synthetic_world import Catalogue, Walk
from turbogr.errors import ConfigError, did_you_mean
from turbogr.files import whole_folder, write_json
from turbogr.progress import Bar, bar

LOG_NAME = "log_standard_4_08_to_5_08_synthetic.csv"
KINDS = ("kuairand-27k",)
FIRST_MS = 1_649_347_200_000
"""2022-04-08 00:00 in China, where KuaiRand's dates are."""
SPAN_MS = 31 * 86_400_000
UTC_OFFSET_MS = 8 * 3_600_000
GAP_EDGES_S = {"<1s": (0, 1), "1-10s": (1, 10), "10-60s": (10, 60), "1-5min": (60, 300), "5-30min": (300, 1800),
               "30-120min": (1800, 7200), ">=120min": (7200, np.inf)}  # fmt: skip
SESSION_MS = 300_000
TIED_SHARE = 0.999
"""Of the gaps below a second; the real ones are zero but for a few."""
MASK_MATCH = 0.5
"""How much the fit of an event to its user weighs, against chance, in how much the user does with it."""
CHUNK_EVENTS = 4_000_000
CHUNK_BITS = 2**31
"""Bound of a chunk's seen-bits: users x items."""
SLICE_ROWS = 500_000
TITLES = (
    "street food", "baking", "farm life", "gardening", "cats", "wild animals", "make-up", "fashion",
    "basketball", "football", "gym", "street dance", "pop songs", "guitar", "stand-up comedy", "short drama",
    "anime", "mobile games", "woodwork", "cars", "gadgets", "space", "city walks", "camping",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SynthReport:
    path: Path
    users: int
    items: int
    rows: int
    clicks: int
    repeats: int
    """Rows whose video the user had been shown before."""
    oracle: dict[str, dict[str, float]]
    """As in truth.json: metrics of `exposures`, `exposures_unordered` and `clicks`."""


def synthesize(
    out: Path,
    *,
    users: int,
    items: int,
    like: str = "kuairand-27k",
    length_scale: float = 1.0,
    popularity: float = 1.0,
    seed: int = 0,
    overwrite: bool = False,
) -> SynthReport:
    """Write a raw log of `users` and `items` into the folder `out`.

    `length_scale` multiplies the real lengths (on average 11,812 exposures per user); `popularity` is the power of the
    real rank-share curve: 1 is the real curve, 0 makes all items equal.
    """
    _check(users, items, like, length_scale, popularity, seed)
    arguments = {"users": users, "items": items, "like": like, "length_scale": length_scale, "popularity": popularity,
                 "seed": seed}  # fmt: skip
    rng = _generator(seed, 0)
    lengths, click_rate = _lengths(rng, like, users, length_scale)
    with whole_folder(Path(out), overwrite=overwrite) as folder:
        world = worlds.make_catalogue(rng, popularity_shares(like, items, popularity), lengths, _session_share(like))
        video_id = rng.permutation(items)
        duration_ms = _durations(rng, like, items)
        _write_videos(folder, world, video_id, duration_ms)
        _write_users(folder, lengths)
        with bar("synthesize", int(lengths.sum())) as progress:
            log = _Log(seed, like, world, video_id, duration_ms, progress)
            log.write(folder / LOG_NAME, lengths, click_rate)
        scores = {name: score.means() for name, score in log.scores.items() if score.users}
        counts = {"rows": int(lengths.sum()), "clicks": log.clicks, "repeats": log.repeats}
        write_json(folder / "truth.json", {"arguments": arguments, "counts": counts, "oracle": scores})
    return SynthReport(path=Path(out), users=users, items=items, oracle=scores, **counts)


def _check(users: int, items: int, like: str, length_scale: float, popularity: float, seed: int) -> None:
    if like not in KINDS:
        raise ConfigError(f"--like {like!r} is not known{did_you_mean(like, KINDS)}: {', '.join(KINDS)} is.")
    for name, value, holds, need in (
        ("users", users, users >= 2, "be at least 2"),
        ("items", items, 100 <= items < 2**31, "lie in [100, 2^31)"),
        ("length-scale", length_scale, 0 < length_scale < np.inf, "be above 0"),
        ("popularity", popularity, 0 <= popularity < np.inf, "not be negative"),
        ("seed", seed, 0 <= seed < 2**63, "lie in [0, 2^63)"),
    ):
        if not holds:
            raise ConfigError(f"--{name} must {need}, not {value}.")


def _generator(seed: int, stream: int) -> np.random.Generator:
    """Stream 0 makes lengths and catalogue, stream 1 + c the users of chunk c."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))


def _lengths(rng: np.random.Generator, like: str, users: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Exposures int64 [users] and click-through float64 [users]; every part of the real distribution has its users."""
    place = (rng.permutation(users) + rng.random(users)) / users
    exposures = quantiles(like, "exposures")
    lengths = np.interp(place, np.linspace(0, 1, len(exposures)), exposures) * scale
    by_length = np.asarray(load_shape(like)["ctr_by_exposures"])  # [20, 41]
    band = (place * len(by_length)).astype(np.int64)
    at = rng.random(users) * (by_length.shape[1] - 1)
    low = at.astype(np.int64)
    rate = by_length[band, low] + (at - low) * (by_length[band, low + 1] - by_length[band, low])
    return np.maximum(1, np.rint(lengths)).astype(np.int64), np.clip(rate, 0.001, 0.995)


def _durations(rng: np.random.Generator, like: str, items: int) -> np.ndarray:
    mean, spread = load_shape(like)["log_ms"]["duration"]
    return np.clip(np.exp(rng.normal(mean, spread, items)), 3_000, 1_200_000).astype(np.int64)


def _session_share(like: str) -> float:
    shares = load_shape(like)["gap_shares"]
    return float(sum(shares[name] for name, (low, _) in GAP_EDGES_S.items() if low * 1000 >= SESSION_MS))


@dataclass
class _Log:
    """Writes the log chunk by chunk and keeps what the oracle needs."""

    seed: int
    like: str
    world: Catalogue
    video_id: np.ndarray
    duration_ms: np.ndarray
    progress: Bar
    clicks: int = 0
    repeats: int = 0
    scores: dict[str, oracle.Score] = field(
        default_factory=lambda: {n: oracle.Score() for n in ("exposures", "exposures_unordered", "clicks")}
    )

    def write(self, path: Path, lengths: np.ndarray, click_rate: np.ndarray) -> None:
        users = len(lengths)
        size = int(np.clip(min(CHUNK_EVENTS / lengths.mean(), CHUNK_BITS / len(self.video_id)), 1, users))
        done = 0
        with path.open("wb") as stream:
            for chunk, first in enumerate(range(0, users, size)):
                part = slice(first, min(first + size, users))
                columns = self._chunk(_generator(self.seed, 1 + chunk), first, lengths[part], click_rate[part], done)
                table = pa.table(columns)
                _write_csv(table, stream, header=first == 0)
                done += table.num_rows
                self.progress.update(done)

    def _chunk(
        self, rng: np.random.Generator, first: int, lengths: np.ndarray, click_rate: np.ndarray, done: int
    ) -> dict[str, np.ndarray]:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        user = np.repeat(np.arange(len(lengths)), lengths)
        time_ms, begins = _times(rng, load_shape(self.like), offsets, user)
        walked = worlds.walk(rng, self.world, offsets, begins, lambda events: self.progress.update(done + events))
        fit = worlds.match(walked, self.world.topic[walked.item])
        intercept = _intercepts(fit, offsets, click_rate)
        clicked = rng.random(len(fit)) < _sigmoid(intercept[user] + worlds.CLICK_SLOPE * fit)
        self._score(walked, user, offsets, begins, clicked, intercept)
        self.clicks += int(clicked.sum())
        self.repeats += walked.repeats
        actions = _actions(rng, load_shape(self.like), clicked, fit)
        session = np.cumsum(begins) - 1
        return {
            "user_id": first + user,
            "video_id": self.video_id[walked.item],
            **_clock(time_ms),
            **{name: actions[name] for name in ACTION_COLUMNS},
            **_stays(rng, load_shape(self.like), actions, self.duration_ms[walked.item]),
            "is_profile_enter": actions["is_profile_enter"],
            "is_rand": np.zeros(len(user), np.int8),
            "tab": _tabs(rng, load_shape(self.like), int(session[-1]) + 1)[session],
        }

    def _score(
        self, walked: Walk, user: np.ndarray, offsets: np.ndarray, begins: np.ndarray, clicked: np.ndarray,
        intercept: np.ndarray,
    ) -> None:  # fmt: skip
        """Let the oracle rank every user's last exposure and last click."""
        everything = np.arange(len(user))
        previous = self.world.topic[np.roll(walked.item, 1)]
        for names, events in (
            (("exposures", "exposures_unordered"), everything),
            (("clicks",), np.flatnonzero(clicked)),
        ):
            owner = user[events]
            is_last = np.append(owner[1:] != owner[:-1], True)[: len(events)]
            is_only = np.bincount(owner, minlength=len(offsets) - 1)[owner] == 1
            last = events[is_last & ~is_only]
            visible = events[~is_last]
            row_of_user = np.zeros(len(offsets) - 1, np.int64)
            row_of_user[user[last]] = np.arange(len(last))
            taste = worlds.taste_of(walked.favourites[last], len(self.world.flow))
            for name in names:
                # without order neither the previous topic nor the session is known, as at a session's start
                unknown = begins[last] | (name == "exposures_unordered")
                chances = worlds.next_topic_chances(self.world, previous[last], walked.dominant[last], taste, unknown)
                if name == "clicks":
                    fit = taste.copy()
                    fit[np.arange(len(last)), walked.dominant[last]] += worlds.SESSION_MATCH
                    chances *= _sigmoid(intercept[user[last], None] + worlds.CLICK_SLOPE * fit)
                self.scores[name].add(
                    oracle.ranks(
                        self.world,
                        chances / self.world.mass,
                        walked.item[last],
                        row_of_user[user[visible]],
                        walked.item[visible],
                    )  # fmt: skip
                )


ACTION_COLUMNS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view")


def _times(
    rng: np.random.Generator, shape: dict[str, Any], offsets: np.ndarray, user: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Time in ms int64 [T] and whether a session begins bool [T].

    Every user has about the same number of long pauses, however many exposures stand between them: a month of them.
    """
    lengths = np.diff(offsets)
    names = list(GAP_EDGES_S)
    share = np.array([shape["gap_shares"][name] for name in names])
    is_long = np.array([GAP_EDGES_S[name][0] >= 1800 for name in names])
    long_share = np.minimum(0.5, share[is_long].sum() * lengths.mean() / lengths)[user]
    long = rng.random(len(user)) < long_share
    edges = [np.cumsum(share[part]) / share[part].sum() for part in (~is_long, is_long)]
    u = rng.random(len(user))
    kind = np.where(long, (~is_long).sum() + np.searchsorted(edges[1], u), np.searchsorted(edges[0], u))
    gap = _gaps(rng, np.minimum(kind, len(names) - 1), share, shape["gap_mean_s"])
    gap[offsets[:-1]] = 0
    total = np.add.reduceat(gap, offsets[:-1])
    gap = np.floor(gap * np.minimum(1, 0.99 * SPAN_MS / np.maximum(total, 1))[user]).astype(np.int64)
    begins = gap >= SESSION_MS
    begins[offsets[:-1]] = True
    since = np.cumsum(gap)
    since -= since[offsets[:-1]][user]
    spare = SPAN_MS - since[offsets[1:] - 1]
    return FIRST_MS + (rng.random(len(lengths)) * spare).astype(np.int64)[user] + since, begins


def _gaps(rng: np.random.Generator, kind: np.ndarray, share: np.ndarray, mean_s: float) -> np.ndarray:
    """Gaps in ms float64 [T] of the given bins: ties, evenly in logarithm, and a tail that gives the real mean."""
    low, high = np.array(list(GAP_EDGES_S.values())).T
    middle = slice(1, len(low) - 1)
    log_mean = (high[middle] - low[middle]) / np.log(high[middle] / low[middle])
    tail_mean = (mean_s - share[middle] @ log_mean) / share[-1] - low[-1]
    u = rng.random(len(kind))
    tied = np.where(u < TIED_SHARE, 0, 1 + 998 * (u - TIED_SHARE) / (1 - TIED_SHARE))
    tail = 1000 * (low[-1] - tail_mean * np.log1p(-u))
    inner = np.clip(kind, 1, len(low) - 2)
    between = 1000 * low[inner] * (high[inner] / low[inner]) ** u
    return np.where(kind == 0, tied, np.where(kind == len(low) - 1, tail, between))


def _intercepts(fit: np.ndarray, offsets: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """b_u such that the mean of sigmoid(b_u + CLICK_SLOPE * fit) over user u's events is `rate` [n], by bisection."""
    lengths = np.diff(offsets)
    low, high = np.full(len(rate), -16.0), np.full(len(rate), 8.0)
    for _ in range(20):
        middle = (low + high) / 2
        mean = np.add.reduceat(_sigmoid(np.repeat(middle, lengths) + worlds.CLICK_SLOPE * fit), offsets[:-1]) / lengths
        low, high = np.where(mean < rate, middle, low), np.where(mean < rate, high, middle)
    return np.asarray((low + high) / 2)


def _actions(
    rng: np.random.Generator, shape: dict[str, Any], clicked: np.ndarray, fit: np.ndarray
) -> dict[str, np.ndarray]:
    """Flags int8 [T]: combinations as frequent as the real ones given the click, the richer the better the fit."""
    masks = np.array([int(mask) for mask in shape["action_masks"]])
    share = np.array(list(shape["action_masks"].values()))
    hate = 1 << shape["action_bits"].index("is_hate")
    richness = [int(mask).bit_count() - 8 * bool(mask & hate) for mask in masks]
    order = np.argsort(richness, kind="stable")
    masks, share = masks[order], share[order]
    chosen = np.zeros(len(fit), np.int64)
    for flag in (False, True):
        at = np.flatnonzero(clicked == flag)
        of_kind = (masks & 1) == flag
        liking = MASK_MATCH * fit[at] / max(fit.std(), 1e-9) + rng.standard_normal(len(at))
        place = np.empty(len(at))
        place[np.argsort(liking, kind="stable")] = (np.arange(len(at)) + rng.random(len(at))) / max(len(at), 1)
        edges = np.cumsum(share[of_kind]) / share[of_kind].sum()
        chosen[at] = masks[of_kind][np.minimum(np.searchsorted(edges, place), of_kind.sum() - 1)]
    return {name: ((chosen >> bit) & 1).astype(np.int8) for bit, name in enumerate(shape["action_bits"])}


def _stays(
    rng: np.random.Generator, shape: dict[str, Any], actions: dict[str, np.ndarray], duration_ms: np.ndarray
) -> dict[str, np.ndarray]:
    """How long was watched; a long view is 18 seconds or the whole video, as KuaiRand defines it."""
    rows = len(duration_ms)
    (hit, hit_spread), (miss, miss_spread) = shape["log_ms"]["clicked"], shape["log_ms"]["passed"]
    clicked = actions["is_click"] == 1
    play = np.exp(np.where(clicked, hit, miss) + np.where(clicked, hit_spread, miss_spread) * rng.standard_normal(rows))
    enough = np.minimum(duration_ms, 18_000)
    play = np.where(actions["long_view"] == 1, np.maximum(play, enough), np.minimum(play, enough - 1))
    return {
        "play_time_ms": play.astype(np.int64),
        "duration_ms": duration_ms,
        "profile_stay_time": (actions["is_profile_enter"] * rng.exponential(8_000, rows)).astype(np.int64),
        "comment_stay_time": (actions["is_comment"] * rng.exponential(12_000, rows)).astype(np.int64),
    }


def _tabs(rng: np.random.Generator, shape: dict[str, Any], sessions: int) -> np.ndarray:
    tabs = np.array([int(tab) for tab in shape["tabs"]], np.int8)
    share = np.array(list(shape["tabs"].values()))
    return np.asarray(rng.choice(tabs, size=sessions, p=share / share.sum()))


def _clock(time_ms: np.ndarray) -> dict[str, np.ndarray]:
    """KuaiRand's date (20220408) and hourmin (1800: the hour), both in Chinese time."""
    local = time_ms + UTC_OFFSET_MS
    day = (local // 86_400_000).astype("datetime64[D]")
    dates, of_row = np.unique(day, return_inverse=True)
    numbers = np.array([int(str(date).replace("-", "")) for date in dates])
    return {"date": numbers[of_row], "hourmin": local // 3_600_000 % 24 * 100, "time_ms": time_ms}


def _write_videos(folder: Path, world: Catalogue, video_id: np.ndarray, duration_ms: np.ndarray) -> None:
    place = np.empty(len(video_id), np.int64)
    place[world.by_topic] = np.arange(len(place)) - np.repeat(world.starts[:-1], np.diff(world.starts)) + 1
    words = pa.array([words.capitalize() for words in TITLES]).take(pa.array(world.topic))
    table = pa.table(
        {
            "video_id": video_id,
            "video_type": pa.array(["NORMAL"]).take(pa.array(np.zeros(len(video_id), np.int8))),
            "video_duration": duration_ms,
            "tag": world.topic,
            "title": pc.binary_join_element_wise(words, pa.array(place).cast(pa.string()), " #"),
        }
    )
    with (folder / "video_features_basic_synthetic.csv").open("wb") as stream:
        _write_csv(table.sort_by("video_id"), stream)


def _write_users(folder: Path, lengths: np.ndarray) -> None:
    degrees = pa.array(["middle_active", "high_active", "full_active"])
    third = np.searchsorted(np.quantile(lengths, [1 / 3, 2 / 3]), lengths)
    table = pa.table({"user_id": np.arange(len(lengths)), "user_active_degree": degrees.take(pa.array(third))})
    with (folder / "user_features_synthetic.csv").open("wb") as stream:
        _write_csv(table, stream)


def _write_csv(table: pa.Table, stream: BinaryIO, *, header: bool = True) -> None:
    if header:  # Arrow puts names in quotes, KuaiRand does not
        stream.write((",".join(table.column_names) + "\n").encode())
    options = pa.csv.WriteOptions(include_header=False, quoting_style="none", batch_size=SLICE_ROWS)
    pa.csv.write_csv(table, stream, options)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))
