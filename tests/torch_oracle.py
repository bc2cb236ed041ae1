"""LLaMA as a plain `nn.Module`, written down from the papers, for torch's own parallel modules to be applied to.

It shares nothing with the library but canonical names and weights, and is as ordinary as users' models are: every
parameter belongs to an `nn.Embedding`, an `nn.Linear` or a norm, and head counts follow from the widths of what the
projections return, so that `ColwiseParallel` may hand it a part of the heads.

    rotary position   RoFormer, arXiv:2104.09864, pairs (j, j + D/2) as in LLaMA's published weights
    grouped heads     arXiv:2305.13245
    RMSNorm           arXiv:1910.07467
    gated unit        arXiv:2002.05202

Shape letters: B batch, S sequence, T keys, H hidden, K kv heads, G query heads of each, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from sharding_cases import Array
from torch import Tensor, nn

from duomesh.core.spec.model import AttentionSpec, BlockSpec, ModelSpec, NormSpec

__all__ = ["Llama", "canonical"]


class Norm(nn.Module):
    """RMSNorm over the last dim."""

    def __init__(self, size: int, spec: NormSpec) -> None:
        super().__init__()
        assert spec.kind == "rms" and not spec.weight_offset and not spec.has_bias
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, base: float) -> Tensor:
    """Each pair (j, j + D/2) of [B, S, heads, D] turned by position * base^(-2j/D), an angle in fp32 per position."""
    half = x.shape[-1] // 2
    thetas = torch.tensor([base ** (-j / half) for j in range(half)], dtype=torch.float32).to(x.dtype)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * thetas
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention, the softmax written out."""

    def __init__(self, hidden: int, spec: AttentionSpec) -> None:
        super().__init__()
        assert spec.rope is not None and spec.rope.pairing == "half" and spec.rope.rotary_dim == spec.head_dim
        self.base, self.head_dim = spec.rope.base, spec.head_dim
        self.group = spec.num_heads // spec.num_kv_heads
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = nn.Linear(hidden, queries, bias=False)
        self.k = nn.Linear(hidden, keys, bias=False)
        self.v = nn.Linear(hidden, keys, bias=False)
        self.o = nn.Linear(queries, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (self.q(x), self.k(x), self.v(x)))
        q, k = rotate(q, self.base), rotate(k, self.base)
        q_BSKGD = q.unflatten(2, (-1, self.group))
        scores_BKGST = torch.einsum("bskgd,btkd->bkgst", q_BSKGD, k) / math.sqrt(self.head_dim)
        length = q.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores_BKGST.masked_fill(future, -math.inf)
        powers = torch.exp(scores - scores.amax(-1, keepdim=True))
        probs = powers / powers.sum(-1, keepdim=True)
        return self.o(torch.einsum("bkgst,btkd->bskgd", probs, v).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden: int, spec: BlockSpec) -> None:
        super().__init__()
        assert spec.mlp is not None and spec.attention_norm is not None and spec.mlp_norm is not None
        self.attention_norm = Norm(hidden, spec.attention_norm)
        self.attention = Attention(hidden, spec.attention)
        self.mlp_norm = Norm(hidden, spec.mlp_norm)
        self.mlp = Mlp(hidden, spec.mlp.ffn_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """[B, S] ids -> [B, S, V] logits, in float64.

    Args:
        spec: a model of nothing but what LLaMA has; its sizes are used.
        params: weights by canonical name.
    """

    def __init__(self, spec: ModelSpec, params: Mapping[str, Array]) -> None:
        super().__init__()
        assert not spec.tie_embeddings
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec.hidden_size, block) for block in spec.blocks)
        self.norm = Norm(spec.hidden_size, spec.final_norm)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.double()
        assert {canonical(name) for name, _ in self.named_parameters()} == set(params)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.from_numpy(params[canonical(name)]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def canonical(name: str) -> str:
    """The library's name of one of these parameters."""
    return "head.norm.weight" if name == "norm.weight" else name
