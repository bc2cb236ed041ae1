"""Spec -> programs: the one place where a model's structure is written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from duomesh.core.ir.program import ModelProgram, Program, ProgramBuilder, Term
from duomesh.core.ir.values import Axis, Init, Param, Value
from duomesh.core.rope import attention_factor, inverse_frequencies
from duomesh.core.spec.model import AttentionSpec, BlockSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec

__all__ = ["build_program"]

BATCH, SEQ = Axis("batch"), Axis("seq")


@lru_cache(maxsize=64)
def build_program(spec: ModelSpec) -> ModelProgram:
    """Expands a model once. Equal blocks share one program."""
    kinds = tuple(dict.fromkeys(spec.blocks))
    ropes = _ropes(spec)
    return ModelProgram(
        spec=spec,
        embed=_embed(spec),
        tables=_tables(ropes),
        blocks=tuple(_Block(spec, block, ropes, i).build() for i, block in enumerate(kinds)),
        layers=tuple(kinds.index(block) for block in spec.blocks),
        head=_head(spec),
        loss=_loss(spec),
        aliases=MappingProxyType({"head.weight": "embed.weight"} if spec.tie_embeddings else {}),
        terms=tuple(term for i, block in enumerate(kinds) for term in _terms(f"block{i}", block.moe)),
    )


def _terms(program: str, moe: MoeSpec | None) -> Iterator[Term]:
    """What a block adds to the loss."""
    if moe is not None and moe.balance_coefficient:
        # with counts n over T tokens, f = n / (top_k T), and P = sum of probabilities / T: both sums are over tokens
        yield Term(program, "balance", moe.balance_coefficient * moe.num_experts / moe.top_k, 2)
    if moe is not None and moe.z_coefficient:
        yield Term(program, "z", moe.z_coefficient, 1)


def _ropes(spec: ModelSpec) -> tuple[RopeSpec, ...]:
    """Distinct rotary tables of the model, in order of first use."""
    return tuple(dict.fromkeys(b.attention.rope for b in spec.blocks if b.attention.rope is not None))


def _stream(spec: ModelSpec) -> Value:
    return Value("x", (BATCH, SEQ, Axis("embed", spec.hidden_size)))


def _table(rope: RopeSpec, index: int) -> tuple[Value, Value]:
    axes = (BATCH, SEQ, Axis("rotary", rope.rotary_dim // 2))
    return Value(f"rope{index}.cos", axes, "wide"), Value(f"rope{index}.sin", axes, "wide")


class _Dropout:
    """Adds a program's dropouts, and with the first one the inputs that they count with; none at a rate of 0."""

    def __init__(self, b: ProgramBuilder, rate: float) -> None:
        self._b, self._rate, self._sites = b, rate, 0
        self._counted: tuple[Value, ...] = ()

    def apply(self, name: str, x: Value) -> Value:
        if not self._rate:
            return x
        if not self._counted:
            axes = {"samples": BATCH, "places": SEQ, "dropout_key": Axis("key", 2)}
            self._counted = tuple(self._b.input(Value(source, (axis,), "int")) for source, axis in axes.items())
        (x,) = self._b.op("dropout", name, [x, *self._counted], rate=self._rate, site=self._sites)
        self._sites += 1
        return x


def _embed(spec: ModelSpec) -> Program:
    b = ProgramBuilder("embed")
    tokens = b.input(Value("tokens", (BATCH, SEQ), "int"))
    vocab, embed = Axis("vocab", spec.vocab_size), Axis("embed", spec.hidden_size)
    weight = b.param("weight", ((vocab,), (embed,)), Init("normal", spec.init_std))
    (x,) = b.op("embedding", "lookup", [tokens], [weight])
    if spec.embedding_scale is not None:
        (x,) = b.op("scale", "scale", [x], factor=spec.embedding_scale)
    x = _Dropout(b, spec.dropout).apply("dropout", x)
    return b.build({"x": x})


def _tables(ropes: tuple[RopeSpec, ...]) -> Program:
    """One rotary table for each distinct RopeSpec of the model; empty for a model without."""
    b = ProgramBuilder("tables")
    positions = b.input(Value("positions", (BATCH, SEQ), "int"))
    outputs: dict[str, Value] = {}
    for i, rope in enumerate(ropes):
        rotary = Axis("rotary", rope.rotary_dim // 2)
        frequencies = [float(f) for f in inverse_frequencies(rope)]
        inv_freq = b.constant(f"rope{i}.inv_freq", frequencies, (rotary,))
        names = tuple(v.name for v in _table(rope, i))
        factor = attention_factor(rope)
        cos, sin = b.op("rope_table", f"rope{i}", [positions, inv_freq], (), names, attention_factor=factor)
        outputs |= {cos.name: cos, sin.name: sin}
    return b.build(outputs)


def _norm(b: ProgramBuilder, name: str, x: Value, norm: NormSpec, *, dims: int = 1) -> Value:
    """A norm over x's last `dims` axes together; freshly drawn gains are 1 whatever the stored offset."""
    axes = x.axes[-dims:]
    weight = b.param(f"{name}.weight", (axes,), Init("fill", 1.0 - norm.weight_offset))
    bias = b.param(f"{name}.bias", (axes,), Init("fill", 0.0)) if norm.has_bias else None
    (out,) = b.op(
        "norm",
        name,
        [x],
        [weight, bias],
        centered=norm.kind == "layer",
        eps=norm.eps,
        weight_offset=norm.weight_offset,
        cast=norm.cast,
    )
    return out


def _linear(
    b: ProgramBuilder,
    name: str,
    x: Value,
    parts: Sequence[tuple[str, tuple[Axis, ...], bool]],
    in_dims: int,
    std: float,
) -> tuple[Value, ...]:
    """One packed linear; `parts` are (canonical name, output axes, has a bias)."""
    contract = x.axes[len(x.axes) - in_dims :]
    weights: list[Param | None] = []
    biases: list[Param | None] = []
    for part, out, has_bias in parts:
        weights.append(b.param(f"{part}.weight", (out, contract), Init("normal", std)))
        biases.append(b.param(f"{part}.bias", (out,), Init("fill", 0.0)) if has_bias else None)
    return b.op(
        "linear",
        name,
        [x],
        [*weights, *biases],
        [part for part, _, _ in parts],
    )


class _Block:
    """Builds one block program."""

    def __init__(self, spec: ModelSpec, block: BlockSpec, ropes: tuple[RopeSpec, ...], index: int) -> None:
        self._spec, self._block, self._ropes = spec, block, ropes
        self._b = ProgramBuilder(f"block{index}")
        layers_std = spec.init_std / (2 * spec.num_layers) ** 0.5
        self._out_std = layers_std if spec.init_scaled_output else spec.init_std

    def build(self) -> Program:
        b, block = self._b, self._block
        x = b.input(_stream(self._spec))
        tables: tuple[Value, Value] | None = None
        if block.attention.rope is not None:
            cos, sin = _table(block.attention.rope, self._ropes.index(block.attention.rope))
            tables = b.input(cos), b.input(sin)
        segment_ids = b.input(Value("segment_ids", (BATCH, SEQ), "int"))
        dropout = _Dropout(b, self._spec.dropout)

        h = x if block.attention_norm is None else _norm(b, "attention_norm", x, block.attention_norm)
        h = self._attention(h, tables, segment_ids, block.attention)
        if block.attention_post_norm is not None:
            h = _norm(b, "attention_post_norm", h, block.attention_post_norm)
        h = dropout.apply("attention_post_dropout", h)
        (x,) = b.op("add", "attention_residual", [x, h])

        h = x if block.mlp_norm is None else _norm(b, "mlp_norm", x, block.mlp_norm)
        h, terms = self._feed_forward(h, block)
        if block.mlp_post_norm is not None:
            h = _norm(b, "mlp_post_norm", h, block.mlp_post_norm)
        h = dropout.apply("mlp_post_dropout", h)
        (x,) = b.op("add", "mlp_residual", [x, h])
        return b.build({"x": x, **terms})

    def _feed_forward(self, h: Value, block: BlockSpec) -> tuple[Value, dict[str, Value]]:
        """The MLP, the experts or the sum of both, and the scalars that enter the loss by their outside names."""
        shared = None if block.mlp is None else self._mlp(h, block.mlp)
        if block.moe is None:
            assert shared is not None, "a block has one of them"
            return shared, {}
        experts = _Experts(self._b, block.moe, self._spec.init_std, self._out_std)
        routed = experts.build(h)
        if shared is not None:
            (routed,) = self._b.op("add", "moe.sum", [shared, routed])
        return routed, experts.terms

    def _attention(
        self, h: Value, tables: tuple[Value, Value] | None, segment_ids: Value, spec: AttentionSpec
    ) -> Value:
        b = self._b
        kv = (Axis("kv_heads", spec.num_kv_heads), Axis("head_dim", spec.head_dim))
        heads = (kv[0], Axis("q_per_kv", spec.q_per_kv), kv[1])
        q, k, v = _linear(
            b,
            "attention.qkv",
            h,
            [
                ("attention.q", heads, spec.q_bias),
                ("attention.k", kv, spec.k_bias),
                ("attention.v", kv, spec.v_bias),
            ],
            in_dims=1,
            std=self._spec.init_std,
        )
        if spec.qk_norm is not None:
            is_whole = spec.qk_norm_over == "all"
            q = _norm(b, "attention.q_norm", q, spec.qk_norm, dims=len(heads) if is_whole else 1)
            k = _norm(b, "attention.k_norm", k, spec.qk_norm, dims=len(kv) if is_whole else 1)
        if tables is not None and spec.rope is not None:
            attrs: dict[str, Any] = {"pairing": spec.rope.pairing, "compute": spec.rope.compute}
            (q,) = b.op("rope", "attention.q_rope", [q, *tables], **attrs)
            (k,) = b.op("rope", "attention.k_rope", [k, *tables], **attrs)
        (h,) = b.op(
            "attention",
            "attention.core",
            [q, k, v, segment_ids],
            scale=spec.softmax_scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        embed = (Axis("embed", self._spec.hidden_size),)
        (h,) = _linear(b, "attention.o", h, [("attention.o", embed, spec.o_bias)], in_dims=3, std=self._out_std)
        return h

    def _mlp(self, h: Value, spec: MlpSpec) -> Value:
        b = self._b
        ffn, embed = (Axis("ffn", spec.ffn_size),), (Axis("embed", self._spec.hidden_size),)
        std = self._spec.init_std
        if spec.is_gated:
            parts = [("mlp.gate", ffn, spec.up_bias), ("mlp.up", ffn, spec.up_bias)]
            gate, up = _linear(b, "mlp.gate_up", h, parts, in_dims=1, std=std)
            (h,) = b.op("glu", "mlp.glu", [gate, up], activation=spec.activation)
        else:
            (up,) = _linear(b, "mlp.up", h, [("mlp.up", ffn, spec.up_bias)], in_dims=1, std=std)
            (h,) = b.op("activation", "mlp.activation", [up], activation=spec.activation)
        (h,) = _linear(b, "mlp.down", h, [("mlp.down", embed, spec.down_bias)], in_dims=1, std=self._out_std)
        return h


class _Experts:
    """Builds a mixture of experts within a block program. `terms` are the scalars that enter the loss, by name."""

    def __init__(self, b: ProgramBuilder, spec: MoeSpec, std: float, out_std: float) -> None:
        self._b, self._moe, self._std, self._out_std = b, spec, std, out_std
        self._experts = Axis("experts", spec.num_experts)
        self.terms: dict[str, Value] = {}

    def build(self, x: Value) -> Value:
        b, spec = self._b, self._moe
        groups = ((Axis("scores", spec.num_experts),), x.axes[-1:])
        weight = b.param("moe.router.weight", groups, Init("normal", self._std))
        (scores,) = b.op("router", "moe.router", [x], [weight])
        names = ("moe.probs", "moe.gates", "moe.ids")
        attrs = {"top_k": spec.top_k, "renormalize": spec.renormalize}
        probs, gates, ids = b.op("route", "moe.route", [scores], (), names, **attrs)
        self._add_terms(scores, probs, ids)
        (h,) = b.op("dispatch", "moe.dispatch", [x, ids], num_experts=spec.num_experts)
        y = self._linear("down", self._hidden(h), x.axes[-1], self._out_std)
        (out,) = b.op("combine", "moe.combine", [y, gates, ids])
        return out

    def _add_terms(self, scores: Value, probs: Value, ids: Value) -> None:
        if self._moe.balance_coefficient:
            (counts,) = self._b.op("count_choices", "moe.counts", [ids], num_experts=self._moe.num_experts)
            (self.terms["balance"],) = self._b.op("balance_sum", "moe.balance", [probs, counts])
        if self._moe.z_coefficient:
            (self.terms["z"],) = self._b.op("z_sum", "moe.z", [scores])

    def _hidden(self, h: Value) -> Value:
        activation, ffn = self._moe.activation, Axis("expert_ffn", self._moe.ffn_size)
        if self._moe.is_gated:
            gate, up = (self._linear(name, h, ffn, self._std) for name in ("gate", "up"))
            (h,) = self._b.op("glu", "moe.glu", [gate, up], activation=activation)
        else:
            up = self._linear("up", h, ffn, self._std)
            (h,) = self._b.op("activation", "moe.activation", [up], activation=activation)
        return h

    def _linear(self, name: str, x: Value, out: Axis, std: float) -> Value:
        groups = ((self._experts,), (out,), x.axes[-1:])
        weight = self._b.param(f"moe.{name}.weight", groups, Init("normal", std))
        (y,) = self._b.op("expert_linear", f"moe.{name}", [x], [weight, None])
        return y


def _head(spec: ModelSpec) -> Program:
    b = ProgramBuilder("head")
    x = b.input(_stream(spec))
    h = _norm(b, "norm", x, spec.final_norm)
    vocab = Axis("vocab", spec.vocab_size)
    weight = b.param("weight", ((vocab,), (h.axes[-1],)), Init("normal", spec.init_std))
    (logits,) = b.op("linear", "logits", [h], [weight, None])
    if spec.logit_softcap is not None:
        (logits,) = b.op("softcap", "capped_logits", [logits], cap=spec.logit_softcap)
    return b.build({"logits": logits})


def _loss(spec: ModelSpec) -> Program:
    b = ProgramBuilder("loss")
    logits = b.input(Value("logits", (BATCH, SEQ, Axis("vocab", spec.vocab_size))))
    labels = b.input(Value("labels", (BATCH, SEQ), "int"))
    mask = b.input(Value("loss_mask", (BATCH, SEQ), "wide"))
    (token_loss,) = b.op("cross_entropy", "token_loss", [logits, labels])
    (loss_sum,) = b.op("masked_sum", "loss_sum", [token_loss, mask])
    return b.build({"loss_sum": loss_sum})
