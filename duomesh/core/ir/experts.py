"""The op kinds of a mixture of experts, entries of `core.ir.ops.KINDS`.

A router scores every expert for every token, `route` keeps the best few of them (a token's *choices*), `dispatch`
hands tokens to experts, `expert_linear` applies to each expert its own matrix, and `combine` brings the results back.

A dispatched value is [experts, B, S, ...] in meaning: the row of an expert that a token did not choose is zero there,
and does not exist where the value is stored (`Value.live`).

The scores' axis and the experts' axis have the same size and different names: every rank that has tokens needs all of
their scores, while it may have only some of the experts.

Shape letters in comments: B batch, S sequence, H hidden, E experts, C choices of a token.
"""

from __future__ import annotations

from duomesh.core.errors import SpecError
from duomesh.core.ir.kind import Attrs, DType, Inferred, Inputs, OpKind, Params, infer_plainly, required
from duomesh.core.ir.values import Axes, Axis, Value

__all__ = ["EXPERTS"]


def _number(attrs: Attrs, name: str) -> int:
    """A positive integer attribute."""
    number = attrs[name]
    if not isinstance(number, int) or number < 1:
        raise SpecError(f"{name} is {number!r}; it must be a positive integer.")
    return number


def _router(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    x, weight = required(inputs[0], "x"), params[0]
    assert weight is not None
    if len(weight.groups) != 2 or weight.groups[1] != x.axes[-1:]:
        raise SpecError(f"router weight {weight.name} has shape {weight.shape}; its input ends in {x.axes[-1]}.")
    return infer_plainly(inputs, params, [(x.axes[:-1] + weight.groups[0], "wide")])


def _route(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    scores, top_k = required(inputs[0], "scores"), _number(attrs, "top_k")
    experts = scores.axes[-1]
    if top_k > (experts.size or 0):
        raise SpecError(f"top_k is {top_k}; it must be at most the number of {experts}.")
    choice = Axis("choice", top_k)
    chosen = (*scores.axes[:-1], choice)
    outputs: list[tuple[Axes, DType]] = [(scores.axes, "wide"), (chosen, "wide"), (chosen, "int")]
    return infer_plainly(inputs, params, outputs, local=(experts.name, choice.name))


def _count_choices(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    ids = required(inputs[0], "ids")
    counts = (Axis("scores", _number(attrs, "num_experts")),)
    return infer_plainly(inputs, params, [(counts, "int")], local=(ids.axes[-1].name,))


def _balance_sum(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    probs, counts = required(inputs[0], "probs"), required(inputs[1], "counts")
    if counts.axes != probs.axes[-1:]:
        raise SpecError(f"counts have the axes {_show(counts)}; the probabilities end in {probs.axes[-1]}.")
    return infer_plainly(inputs, params, [((), "wide")])


def _z_sum(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    scores = required(inputs[0], "scores")
    return infer_plainly(inputs, params, [((), "wide")], local=(scores.axes[-1].name,))


def _dispatch(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    x, ids = required(inputs[0], "x"), required(inputs[1], "ids")
    if ids.axes[:-1] != x.axes[:-1]:
        raise SpecError(f"choices have the axes {_show(ids)}; the tokens have {_show(x)}.")
    experts, choice = Axis("experts", _number(attrs, "num_experts")), ids.axes[-1]
    live = (choice.size or 0, experts.size or 0)
    return infer_plainly(inputs, params, [((experts, *x.axes), x.dtype)], local=(choice.name,), live=live)


def _expert_linear(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    x, (weight, bias) = required(inputs[0], "x"), params
    assert weight is not None
    if len(weight.groups) != 3 or (weight.groups[0], weight.groups[2]) != (x.axes[:1], x.axes[-1:]):
        raise SpecError(
            f"expert weight {weight.name} has shape {weight.shape}; its input begins with {x.axes[0]} and ends in "
            f"{x.axes[-1]}."
        )
    out = weight.groups[1]
    if bias is not None and bias.groups != (x.axes[:1], out):
        raise SpecError(f"bias {bias.name} has shape {bias.shape}; the output has {x.axes[0]} and {out}.")
    both = (x.axes[-1].name,) if x.axes[-1] in out else ()  # as in `linear`
    return infer_plainly(inputs, params, [(x.axes[:-1] + out, "compute")], local=both, live=x.live)


def _combine(inputs: Inputs, params: Params, attrs: Attrs) -> Inferred:
    y, gates, ids = (required(x, role) for x, role in zip(inputs, ("y", "gates", "ids"), strict=True))
    if gates.axes != ids.axes or gates.axes[:-1] != y.axes[1:-1]:
        raise SpecError(f"gates {_show(gates)} and choices {_show(ids)} do not fit the experts' output {_show(y)}.")
    return infer_plainly(inputs, params, [(y.axes[1:], y.dtype)], local=(gates.axes[-1].name,))


def _show(value: Value) -> str:
    return f"[{', '.join(map(str, value.axes))}]"


EXPERTS: dict[str, OpKind] = {
    # x weight^T in at least fp32: [B, S, H], [E, H] -> [B, S, E]
    "router": OpKind(("x",), ("weight",), (), _router, linear=(("x",), ("weight",))),
    # [B, S, E] -> probs [B, S, E], the softmax of the scores; gates [B, S, C], the probabilities of a token's choices,
    # over their sum if renormalize; ids [B, S, C], the experts with the top_k highest scores, the lower id first where
    # two are equal. In at least fp32.
    "route": OpKind(("scores",), (), ("top_k", "renormalize"), _route),
    # how many of the ids [B, S, C] name each expert: [E]
    "count_choices": OpKind(("ids",), (), ("num_experts",), _count_choices),
    # sum over tokens and experts of probs [B, S, E] * counts [E], which carry no gradient; in at least fp32
    "balance_sum": OpKind(("probs", "counts"), (), (), _balance_sum, linear=(("probs",), ("counts",))),
    # sum over tokens of logsumexp(scores)^2, in at least fp32
    "z_sum": OpKind(("scores",), (), (), _z_sum),
    # x [B, S, H], ids [B, S, C] -> [E, B, S, H]: x where the token chose the expert, else zeros
    "dispatch": OpKind(("x", "ids"), (), ("num_experts",), _dispatch, linear=(("x",),)),
    # x[e] weight[e]^T + bias[e] for each expert e: [E, B, S, in], [E, out, in], [E, out] -> [E, B, S, out]
    "expert_linear": OpKind(
        ("x",), ("weight", "bias?"), (), _expert_linear, linear=(("x", "bias?"), ("weight", "bias?"))
    ),
    # sum over a token's choices of gate * y[id]: [E, B, S, H], [B, S, C], [B, S, C] -> [B, S, H]; rounded once
    "combine": OpKind(("y", "gates", "ids"), (), (), _combine, linear=(("y",), ("gates",))),
}
