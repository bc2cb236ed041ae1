"""Whether a plan fits a model. Needs no device.

Every problem is found before any is reported, each with what was given, what is needed and what to change. Two kinds
are told apart: a plan that cannot be (`impossible`), and one that asks for what is not built yet (`not_built`); the
second never hides the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

from duomesh.core.plan.experts import experts
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.problem import Problem, Problems, divisors, multiples, nearest, refuse
from duomesh.core.plan.rules import attentions, kv_copies
from duomesh.core.spec.model import AttentionSpec, ModelSpec

__all__ = ["check", "check_step", "validate"]


def validate(spec: ModelSpec, plan: Plan, *, seq: int | None = None, world_size: int | None = None) -> list[Problem]:
    """Every problem of running the model by the plan; empty if it can be run.

    Args:
        spec: the model.
        plan: the plan.
        seq: tokens of a sequence; None if unknown, and then not checked.
        world_size: ranks that there are; None if unknown.
    """
    found = [
        *_heads(spec, plan),
        *_widths(spec, plan),
        *_sequence(plan, seq),
        *_batch(plan),
        *_ranks(plan, world_size),
        *_zero(plan),
        *_dtypes(plan),
        *_narrow_sums(plan, plan.resolved_micro_batches),
        *_pipeline(spec, plan),
        *experts(spec, plan, seq),
        *_not_built(plan),
    ]
    return list(dict.fromkeys(found))


def check(spec: ModelSpec, plan: Plan, *, seq: int | None = None, world_size: int | None = None) -> None:
    """Raises PlanError with every problem, one a line. Arguments as of `validate`."""
    refuse(validate(spec, plan, seq=seq, world_size=world_size))


def check_step(plan: Plan, samples: Sequence[int]) -> None:
    """Raises PlanError if the batches of a step are not those that the plan states, with every reason.

    samples: of each micro-batch, over all data ranks.
    """
    refuse([*_step(plan, samples), *_narrow_sums(plan, len(samples))])


# What tp splits


def _cuts_heads(attention: AttentionSpec, tp: int) -> bool:
    """Whole query heads on each rank, and kv heads either whole or in whole copies."""
    kv_heads = attention.num_kv_heads
    return attention.num_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _tp_choices(spec: ModelSpec) -> list[int]:
    """Every tp that cuts all heads and ffn sizes of the model."""
    heads = min(a.num_heads for a in attentions(spec))
    widths = {block.mlp.ffn_size for block in spec.blocks if block.mlp is not None}

    def fits(tp: int) -> bool:
        return all(_cuts_heads(a, tp) for a in attentions(spec)) and not any(width % tp for width in widths)

    return [tp for tp in range(1, heads + 1) if fits(tp)]


def _tp_fix(choices: Iterable[int]) -> str:
    return f"use tp in {', '.join(map(str, choices))}"


def _heads(spec: ModelSpec, plan: Plan) -> Problems:
    tp = plan.tp
    copies, choices = kv_copies(spec, plan), _tp_choices(spec)
    for a in attentions(spec):
        kv_heads = a.num_kv_heads
        if a.num_heads % tp:
            given = f"num_heads={a.num_heads}, num_kv_heads={kv_heads}, tp={tp}"
            yield Problem(given, "tp must divide the query heads", _tp_fix(choices))
        if kv_heads % tp and tp % kv_heads:
            given = f"num_kv_heads={kv_heads}, tp={tp}"
            yield Problem(given, "tp must divide the kv heads or be a multiple of them", _tp_fix(choices))
        elif a.num_heads % tp == 0 and a.q_per_kv % copies:  # another block's kv heads ask for more copies
            given = f"num_heads={a.num_heads}, num_kv_heads={kv_heads}, tp={tp}"
            needed = f"its {a.q_per_kv} query heads per kv head must be a multiple of the {copies} copies of kv heads"
            yield Problem(given, f"{needed} that the blocks have in common", "use a smaller tp")


def _widths(spec: ModelSpec, plan: Plan) -> Problems:
    tp, choices = plan.tp, _tp_choices(spec)
    for width in dict.fromkeys(block.mlp.ffn_size for block in spec.blocks if block.mlp is not None):
        if width % tp:
            yield Problem(f"ffn_size={width}, tp={tp}", "tp must divide the ffn size", _tp_fix(choices))


# Tokens and samples


def _sequence(plan: Plan, seq: int | None) -> Problems:
    if plan.sequence_parallel and plan.tp == 1:
        yield Problem(
            "sequence_parallel, tp=1", "sequence parallelism is over the tp ranks", "leave it out or use tp=2 or more"
        )
    if plan.cp == 1 and plan.cp_kind is not None:
        yield Problem(f"cp_kind={plan.cp_kind}, cp=1", "cp_kind needs cp > 1", "leave it out or use cp=2 or more")
    if seq is None:
        return
    parts, words = {}, "tp"
    if plan.cp > 1:
        parts["2*cp"] = 2 * plan.cp  # in zigzag every rank has two chunks
    if plan.sequence_parallel and plan.tp > 1:
        words = "cp*tp" if plan.cp > 1 else "tp"
        parts[words] = plan.cp * plan.tp
    unit = lcm(*parts.values())
    if seq % unit:
        sizes = ", ".join(f"{name}={getattr(plan, name)}" for name in ("cp", "tp") if getattr(plan, name) > 1)
        reason = " under sequence_parallel" if words in parts else ""
        shown = " and ".join(name if name == "tp" else f"{name}={size}" for name, size in parts.items())
        needed = f"{shown} must divide the sequence length{reason}"
        yield Problem(f"seq={seq}, {sizes}", needed, f"use seq={multiples(seq, unit)}")


def _batch(plan: Plan) -> Problems:
    total, size = plan.global_batch_size, plan.micro_batch_size
    if total is None:
        return
    passes = f"micro_batches={plan.resolved_micro_batches}, dp={plan.dp}"
    parts = plan.resolved_micro_batches * plan.dp
    if size is None:
        if total % parts:
            needed = f"the global batch must be a multiple of micro_batches*dp={parts}"
            fix = f"use global_batch_size={multiples(total, parts)}"
            yield Problem(f"global_batch_size={total}, {passes}", needed, fix)
    elif total != size * parts:
        given = f"global_batch_size={total}, micro_batch_size={size}, {passes}"
        needed = f"the global batch must be micro_batch_size*micro_batches*dp={size * parts}"
        per_pass = size * plan.dp
        if total % per_pass == 0:
            fix = f"use micro_batches={total // per_pass}"
        else:
            fix = f"use global_batch_size={multiples(total, per_pass)}, micro_batches={_multiples_of(total, per_pass)}"
        yield Problem(given, needed, fix)


def _step(plan: Plan, samples: Sequence[int]) -> Problems:
    if plan.micro_batches not in (None, len(samples)):
        given = f"micro_batches={plan.micro_batches}, batches of the step: {len(samples)}"
        yield Problem(given, "the plan states how many there are", f"give {plan.micro_batches} or change the plan")
    shown = ", ".join(map(str, dict.fromkeys(samples)))
    if plan.micro_batch_size is not None:
        size = plan.micro_batch_size * plan.dp
        if any(count != size for count in samples):
            given = f"micro_batch_size={plan.micro_batch_size}, dp={plan.dp}, samples of a batch: {shown}"
            needed = f"a batch has those of all data ranks, micro_batch_size*dp={size}"
            yield Problem(given, needed, f"give {size} or change the plan")
    if plan.global_batch_size not in (None, sum(samples)):
        given = f"global_batch_size={plan.global_batch_size}, samples of the step's batches: {sum(samples)}"
        yield Problem(given, "the plan states how many there are", f"give {plan.global_batch_size} or change the plan")


def _multiples_of(number: int, of: int) -> str:
    """How often `of` goes into each of `_multiples`."""
    return " or ".join(str(n) for n in (number // of, number // of + 1) if n)


def _ranks(plan: Plan, world_size: int | None) -> Problems:
    if world_size is None or world_size == plan.world_size:
        return
    sizes = ", ".join(f"{name}={getattr(plan, name)}" for name in ("tp", "dp", "cp", "pp"))
    replica = plan.tp * plan.cp * plan.pp
    if world_size % replica == 0:
        fix = f"use dp={world_size // replica} or start {plan.world_size} ranks"
    else:
        fix = f"start {plan.world_size} ranks, or {multiples(world_size, replica)} with another dp"
    yield Problem(f"{world_size} ranks, {sizes}", f"tp*dp*cp*pp={plan.world_size} ranks are needed", fix)


# State, dtypes, and the axes that come later


def _zero(plan: Plan) -> Problems:
    if plan.zero and plan.dp == 1:
        yield Problem(f"zero={plan.zero}, dp=1", "zero shares state among dp ranks", "use zero=0 or dp=2 or more")
    shard = plan.zero_shard
    if shard is None:
        return
    if not plan.zero:
        yield Problem(f"zero_shard={shard}, zero=0", "zero_shard needs zero", "leave it out or use zero=1, 2 or 3")
    if plan.dp % shard:
        fix = f"use zero_shard={nearest(shard, divisors(plan.dp))}"
        yield Problem(f"zero_shard={shard}, dp={plan.dp}", "zero_shard must divide dp", fix)


def _dtypes(plan: Plan) -> Problems:
    precision, grad_dtype = plan.resolved_precision, plan.resolved_grad_dtype
    allowed = {"float32": ("float32",), "bfloat16": ("float32", "bfloat16"), "float64": ("float64",)}[precision]
    if grad_dtype not in allowed:
        needed = f"gradients of a {precision} step are kept in {' or '.join(allowed)}"
        fix = f"use grad_dtype={' or '.join(allowed)}"
        yield Problem(f"grad_dtype={grad_dtype}, precision={precision}", needed, fix)


def _narrow_sums(plan: Plan, micro_batches: int) -> Problems:
    if plan.grad_dtype == "bfloat16" and micro_batches > 1:
        needed = "bfloat16 is too narrow to add up several micro-batches"
        given = f"grad_dtype=bfloat16, micro_batches={micro_batches}"
        yield Problem(given, needed, "use grad_dtype=float32 or micro_batches=1")


def _pipeline(spec: ModelSpec, plan: Plan) -> Problems:
    drop = "leave it out or use pp=2 or more"
    if plan.pp == 1 and plan.vpp > 1:
        yield Problem(f"vpp={plan.vpp}, pp=1", "parts of pipeline ranks need pp > 1", drop)
    if plan.pp == 1 and plan.schedule is not None:
        yield Problem(f"schedule={plan.schedule}, pp=1", "a schedule needs pp > 1", drop)
    if plan.pp > 1 and plan.pp * plan.vpp > spec.num_layers:
        given = f"pp={plan.pp}, vpp={plan.vpp}, num_layers={spec.num_layers}"
        yield Problem(given, "each of the pp*vpp parts needs a layer", f"use pp*vpp of at most {spec.num_layers}")


def _not_built(plan: Plan) -> Problems:
    defaults = Plan()
    for name in ("pp", "vpp", "schedule", "cp", "cp_kind", "ep", "etp"):
        value = getattr(plan, name)
        if value != getattr(defaults, name):
            yield Problem(f"{name}={value}", f"{name} is not built yet", "leave it out", "not_built")
