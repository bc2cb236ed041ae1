"""One call of every op kind and convention, in float64, each beside the same function written with torch.

Dims are pairwise distinct. Shape letters as in `core.ir.ops`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from duomesh.core.batch import IGNORE
from duomesh.core.spec.model import ACTIVATIONS

__all__ = ["OP_CASES", "Case", "dropped_by_hand", "philox_by_hand", "torch_activation"]

Array = npt.NDArray[Any]
B, S, K, G, D, H, V = 2, 7, 3, 4, 6, 5, 11
E, C, F = 9, 3, 8  # experts, choices of a token, their hidden width

# Operands and results that are wide in every run: tables, router scores, losses and masks.
_WIDE_OPERANDS = {
    "rope": (1, 2),
    "rope_table": (1,),
    "masked_sum": (0, 1),
    "route": (0,),
    "balance_sum": (0,),
    "z_sum": (0,),
    "combine": (1,),
}
_WIDE_RESULTS = ("rope_table", "cross_entropy", "masked_sum", "router", "route", "balance_sum", "z_sum")


@dataclass(frozen=True)
class Case:
    """One op call. `torch_form` is the same function written with torch, of (*inputs, *storage)."""

    id: str
    kind: str
    inputs: tuple[Array | None, ...]
    storage: tuple[Array | None, ...]
    attrs: dict[str, Any]
    torch_form: Callable[..., Any]
    not_differentiated: tuple[int, ...] = ()  # operands whose cotangent is None

    @property
    def operands(self) -> tuple[Array | None, ...]:
        return self.inputs + self.storage

    @property
    def differentiated(self) -> list[int]:
        return [i for i, x in enumerate(self.operands) if x is not None and i not in self.not_differentiated]

    @property
    def makes_wide(self) -> bool:
        return self.kind in _WIDE_RESULTS

    def lowered(self, dtype: npt.DTypeLike) -> tuple[Array | None, ...]:
        """The operands as a run of a lower dtype has them."""

        def lower(i: int, x: Array | None) -> Array | None:
            if x is None or x.dtype != np.float64:
                return x
            return x.astype(np.float32 if i in _WIDE_OPERANDS.get(self.kind, ()) else dtype)

        return tuple(lower(i, x) for i, x in enumerate(self.operands))


_rng = np.random.default_rng(20240)


def _normal(*shape: int) -> Array:
    return _rng.standard_normal(shape)


def _norm(name: str, *, centered: bool, has_bias: bool, offset: float, cast: str, over: tuple[int, ...] = (H,)) -> Case:
    """A norm of heads [B, S, K, H] one by one, or of all heads of a token together."""

    def torch_form(x: Any, weight: Any, bias: Any) -> Any:
        import torch.nn.functional as F

        gain = (weight + offset).reshape(over)
        if centered:
            return F.layer_norm(x, over, gain, bias, eps=0.01)
        out = F.rms_norm(x, over, gain, eps=0.01)
        return out if bias is None else out + bias.reshape(over)

    width = math.prod(over)
    storage = (_normal(width), _normal(width) if has_bias else None)
    attrs = {"centered": centered, "eps": 0.01, "weight_offset": offset, "cast": cast, "norm_dims": len(over)}
    shape = (B, S, *over) if len(over) > 1 else (B, S, K, *over)
    return Case(name, "norm", (_normal(*shape) + 0.5,), storage, attrs, torch_form)


def _linear(name: str, *, outs: tuple[tuple[int, ...], ...], biased: tuple[bool, ...], ins: tuple[int, ...]) -> Case:
    rows = [math.prod(out) for out in outs]
    bias_rows = sum(n for n, has in zip(rows, biased, strict=True) if has)

    def torch_form(x: Any, weight: Any, bias: Any) -> Any:
        import torch.nn.functional as F

        weights = weight.split(rows)
        biases = [] if bias is None else list(bias.split([n for n, has in zip(rows, biased, strict=True) if has]))
        flat = x.reshape(B, S, -1)
        parts = [
            F.linear(flat, w, biases.pop(0) if has else None).reshape(B, S, *out)
            for w, has, out in zip(weights, biased, outs, strict=True)
        ]
        return tuple(parts)

    storage = (_normal(sum(rows), math.prod(ins)), _normal(bias_rows) if bias_rows else None)
    attrs = {"outs": outs, "biased": biased, "in_dims": len(ins)}
    return Case(name, "linear", (_normal(B, S, *ins),), storage, attrs, torch_form)


def _rope(name: str, *, heads: tuple[int, ...], pairs: int, pairing: str, compute: str) -> Case:
    """torch form: pairs as complex numbers."""

    def torch_form(x: Any, cos: Any, sin: Any) -> Any:
        import torch

        turn = torch.complex(cos, sin).reshape(B, S, *[1] * len(heads), pairs)
        rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if pairing == "half":
            z = torch.complex(rotated[..., :pairs], rotated[..., pairs:]) * turn
            return torch.cat((z.real, z.imag, rest), -1)
        z = torch.complex(rotated[..., ::2], rotated[..., 1::2]) * turn
        return torch.cat((torch.view_as_real(z).flatten(-2), rest), -1)

    angles = _rng.uniform(-50, 50, (B, S, pairs))
    inputs = (_normal(B, S, *heads, D), 1.3 * np.cos(angles), 1.3 * np.sin(angles))
    return Case(name, "rope", inputs, (), {"pairing": pairing, "compute": compute}, torch_form, (1, 2))


def _attention(name: str, *, window: int | None, softcap: float | None, segments: bool, scale: float = 0.7) -> Case:
    ids = np.sort(_rng.integers(0, 3, (B, S)), axis=1).astype(np.int32) if segments else None

    def torch_form(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        import torch
        import torch.nn.functional as F

        gap = torch.arange(S)[:, None] - torch.arange(S)
        mask = (gap >= 0) & (gap < (window or S))
        mask = mask.expand(B, 1, S, S)
        if segment_ids is not None:
            mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        heads = q.reshape(B, S, K * G, D).transpose(1, 2)
        keys, values = (x.repeat_interleave(G, dim=2).transpose(1, 2) for x in (k, v))
        if softcap is None:
            out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask, scale=scale)
        else:
            scores = torch.tanh(heads @ keys.transpose(-1, -2) * scale / softcap) * softcap
            out = F.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ values
        return out.transpose(1, 2).reshape(B, S, K, G, D)

    inputs = (_normal(B, S, K, G, D), _normal(B, S, K, D), _normal(B, S, K, D), ids)
    attrs = {"scale": scale, "window": window, "softcap": softcap}
    return Case(name, "attention", inputs, (), attrs, torch_form, (3,))


def torch_activation(name: str) -> Callable[[Any], Any]:
    import torch
    import torch.nn.functional as F

    return {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: F.silu(1.702 * x) / 1.702,
        "relu": F.relu,
        "relu2": lambda x: torch.where(x > 0, x**2, 0.0),
        "sigmoid": F.sigmoid,
        "tanh": F.tanh,
    }[name]


def _pointwise(name: str) -> list[Case]:
    # wide enough that both tails are reached
    return [
        Case(
            f"activation-{name}",
            "activation",
            (4 * _normal(B, S, H),),
            (),
            {"activation": name},
            lambda x, name=name: torch_activation(name)(x),
        ),
        Case(
            f"glu-{name}",
            "glu",
            (4 * _normal(B, S, H), _normal(B, S, H)),
            (),
            {"activation": name},
            lambda gate, up: torch_activation(name)(gate) * up,
        ),
    ]


def _torch_cross_entropy(logits: Any, labels: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().long(), reduction="none").view(B, S)


def _torch_embedding(ids: Any, table: Any) -> Any:
    import torch.nn.functional as F

    return F.embedding(ids, table)


def _torch_cap(x: Any) -> Any:
    import torch

    return 1.5 * torch.tanh(x / 1.5)


def _torch_table(positions: Any, inv_freq: Any) -> Any:
    import torch

    turned = torch.polar(torch.full((B, S, 3), 1.2, dtype=torch.float64), positions[..., None] * inv_freq)
    return turned.real, turned.imag


# Dropout


def dropped_by_hand(samples: Any, places: Any, key: Any, features: int, rate: float, site: int) -> Array:
    """[B, S, features] True where an element is dropped: one at a time, in Python integers (`core.dropout`)."""
    out = np.zeros((len(samples), len(places), features), bool)
    k0, k1 = (int(word) % 2**32 for word in key)
    for b, s, f in np.ndindex(out.shape):
        words = philox_by_hand([int(places[s]) % 2**32, f // 4, int(samples[b]) % 2**32, site], [k0, k1])
        out[b, s, f] = words[f % 4] < rate * 2**32
    return out


def philox_by_hand(words: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, after section 3.3 of Salmon et al. 2011."""
    for _ in range(10):
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * words[0], 2**32), divmod(0xCD9E8D57 * words[2], 2**32)
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return words


def _dropout_cases() -> list[Case]:
    samples, places = np.array([-7, 2**31 - 1], np.int32), np.arange(40, 40 + S, dtype=np.int32)
    key, attrs = np.array([-(2**31), 12345], np.int32), {"rate": 0.3, "site": 2}

    def torch_form(x: Any, samples: Any, places: Any, key: Any) -> Any:
        import torch

        dropped = dropped_by_hand(samples, places, key, math.prod(x.shape[2:]), 0.3, 2).reshape(x.shape)
        return x.masked_fill(torch.from_numpy(dropped), 0.0) / 0.7

    counted = (samples, places, key)
    return [
        Case("dropout", "dropout", (_normal(B, S, H), *counted), (), attrs, torch_form, (1, 2, 3)),
        Case("dropout-heads", "dropout", (_normal(B, S, K, H), *counted), (), attrs, torch_form, (1, 2, 3)),
        Case("dropout-off", "dropout", (_normal(B, S, H), None, None, None), (), attrs, lambda x, *_: x, (1, 2, 3)),
    ]


# Experts


def _clear_scores() -> Array:
    """Scores whose order no difference quotient changes: a token's are at least 0.3 apart."""
    apart = np.tile(np.linspace(-2, 2, E), (B, S, 1))
    return _rng.permuted(apart, axis=-1) + _rng.uniform(-0.1, 0.1, (B, S, E))


def _choices() -> Array:
    """C experts of each token, in no order; expert 4 is nobody's."""
    others = np.delete(np.arange(E, dtype=np.int32), 4)
    return np.stack([_rng.permutation(others)[:C] for _ in range(B * S)]).reshape(B, S, C)


def _torch_route(renormalize: bool) -> Callable[..., Any]:
    def torch_form(scores: Any) -> Any:
        import torch

        probs = torch.softmax(scores, -1)
        gates, ids = torch.topk(probs, C)
        if renormalize:  # the softmax of the chosen scores alone
            gates = torch.softmax(torch.gather(scores, -1, ids), -1)
        return probs, gates, ids.int()

    return torch_form


def _torch_count(ids: Any) -> Any:
    import torch

    return torch.bincount(ids.flatten(), minlength=E).int()


def _torch_z(scores: Any) -> Any:
    return scores.logsumexp(-1).square().sum()


def _torch_dispatch(x: Any, ids: Any) -> Any:
    """By index: row (id, b, s) of the result is token (b, s)."""
    import torch

    b, s = torch.arange(B)[:, None, None], torch.arange(S)[None, :, None]
    return torch.zeros(E, B, S, H, dtype=x.dtype).index_put((ids.long(), b, s), x[:, :, None].expand(B, S, C, H))


def _torch_expert_linear(x: Any, weight: Any, bias: Any) -> Any:
    import torch
    import torch.nn.functional as F

    biases = [None] * E if bias is None else bias
    return torch.stack([F.linear(x[e], weight[e], biases[e]) for e in range(E)])


def _torch_combine(y: Any, gates: Any, ids: Any) -> Any:
    import torch

    b, s = torch.arange(B)[:, None, None], torch.arange(S)[None, :, None]
    return (gates[..., None] * y[ids.long(), b, s]).sum(2)


def _expert_cases() -> list[Case]:
    counts = _rng.integers(0, 6, E).astype(np.int32)
    x, weight, bias = _normal(E, B, S, H), _normal(E, F, H), _normal(E, F)
    combined = (_normal(E, B, S, H), _rng.uniform(0, 1, (B, S, C)), _choices())
    return [
        Case("router", "router", (_normal(B, S, H),), (_normal(E, H),), {}, lambda x, w: x @ w.T),
        *[
            Case(name, "route", (_clear_scores(),), (), {"top_k": C, "renormalize": flag}, _torch_route(flag))
            for name, flag in (("route", False), ("route-renormalised", True))
        ],
        Case("count_choices", "count_choices", (_choices(),), (), {"num_experts": E}, _torch_count, (0,)),
        Case("balance_sum", "balance_sum", (_normal(B, S, E), counts), (), {}, lambda p, n: (p * n).sum(), (1,)),
        Case("z_sum", "z_sum", (3 * _normal(B, S, E),), (), {}, _torch_z),
        Case("dispatch", "dispatch", (_normal(B, S, H), _choices()), (), {"num_experts": E}, _torch_dispatch, (1,)),
        Case("expert_linear", "expert_linear", (x,), (weight, None), {}, _torch_expert_linear),
        Case("expert_linear-bias", "expert_linear", (x,), (weight, bias), {}, _torch_expert_linear),
        Case("combine", "combine", combined, (), {}, _torch_combine, (2,)),
    ]


_LABELS = _rng.integers(0, V, (B, S)).astype(np.int32)
_LABELS[0, 2] = _LABELS[1, 5] = IGNORE

OP_CASES = [
    Case("embedding", "embedding", (_rng.integers(0, V, (B, S)),), (_normal(V, H),), {}, _torch_embedding, (0,)),
    Case("scale", "scale", (_normal(B, S, H),), (), {"factor": 4.47}, lambda x: 4.47 * x),
    _norm("rms", centered=False, has_bias=False, offset=0.0, cast="before_weight"),
    _norm("rms-offset-bias", centered=False, has_bias=True, offset=1.0, cast="after_weight"),
    _norm("layer", centered=True, has_bias=True, offset=0.0, cast="before_weight"),
    _norm("layer-offset", centered=True, has_bias=False, offset=1.0, cast="after_weight"),
    _norm("rms-k", centered=False, has_bias=False, offset=0.0, cast="after_weight", over=(K, D)),
    _norm("rms-q", centered=False, has_bias=True, offset=0.5, cast="before_weight", over=(K, G, D)),
    _linear("linear-one", outs=((V,),), biased=(False,), ins=(H,)),
    _linear("linear-bias", outs=((V,),), biased=(True,), ins=(H,)),
    _linear("linear-qkv", outs=((K, G, D), (K, D), (K, D)), biased=(False, False, False), ins=(H,)),
    _linear("linear-qkv-some-biases", outs=((K, G, D), (K, D), (K, D)), biased=(True, False, True), ins=(H,)),
    _linear("linear-o", outs=((H,),), biased=(True,), ins=(K, G, D)),
    Case(
        "rope_table",
        "rope_table",
        (_rng.integers(0, 4000, (B, S)), _rng.uniform(0, 1, 3)),
        (),
        {"attention_factor": 1.2},
        _torch_table,
        (0, 1),
    ),
    _rope("rope-q-half", heads=(K, G), pairs=3, pairing="half", compute="activation"),
    _rope("rope-k-half-partial", heads=(K,), pairs=2, pairing="half", compute="fp32"),
    _rope("rope-q-interleaved", heads=(K, G), pairs=3, pairing="interleaved", compute="fp32"),
    _rope("rope-k-interleaved-partial", heads=(K,), pairs=1, pairing="interleaved", compute="activation"),
    _attention("attention", window=None, softcap=None, segments=False),
    # (a window of 1 has no gradient but rounding in q and k; the oracle's cases have one)
    _attention("attention-window-2", window=2, softcap=None, segments=False),
    _attention("attention-window-3", window=3, softcap=None, segments=False),
    _attention("attention-segments", window=None, softcap=None, segments=True),
    _attention("attention-softcap", window=None, softcap=0.8, segments=False),
    _attention("attention-all", window=4, softcap=1.7, segments=True, scale=-1.1),
    *[case for name in ACTIVATIONS for case in _pointwise(name)],
    Case("add", "add", (_normal(B, S, H), _normal(B, S, H)), (), {}, lambda x, y: x + y),
    Case("softcap", "softcap", (3 * _normal(B, S, H),), (), {"cap": 1.5}, _torch_cap),
    Case("cross_entropy", "cross_entropy", (3 * _normal(B, S, V), _LABELS), (), {}, _torch_cross_entropy, (1,)),
    Case(
        "masked_sum",
        "masked_sum",
        (_normal(B, S), _rng.uniform(0, 2, (B, S))),
        (),
        {},
        lambda x, m: (x * m).sum(),
        (1,),
    ),
    *_expert_cases(),
    *_dropout_cases(),
]
