"""A `ModelSpec` as JSON. Equal blocks are written once and layers refer to them by index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from duomesh.core.errors import SpecError
from duomesh.core.spec.codec import decode, encode
from duomesh.core.spec.model import BlockSpec, ModelSpec

__all__ = ["spec_differences", "spec_from_dict", "spec_from_json", "spec_to_dict", "spec_to_json"]


def spec_to_dict(spec: ModelSpec) -> dict[str, Any]:
    """JSON values; `blocks` becomes `block_kinds` (the distinct ones) and `layers` (indices into them)."""
    kinds = list(dict.fromkeys(spec.blocks))
    out: dict[str, Any] = encode(spec)
    out["block_kinds"] = [encode(kind) for kind in kinds]
    out["layers"] = [kinds.index(block) for block in spec.blocks]
    del out["blocks"]
    return out


def spec_from_dict(data: Any) -> ModelSpec:
    """The inverse of `spec_to_dict`. Raises SpecError with the path of the first field that does not fit."""
    if not isinstance(data, dict):
        raise SpecError(f"a model spec must be a table of fields, not {type(data).__name__}.")
    if "blocks" in data:
        raise SpecError("a model spec has no field 'blocks'; it has 'block_kinds' and 'layers'.")
    rest = dict(data)
    kinds, layers = rest.pop("block_kinds", None), rest.pop("layers", None)
    if not isinstance(kinds, list) or not isinstance(layers, list):
        raise SpecError("a model spec needs the lists 'block_kinds' and 'layers'.")
    blocks = [decode(BlockSpec, kind, path=f"block_kinds[{i}]") for i, kind in enumerate(kinds)]
    for i, layer in enumerate(layers):
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(blocks):
            raise SpecError(f"layers[{i}] is {layer!r}; it must index one of the {len(blocks)} block_kinds.")
    spec: dict[str, Any] = {**rest, "blocks": [encode(blocks[layer]) for layer in layers]}
    return decode(ModelSpec, spec)


def spec_to_json(spec: ModelSpec) -> str:
    return json.dumps(spec_to_dict(spec), indent=2)


def spec_from_json(text: str) -> ModelSpec:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"the model spec is not valid JSON: {error}.") from None
    return spec_from_dict(data)


def spec_differences(a: ModelSpec, b: ModelSpec) -> list[str]:
    """Where two specs differ, one "path: value in a, value in b" each."""
    left, right = _flatten(spec_to_dict(a), ""), _flatten(spec_to_dict(b), "")
    names = dict.fromkeys([*left, *right])
    return [
        f"{name}: {left.get(name, 'absent')}, {right.get(name, 'absent')}"
        for name in names
        if left.get(name, "absent") != right.get(name, "absent")
    ]


def _flatten(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif path == "block_kinds":
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for key, item in items for name, leaf in _flatten(item, key).items()}
