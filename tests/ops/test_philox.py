"""The counter-based generator: known vectors, counter layout, and what is built on the words."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.philox import draw
from turbogr.ops.philox import (
    Key,
    Purpose,
    normal_rows,
    random_below,
    random_order,
    random_words,
    reference,
    uniform_rows,
)

ONES = 0xFFFFFFFF


def tensor(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("key", "counter", "wanted"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_known_vectors_of_random123_come_out(key: Any, counter: Any, wanted: Any) -> None:
    """Catches: swapped lanes, a key step forgotten, a signed high half."""
    got = reference.philox4x32(key[1] << 32 | key[0], counter[0], counter[1], tensor(counter[2]), tensor(counter[3]))
    assert tuple(got[0].tolist()) == wanted


def test_a_draw_is_addressed_by_seed_step_purpose_layer_user_position_and_number() -> None:
    """Catches: any other counter layout, which would change every published run and every other device's numbers."""
    key = Key(seed=(9 << 32) | 5, step=17, purpose=Purpose.DROPOUT, layer=6)
    users, positions = tensor(0, 3, 4_000_000_000), tensor(65_535, 0, 12)
    words = random_words(key, users, positions, 11)
    for token in range(3):
        for number in range(11):
            place = (int(users[token]), int(positions[token]), number)
            assert int(words[token, number]) == draw(key.seed, 17, 3, 6, *place), place


def test_the_numbers_of_the_purposes_never_change() -> None:
    """Catches: a purpose put in between, which would silently change the draws of all that follow."""
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "ORDER": 1,
        "NEGATIVES": 2,
        "DROPOUT": 3,
        "ATTENTION_DROPOUT": 4,
        "TABLE_ROWS": 5,
        "PARAMETERS": 6,
        "SAMPLE_USERS": 7,
        "ROUNDING": 8,
    }


def test_a_draw_depends_neither_on_its_neighbours_nor_on_chunks_nor_on_how_many_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: numbers that depend on the batch's composition, on its order or on the working chunk."""
    key = Key(1, 2, Purpose.NEGATIVES)
    users, positions = torch.arange(50) * 7, torch.arange(50) % 13
    whole = random_words(key, users, positions, 10)
    some = tensor(41, 3, 3, 8)
    assert torch.equal(random_words(key, users[some], positions[some], 10), whole[some])
    assert torch.equal(random_words(key, users, positions, 6), whole[:, :6])
    monkeypatch.setattr(reference, "CHUNK", 7)
    assert torch.equal(random_words(key, users, positions, 10), whole)


def test_integers_below_a_bound_are_the_high_half_of_the_product() -> None:
    """Catches: a remainder in place of the high half, or one that overflows for a large bound."""
    key, users = Key(3, 0, Purpose.NEGATIVES), torch.arange(40)
    words = random_words(key, users, users, 5)
    for bound in (1, 2, 3883, 2**31 - 1):
        wanted = [[word * bound >> 32 for word in row] for row in words.tolist()]
        assert random_below(key, users, users, 5, bound).tolist() == wanted


def test_the_negatives_of_three_tokens_stay_what_they_are() -> None:
    """Catches: any change of seed use, layout or bound rule; the vectors below are part of the format."""
    got = random_below(Key(42, 1000, Purpose.NEGATIVES), tensor(0, 1, 127), tensor(0, 5, 199), 6, 3883)
    wanted = [[draw(42, 1000, 2, 0, user, place, n) * 3883 >> 32 for n in range(6)] for user, place in FIXED]
    assert got.tolist() == wanted == list(FIXED.values())


FIXED = {
    (0, 0): [1562, 703, 574, 3708, 176, 2452],
    (1, 5): [3580, 391, 2418, 2776, 1708, 2707],
    (127, 199): [2881, 1140, 193, 810, 2425, 3733],
}


def test_an_order_is_a_permutation_drawn_by_seed_and_epoch() -> None:
    """Catches: an order that repeats users, ignores the epoch, or sorts by fewer bits than it says."""
    order = random_order(5, 2, 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert not torch.equal(order, random_order(5, 3, 1000)) and not torch.equal(order, random_order(6, 2, 1000))
    numbers = [draw(5, 2, 1, 0, i, 0, 0) << 31 | draw(5, 2, 1, 0, i, 0, 1) >> 1 for i in range(1000)]
    assert order.tolist() == sorted(range(1000), key=numbers.__getitem__)
    assert random_order(5, 2, 0).tolist() == []


def test_normal_rows_have_the_moments_of_the_normal_distribution() -> None:
    """Catches: a wrong scale, a shifted or one-sided inverse distribution function."""
    x = normal_rows(Key(0, 0, Purpose.PARAMETERS, 1), torch.arange(2000), 200, std=0.5) / 0.5
    n = x.numel()
    for power, moment, deviation in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs(float(x.double().pow(power).mean()) - moment) < 5 * deviation / n**0.5


def test_truncated_normal_rows_end_at_the_bound_and_have_the_truncated_deviation() -> None:
    """Catches: clipping (which piles up values at the bound) in place of truncation."""
    x = normal_rows(Key(0, 0, Purpose.TABLE_ROWS), torch.arange(2000), 100, std=0.02, bound=2.0)
    assert float(x.abs().max()) <= 0.04 * (1 + 1e-6)
    assert float((x.abs() > 0.0399).double().mean()) < 0.001
    density, inside = math.exp(-2) / math.sqrt(2 * math.pi), math.erf(2 / math.sqrt(2))
    assert float(x.double().std()) == pytest.approx(0.02 * math.sqrt(1 - 4 * density / inside), rel=0.01)


def test_uniform_rows_fill_the_interval_evenly() -> None:
    """Catches: an interval of half the width or on one side of zero."""
    x = uniform_rows(Key(0, 0, Purpose.PARAMETERS, 2), torch.arange(1000), 100, edge=0.3)
    assert float(x.abs().max()) < 0.3 and abs(float(x.mean())) < 0.003
    assert float(x.double().std()) == pytest.approx(0.3 / math.sqrt(3), rel=0.01)


def test_a_row_is_a_function_of_its_id_alone() -> None:
    """Catches: rows drawn by place, so that a table's initial values depend on its chunks or its size."""
    key = Key(4, 0, Purpose.TABLE_ROWS, 1)
    rows = normal_rows(key, torch.arange(20), 7, 1.0, 2.0)
    assert torch.equal(normal_rows(key, tensor(13, 2), 7, 1.0, 2.0), rows[[13, 2]])
