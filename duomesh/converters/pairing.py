"""The two rotary pairings as two orders of the same channels (architectures differ in which one they store).

Interleaved rotates channels (2j, 2j + 1), half-split rotates (j, j + r/2). Taking the rotated channels of every head
in the order 0, 2, 4, ..., 1, 3, 5, ... turns a model of the first kind into one of the second: dot products of q and
k are sums over channels, so a permutation that both share changes nothing. It must reach everything that is indexed
by a channel of q or k: rows of both weights, both biases, and the weights of per-head q/k norms.

No arithmetic: converting there and back restores every byte.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from duomesh.core.arrays import Array
from duomesh.core.spec.model import AttentionSpec, BlockSpec, ModelSpec

__all__ = ["Pairing", "convert_pairing", "has_pairing", "with_pairing"]

Pairing = Literal["half", "interleaved"]
_CHANNELLED = re.compile(r"layers\.(\d+)\.attention\.([qk]|[qk]_norm)\.(weight|bias)")


def has_pairing(spec: ModelSpec, pairing: Pairing) -> bool:
    """Whether every rotary layer of the model uses this pairing."""
    return all(b.attention.rope is None or b.attention.rope.pairing == pairing for b in spec.blocks)


def with_pairing(spec: ModelSpec, pairing: Pairing) -> ModelSpec:
    """The same model with its rotary channels in the other order; `convert_pairing` converts its tensors."""

    def convert(block: BlockSpec) -> BlockSpec:
        rope = block.attention.rope
        if rope is None:
            return block
        return replace(block, attention=replace(block.attention, rope=replace(rope, pairing=pairing)))

    return replace(spec, blocks=tuple(convert(block) for block in spec.blocks))


def convert_pairing(spec: ModelSpec, name: str, array: Array, pairing: Pairing) -> Array:
    """A tensor of the model `spec` as the model `with_pairing(spec, pairing)` stores it.

    Args:
        name: canonical name. Tensors without rotary channels come back as they are.
        array: the whole tensor, or any number of whole heads of it.
    """
    match = _CHANNELLED.fullmatch(name)
    if match is None:
        return array
    attention = spec.blocks[int(match[1])].attention
    if attention.rope is None or attention.rope.pairing == pairing:
        return array
    heads = array.reshape(-1, attention.head_dim, *array.shape[1:])
    return np.ascontiguousarray(heads[:, _order(attention, pairing)]).reshape(array.shape)


def _order(attention: AttentionSpec, pairing: Pairing) -> npt.NDArray[np.intp]:
    """[head_dim] for each stored channel of the wanted pairing, the channel of the other one."""
    assert attention.rope is not None
    channels = np.arange(attention.head_dim)
    rotary = attention.rope.rotary_dim
    rotated = np.concatenate([channels[0:rotary:2], channels[1:rotary:2]])
    order = np.concatenate([rotated, channels[rotary:]])
    return order if pairing == "half" else np.argsort(order)
