"""What a user of the library touches: open a model from anywhere, build it on a backend, run it.

model = dm.build("path/to/Llama-3.2-1B", backend="torch")  # or a preset, whose weights are drawn from a seed
loss, grads = model.loss_and_grads(batch)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from duomesh.core.arrays import Array
from duomesh.core.batch import Batch
from duomesh.core.errors import BackendError, CheckpointError, ConfigError, DuomeshWarning, SpecError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.ir.listing import explain_program
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.shard import shard
from duomesh.core.plan.validate import check
from duomesh.core.session import ComputeDType, Session
from duomesh.core.sharding.collectives import StepShape, step_collectives
from duomesh.core.sharding.listing import LayoutListing, list_layout
from duomesh.core.sharding.picture import draw_program
from duomesh.core.spec.model import ModelSpec
from duomesh.core.spec.serialize import spec_differences

if TYPE_CHECKING:
    from duomesh.converters.hf.writer import ExportReport

__all__ = ["BACKENDS", "Model", "ModelSource", "build", "draw", "explain", "new_session", "open_model"]

Params = Iterator[tuple[str, Array]]
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
        params: makes an iterator of (canonical name, array in its stored dtype).
    """

    name: str
    kind: Literal["preset", "hf", "neutral"]
    spec: ModelSpec
    directory: Path | None
    params: Callable[[], Params]


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

        def neutral_params() -> Params:
            with Checkpoint(path) as checkpoint:
                yield from checkpoint.params()

        with Checkpoint(path) as checkpoint:
            return ModelSource(str(model), "neutral", checkpoint.spec, path, neutral_params)
    if (path / "config.json").is_file():
        from duomesh.converters.hf.reader import HfCheckpoint

        def hf_params() -> Params:
            with HfCheckpoint(path) as hf:
                yield from hf.params()

        with HfCheckpoint(path) as hf:
            for text in hf.warnings:
                warnings.warn(text, DuomeshWarning, stacklevel=2)
            return ModelSource(str(model), "hf", hf.spec, path, hf_params)
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
    return ModelSource(name, "preset", spec, None, lambda: initial_params(program, seed, perturb=perturb))


def new_session(
    spec: ModelSpec,
    *,
    backend: str,
    dtype: ComputeDType = "float32",
    device: str | None = None,
    compile: bool = False,
    plan: Plan | None = None,
) -> Session:
    """A backend's session without weights.

    Args:
        backend: "torch" or "jax".
        plan: the layout on several ranks, which must be running (torchrun, or `backends.torch.launch`); None for one.
        dtype: compute dtype; bfloat16 trains with an fp32 master.
        device: such as "cpu" or "cuda"; None lets the backend choose.
        compile: compile on torch; JAX always does.

    Raises:
        BackendError: the backend is unknown or not installed, or lacks the device.
        ConfigError: the dtype is none that models are computed in.
    """
    if dtype not in get_args(ComputeDType):
        raise ConfigError(f"dtype {dtype!r} cannot be computed in; use one of {', '.join(get_args(ComputeDType))}.")
    options: dict[str, Any] = {"compute_dtype": dtype, "device": device, "compile": compile}
    if plan is not None and plan.world_size > 1 and backend != "torch":
        raise BackendError(f"{backend} cannot run on the ranks of a plan yet ({plan}); use backend='torch'.")
    program = build_program(spec)
    try:
        if backend == "torch":
            from duomesh.backends.torch.session import TorchSession

            return TorchSession(program, plan=plan, **options)
        if backend == "jax":
            from duomesh.backends.jax.session import JaxSession

            return JaxSession(program, **options)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "duomesh":
            raise  # our own fault, not a package to install
        raise BackendError(
            f"the {backend} backend needs the package {error.name!r}. "
            f"Install it with: pip install 'duomesh[{backend}]'."
        ) from error
    raise BackendError(f"there is no backend {backend!r}; use one of {', '.join(BACKENDS)}.")


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
        self.session.load_params(found.params())
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
    shape = StepShape(plan.samples_of_a_pass, length, plan.micro_batches)
    storage = shard(build_program(spec), plan)
    return list_layout(storage, shape, compute=plan.precision, grads=plan.resolved_grad_dtype)


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
    collectives = step_collectives(storage, StepShape(plan.samples_of_a_pass, length, plan.micro_batches))
    title = f"{program}: {plan or 'one rank'}"
    return draw_program(programs[program], storage.sharded.mesh, title=title, collectives=collectives)


def _checked(spec: ModelSpec, plan: Plan | str, seq: int | None) -> tuple[Plan, int]:
    """The plan, if the model can be run by it, and the length of a sample."""
    made = Plan.parse(plan) if isinstance(plan, str) else plan
    length = seq or spec.max_positions
    check(spec, made, seq=length)
    return made, length
