"""The map from ids to slots: against a dict, both backends on the same tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turbogr.ops.id_map import OPERATOR, empty_index, find, insert, reference, remove

COMPILED = next(one for one in OPERATOR.backends if one.name == "cpu").rejects(torch.device("cpu")) is None
needs_compiled = pytest.mark.skipif(not COMPILED, reason="the compiled library is not here")
BACKENDS = [pytest.param("cpu", marks=needs_compiled), "reference"]
CAPACITY = 16
EDGES = st.sampled_from([0, -1, 1, 2**63 - 1, -(2**63), 2**32, 2**33])
IDS = st.one_of(EDGES, st.integers(-(2**63), 2**63 - 1), st.integers(0, 40))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param(None, marks=needs_compiled)])
@given(operations=st.lists(st.tuples(st.booleans(), st.lists(IDS, unique=True, max_size=6)), max_size=12))
def test_a_map_is_a_dict(backend: str | None, operations: list[tuple[bool, list[int]]]) -> None:
    """Catches: an id that is lost when another one is taken out before it, a hash that decides alone, and, with None,
    an index that one backend leaves so that the other cannot read it."""
    index, names, wanted = empty_index(CAPACITY), torch.zeros(CAPACITY, dtype=torch.int64), dict[int, int]()
    for number, (enters, own) in enumerate(operations):
        used = backend or ("cpu", "reference")[number % 2]
        if enters:
            free = [slot for slot in range(CAPACITY) if slot not in wanted.values()]
            new = [one for one in own if one not in wanted][: len(free)]
            insert(ints(*new), ints(*free[: len(new)]), index, names, backend=used)
            wanted |= dict(zip(new, free, strict=False))
        else:
            old = [one for one in own if one in wanted] or list(wanted)[:2]
            remove(ints(*old), index, names, backend=used)
            for one in old:
                del wanted[one]
        asked = ints(*wanted, *own, 5, -5)
        for reader in ("cpu", "reference") if COMPILED else ("reference",):
            got = find(asked, index, names, backend=reader)
            assert got.tolist() == [wanted.get(one, -1) for one in asked.tolist()]
    assert int((index > 0).sum()) == len(wanted)


@needs_compiled
def test_a_large_map_survives_removals_by_any_number_of_threads() -> None:
    """Catches: clusters that wrap around the end, and are cut where something was taken out."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-(2**62), 2**62, (40_000,), generator=generator).unique()
    index, names = empty_index(len(ids)), torch.zeros(len(ids), dtype=torch.int64)
    slots = torch.randperm(len(ids), generator=generator)
    insert(ids, slots, index, names)
    gone = torch.rand(len(ids), generator=generator) < 0.4
    remove(ids[gone], index, names)
    wanted = torch.where(gone, -1, slots)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(find(ids, index, names), wanted)
    torch.set_num_threads(1)
    assert torch.equal(find(ids, index, names, backend="reference"), wanted)
    insert(ids[gone], slots[gone], index, names)
    assert torch.equal(find(ids, index, names), slots)


def test_the_hash_never_changes() -> None:
    """Catches: another hash, with which a saved index could not be read."""
    got = [value & (1 << 64) - 1 for value in reference.id_hash(ints(0, 1, -1, 2**40)).tolist()]

    def known(x: int) -> int:
        x &= (1 << 64) - 1
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x ^= x >> 33
            x = x * factor & (1 << 64) - 1
        return x ^ x >> 33

    assert got == [known(one) for one in (0, 1, -1, 2**40)]


def test_what_does_not_fit_is_refused() -> None:
    """Catches: an index without a free cell, which would be searched for ever; slots beside the names."""
    index, names = empty_index(4), torch.zeros(4, dtype=torch.int64)
    assert len(index) == 8 and len(empty_index(1)) == 2 and len(empty_index(5)) == 16
    with pytest.raises(ValueError, match=r"index is int32 \[4\], wanted int32 \[a power of two, at least 8\]"):
        find(ints(1), index[:4], names)
    with pytest.raises(ValueError, match=r"slots\[0\] is 4"):
        insert(ints(1), ints(4), index, names)
    with pytest.raises(KeyError, match="id 3 is not in the map"):
        remove(ints(3), index, names)
    with pytest.raises(ValueError, match=r"ids is float32 \[2\], wanted int64 \[2\]"):
        find(torch.zeros(2), index, names)
