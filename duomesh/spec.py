"""Model descriptions, as users meet them: `duomesh.spec.preset`, `duomesh.spec.from_hf`, the spec classes."""

from __future__ import annotations

from pathlib import Path

from duomesh.core.spec.model import (
    AttentionSpec,
    BlockSpec,
    LinearScaling,
    Llama3Scaling,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    YarnScaling,
)
from duomesh.core.spec.presets import preset, preset_names
from duomesh.core.spec.serialize import spec_from_json as from_json
from duomesh.core.spec.serialize import spec_to_json as to_json

__all__ = [
    "AttentionSpec",
    "BlockSpec",
    "LinearScaling",
    "Llama3Scaling",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "NormSpec",
    "RopeSpec",
    "YarnScaling",
    "from_hf",
    "from_json",
    "preset",
    "preset_names",
    "to_json",
]


def from_hf(directory: str | Path) -> ModelSpec:
    """The spec of a Hugging Face directory; its config.json alone is read."""
    from duomesh.converters.hf.config import read_config

    return read_config(Path(directory)).spec
