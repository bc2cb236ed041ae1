"""The verbs of the IR: for each op kind its operands, its axis signature and the values that it makes.

A kind is one entry of `KINDS`: a function from (input values, parameters, attributes) to output axes and a
`Signature`. It refuses operands that do not fit, naming the op. The same kind has a reference in
`kernels/reference` and one function of the same name in each backend, all called as

    fn(*inputs, *storage tensors, **attrs, **derived)

where storage tensors are what `core.ir.storage` makes of the op's parameters (packed weights are one tensor) and
derived arguments follow from the shapes of the operands.

Here are the kinds of dense models; those of a mixture of experts are in `experts`.

Shape letters in comments: B batch, S sequence, H hidden, K kv heads, G query heads per kv head, D head dim.
"""

from __future__ import annotations

from duomesh.core.errors import SpecError
from duomesh.core.ir.experts import EXPERTS
from duomesh.core.ir.kind import (
    Attrs,
    DType,
    Inferred,
    Inputs,
    OpKind,
    Own,
    Params,
    axis_names,
    infer_plainly,
    required,
)
from duomesh.core.ir.values import Attr, Axes, Signature

__all__ = ["EXPERT_KINDS", "KINDS", "Inferred", "OpKind"]


def _embedding(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    ids, table = required(inputs[0], "ids"), params[0]
    assert table is not None
    return infer_plainly(inputs, params, [(ids.axes + table.groups[1], "compute")])


def _scale(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    x = required(inputs[0], "x")
    return infer_plainly(inputs, params, [(x.axes, x.dtype)])


def _norm(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    x, weight = required(inputs[0], "x"), params[0]
    assert weight is not None
    (normed,) = weight.groups
    if x.axes[-len(normed) :] != normed:
        ends = ", ".join(map(str, x.axes[-len(normed) :]))
        raise SpecError(f"norm weight {weight.name} has shape {weight.shape}; its input ends in {ends}.")
    if attrs["centered"] and len(normed) > 1:
        raise SpecError(f"a centered norm is over one axis; weight {weight.name} has {', '.join(map(str, normed))}.")
    *inner, local = axis_names(normed)
    return infer_plainly(inputs, params, [(x.axes, "compute")], local=(local,), inner=tuple(inner))


def _norm_dims(inputs: Inputs, params: Params) -> dict[str, Attr]:
    """norm_dims: how many trailing dims of x are normed together."""
    assert params[0] is not None
    return {"norm_dims": len(params[0].groups[0])}


def _linear(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    x = required(inputs[0], "x")
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
    # an axis that is summed and made anew has one name for two dims: it cannot be split
    both = {a.name for w in weights if w is not None for a in w.groups[0] if a in w.groups[1]}
    return infer_plainly(inputs, params, outputs, local=tuple(sorted(both)))


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


def _rope_table(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    positions, inv_freq = required(inputs[0], "positions"), required(inputs[1], "inv_freq")
    axes = positions.axes + inv_freq.axes
    return infer_plainly(inputs, params, [(axes, "wide"), (axes, "wide")])


def _rope(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    x = required(inputs[0], "x")
    cos = required(inputs[1], "cos")
    half = cos.axes[-1].size or 0
    if 2 * half > (x.axes[-1].size or 0):
        raise SpecError(f"a rotary table for {2 * half} channels cannot rotate heads of {x.axes[-1].size}.")
    return infer_plainly(inputs, params, [(x.axes, "compute")], local=(x.axes[-1].name, cos.axes[-1].name))


def _attention(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    q, k, v = (required(x, role) for x, role in zip(inputs[:3], "qkv", strict=True))  # BSKGD, BSKD, BSKD
    if k.axes != v.axes or q.axes[:3] + q.axes[4:] != k.axes:
        raise SpecError(f"attention over q {axis_names(q.axes)}, k {axis_names(k.axes)}, v {axis_names(v.axes)}.")
    batch, _, heads, _, dim = axis_names(q.axes)
    kv = (batch, "kv_seq", heads, dim)
    # keys of every segment are read whole; a query's own segment is found among them
    segments = () if inputs[3] is None else ((batch, "kv_seq"),)
    signature = Signature(
        inputs=(axis_names(q.axes), kv, kv, *segments),
        params=(),
        outputs=(axis_names(q.axes),),
        local=("kv_seq", dim),
    )
    return Inferred(((q.axes, "compute"),), signature)


def _elementwise(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    first = required(inputs[0], "first")
    for other in inputs[1:]:
        # glu's two operands are both `ffn`; add's are both the stream
        if other is None or (other.axes, other.live) != (first.axes, first.live):
            raise SpecError(f"operands {first} and {other} must have the same axes.")
    return infer_plainly(inputs, params, [(first.axes, first.dtype)], live=first.live)


def _dropout(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    x, samples, places, key = (required(v, role) for v, role in zip(inputs, _DROPOUT_INPUTS, strict=True))
    if samples.axes + places.axes != x.axes[:2] or len(x.axes) < 3:
        raise SpecError(f"dropout over {axis_names(x.axes)}, with {axis_names(samples.axes + places.axes)} counted.")
    rate = attrs["rate"]
    if not isinstance(rate, float) or not 0 < rate < 1:
        raise SpecError(f"rate is {rate!r}; it must be a number above 0 and below 1.")
    # a mask is drawn for features as they are numbered from the first
    local = axis_names((*x.axes[2:], *key.axes))
    return infer_plainly(inputs, params, [(x.axes, x.dtype)], local=local)


def _cross_entropy(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    logits = required(inputs[0], "logits")
    return infer_plainly(inputs, params, [(logits.axes[:-1], "wide")], inner=(logits.axes[-1].name,))


def _masked_sum(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    return infer_plainly(inputs, params, [((), "wide")])


_DROPOUT_INPUTS = ("x", "samples", "places", "key")
_CROSS_ENTROPY_OWN: Own = (
    ("forward", "maximum"),
    ("forward", "sum of exponentials"),
    ("forward", "label's logit"),
)

KINDS: dict[str, OpKind] = {
    # x[b, s] -> weight[x]; ids outside [0, vocab) are the caller's error.
    "embedding": OpKind(("ids",), ("weight",), (), _embedding, linear=(("weight",),)),
    # x * factor, the factor rounded to x's dtype first.
    "scale": OpKind(("x",), (), ("factor",), _scale, linear=(("x",),)),
    # see NormSpec; centered is the layer norm. Over as many trailing dims as the weight has axes.
    "norm": OpKind(
        ("x",),
        ("weight", "bias?"),
        ("centered", "eps", "weight_offset", "cast"),
        _norm,
        ("norm_dims",),
        _norm_dims,
        own=(("forward", "sum of squares"), ("backward", "sum of products")),
    ),
    # one input, several weights that are packed where they are stored; always returns a tuple.
    "linear": OpKind(
        ("x",),
        ("weights*", "biases*"),
        (),
        _linear,
        ("outs", "biased", "in_dims"),
        _linear_shapes,
        linear=(("x", "biases*"), ("weights*", "biases*")),
    ),
    # cos and sin of position * inv_freq, times attention_factor, in at least fp32.
    "rope_table": OpKind(("positions", "inv_freq"), (), ("attention_factor",), _rope_table),
    # rotates the first 2 * len(cos) channels; see RopeSpec.
    "rope": OpKind(("x", "cos", "sin"), (), ("pairing", "compute"), _rope),
    # causal; see AttentionSpec. segment_ids: tokens attend within their own segment only.
    "attention": OpKind(("q", "k", "v", "segment_ids?"), (), ("scale", "window", "softcap"), _attention),
    # activation(gate) * up
    "glu": OpKind(("gate", "up"), (), ("activation",), _elementwise),
    "activation": OpKind(("x",), (), ("activation",), _elementwise),
    "add": OpKind(("x", "y"), (), (), _elementwise, linear=(("x", "y"),)),
    # x / (1 - rate) where a random word of the element is not below the rate, else 0. The word is a function of the key
    # (two words), the index of the sample, the place within it, the feature, and the site, a number that no other
    # dropout of the program has. Without a key it is x: see `core.dropout`.
    "dropout": OpKind(_DROPOUT_INPUTS, (), ("rate", "site"), _dropout, linear=(("x",),)),
    # cap * tanh(x / cap)
    "softcap": OpKind(("x",), (), ("cap",), _elementwise),
    # logsumexp(logits) - logits[label], in at least fp32; exactly 0, with zero gradient, where label is IGNORE.
    "cross_entropy": OpKind(("logits", "labels"), (), (), _cross_entropy, own=_CROSS_ENTROPY_OWN),
    # sum(x * mask)
    "masked_sum": OpKind(("x", "mask"), (), (), _masked_sum, linear=(("x",),)),
    **EXPERTS,
}
# What a model with a mixture of experts has and others have not.
EXPERT_KINDS: tuple[str, ...] = tuple(EXPERTS)
