"""The split: a record's side depends on the record alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.data.records import Records
from straightdp.data.split import record_ids, split_by_content
from straightdp.errors import BadInput

CLASSES = ("ant", "bee", "cow")
RECORD = st.tuples(st.binary(min_size=4, max_size=4), st.sampled_from(CLASSES))


def records_of(rows, classes=None) -> Records:
    """Rows of (4 bytes, class name) as records, with the class list that would be found in them."""
    classes = classes or tuple(sorted({name for _, name in rows}))
    x = np.frombuffer(b"".join(pixels for pixels, _ in rows), np.uint8).reshape(-1, 1, 2, 2)
    labels = np.array([classes.index(name) for _, name in rows], np.int64)
    return Records(x, labels, classes, tuple(f"{name} {i}" for i, (_, name) in enumerate(rows)))


def rows_of(records: Records):
    return [(x.tobytes(), records.classes[y]) for x, y in zip(records.x, records.labels, strict=True)]


@settings(deadline=None, max_examples=150)
@given(st.lists(RECORD, min_size=1, max_size=30), RECORD, st.integers(0, 30), st.floats(0, 1))
def test_adding_one_record_moves_no_other(rows, extra, at, fraction):
    """Also when the extra record brings a class that shifts every index."""
    at = min(at, len(rows))
    before = split_by_content(records_of(rows), fraction)
    after = split_by_content(records_of([*rows[:at], extra, *rows[at:]]), fraction)
    sides = [(rows_of(a), rows_of(b)) for a, b in zip(before, after, strict=True)]
    grown = [side for side in sides if len(side[1]) == len(side[0]) + 1]
    same = [side for side in sides if side[0] == side[1]]
    assert len(grown) == len(same) == 1
    old, new = grown[0]
    assert any(new[:i] + new[i + 1 :] == old for i in range(len(new)) if new[i] == extra)


@settings(deadline=None, max_examples=50)
@given(st.lists(RECORD, min_size=1, max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_only_adds(rows, a, b):
    small, large = (rows_of(split_by_content(records_of(rows), f)[1]) for f in sorted((a, b)))
    assert all(small.count(row) <= large.count(row) for row in small)


def some(n=4_000) -> Records:
    rng = np.random.default_rng(0)
    return Records(rng.integers(0, 256, size=(n, 1, 3, 3), dtype=np.uint8), rng.integers(0, 3, size=n), CLASSES)


def test_the_edges_and_the_share():
    records = some()
    keep, held_out = split_by_content(records, 0)
    assert (len(keep), len(held_out)) == (4_000, 0)
    assert held_out.x.shape == (0, 1, 3, 3)
    assert held_out.classes == CLASSES
    assert [len(part) for part in split_by_content(records, 1)] == [0, 4_000]
    spread = 5 * np.sqrt(4_000 * 0.1 * 0.9)
    assert len(split_by_content(records, 0.1)[1]) == pytest.approx(400, abs=spread)


def test_ids_depend_on_pixels_class_and_nothing_else():
    records = some(50)
    ids = record_ids(records)
    assert len(set(ids.tolist())) == 50
    order = np.random.default_rng(1).permutation(50)
    assert np.array_equal(record_ids(records.subset(order)), ids[order])
    other = Records(records.x, (records.labels + 1) % 3, CLASSES)
    assert not np.any(record_ids(other) == ids)
    renumbered = Records(records.x, records.labels + 1, ("aardvark", *CLASSES))
    assert np.array_equal(record_ids(renumbered), ids)
    floats = Records(records.x.astype(np.float32) / 255, records.labels, CLASSES)
    assert not np.any(record_ids(floats) == ids)


def test_texts_follow_their_records():
    rows = [(bytes([i] * 4), CLASSES[i % 3]) for i in range(60)]
    for part in split_by_content(records_of(rows), 0.5):
        assert part.texts == tuple(f"{CLASSES[x[0, 0, 0] % 3]} {x[0, 0, 0]}" for x in part.x)


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_outside_the_unit_interval_is_refused(fraction):
    with pytest.raises(BadInput, match=r"between 0 and 1 .*private\.holdout"):
        split_by_content(some(5), fraction)
