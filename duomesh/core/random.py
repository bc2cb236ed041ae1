"""Counter-based random numbers: element i of a named tensor is a pure function of (seed, name, i).

A slice can be drawn without the whole, in any order, on any number of hosts, and has the same bits.

Bits come from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Normals come from
the inverse of the normal distribution (Wichura 1988, algorithm AS 241, PPND16) with a logarithm built from
additions, multiplications and divisions only: every step is an IEEE operation that numpy rounds exactly, so the
result does not depend on a platform's mathematical library. (Box-Muller would: cos and log differ by one bit
between processors.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import numpy.typing as npt

from duomesh.core.arrays import Array
from duomesh.core.boxes import box_shape, runs, show_box, within
from duomesh.core.errors import SpecError
from duomesh.core.ir.values import Param

__all__ = ["KEY_STEPS", "MULTIPLIERS", "ROUNDS", "draw", "key_words", "normals", "philox", "random_bits"]

# Philox4x32-10: numbers of section 3.3 of the paper.
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_U32 = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_CHUNK = 1 << 18  # elements a worker draws at once: a few MiB of temporaries


Words = npt.NDArray[np.uint64]  # 32 bits in each


def key_words(seed: int, name: str) -> tuple[int, int]:
    """Two 32-bit key words. A hash, so that neighbouring seeds and names share nothing."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Four words of 32 random bits for each counter of four words, whose shapes are broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _U32,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _U32,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(seed: int, name: str, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """[stop - start] words of 32 random bits (in uint64) of elements start..stop of the stream `name`."""
    return _bits_of_runs(seed, name, np.array([start]), stop - start).reshape(-1)


def _bits_of_runs(seed: int, name: str, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint64]:
    """[runs, length]: the bits of several runs of equal length."""
    skipped = starts % 4  # a counter makes four words
    blocks = -(-(int(skipped.max(initial=0)) + length) // 4)
    counter: Words = np.add.outer(starts.astype(np.uint64) // np.uint64(4), np.arange(blocks, dtype=np.uint64))
    zeros = np.zeros_like(counter)
    made = philox((counter & _U32, counter >> _SHIFT, zeros, zeros), key_words(seed, name))
    words: Words = np.stack(made, axis=-1).reshape(len(starts), 4 * blocks)
    if len(set(skipped.tolist())) == 1:
        return words[:, skipped[0] : skipped[0] + length]
    return np.take_along_axis(words, skipped[:, None] + np.arange(length), axis=1)


# AS 241, PPND16: numerators and denominators by falling power, central, middle and far regions.
_CENTRAL = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_MIDDLE = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip

Float = npt.NDArray[np.float64]


def _rational(x: Float, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Float:
    top, bottom = (np.full_like(x, c[0]) for c in coefficients)
    for a, b in zip(coefficients[0][1:], coefficients[1][1:], strict=True):
        top, bottom = top * x + a, bottom * x + b
    return np.asarray(top / bottom)


def _log(x: Float) -> Float:
    """Natural logarithm from exactly rounded operations: 2 atanh((m - 1) / (m + 1)) + e ln 2."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa, exponent = np.where(low, mantissa * 2, mantissa), exponent - low
    s = (mantissa - 1) / (mantissa + 1)  # |s| < 0.172: 12 terms reach 1e-19
    square, series = s * s, np.zeros_like(s)
    for power in range(23, 0, -2):
        series = series * square + 1.0 / power
    return np.asarray(2 * s * series + exponent * 0.6931471805599453)


def _normal_quantile(p: Float) -> Float:
    """The x with Phi(x) = p, for p in (0, 1); relative error about 1e-16."""
    q = p - 0.5
    out = q * _rational(0.180625 - q * q, _CENTRAL)
    tail = np.abs(q) > 0.425
    side = q[tail]
    r = np.sqrt(-_log(np.where(side < 0, p[tail], 1 - p[tail])))
    value = np.where(r <= 5, _rational(r - 1.6, _MIDDLE), _rational(r - 5, _FAR))
    out[tail] = np.where(side < 0, -value, value)
    return out


def normals(seed: int, name: str, start: int, stop: int) -> Float:
    """[stop - start] float64 standard normals, elements start..stop of the stream `name`; |x| < 6.4."""
    return _normals_of(random_bits(seed, name, start, stop))


def _normals_of(bits: npt.NDArray[np.uint64]) -> Float:
    return _normal_quantile((bits.astype(np.float64) + 0.5) * 2.0**-32)


def draw(
    param: Param,
    seed: int,
    *,
    box: Sequence[tuple[int, int]] = (),
    perturb: float = 0.0,
    workers: int | None = None,
) -> Array:
    """Freshly drawn values of a parameter, float32.

    Args:
        param: its initialiser says what is drawn, its canonical name which stream.
        seed: the run's seed.
        box: a rectangle: [start, stop) of its first dims. It has the bits of the whole.
        perturb: standard deviation of a normal added to a constant fill, from a stream of its own. Checks use
            it: a bias of zeros or a gain of ones would hide a fault.
        workers: threads; None for one a core. The bits do not depend on it.

    Returns:
        float32 of the box's shape, rounded once from float64.
    """
    found = within(box, param.shape)
    if found is None:
        raise SpecError(f"{show_box(box)} is not within {param.name}, which has the shape {param.shape}.")
    init = param.init
    if init.kind == "fill" and perturb == 0.0:
        return np.full(box_shape(found), init.value, np.float32)
    mean, std = (init.value, perturb) if init.kind == "fill" else (0.0, init.value)
    stream = f"{param.name}/perturb" if init.kind == "fill" else param.name
    starts, length = runs(found, param.shape)
    out = np.empty((len(starts), length), np.float32)
    num_runs = max(1, _CHUNK // max(length, 1))

    def fill(corner: tuple[int, int]) -> None:
        run, first = corner
        part = out[run : run + num_runs, first : first + _CHUNK]
        bits = _bits_of_runs(seed, stream, starts[run : run + num_runs] + first, part.shape[1])
        part[...] = mean + std * _normals_of(bits)

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        list(pool.map(fill, product(range(0, len(starts), num_runs), range(0, length, _CHUNK))))
    return out.reshape(box_shape(found))
