"""The synthetic log: KuaiRand's format, the real distributions, a known process and an oracle that is right."""

import json
from pathlib import Path

import numpy as np
import pyarrow.csv as csv
import pytest

from turbogr.data.sources import synthetic
from turbogr.data.sources import synthetic_oracle as oracle
from turbogr.data.sources import synthetic_world as worlds
from turbogr.data.sources.shape import load_shape, popularity_shares, quantiles
from turbogr.data.sources.synthetic import GAP_EDGES_S, LOG_NAME, SynthReport, synthesize
from turbogr.errors import UserError

COLUMNS = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,play_time_ms,"
    "duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SynthReport:
    out = tmp_path_factory.mktemp("synthetic") / "log"
    return synthesize(out, users=1500, items=3000, length_scale=0.01, popularity=0.6)


@pytest.fixture(scope="module")
def log(made: SynthReport) -> dict[str, np.ndarray]:
    table = csv.read_csv(made.path / LOG_NAME)
    return {name: table[name].to_numpy() for name in table.column_names}


def test_the_log_has_kuairands_columns_users_in_turn_and_times_that_rise(made: SynthReport, log: dict[str, np.ndarray]):
    with (made.path / LOG_NAME).open() as stream:
        assert stream.readline().strip() == COLUMNS
    assert len(log["user_id"]) == made.rows
    assert np.array_equal(np.unique(log["user_id"]), np.arange(1500))
    assert (np.diff(log["user_id"]) >= 0).all()
    assert (np.diff(log["time_ms"])[np.diff(log["user_id"]) == 0] >= 0).all()
    assert log["video_id"].min() >= 0
    assert log["video_id"].max() < 3000


def test_dates_and_hours_are_the_time_in_china_within_the_real_month(log: dict[str, np.ndarray]):
    local = (log["time_ms"] + 8 * 3_600_000).astype("datetime64[ms]")
    assert np.array_equal(log["hourmin"], local.astype("datetime64[h]").astype(np.int64) % 24 * 100)
    assert [str(d).replace("-", "") for d in local[:200].astype("datetime64[D]")] == [str(d) for d in log["date"][:200]]
    assert log["date"].min() >= 20220408
    assert log["date"].max() <= 20220508


def test_lengths_follow_the_real_quantiles_times_the_scale(log: dict[str, np.ndarray]):
    lengths = np.sort(np.bincount(log["user_id"]))
    real = quantiles("kuairand-27k", "exposures") * 0.01
    at = np.arange(1, 600)
    ours = np.searchsorted(lengths, at + 0.5) / len(lengths)
    assert np.abs(ours - np.interp(at + 0.5, real, np.linspace(0, 1, 1001))).max() < 0.01


def test_items_follow_the_flattened_real_popularity(log: dict[str, np.ndarray]):
    counts = np.sort(np.bincount(log["video_id"], minlength=3000))[::-1]
    off = np.abs(np.cumsum(counts) / counts.sum() - np.cumsum(popularity_shares("kuairand-27k", 3000, 0.6)))
    assert off.max() < 0.03


def test_gaps_fall_into_the_real_bins(log: dict[str, np.ndarray]):
    gap = np.diff(log["time_ms"])[np.diff(log["user_id"]) == 0] / 1000
    for name, (low, high) in GAP_EDGES_S.items():
        assert np.mean((gap >= low) & (gap < high)) == pytest.approx(load_shape()["gap_shares"][name], abs=0.005)
    assert gap.mean() == pytest.approx(load_shape()["gap_mean_s"], rel=0.2)
    assert np.mean(gap == 0) > 0.8


def test_clicks_and_other_actions_are_as_frequent_as_the_real_ones(log: dict[str, np.ndarray]):
    shape = load_shape()
    wanted = quantiles("kuairand-27k", "clicks").mean() / quantiles("kuairand-27k", "exposures").mean()
    assert log["is_click"].mean() == pytest.approx(wanted, abs=0.02)
    masks = {int(mask): share for mask, share in shape["action_masks"].items()}
    clicked = sum(share for mask, share in masks.items() if mask & 1)
    for bit, name in enumerate(shape["action_bits"]):
        real = sum(share for mask, share in masks.items() if mask & 1 and mask >> bit & 1) / clicked
        assert log[name][log["is_click"] == 1].mean() == pytest.approx(real, rel=0.1, abs=0.001), name


def test_few_items_and_only_popular_ones_are_shown_twice(made: SynthReport, log: dict[str, np.ndarray]):
    pairs = log["user_id"] * 3000 + log["video_id"]
    assert made.repeats == len(pairs) - len(np.unique(pairs))
    assert made.repeats / made.rows < 0.08
    tail = np.flatnonzero(np.bincount(log["video_id"], minlength=3000)[log["video_id"]] < 60)
    assert len(tail) - len(np.unique(pairs[tail])) < 0.01 * len(tail)


def test_the_real_curve_is_reached_by_showing_the_head_again(tmp_path: Path):
    synthesize(tmp_path / "log", users=500, items=1000, length_scale=0.01, popularity=1.0)
    counts = np.bincount(csv.read_csv(tmp_path / "log" / LOG_NAME)["video_id"].to_numpy(), minlength=1000)
    off = np.cumsum(np.sort(counts)[::-1]) / counts.sum() - np.cumsum(popularity_shares("kuairand-27k", 1000))
    assert np.abs(off).max() < 0.05


def test_equal_arguments_give_equal_bytes_and_another_seed_does_not(tmp_path: Path):
    def files(name: str, seed: int) -> dict[str, bytes]:
        synthesize(tmp_path / name, users=50, items=200, length_scale=0.002, seed=seed)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    assert files("a", 1) == files("b", 1)
    assert files("a2", 1)[LOG_NAME] != files("c", 2)[LOG_NAME]


def test_every_chunk_of_users_has_its_own_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(synthetic, "CHUNK_EVENTS", 50)
    synthesize(tmp_path / "log", users=200, items=500, length_scale=1e-6)  # one event each, so that chunks are alike
    table = csv.read_csv(tmp_path / "log" / LOG_NAME)
    assert np.array_equal(table["user_id"].to_numpy(), np.arange(200))
    chunks = table["video_id"].to_numpy().reshape(4, 50)
    assert len(np.unique(chunks, axis=0)) == 4


def test_the_oracle_ranks_as_a_plain_sort_does():
    rng = np.random.default_rng(0)
    world = worlds.make_catalogue(rng, popularity_shares("kuairand-27k", 300, 0.6), np.full(100, 20), 0.05)
    scores = rng.random((40, len(world.flow))) + 0.1
    target = rng.integers(300, size=40)
    history_user = rng.integers(40, size=800)
    history_item = rng.integers(300, size=800)
    ranked = oracle.ranks(world, scores, target, history_user, history_item)
    for row in range(40):
        score = scores[row, world.topic] * world.weight
        seen = history_item[history_user == row]
        wanted = np.delete(score, np.unique(seen)) > score[target[row]]
        assert ranked[row] == (301 if target[row] in seen else 1 + wanted.sum())


def test_the_stated_topic_chances_are_those_of_the_walk():
    rng = np.random.default_rng(1)
    world = worlds.make_catalogue(rng, popularity_shares("kuairand-27k", 4000, 0.3), np.full(3000, 4), 0.1)
    offsets = np.arange(0, 4 * 20000 + 1, 4)
    begins = rng.random(offsets[-1]) < 0.2
    begins[offsets[:-1]] = True
    walked = worlds.walk(rng, world, offsets, begins)
    topic = world.topic[walked.item]
    for part in (begins, ~begins):
        at = np.setdiff1d(np.flatnonzero(part), offsets[:-1])
        taste = worlds.taste_of(walked.favourites[at], len(world.flow))
        chances = worlds.next_topic_chances(world, topic[at - 1], walked.dominant[at], taste, begins[at])
        assert np.allclose(chances.sum(1), 1)
        # of the events given a chance near c, a share near c happens
        happened = topic[at][:, None] == np.arange(len(world.flow))
        for low in (0.0, 0.05, 0.2, 0.4):
            near = (chances >= low) & (chances < low + 0.15)
            if near.sum() > 3000:
                assert happened[near].mean() == pytest.approx(chances[near].mean(), rel=0.06)
        for successor in world.successors:
            follows = np.arange(len(at)), successor[topic[at - 1]]
            assert happened[follows].mean() == pytest.approx(chances[follows].mean(), abs=0.01)


def test_order_and_taste_both_carry_signal(made: SynthReport):
    truth = json.loads((made.path / "truth.json").read_text())
    assert truth["oracle"] == made.oracle
    assert truth["counts"] == {"rows": made.rows, "clicks": made.clicks, "repeats": made.repeats}
    known, unordered = made.oracle["exposures"]["HR@10"], made.oracle["exposures_unordered"]["HR@10"]
    assert known > 1.4 * unordered
    assert unordered > 0.05


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"users": 1}, "--users must be at least 2, not 1"),
        ({"items": 99}, "--items must lie in"),
        ({"popularity": -0.1}, "--popularity must not be negative"),
        ({"length_scale": 0.0}, "--length-scale must be above 0"),
        ({"length_scale": float("nan")}, "--length-scale must be above 0"),
        ({"seed": -1}, "--seed must lie in"),
        ({"like": "kuairand27k"}, "did you mean 'kuairand-27k'"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_leaves_nothing(tmp_path: Path, wrong: dict[str, object], said: str):
    arguments = {"users": 10, "items": 200, "length_scale": 0.01, **wrong}
    with pytest.raises(UserError, match=said):
        synthesize(tmp_path / "log", **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept_unless_overwritten(tmp_path: Path):
    (tmp_path / "log").mkdir()
    with pytest.raises(UserError, match="exists already"):
        synthesize(tmp_path / "log", users=5, items=100, length_scale=0.001)
    synthesize(tmp_path / "log", users=5, items=100, length_scale=0.001, overwrite=True)
    assert (tmp_path / "log" / LOG_NAME).exists()


def test_the_table_names_its_sources_and_its_quantiles_have_the_right_means():
    assert "CC BY-SA 4.0" in load_shape("kuairand-27k")["licence"]
    assert "redistributed" in load_shape("ml-1m")["licence"]
    for name, what, mean in (("kuairand-27k", "exposures", 11811.6), ("kuairand-27k", "clicks", 4473.2),
                             ("ml-1m", "ratings", 1000209 / 6040)):  # fmt: skip
        values = quantiles(name, what)
        assert len(values) == 1001
        assert (values[1:] + values[:-1]).mean() / 2 == pytest.approx(mean, rel=0.01)
    with pytest.raises(UserError, match="did you mean 'clicks'"):
        quantiles("kuairand-27k", "click")
    with pytest.raises(UserError, match="did you mean 'ml-1m'"):
        load_shape("ml1m")
