"""Rectangles of tensors against numpy's own indexing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duomesh.core.boxes import Box, Deferred, box_shape, common, cut, runs, slices, tiles, whole, within

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    side = [
        st.lists(st.integers(0, size), min_size=2, max_size=2).map(lambda run: tuple(sorted(run))) for size in shape
    ]
    return shape, [tuple(draw(run) for run in side) for _ in range(count)]  # type: ignore[misc]


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(*run) for run in box)))


@given(boxes(1))
def test_runs_are_the_box_in_the_flattened_tensor(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    array = np.arange(np.prod(shape)).reshape(shape)
    starts, length = runs(box, shape)
    got = [element for start in starts.tolist() for element in range(start, start + length)]
    assert got == array[slices(box)].reshape(-1).tolist()


def test_runs_are_as_long_as_they_can_be() -> None:
    assert [len(runs(box, (6, 4, 5))[0]) for box in (((2, 5), (0, 4), (0, 5)), ((2, 3), (1, 3), (0, 5)))] == [1, 1]
    starts, length = runs(((2, 5), (1, 3), (0, 5)), (6, 4, 5))
    assert (starts.tolist(), length) == ([45, 65, 85], 10)


@given(boxes(2))
def test_common_is_the_intersection(case: tuple[tuple[int, ...], list[Box]]) -> None:
    _, (a, b) = case
    both = common(a, b)
    assert (set() if both is None else elements(both)) == elements(a) & elements(b)


@given(boxes(3), st.data())
def test_tiles_are_each_element_once(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, made = case
    found = [element for box in made for element in elements(box)]
    assert tiles(made, shape) == (sorted(found) == sorted(elements(tuple((0, size) for size in shape))))
    # cut into two, and each of these again along another dim: always a tiling, until one is left out or shifted
    whole_box: Box = tuple((0, size) for size in shape)
    parts = [half for part in _halves(whole_box, data) for half in _halves(part, data)]
    assert tiles(parts, shape)
    assert tiles([*parts, ((0, 0),) * len(shape)], shape)  # nothing is no overlap
    assert not tiles(parts[1:], shape) or not elements(parts[0])
    (start, stop), *rest = parts[0]
    assert not tiles([((start + 1, stop + 1), *rest), *parts[1:]], shape) or not elements(parts[0])
    assert not tiles([*parts, parts[0]], shape) or not elements(parts[0])


def _halves(box: Box, data: st.DataObject) -> list[Box]:
    dim = data.draw(st.integers(0, len(box) - 1))
    start, stop = box[dim]
    middle = data.draw(st.integers(start, stop))
    return [(*box[:dim], run, *box[dim + 1 :]) for run in ((start, middle), (middle, stop))]


@pytest.mark.parametrize(
    ("box", "want"),
    [
        ([], ((0, 4), (0, 3))),
        ([(1, 4)], ((1, 4), (0, 3))),
        ([(2, 2), (0, 3)], ((2, 2), (0, 3))),
        ([(0, 5)], None),
        ([(-1, 2)], None),
        ([(3, 2)], None),
        ([(0, 4), (0, 3), (0, 1)], None),
    ],
)
def test_dims_that_a_box_leaves_out_are_whole(box: list[tuple[int, int]], want: Box | None) -> None:
    assert within(box, (4, 3)) == want


def test_a_deferred_tensor_makes_what_is_asked_for() -> None:
    array, asked = np.arange(12.0).reshape(4, 3), []

    def read(box: Box) -> np.ndarray:
        asked.append(box)
        return array[slices(box)]

    tensor = Deferred(array.shape, read).astype(np.float32)
    assert tensor.shape == (4, 3) and asked == []
    box = ((1, 3), (2, 3))
    for got, want in ((cut(tensor, box), array[1:3, 2:]), (whole(tensor), array)):
        assert got.dtype == np.float32 and np.array_equal(got, want)
    assert asked == [box, ((0, 4), (0, 3))]
    assert cut(array, box).base is not None and whole(array) is array
    assert box_shape(box) == (2, 1)
