"""Promises: what a report draws holds every extreme that was measured, and its bands are what their formulas say."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llqr_lab.report.bands import band
from llqr_lab.report.lines import NOT_FINITE, chunks, column, flattened
from llqr_lab.report.series import Series


def series(values: list[float], limit: int = 10_000, every: int = 1, chunk: int = 7) -> Series:
    """A run that measured `loss` every so many steps, read in chunks."""
    made = Series(limit)
    for start in range(0, len(values), chunk):
        part = np.array(values[start : start + chunk])
        made.add(every * (np.arange(start, start + len(part)) + 1), {"loss": part})
    return made


@given(
    st.lists(st.integers(-1000, 1000).map(float), min_size=1, max_size=300),
    st.integers(1, 40),
    st.sampled_from((1, 3, 50)),
    st.integers(1, 64),
)
def test_buckets_hold_the_extremes_and_the_last(values: list[float], limit: int, every: int, chunk: int) -> None:
    """Bucket k has the steps s with ⌊(s - 1)/w⌋ = k; w is the smallest power of two with no more than `limit` of them."""
    made = series(values, limit, every, chunk)
    steps = [every * (number + 1) for number in range(len(values))]
    width = 1
    while len({(step - 1) // width for step in steps}) > limit:
        width *= 2
    assert made.width == width
    buckets: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        buckets.setdefault((step - 1) // width, []).append(number)
    assert len(made) == len(buckets)
    found = made.columns["loss"]
    for place, inside in enumerate(buckets.values()):
        held = [values[number] for number in inside]
        assert made.step[place] == steps[inside[-1]]
        assert (found.last[place], found.low[place], found.high[place]) == (held[-1], min(held), max(held))
    assert (np.min(found.low), np.max(found.high)) == (min(values), max(values))
    assert made.points == len(values)


def test_few_points_stay_as_they_are() -> None:
    made = series([3.0, 1.0, 2.0], limit=3, every=100)
    assert made.step.tolist() == [100, 200, 300]
    for part in ("last", "low", "high"):
        assert getattr(made.columns["loss"], part).tolist() == [3.0, 1.0, 2.0]


def test_coarser_buckets_are_what_they_would_have_been() -> None:
    values = [math.sin(7.0 * number) for number in range(1000)]
    fine, coarse = series(values, limit=500), series(values, limit=100)
    again = fine.coarsened(coarse.width)
    assert (again.step == coarse.step).all()
    for part in ("last", "low", "high"):
        assert (getattr(again.columns["loss"], part) == getattr(coarse.columns["loss"], part)).all()


def test_what_isn_t_finite_or_wasn_t_measured() -> None:
    made = Series(2)
    made.add(np.array([1, 2, 3]), {"loss": np.array([1.0, NOT_FINITE, 2.0]), "late": np.array([np.nan, np.nan, 5.0])})
    made.add(np.array([4]), {"loss": np.array([NOT_FINITE])})
    assert made.width == 2
    assert made.columns["loss"].last.tolist() == [NOT_FINITE, NOT_FINITE]
    assert made.columns["loss"].high.tolist() == [1.0, 2.0]
    assert np.isnan(made.columns["late"].last[0])
    assert made.columns["late"].last[1] == 5.0
    assert made.not_finite == {"loss": 2}


def test_steps_that_go_back_are_put_in_order() -> None:
    made = Series(10)
    made.add(np.array([5, 3, 5]), {"loss": np.array([1.0, 2.0, 3.0])})
    assert made.step.tolist() == [3, 5]
    assert made.columns["loss"].last.tolist() == [2.0, 3.0]


def test_lines_that_can_t_be_read_and_one_that_isn_t_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\nnot json\n[1]\n{"a": NaN}\n{"a": \xff}\n' + b"[" * 5000 + b'\n{"a": 2}\n{"a": 3')
    (rows,) = chunks(path)
    assert [row and row["a"] for row in rows if row is None or not isinstance(row["a"], float)] == [
        1,
        None,
        None,
        None,
        None,
        2,
    ]
    assert list(chunks(tmp_path / "nowhere")) == []


def test_columns_of_anything() -> None:
    """Null, NaN, infinities and integers beyond all floats are not finite; words, truths and tables aren't numbers."""
    rows = [{"a": each} for each in (1, 2.5, None, math.nan, -math.inf, 10**400, "3", True, {}, [])] + [{}]
    found = column(rows, "a")
    assert found is not None
    assert found[:2].tolist() == [1.0, 2.5]
    assert (found[2:6] == NOT_FINITE).all()
    assert np.isnan(found[6:]).all()
    assert column(rows[6:], "a") is None
    plain = column([{"a": 1}, {"a": math.inf}, {"a": 10**400}], "a")
    assert plain is not None
    assert plain.tolist() == [1.0, NOT_FINITE, NOT_FINITE]
    assert flattened({"a": {"b": {"c": 1}}, "d": [2, 3], "e": 4}) == {"a.b.c": 1, "d.0": 2, "d.1": 3, "e": 4}


def test_a_band_is_mean_median_deviation_and_range() -> None:
    """x̄ = Σx/n, s² = Σ(x - x̄)²/(n - 1)."""
    seeds = ([3.0, 2.0], [4.0, 1.0], [8.0, 6.0])
    found = band([(series(list(values), every=10), True) for values in seeds])
    spread = found.spreads["loss"]
    assert found.step.tolist() == [10, 20]
    for place in range(2):
        held = [values[place] for values in seeds]
        assert spread.mean[place] == pytest.approx(statistics.mean(held))
        assert spread.median[place] == statistics.median(held)
        assert spread.deviation[place] == pytest.approx(statistics.stdev(held))
        assert (spread.low[place], spread.high[place], spread.count[place]) == (min(held), max(held), 3)


def test_who_counts_in_a_band() -> None:
    """A finished run holds its last value; one that was stopped is left out after it, and what isn't finite is left out."""
    long, short = series([4.0, 3.0, 2.0, 1.0], every=10), series([6.0, 5.0], every=10)
    ended = band([(long, True), (short, True)]).spreads["loss"]
    assert ended.mean.tolist() == [5.0, 4.0, 3.5, 3.0]
    assert ended.median.tolist() == ended.mean.tolist()
    stopped = band([(long, True), (short, False)]).spreads["loss"]
    assert stopped.mean.tolist() == [5.0, 4.0, 2.0, 1.0]
    assert stopped.count.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert np.isnan(stopped.deviation[2:]).all()
    broken = band([(long, True), (series([6.0, NOT_FINITE], every=10), False)]).spreads["loss"]
    assert broken.mean.tolist() == [5.0, 3.0, 2.0, 1.0]
    # evaluations at other steps: between them a run has the value that it had
    odd = band([(long, True), (series([8.0, 7.0], every=15), True)])
    assert odd.step.tolist() == [10, 15, 20, 30, 40]
    assert odd.spreads["loss"].mean.tolist() == [4.0, 6.0, 5.5, 4.5, 4.0]
    assert odd.spreads["loss"].count.tolist() == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_a_spike_of_one_seed_stays_in_the_band() -> None:
    calm, wild = [1.0] * 1000, [1.0] * 1000
    wild[612] = 99.0
    found = band([(series(calm, limit=40), True), (series(wild, limit=40), True)])
    assert found.width == 32
    spread = found.spreads["loss"]
    assert len(found.step) == 32
    assert np.flatnonzero(spread.high == 99.0).tolist() == [612 // 32]
    assert (spread.mean == 1.0).all()
