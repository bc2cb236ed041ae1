"""Rotary parameters of a config.json, in both dialects, to and from `RopeSpec`.

transformers up to 4.x: `rope_theta` at top level and `rope_scaling` (null, or a kind with its numbers).
transformers 5.x: both in `rope_parameters`, either flat or one table per layer type.
Where several places state the base they must agree; where none does, the family's default is announced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from duomesh.converters.hf.fields import Fields, is_integer, is_number
from duomesh.core.errors import ConversionError
from duomesh.core.spec.model import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling

__all__ = ["Dialect", "LayerType", "read_ropes", "write_rope"]

Dialect = Literal["v4", "v5"]
LayerType = Literal["full_attention", "sliding_attention"]

_LAYER_TYPES = ("full_attention", "sliding_attention")
_COMMON = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
_NO_EFFECT = ("finetuned",)  # a note that some YaRN checkpoints carry


def read_ropes(fields: Fields, head_dim: int, layer_types: Sequence[LayerType]) -> dict[LayerType, RopeSpec]:
    """The rotary embedding of every layer type that occurs. Raises ConversionError."""
    place, table = _table(fields)
    nested = [name for name, value in table.items() if isinstance(value, dict)]
    wanted: list[LayerType] = list(dict.fromkeys(layer_types))
    if not nested:
        rope = _Table(fields, place, table).read(head_dim)
        return dict.fromkeys(wanted, rope)
    strangers = [name for name in table if name not in _LAYER_TYPES]
    if strangers:
        raise ConversionError(
            f"{fields.where}: {place} mixes tables per layer type with {strangers[0]!r}; "
            f"known layer types are {', '.join(_LAYER_TYPES)}."
        )
    missing = [kind for kind in wanted if not isinstance(table.get(kind), dict)]
    if missing:
        raise ConversionError(f"{fields.where}: {place} has no table for the layer type {missing[0]!r} that is used.")
    return {kind: _Table(fields, f"{place}[{kind!r}]", table[kind]).read(head_dim) for kind in wanted}


def _table(fields: Fields) -> tuple[str, Mapping[str, Any]]:
    """(name of the field, its table); an empty table where there is none."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.raw.get(name)
        if value is None or value is False:  # some files say false for none
            continue
        if not isinstance(value, dict):
            raise fields.fault(name, "it must be a table")
        found[name] = value
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise ConversionError(
            f"{fields.where}: rope_parameters and rope_scaling are both given and differ; keep the one that holds."
        )
    return next(iter(found.items()), ("rope_parameters", {}))


class _Table:
    """One table of rotary parameters."""

    def __init__(self, fields: Fields, place: str, table: Mapping[str, Any]) -> None:
        self._fields, self._place = fields, place
        self._table = {key: value for key, value in table.items() if value is not None}

    def _fault(self, message: str) -> ConversionError:
        return ConversionError(f"{self._fields.where}: {self._place}: {message}")

    def read(self, head_dim: int) -> RopeSpec:
        kind = self._kind()
        self._check_keys(kind)
        for place, value in (
            ("partial_rotary_factor", self._fields.raw.get("partial_rotary_factor")),
            (f"{self._place}.partial_rotary_factor", self._table.get("partial_rotary_factor")),
        ):
            # transformers' code of these families rotates whole heads and ignores or rejects anything else
            if value is not None and value != 1:
                raise ConversionError(
                    f"{self._fields.where}: {place} = {value!r} is not supported for "
                    f"model_type {self._fields.raw.get('model_type')!r}; only 1.0 is."
                )
        return RopeSpec(base=self._base(), rotary_dim=head_dim, scaling=self._scaling(kind))

    def _kind(self) -> str:
        names = [self._table[key] for key in ("rope_type", "type") if key in self._table]
        if not names:
            if set(self._table) - set(_COMMON):
                raise self._fault(f"it gives {', '.join(self._table)} but no rope_type; one of {', '.join(_KEYS)}.")
            return "default"
        if names[0] != names[-1]:
            raise self._fault(f"rope_type is {names[0]!r} but type is {names[-1]!r}.")
        if names[0] not in _KEYS:
            raise self._fault(f"rope_type {names[0]!r} is not supported; supported are {', '.join(_KEYS)}.")
        return str(names[0])

    def _check_keys(self, kind: str) -> None:
        for key, value in self._table.items():
            if key in _COMMON or key in _KEYS[kind] or key in _NO_EFFECT:
                continue
            if not any(key in keys for keys in _KEYS.values()):
                raise self._fault(f"{key} = {value!r} is unknown and may change the rotation.")
            self._fields.warnings.append(
                f"{self._fields.where}: {self._place}: {key} has no effect with rope_type {kind!r}."
            )

    def _base(self) -> float:
        inside, outside = self._table.get("rope_theta"), self._fields.raw.get("rope_theta")
        if inside is None:
            return self._fields.number("rope_theta")
        if not is_number(inside) or inside <= 0:
            raise self._fault(f"rope_theta is {inside!r}; it must be a positive number.")
        if outside is not None and outside != inside:
            raise self._fault(f"rope_theta is {inside!r}, but {outside!r} at top level.")
        return float(inside)

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._table.get(key)
        if value is None and default is not None:
            return default
        if not is_number(value):
            raise self._fault(f"{key} is {value!r}; it must be a number.")
        return float(value)  # type: ignore[arg-type]

    def _optional(self, key: str) -> float | None:
        return self._number(key) if key in self._table else None

    def _scaling(self, kind: str) -> RopeScaling | None:
        if kind == "default":
            return None
        if kind == "linear":
            return LinearScaling(factor=self._number("factor"))
        if kind == "llama3":
            return Llama3Scaling(
                factor=self._number("factor"),
                low_freq_factor=self._number("low_freq_factor"),
                high_freq_factor=self._number("high_freq_factor"),
                original_max_positions=self._original(),
            )
        return self._yarn()

    def _yarn(self) -> YarnScaling:
        original = self._original()
        ratio = self._fields.integer("max_position_embeddings") / original
        factor = self._number("factor", ratio)
        if ratio not in (factor, 1.0):
            self._fields.warnings.append(
                f"{self._fields.where}: {self._place}: factor {factor:g} was taken although max_position_embeddings / "
                f"original_max_position_embeddings is {ratio:g} (transformers before 5.0 take the latter)."
            )
        truncate = self._table.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self._fault(f"truncate is {truncate!r}; it must be true or false.")
        return YarnScaling(
            factor=factor,
            original_max_positions=original,
            beta_fast=self._number("beta_fast", 32.0) or 32.0,
            beta_slow=self._number("beta_slow", 1.0) or 1.0,
            attention_factor=self._optional("attention_factor"),
            mscale=self._optional("mscale"),
            mscale_all_dim=self._optional("mscale_all_dim"),
            truncate=truncate,
        )

    def _original(self) -> int:
        """original_max_position_embeddings, here or at top level; transformers then falls back to the full length."""
        key = "original_max_position_embeddings"
        values = [v for v in (self._table.get(key), self._fields.raw.get(key)) if v is not None]
        if not values:
            full = self._fields.integer("max_position_embeddings")
            self._fields.warnings.append(
                f"{self._fields.where}: {self._place}: {key} is absent; max_position_embeddings = {full} was taken."
            )
            return full
        if values[0] != values[-1]:
            raise self._fault(f"{key} is {values[0]!r}, but {values[-1]!r} at top level.")
        if not is_integer(values[0]):
            raise self._fault(f"{key} is {values[0]!r}; it must be an integer.")
        return int(values[0])


def write_rope(rope: RopeSpec, dialect: Dialect) -> dict[str, Any]:
    """The fields of config.json that state a rotary embedding."""
    scaling = rope.scaling
    table: dict[str, Any] = {"rope_type": "default" if scaling is None else scaling.kind}
    if isinstance(scaling, LinearScaling):
        table["factor"] = scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        table["factor"] = scaling.factor
        table["low_freq_factor"] = scaling.low_freq_factor
        table["high_freq_factor"] = scaling.high_freq_factor
        table["original_max_position_embeddings"] = scaling.original_max_positions
    elif isinstance(scaling, YarnScaling):
        table["factor"] = scaling.factor
        table["original_max_position_embeddings"] = scaling.original_max_positions
        table["beta_fast"], table["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(scaling, key) is not None:
                table[key] = getattr(scaling, key)
        table["truncate"] = scaling.truncate
    if dialect == "v5":
        return {"rope_parameters": {"rope_theta": rope.base, **table}}
    return {"rope_theta": rope.base, "rope_scaling": None if scaling is None else table}
