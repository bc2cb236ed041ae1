"""Counter-based draws: published vectors, independence of cuts and workers, the distribution, and frozen bits."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
from compare import rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import philox_by_hand

from duomesh.core import random as counter
from duomesh.core.errors import SpecError
from duomesh.core.init import deferred_initial_params, initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.ir.values import Axis, Init, Param


def param(*shape: int, name: str = "layers.0.mlp.up.weight", kind: str = "normal", value: float = 0.02) -> Param:
    axes = tuple((Axis(f"axis{i}", n),) for i, n in enumerate(shape))
    return Param(name, axes, Init(kind, value))  # type: ignore[arg-type]


def philox(words: list[int], key: tuple[int, int]) -> list[str]:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in words)
    return [f"{int(word[0]):08x}" for word in counter.philox((c0, c1, c2, c3), key)]


# Random123's kat_vectors: counter, key, result; the third from digits of pi.
ONE = 0xFFFFFFFF
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0)
KNOWN: list[tuple[list[int], tuple[int, int], str]] = [
    ([0, 0, 0, 0], (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([ONE] * 4, (ONE, ONE), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (*PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("words", "key", "want"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(words: list[int], key: tuple[int, int], want: str) -> None:
    """Vectors of the Random123 distribution (kat_vectors)."""
    assert philox(words, key) == want.split()
    assert [f"{word:08x}" for word in philox_by_hand(words, list(key))] == want.split()


WORD = st.integers(0, 2**32 - 1)


@given(st.lists(WORD, min_size=4, max_size=4), WORD, WORD)
def test_philox_equals_the_paper_s_form(words: list[int], k0: int, k1: int) -> None:
    assert philox(words, (k0, k1)) == [f"{word:08x}" for word in philox_by_hand(words, [k0, k1])]


@given(st.integers(0, 90), st.integers(0, 90), st.sampled_from([0, 2**40 - 7]))
def test_a_range_of_bits_is_a_slice_of_the_stream(a: int, b: int, offset: int) -> None:
    start, stop = sorted((a, b))
    whole = counter.random_bits(1, "x", offset, offset + 90)
    assert (whole < 2**32).all()
    np.testing.assert_array_equal(counter.random_bits(1, "x", offset + start, offset + stop), whole[start:stop])


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.data(), st.sampled_from(["normal", "fill"]))
def test_a_slice_has_the_bits_of_the_whole(rows: int, columns: int, data: st.DataObject, kind: str) -> None:
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    chosen = param(rows, columns, kind=kind)
    whole = counter.draw(chosen, 5, perturb=0.3)
    assert whole.shape == (rows, columns) and whole.dtype == np.float32
    part = counter.draw(chosen, 5, box=[(start, stop)], perturb=0.3)
    assert part.shape == (stop - start, columns)
    np.testing.assert_array_equal(part, whole[start:stop])
    first = data.draw(st.integers(0, columns))
    last = data.draw(st.integers(first, columns))
    part = counter.draw(chosen, 5, box=[(start, stop), (first, last)], perturb=0.3)
    np.testing.assert_array_equal(part, whole[start:stop, first:last])


def test_slices_and_workers_across_chunks() -> None:
    """Larger than a worker's chunk, with a chunk that is no multiple of the row."""
    chosen = param(911, 677)
    whole = counter.draw(chosen, 0, workers=1)
    assert whole.size > 2 * counter._CHUNK
    np.testing.assert_array_equal(whole, counter.draw(chosen, 0, workers=3))
    np.testing.assert_array_equal(whole, counter.draw(chosen, 0))
    cuts = (0, 1, 450, 911)
    parts = [counter.draw(chosen, 0, box=[rows]) for rows in pairwise(cuts)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    columns = [counter.draw(chosen, 0, box=[(0, 911), run]) for run in pairwise((0, 1, 602, 677))]
    assert columns[1].size > 2 * counter._CHUNK
    np.testing.assert_array_equal(whole, np.concatenate(columns, axis=1))
    wide = param(2, 300_001)  # a run that is longer than a chunk
    np.testing.assert_array_equal(counter.draw(wide, 0, box=[(1, 2), (7, 300_000)])[0], counter.draw(wide, 0)[1, 7:-1])
    assert len(np.unique(whole)) > whole.size // 2  # no chunk repeats another


@pytest.mark.parametrize("box", [[(-1, 2)], [(2, 1)], [(0, 4)], [(0, 3), (1, 3)]])
def test_a_rectangle_outside_the_parameter_is_refused(box: list[tuple[int, int]]) -> None:
    with pytest.raises(SpecError, match=r"layers\.0\.mlp\.up\.weight, which has the shape \(3, 2\)"):
        counter.draw(param(3, 2), 0, box=box)


def test_quantile_matches_an_independent_one() -> None:
    """Against the standard library's inverse distribution, all three regions of the approximation."""
    p = np.concatenate(
        ([2.0**-33, 1 - 2.0**-33, 0.5, 0.075, 0.925], np.linspace(0.001, 0.999, 999), 10.0 ** -np.arange(1, 300, 7))
    )
    want = np.array([NormalDist().inv_cdf(float(v)) for v in p])
    assert np.sqrt(-np.log(p.min())) > 5  # the far region is reached
    got = counter._normal_quantile(p)
    # element by element; polynomials of eight terms
    assert (np.abs(got - want) <= rounding(8) * np.abs(want)).all()


def test_logarithm_is_accurate() -> None:
    x = np.concatenate((np.linspace(0.001, 0.999, 4001), 2.0 ** -np.arange(1, 60), 10.0 ** -np.arange(1, 300, 7)))
    want = np.array([math.log(v) for v in x])
    assert (np.abs(counter._log(x) - want) <= rounding(1) * np.abs(want)).all()


def test_moments() -> None:
    """Of n normals the k-th moment has the standard error sqrt((m_2k - m_k^2) / n): within five of them."""
    n = 400_000
    x = counter.normals(11, "moments", 0, n)
    assert np.abs(x).max() < 6.4
    for k, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**k).mean() - moment) < 5 * math.sqrt(variance / n), k
    # neighbours within a counter block and across blocks are uncorrelated
    for lag in (1, 2, 3, 4, 5):
        assert abs((x[lag:] * x[:-lag]).mean()) < 5 / math.sqrt(n), lag


def test_std_and_mean_of_a_parameter() -> None:
    drawn = counter.draw(param(300, 200, value=0.02), 0)
    unit = counter.normals(0, "layers.0.mlp.up.weight", 0, 60_000).reshape(300, 200)
    np.testing.assert_array_equal(drawn, (0.02 * unit).astype(np.float32))


def test_names_and_seeds_share_nothing() -> None:
    draws = [
        counter.draw(param(50, 20, name=name), seed).ravel()
        for name in ("a.weight", "b.weight", "a.weight/perturb", "layers.1.a", "layers.11.a")
        for seed in (0, 1, 2, 10, -1, 2**63)
    ]
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 6 / math.sqrt(1000)
    assert len({draw.tobytes() for draw in draws}) == len(draws)


def test_perturb_moves_constants_only() -> None:
    fill, normal = param(500, kind="fill", value=1.0), param(5, 7)
    np.testing.assert_array_equal(counter.draw(fill, 3), np.ones(500, np.float32))
    moved = counter.draw(fill, 3, perturb=0.3)
    unit = counter.normals(3, f"{fill.name}/perturb", 0, 500)
    np.testing.assert_array_equal(moved, (1.0 + 0.3 * unit).astype(np.float32))
    assert len(np.unique(moved)) > 490
    np.testing.assert_array_equal(counter.draw(normal, 3), counter.draw(normal, 3, perturb=0.3))


def test_initial_params_are_draws_under_canonical_names() -> None:
    from spec_cases import CASES

    program = build_program(CASES["qkv_bias_tied"])
    drawn = dict(initial_params(program, 9))
    assert list(drawn) == list(program.params)
    for name, value in drawn.items():
        assert value.shape == program.params[name].shape
        np.testing.assert_array_equal(value, counter.draw(program.params[name], 9))
    deferred = dict(deferred_initial_params(program, 9, perturb=0.3))
    assert list(deferred) == list(drawn)
    for name, tensor in deferred.items():
        box = tuple((size // 3, size) for size in tensor.shape)
        np.testing.assert_array_equal(tensor.read(box), counter.draw(program.params[name], 9, box=box, perturb=0.3))
    assert not np.array_equal(drawn["layers.0.mlp.up.weight"], drawn["layers.1.mlp.up.weight"])
    assert (drawn["layers.0.attention_norm.weight"] == 1).all() and (drawn["layers.0.attention.q.bias"] == 0).all()


# A change of these bits changes every model that was ever initialised: it must be meant.
GOLDEN = {
    (0, "embed.weight", 0): "94543f6268a57b6b598473e5 3fc9a63cd183cf53bfcd877baf0837fbbfd8b75dc13a5a9b",
    (0, "embed.weight", 2**33): "84f1bb872c111208a9e0faf6 3fa8cbec3014e0abbfee43aabc43fe253fdb069cffbb112c",
    (
        1234,
        "layers.7.attention.q.weight",
        5,
    ): "5043a7a41298d25ad698b0bb bfdf185f00094c03bff74d50c34766a03fef9877f67ecd30",
}


@pytest.mark.parametrize(("stream", "expected"), GOLDEN.items(), ids=["first", "far", "layer"])
def test_golden_bits(stream: tuple[int, str, int], expected: str) -> None:
    seed, name, start = stream
    bits = counter.random_bits(seed, name, start, start + 3).astype(">u4").tobytes().hex()
    normals = counter.normals(seed, name, start, start + 3).astype(">f8").tobytes().hex()
    assert f"{bits} {normals}" == expected
