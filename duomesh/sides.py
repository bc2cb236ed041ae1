"""The sides that `verify` can compare, with equal weights: a backend, alone or on a plan's ranks, or transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast, get_args

from duomesh.api import BACKENDS, ModelSource, new_session, open_model, simulate_devices
from duomesh.core.arrays import DTYPES
from duomesh.core.batch import Batch
from duomesh.core.boxes import Sliceable, whole
from duomesh.core.errors import ConfigError, PlanError, SpecError
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.shard import check_for_session, shard
from duomesh.core.plan.validate import check_step
from duomesh.core.session import ComputeDType, JaxMode, Trace, check_compute_dtype
from duomesh.core.sharding.local import check_batch
from duomesh.core.spec.model import ModelSpec
from duomesh.core.verify.run import Side, Tracer, VerifyReport, random_batch, verify_sides

__all__ = ["PERTURB", "make_side", "trace_on_rank", "verify"]

_OPTIONS = ("device", "model", "mode")
PERTURB = 0.1


@dataclass(frozen=True)
class _Words:
    """A side as written: `torch`, `jax:device=cpu`, `torch:model=DIR`, `torch:tp=2,dp=2,zero=1`,
    `jax:tp=2,mode=explicit`."""

    text: str
    framework: str
    options: dict[str, str]
    plan: Plan


def _parse(text: str) -> _Words:
    framework, _, rest = text.partition(":")
    frameworks = (*BACKENDS, "hf")
    if framework not in frameworks:
        raise ConfigError(f"side {text!r}: {framework!r} is not one of {', '.join(frameworks)}.")
    options: dict[str, str] = {}
    others = []
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if key not in _OPTIONS:
            others.append(word)
        elif equals and value:
            options[key] = value
        else:
            raise ConfigError(f"side {text!r}: {word!r} has no value; write {key}=...")
    return _Words(text, framework, options, _plan(text, framework, others, options))


def _plan(text: str, framework: str, words: list[str], options: dict[str, str]) -> Plan:
    """What is no option of a side is a part of a plan."""
    if framework == "hf" and "device" in options:
        raise ConfigError(f"side {text!r}: the hf side runs on the cpu only.")
    try:
        plan = Plan.parse(",".join(words), source=f"side {text!r}")
    except PlanError as error:
        raise ConfigError(
            f"{error} Beside a plan, a side has the options {', '.join(f'{o}=...' for o in _OPTIONS)}."
        ) from None
    if framework == "hf" and plan != Plan():
        raise ConfigError(f"side {text!r}: transformers runs on one device; give a plan to torch or jax.")
    if "mode" in options and (framework != "jax" or options["mode"] not in get_args(JaxMode)):
        raise ConfigError(f"side {text!r}: only jax has modes, {' and '.join(get_args(JaxMode))}.")
    return plan


def make_side(text: str, source: ModelSource, *, dtype: ComputeDType, batch: tuple[int, int], seed: int = 0) -> Side:
    """A side from its words. `model=DIR` takes its weights, and its conventions, from another model; fields of a plan
    run it on as many ranks, which are started for it.

    Args:
        dtype: compute dtype of the comparison; it may be opened in another one to set bounds.
        batch: samples and tokens of the batch that it will be given.

    Raises:
        ConfigError: the words are not a side. SpecError: the other checkpoint's model has other shapes. PlanError: the
            model cannot be run by the plan, or the plan states another precision or batch. BackendError: the plan's
            ranks cannot share the batch.
    """
    words = _parse(text)
    if "model" in words.options:
        other = open_model(words.options["model"], seed=seed, perturb=PERTURB)
        ours, theirs = (build_program(s.spec).params for s in (source, other))
        if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
            raise SpecError(f"side {text!r}: its model has other parameters or shapes than {source.name}.")
        source = other
    _check_plan(source.spec, words.plan, dtype, batch)
    if words.framework == "jax":
        simulate_devices(words.plan.world_size)  # for all sides, before JAX starts for the first of them

    def open_side(opened: str, weights: str) -> Tracer:
        computed = cast(ComputeDType, opened)
        # what the plan says of dtypes is of the comparison's
        plan = replace(words.plan, precision=None, grad_dtype=words.plan.grad_dtype if opened == dtype else None)
        if plan.world_size > 1 and words.framework == "torch":
            return _OnRanks(source, replace(words, plan=plan), computed, weights, seed)
        if words.framework == "hf":
            from duomesh.converters.hf.oracle import HfOracle

            if source.kind == "hf" and source.directory is not None:
                # transformers reads the files itself: what our importer did to them is part of what is checked
                return HfOracle.from_directory(source.directory, dtype=computed, weights=cast(ComputeDType, weights))
            arrays = ((name, whole(tensor)) for name, tensor in _rounded(source, weights))
            return HfOracle(source.spec, arrays, dtype=computed)
        device = words.options.get("device")
        mode = cast(JaxMode, words.options.get("mode", "manual"))
        session = new_session(source.spec, backend=words.framework, dtype=computed, device=device, plan=plan, mode=mode)
        session.load_params(_rounded(source, weights))
        return session

    return Side(text, words.framework, words.framework != "hf", open_side)


def _check_plan(spec: ModelSpec, plan: Plan, dtype: ComputeDType, batch: tuple[int, int]) -> None:
    """Everything that can be known before a rank starts. Errors as of `make_side`."""
    program = build_program(spec)
    samples, seq = batch
    check_for_session(program, plan, dtype, seq=seq)
    check_step(plan, [samples])
    check_batch(shard(program, plan).sharded, batch)


def _rounded(source: ModelSource, weights: str) -> Iterator[tuple[str, Sliceable]]:
    return ((name, tensor.astype(DTYPES[weights])) for name, tensor in source.tensors())


@dataclass(frozen=True)
class _Payload:
    """What every rank of a side is sent. model: what `open_model` finds, or a spec, with the seed of its weights."""

    model: str | ModelSpec
    seed: int
    plan: Plan
    dtype: ComputeDType
    weights: str
    device: str | None
    batch: Batch
    grads: bool


class _OnRanks:
    """A side that starts the ranks of its plan for every trace."""

    def __init__(self, source: ModelSource, words: _Words, dtype: ComputeDType, weights: str, seed: int) -> None:
        model = source.spec if source.kind == "preset" else str(source.directory)
        self._make = partial(_Payload, model, seed, words.plan, dtype, weights, words.options.get("device"))
        self._plan, self._device = words.plan, words.options.get("device")

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        from duomesh.backends.torch.launch import launch

        target = "duomesh.sides:trace_on_rank"
        made = launch(self._plan.world_size, target, self._make(batch, grads), device=self._device)
        return cast(Trace, made)


def trace_on_rank(context: object, payload: _Payload) -> Trace:
    """One rank's part of a trace; each has the whole result."""
    source = open_model(payload.model, seed=payload.seed, perturb=PERTURB)
    session = new_session(source.spec, backend="torch", dtype=payload.dtype, device=payload.device, plan=payload.plan)
    session.load_params(_rounded(source, payload.weights))
    return session.trace(payload.batch, grads=payload.grads)


def verify(
    model: str | ModelSource,
    sides: Sequence[str],
    *,
    dtype: str = "float32",
    grads: bool = True,
    batch: Batch | None = None,
    batch_size: int = 2,
    seq: int = 64,
    seed: int = 0,
) -> VerifyReport:
    """Runs the same weights and tokens through each side and compares with the first.

    Args:
        model: a preset's name, a checkpoint directory, or a source.
        sides: such as ["torch", "jax", "hf", "torch:tp=2,dp=2"].
        dtype: compute dtype of all sides.
        batch: what to run; None draws `batch_size` samples of `seq` random ids.
        seed: of the ids, and of a preset's weights; norm weights and biases are drawn with noise, since with gains of
            one and biases of zero a fault in them would not show.
    """
    source = model if isinstance(model, ModelSource) else open_model(model, seed=seed, perturb=PERTURB)
    computed = check_compute_dtype(dtype)
    batch = batch or random_batch(source.spec.vocab_size, batch=batch_size, seq=seq, seed=seed)
    made = [make_side(text, source, dtype=computed, batch=batch.tokens.shape, seed=seed) for text in sides]
    program = build_program(source.spec)
    return verify_sides(made, program, batch, model=source.name, dtype=dtype, grads=grads)
