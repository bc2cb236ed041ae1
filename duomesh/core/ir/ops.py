"""The verbs of the IR: for each op kind its operands, its axis signature and the values that it makes.

A kind is one entry of `KINDS`: a function from (input values, parameters, attributes) to output axes and a
`Signature`. It refuses operands that do not fit, naming the op. The same kind has a reference in
`kernels/reference` and one function of the same name in each backend, all called as

    fn(*inputs, *storage tensors, **attrs, **derived)

where storage tensors are what `core.ir.storage` makes of the op's parameters (packed weights are one tensor) and
derived arguments follow from the shapes of the operands.

Shape letters in comments: B batch, S sequence, H hidden, K kv heads, G query heads per kv head, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from duomesh.core.errors import SpecError
from duomesh.core.ir.values import Attr, Axes, Param, Signature, Value

__all__ = ["KINDS", "Inferred", "OpKind"]

DType = Literal["compute", "wide", "int"]


@dataclass(frozen=True)
class Inferred:
    """Axes and dtype of each output, and the op's signature."""

    outputs: tuple[tuple[Axes, DType], ...]
    signature: Signature


Inputs = Sequence[Value | None]
Params = Sequence[Param | None]


@dataclass(frozen=True)
class OpKind:
    """What a kind takes and makes.

    Attributes:
        inputs, params: operand names; a trailing `?` marks one that may be absent, a trailing `*` a list that an op
            holds as many of as its first list.
        attrs: names of the attributes that an op stores: conventions and numbers.
        infer: outputs and signature from operands.
        inner: axes that the op reduces by collectives of its own where they are split; its outputs are then whole.
        derived: names of further keyword arguments of the functions, which follow from shapes; `derive` makes them.
    """

    inputs: tuple[str, ...]
    params: tuple[str, ...]
    attrs: tuple[str, ...]
    infer: Callable[[Inputs, Params], Inferred]
    derived: tuple[str, ...] = ()
    derive: Callable[[Inputs, Params], dict[str, Attr]] = lambda inputs, params: {}
    inner: tuple[str, ...] = ()

    def check(self, inputs: Inputs, params: Params, attrs: Mapping[str, Attr]) -> None:
        """Raises SpecError unless operands and attributes are those of the kind."""
        if set(attrs) != set(self.attrs):
            raise SpecError(f"takes the attributes {self.attrs}, got {tuple(attrs)}.")
        for operands, roles in ((inputs, self.inputs), (params, self.params)):
            if any(role.endswith("*") for role in roles):
                if not operands or len(operands) % len(roles):
                    raise SpecError(f"takes equally many {' and '.join(roles)}, got {len(operands)} in all.")
                continue
            if len(operands) != len(roles):
                raise SpecError(f"takes {roles}, got {len(operands)} operands.")
            for operand, role in zip(operands, roles, strict=True):
                if operand is None and not role.endswith("?"):
                    raise SpecError(f"operand {role!r} is required.")


def _names(axes: Axes) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


def _flat(param: Param | None) -> tuple[str, ...]:
    return () if param is None else tuple(axis.name for group in param.groups for axis in group)


def _value(value: Value | None, role: str) -> Value:
    if value is None:
        raise SpecError(f"operand {role!r} is required.")
    return value


def _simple(
    inputs: Inputs,
    params: Params,
    outputs: Sequence[tuple[Axes, DType]],
    local: tuple[str, ...] = (),
) -> Inferred:
    """An inference whose op sees every operand under its own axis names."""
    return Inferred(
        tuple(outputs),
        Signature(
            inputs=tuple(() if v is None else _names(v.axes) for v in inputs),
            params=tuple(_flat(p) for p in params),
            outputs=tuple(_names(axes) for axes, _ in outputs),
            local=local,
        ),
    )


def _embedding(inputs: Inputs, params: Params) -> Inferred:
    ids, table = _value(inputs[0], "ids"), params[0]
    assert table is not None
    return _simple(inputs, params, [(ids.axes + table.groups[1], "compute")])


def _scale(inputs: Inputs, params: Params) -> Inferred:
    x = _value(inputs[0], "x")
    return _simple(inputs, params, [(x.axes, x.dtype)])


def _norm(inputs: Inputs, params: Params) -> Inferred:
    x, weight = _value(inputs[0], "x"), params[0]
    assert weight is not None
    if weight.groups != ((x.axes[-1],),):
        raise SpecError(f"norm weight {weight.name} has shape {weight.shape}; its input ends in {x.axes[-1]}.")
    return _simple(inputs, params, [(x.axes, "compute")], local=(x.axes[-1].name,))


def _linear(inputs: Inputs, params: Params) -> Inferred:
    x = _value(inputs[0], "x")
    weights, biases = params[: len(params) // 2], params[len(params) // 2 :]
    outputs: list[tuple[Axes, DType]] = []
    for weight, bias in zip(weights, biases, strict=True):
        assert weight is not None
        out, contract = weight.groups
        if x.axes[len(x.axes) - len(contract) :] != contract:
            raise SpecError(
                f"linear weight {weight.name} contracts {', '.join(map(str, contract))}; "
                f"its input has axes {', '.join(map(str, x.axes))}."
            )
        if bias is not None and bias.groups != (out,):
            raise SpecError(f"bias {bias.name} has shape {bias.shape}; the output has {out}.")
        outputs.append((x.axes[: len(x.axes) - len(contract)] + out, "compute"))
    return _simple(inputs, params, outputs)


def _linear_shapes(inputs: Inputs, params: Params) -> dict[str, Attr]:
    """outs[i]: the shape that output i's row dim is viewed as; biased[i]: whether the packed bias holds one for it;
    in_dims: how many trailing dims of x are contracted."""
    half = len(params) // 2
    groups = [weight.groups for weight in params[:half] if weight is not None]
    return {
        "outs": tuple(tuple(axis.size for axis in out) for out, _ in groups),
        "biased": tuple(bias is not None for bias in params[half:]),
        "in_dims": len(groups[0][1]),
    }


def _rope_table(inputs: Inputs, params: Params) -> Inferred:
    positions, inv_freq = _value(inputs[0], "positions"), _value(inputs[1], "inv_freq")
    axes = positions.axes + inv_freq.axes
    return _simple(inputs, params, [(axes, "wide"), (axes, "wide")])


def _rope(inputs: Inputs, params: Params) -> Inferred:
    x = _value(inputs[0], "x")
    cos = _value(inputs[1], "cos")
    half = cos.axes[-1].size or 0
    if 2 * half > (x.axes[-1].size or 0):
        raise SpecError(f"a rotary table for {2 * half} channels cannot rotate heads of {x.axes[-1].size}.")
    return _simple(inputs, params, [(x.axes, "compute")], local=(x.axes[-1].name, cos.axes[-1].name))


def _attention(inputs: Inputs, params: Params) -> Inferred:
    q, k, v = (_value(x, role) for x, role in zip(inputs[:3], "qkv", strict=True))  # BSKGD, BSKD, BSKD
    if k.axes != v.axes or q.axes[:3] + q.axes[4:] != k.axes:
        raise SpecError(f"attention over q {_names(q.axes)}, k {_names(k.axes)}, v {_names(v.axes)}.")
    batch, _, heads, _, dim = _names(q.axes)
    kv = (batch, "kv_seq", heads, dim)
    # keys of every segment are read whole; a query's own segment is found among them
    segments = () if inputs[3] is None else ((batch, "kv_seq"),)
    signature = Signature(
        inputs=(_names(q.axes), kv, kv, *segments),
        params=(),
        outputs=(_names(q.axes),),
        local=("kv_seq", dim),
    )
    return Inferred(((q.axes, "compute"),), signature)


def _elementwise(inputs: Inputs, params: Params) -> Inferred:
    first = _value(inputs[0], "first")
    for other in inputs[1:]:
        # glu's two operands are both `ffn`; add's are both the stream
        if other is None or other.axes != first.axes:
            raise SpecError(f"operands {first} and {other} must have the same axes.")
    return _simple(inputs, params, [(first.axes, first.dtype)])


def _cross_entropy(inputs: Inputs, params: Params) -> Inferred:
    logits = _value(inputs[0], "logits")
    return _simple(inputs, params, [(logits.axes[:-1], "wide")])


def _masked_sum(inputs: Inputs, params: Params) -> Inferred:
    return _simple(inputs, params, [((), "wide")])


KINDS: dict[str, OpKind] = {
    # x[b, s] -> weight[x]; ids outside [0, vocab) are the caller's error.
    "embedding": OpKind(("ids",), ("weight",), (), _embedding),
    # x * factor, the factor rounded to x's dtype first.
    "scale": OpKind(("x",), (), ("factor",), _scale),
    # see NormSpec; centered is the layer norm.
    "norm": OpKind(("x",), ("weight", "bias?"), ("centered", "eps", "weight_offset", "cast"), _norm),
    # one input, several weights that are packed where they are stored; always returns a tuple.
    "linear": OpKind(("x",), ("weights*", "biases*"), (), _linear, ("outs", "biased", "in_dims"), _linear_shapes),
    # cos and sin of position * inv_freq, times attention_factor, in at least fp32.
    "rope_table": OpKind(("positions", "inv_freq"), (), ("attention_factor",), _rope_table),
    # rotates the first 2 * len(cos) channels; see RopeSpec.
    "rope": OpKind(("x", "cos", "sin"), (), ("pairing", "compute"), _rope),
    # causal; see AttentionSpec. segment_ids: tokens attend within their own segment only.
    "attention": OpKind(("q", "k", "v", "segment_ids?"), (), ("scale", "window", "softcap"), _attention),
    # activation(gate) * up
    "glu": OpKind(("gate", "up"), (), ("activation",), _elementwise),
    "activation": OpKind(("x",), (), ("activation",), _elementwise),
    "add": OpKind(("x", "y"), (), (), _elementwise),
    # cap * tanh(x / cap)
    "softcap": OpKind(("x",), (), ("cap",), _elementwise),
    # logsumexp(logits) - logits[label], in at least fp32; exactly 0, with zero gradient, where label is IGNORE.
    "cross_entropy": OpKind(("logits", "labels"), (), (), _cross_entropy, inner=("vocab",)),
    # sum(x * mask)
    "masked_sum": OpKind(("x", "mask"), (), (), _masked_sum),
}
