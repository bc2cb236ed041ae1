"""The sides that `verify` can compare: a backend, or transformers, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from duomesh.api import BACKENDS, ModelSource, new_session, open_model
from duomesh.core.arrays import DTYPES
from duomesh.core.batch import Batch
from duomesh.core.errors import ConfigError, SpecError
from duomesh.core.ir.build import build_program
from duomesh.core.session import ComputeDType
from duomesh.core.verify.run import Side, Tracer, VerifyReport, random_batch, verify_sides

__all__ = ["PERTURB", "make_side", "verify"]

_OPTIONS = ("device", "model")
PERTURB = 0.1


@dataclass(frozen=True)
class _Words:
    """A side as written: `torch`, `jax:device=cpu`, `torch:model=DIR`."""

    text: str
    framework: str
    options: dict[str, str]


def _parse(text: str) -> _Words:
    framework, _, rest = text.partition(":")
    frameworks = (*BACKENDS, "hf")
    if framework not in frameworks:
        raise ConfigError(f"side {text!r}: {framework!r} is not one of {', '.join(frameworks)}.")
    options: dict[str, str] = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if key not in _OPTIONS or not equals or not value:
            raise ConfigError(
                f"side {text!r}: {word!r} sets none of the options {', '.join(f'{o}=...' for o in _OPTIONS)}."
            )
        options[key] = value
    if framework == "hf" and "device" in options:
        raise ConfigError(f"side {text!r}: the hf side runs on the cpu only.")
    return _Words(text, framework, options)


def make_side(text: str, source: ModelSource, *, seed: int = 0) -> Side:
    """A side from its words. `model=DIR` takes its weights, and its conventions, from another model.

    Raises:
        ConfigError: the words are not a side. SpecError: the other checkpoint's model has other shapes.
    """
    words = _parse(text)
    if "model" in words.options:
        other = open_model(words.options["model"], seed=seed, perturb=PERTURB)
        ours, theirs = (build_program(s.spec).params for s in (source, other))
        if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
            raise SpecError(f"side {text!r}: its model has other parameters or shapes than {source.name}.")
        source = other

    def open_side(dtype: str, weights: str) -> Tracer:
        rounded = ((name, array.astype(DTYPES[weights])) for name, array in source.params())
        if words.framework == "hf":
            from duomesh.converters.hf.oracle import HfOracle

            if source.kind == "hf" and source.directory is not None:
                # transformers reads the files itself: what our importer did to them is part of what is checked
                return HfOracle.from_directory(
                    source.directory, dtype=cast(ComputeDType, dtype), weights=cast(ComputeDType, weights)
                )
            return HfOracle(source.spec, rounded, dtype=cast(ComputeDType, dtype))
        session = new_session(
            source.spec,
            backend=words.framework,
            dtype=cast(ComputeDType, dtype),
            device=words.options.get("device"),
        )
        session.load_params(rounded)
        return session

    return Side(text, words.framework, words.framework != "hf", open_side)


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
        sides: such as ["torch", "jax", "hf"].
        dtype: compute dtype of all sides.
        batch: what to run; None draws `batch_size` samples of `seq` random ids.
        seed: of the ids, and of a preset's weights; norm weights and biases are drawn with noise, since with gains of
            one and biases of zero a fault in them would not show.
    """
    source = model if isinstance(model, ModelSource) else open_model(model, seed=seed, perturb=PERTURB)
    made = [make_side(text, source, seed=seed) for text in sides]
    batch = batch or random_batch(source.spec.vocab_size, batch=batch_size, seq=seq, seed=seed)
    program = build_program(source.spec)
    return verify_sides(made, program, batch, model=source.name, dtype=dtype, grads=grads)
