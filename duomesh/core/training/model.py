"""Which model a run trains: a spec with numbers changed by the configuration, and where its weights come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from duomesh.core.boxes import Sliceable
from duomesh.core.errors import ConfigError
from duomesh.core.spec.model import BlockSpec, MlpSpec, ModelSpec
from duomesh.core.training.config import ModelConfig

__all__ = ["Model", "change_spec"]


@dataclass(frozen=True)
class Model:
    """A spec and the weights that a run starts from, under canonical names; None leaves the session's own."""

    spec: ModelSpec
    weights: Callable[[], Iterator[tuple[str, Sliceable]]] | None = None


def change_spec(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    """The spec with every number that [model] gives. Raises SpecError or ConfigError if they do not fit together."""
    blocks = tuple(_change_block(block, config) for block in _layers(spec, config.num_layers))
    top = ("vocab_size", "hidden_size", "max_positions", "tie_embeddings", "init_std", "dropout")
    return replace(spec, blocks=blocks, **_given(config, *top))


def _given(config: ModelConfig, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names if getattr(config, name) is not None}


def _layers(spec: ModelSpec, num_layers: int | None) -> tuple[BlockSpec, ...]:
    if num_layers is None or num_layers <= spec.num_layers:
        return spec.blocks[:num_layers]
    if len(set(spec.blocks)) > 1:
        raise ConfigError(
            f"model.num_layers={num_layers} would add layers to a model of {spec.num_layers} whose layers differ; "
            f"use at most {spec.num_layers}."
        )
    return spec.blocks[:1] * num_layers


def _change_block(block: BlockSpec, config: ModelConfig) -> BlockSpec:
    changes = _given(config, "num_heads", "num_kv_heads", "head_dim")
    rope = block.attention.rope
    if rope is not None and config.head_dim is not None:
        # the rotated share of a head is kept
        changes["rope"] = replace(rope, rotary_dim=rope.rotary_dim * config.head_dim // block.attention.head_dim)
    attention = replace(block.attention, **changes)
    return replace(block, attention=attention, mlp=_change_mlp(block.mlp, _given(config, "ffn_size")))


def _change_mlp(mlp: MlpSpec | None, changes: dict[str, Any]) -> MlpSpec | None:
    if mlp is None and changes:
        raise ConfigError("model.ffn_size is the width of an MLP, and a layer of this model has experts only; drop it.")
    return None if mlp is None else replace(mlp, **changes)
