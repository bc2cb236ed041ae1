"""What a user of the library touches: open a model from anywhere, build it on a backend, run it.

model = dm.build("path/to/Llama-3.2-1B", backend="torch")  # or a preset, whose weights are drawn from a seed
loss, grads = model.loss_and_grads(batch)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from duomesh.core.arrays import Array
from duomesh.core.batch import Batch
from duomesh.core.boxes import Sliceable, whole
from duomesh.core.errors import BackendError, CheckpointError, ConfigError, DuomeshWarning, SpecError
from duomesh.core.init import deferred_initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.ir.listing import explain_program
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.shard import shard
from duomesh.core.plan.validate import check
from duomesh.core.session import ComputeDType, JaxMode, Session, check_compute_dtype
from duomesh.core.sharding.collectives import StepShape, step_collectives
from duomesh.core.sharding.compare import CompiledTable, compiled_table
from duomesh.core.sharding.listing import LayoutListing, list_collectives, list_layout
from duomesh.core.sharding.picture import draw_program
from duomesh.core.sharding.stacks import Stacks, stack_collectives
from duomesh.core.spec.model import ModelSpec
from duomesh.core.spec.serialize import spec_differences

if TYPE_CHECKING:
    from duomesh.converters.hf.writer import ExportReport

__all__ = [
    "BACKENDS",
    "Model",
    "ModelSource",
    "build",
    "draw",
    "explain",
    "new_session",
    "open_model",
    "simulate_devices",
]

Params = Iterator[tuple[str, Array]]
Tensors = Iterator[tuple[str, Sliceable]]
BACKENDS = ("torch", "jax")
# fields of a spec on which nothing that weights are for depends
_NOT_COMPUTED = ("max_positions", "init_std", "init_scaled_output", "dropout")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: its spec and where its weights come from.

    Attributes:
        name: as the user gave it.
        kind: "preset" (weights are drawn), "hf" or "neutral".
        directory: where the weights are; None for a preset.
        tensors: makes an iterator of (canonical name, tensor in its stored dtype). Of a tensor no more is read or drawn
            than is used; use it before the next one is asked for, since files are closed after the last one.
    """

    name: str
    kind: Literal["preset", "hf", "neutral"]
    spec: ModelSpec
    directory: Path | None
    tensors: Callable[[], Tensors]

    def params(self) -> Params:
        """`tensors` as whole arrays."""
        return ((name, whole(tensor)) for name, tensor in self.tensors())


def open_model(model: str | Path | ModelSpec, *, seed: int = 0, perturb: float = 0.0) -> ModelSource:
    """Finds a model by preset name, directory or spec.

    Args:
        model: a preset's name, a directory (Hugging Face, or a neutral checkpoint), or a spec.
        seed: of the weights, where they are drawn.
        perturb: noise on drawn norm weights and biases, for checks (see `core.random.draw`).

    Raises:
        SpecError: no preset has that name. CheckpointError: the directory holds no checkpoint.

    Warns:
        DuomeshWarning: a value was missing and a default was taken, or tensors of the directory are ignored.
    """
    if isinstance(model, ModelSpec):
        return _drawn("spec", model, seed, perturb)
    path = Path(model)
    if (path / "manifest.json").is_file():
        from duomesh.core.checkpoint.read import Checkpoint

        def neutral_tensors() -> Tensors:
            with Checkpoint(path) as checkpoint:
                yield from checkpoint.deferred_params()

        with Checkpoint(path) as checkpoint:
            return ModelSource(str(model), "neutral", checkpoint.spec, path, neutral_tensors)
    if (path / "config.json").is_file():
        from duomesh.converters.hf.reader import HfCheckpoint

        def hf_tensors() -> Tensors:
            with HfCheckpoint(path) as hf:
                yield from hf.deferred_params()

        with HfCheckpoint(path) as hf:
            for text in hf.warnings:
                warnings.warn(text, DuomeshWarning, stacklevel=2)
            return ModelSource(str(model), "hf", hf.spec, path, hf_tensors)
    if path.is_dir():
        raise CheckpointError(
            f"{model} holds neither a config.json (Hugging Face) nor a manifest.json (neutral checkpoint)."
        )
    if path.exists() or len(path.parts) > 1:
        raise CheckpointError(f"{model} is not a directory. Give a preset's name or a checkpoint directory.")
    from duomesh.core.spec.presets import preset

    return _drawn(str(model), preset(str(model)), seed, perturb)


def _drawn(name: str, spec: ModelSpec, seed: int, perturb: float) -> ModelSource:
    program = build_program(spec)
    return ModelSource(name, "preset", spec, None, lambda: deferred_initial_params(program, seed, perturb=perturb))


def new_session(
    spec: ModelSpec,
    *,
    backend: str,
    dtype: ComputeDType = "float32",
    device: str | None = None,
    compile: bool = False,
    plan: Plan | str | None = None,
    mode: JaxMode = "manual",
    remat: bool = False,
    length_buckets: tuple[int, ...] = (),
) -> Session:
    """A backend's session without weights.

    Args:
        backend: "torch" or "jax".
        plan: the layout on several ranks or devices; None for one. torch's ranks must be running (torchrun, or
            `backends.torch.launch`). JAX takes the devices of its process, or of all processes that it knows of; a CPU
            simulates as many as are needed.
        mode: how JAX runs a plan: "manual" asks for just the collectives that the plan lists, "explicit" checks every
            movement by types and leaves collectives to XLA.
        remat: JAX only: backward computes each layer again from its input, instead of keeping what the layer made.
        length_buckets: lengths to which JAX pads batches at the end, so that it compiles for no more.
        dtype: compute dtype; bfloat16 trains with an fp32 master.
        device: such as "cpu" or "cuda"; None lets the backend choose.
        compile: compile on torch; JAX always does.

    Raises:
        BackendError: the backend is unknown or not installed, or lacks the device.
        ConfigError: the dtype is none that models are computed in.
    """
    check_compute_dtype(dtype)
    options: dict[str, Any] = {"compute_dtype": dtype, "device": device, "compile": compile}
    if remat and backend != "jax":
        raise ConfigError(f"{backend} keeps what layers make; it cannot compute them again (remat) yet.")
    if length_buckets and backend != "jax":
        raise ConfigError(f"length_buckets={length_buckets} are for jax; {backend} takes every length as it is.")
    if mode != "manual" and backend != "jax":
        raise ConfigError(f"mode {mode!r} is for jax; {backend} runs a plan in one way only.")
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    program = build_program(spec)
    try:
        if backend == "torch":
            from duomesh.backends.torch.session import TorchSession

            return TorchSession(program, plan=plan, **options)
        if backend == "jax":
            from duomesh.backends.jax.session import JaxSession

            made: dict[str, Any] = {"mode": mode, "remat": remat, "length_buckets": length_buckets}
            return JaxSession(program, plan=plan, **made, **options)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "duomesh":
            raise  # our own fault, not a package to install
        raise BackendError(
            f"the {backend} backend needs the package {error.name!r}. "
            f"Install it with: pip install 'duomesh[{backend}]'."
        ) from error
    raise BackendError(f"there is no backend {backend!r}; use one of {', '.join(BACKENDS)}.")


def simulate_devices(count: int) -> None:
    """Lets a CPU stand for as many JAX devices, if JAX is installed and has not started yet in this process."""
    with suppress(ModuleNotFoundError):  # building the session says what to install
        from duomesh.backends.jax.devices import simulate

        simulate(count)


class Model:
    """A model on a backend, with its weights."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.spec = session.program.spec

    def load(self, source: str | Path | ModelSource) -> Model:
        """Takes the weights of a checkpoint directory.

        Raises SpecError if it describes a model that computes something else; context length and initialisation may
        differ.
        """
        found = source if isinstance(source, ModelSource) else open_model(source)
        differences = [text for text in spec_differences(found.spec, self.spec) if not text.startswith(_NOT_COMPUTED)]
        if differences:
            raise SpecError(
                f"{found.name} describes another model than this one: {'; '.join(differences[:4])} (there, here). "
                "Build from it instead."
            )
        self.session.load_params(found.tensors())
        return self

    def params(self) -> Params:
        """(canonical name, array in the compute dtype), in the program's order."""
        return self.session.params()

    def loss_and_grads(self, batches: Batch | Sequence[Batch]) -> tuple[float, dict[str, Array]]:
        """The mean loss over the targets of one step's batches, and its gradients by canonical name."""
        return self.session.loss_and_grads([batches] if isinstance(batches, Batch) else batches)

    def logits(self, tokens: Array) -> Array:
        """[B, S] ids -> [B, S, V]."""
        return self.session.logits(tokens)

    def generate(self, prompt: Sequence[int], *, max_new_tokens: int, stop: Iterable[int] = ()) -> list[int]:
        """Greedy continuation of a prompt's ids, the prompt left out."""
        from duomesh.core.generate import greedy

        return list(greedy(self.session, prompt, max_new_tokens=max_new_tokens, stop=stop))

    def export_hf(
        self,
        directory: str | Path,
        *,
        dtype: str | None = None,
        tokenizer: str | Path | None = None,
        overwrite: bool = False,
    ) -> ExportReport:
        """Writes a directory that transformers loads, with the tokenizer files of another directory if given."""
        from duomesh.converters.hf.writer import export_hf

        return export_hf(directory, self.spec, self.params(), dtype=dtype, tokenizer_dir=tokenizer, overwrite=overwrite)


def build(
    model: str | Path | ModelSpec,
    *,
    backend: str,
    dtype: ComputeDType = "float32",
    device: str | None = None,
    compile: bool = False,
    seed: int = 0,
) -> Model:
    """Opens a model and loads it on a backend; a preset's or spec's weights are drawn from `seed`."""
    source = open_model(model, seed=seed)
    session = new_session(source.spec, backend=backend, dtype=dtype, device=device, compile=compile)
    return Model(session).load(source)


@overload
def explain(model: str | Path | ModelSpec, plan: None = None, *, seq: int | None = None) -> str: ...
@overload
def explain(model: str | Path | ModelSpec, plan: Plan | str, *, seq: int | None = None) -> LayoutListing: ...
def explain(
    model: str | Path | ModelSpec, plan: Plan | str | None = None, *, seq: int | None = None
) -> str | LayoutListing:
    """What the model computes, op by op, as text; with a plan where everything lives, what moves and what a rank holds.

    Args:
        model: as of `open_model`.
        plan: a plan or its text, such as "tp=8,dp=4,zero=1".
        seq: tokens of a sample; None for the model's own context.

    Returns:
        Text, or a listing that prints as text and has `to_dict`.

    Raises PlanError if the model cannot be run by the plan, with every reason.
    """
    spec = open_model(model).spec
    if plan is None:
        return explain_program(build_program(spec), seq=seq)
    plan, length = _checked(spec, plan, seq)
    shape = StepShape(plan.samples_of_a_pass, length, plan.resolved_micro_batches)
    storage = shard(build_program(spec), plan)
    return list_layout(storage, shape, compute=plan.resolved_precision, grads=plan.resolved_grad_dtype)


def explain_compiled(
    model: str | Path | ModelSpec,
    plan: Plan | str,
    *,
    seq: int | None = None,
    mode: JaxMode = "manual",
    remat: bool = False,
    device: str | None = None,
) -> CompiledTable:
    """What XLA makes of the collectives of a training step on JAX, beside those that the sharded program lists.

    No weights are made. A CPU simulates the plan's devices; there, XLA moves bf16 as fp32.

    Args:
        mode, remat: as of `new_session`.
        device: kind of the devices that the step is compiled for; None for JAX's default.

    Returns:
        A table that prints as text and has `rows` and `to_dict`.

    Raises PlanError and BackendError as `new_session`.
    """
    spec = open_model(model).spec
    plan, length = _checked(spec, plan, seq)
    shape = StepShape(plan.samples_of_a_pass, length, plan.resolved_micro_batches)
    how: dict[str, Any] = {"device": device, "mode": mode, "remat": remat}
    session = new_session(spec, backend="jax", dtype=plan.resolved_precision, plan=plan, **how)
    stacks = Stacks(shard(build_program(spec), plan).sharded, plan.zero)
    listed = stack_collectives(stacks, shape, remat=remat)
    shown = list_collectives(listed, compute=plan.resolved_precision, grads=plan.resolved_grad_dtype)
    return compiled_table(shown, session.compiled_collectives(shape))  # type: ignore[attr-defined]


def draw(model: str | Path | ModelSpec, plan: Plan | str, program: str = "block0", *, seq: int | None = None) -> str:
    """One program of a model under a plan as a picture: ops, what moves between them, layouts. SVG text.

    Arguments and errors as of `explain`; ConfigError if the model has no such program.
    """
    spec = open_model(model).spec
    plan, length = _checked(spec, plan, seq)
    storage = shard(build_program(spec), plan)
    programs = storage.sharded.programs
    if program not in programs:
        raise ConfigError(f"the model has no program {program!r}; its programs are {', '.join(programs)}.")
    collectives = step_collectives(storage, StepShape(plan.samples_of_a_pass, length, plan.resolved_micro_batches))
    title = f"{program}: {plan or 'one rank'}"
    return draw_program(programs[program], storage.sharded.mesh, title=title, collectives=collectives)


def _checked(spec: ModelSpec, plan: Plan | str, seq: int | None) -> tuple[Plan, int]:
    """The plan, if the model can be run by it, and the length of a sample."""
    made = Plan.parse(plan) if isinstance(plan, str) else plan
    length = seq or spec.max_positions
    check(spec, made, seq=length)
    return made, length
