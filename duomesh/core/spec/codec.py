"""Frozen dataclasses <-> JSON values, strictly: an unknown, missing or mistyped field is an error by its path."""

from __future__ import annotations

import sys
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from duomesh.core.errors import DuomeshError, SpecError

__all__ = ["decode", "encode"]

T = TypeVar("T")


def encode(value: Any) -> Any:
    """A dataclass tree as dicts, lists and scalars, every field written out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], data: Any, *, path: str = "", error: type[DuomeshError] = SpecError) -> T:
    """The dataclass that `encode` wrote; `error` names the path of the first field that does not fit."""
    return _decode(kind, data, path or kind.__name__, error)  # type: ignore[no-any-return]


def _decode(hint: Any, data: Any, path: str, error: type[DuomeshError]) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass(hint, data, path, error)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(get_args(hint), data, path, error)
    if origin is Literal:
        if data not in get_args(hint):
            raise error(f"{path} is {data!r}; it must be one of {', '.join(map(repr, get_args(hint)))}.")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise error(f"{path} is {data!r}; it must be a list.")
        item = get_args(hint)[0]
        return tuple(_decode(item, entry, f"{path}[{i}]", error) for i, entry in enumerate(data))
    return _scalar(hint, data, path, error)


def _scalar(hint: Any, data: Any, path: str, error: type[DuomeshError]) -> Any:
    if hint is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        # JSON as Python reads it has NaN and infinities; no description means one
        if not abs(data) <= sys.float_info.max:
            raise error(f"{path} is {data!r}; it must be finite.")
        return float(data)
    # bool is an int in Python, but not in a description
    if not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool):
        raise error(f"{path} is {data!r}; it must be of type {hint.__name__}.")
    return data


def _union(options: tuple[Any, ...], data: Any, path: str, error: type[DuomeshError]) -> Any:
    if data is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    if len(rest) == 1:
        return _decode(rest[0], data, path, error)
    if isinstance(data, dict):  # dataclasses told apart by their `kind`
        by_kind: dict[Any, Any] = {getattr(option, "kind", None): option for option in rest}
        given = data.get("kind")
        chosen = by_kind.get(given) if isinstance(given, str) else None
        if chosen is None:
            raise error(f"{path}.kind is {given!r}; it must be one of {', '.join(by_kind)}.")
        return _dataclass(chosen, data, path, error)
    for option in rest:
        if isinstance(option, type) and not is_dataclass(option) and isinstance(data, option):
            return _scalar(option, data, path, error)
    names = ", ".join(getattr(option, "__name__", str(option)) for option in rest)
    raise error(f"{path} is {data!r}; it must be one of the types {names}.")


def _dataclass(kind: Any, data: Any, path: str, error: type[DuomeshError]) -> Any:
    if not isinstance(data, dict):
        raise error(f"{path} is {data!r}; it must be a table of fields.")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.init}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise error(f"{path} has no field {unknown[0]!r}; its fields are {', '.join(known)}.")
    required = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in required if name not in data]
    if missing:
        raise error(f"{path} lacks the field {missing[0]!r}.")
    return kind(**{name: _decode(hints[name], value, f"{path}.{name}", error) for name, value in data.items()})
