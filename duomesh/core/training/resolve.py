"""Where a configuration's values come from: defaults, then a TOML file, then the command line.

Every effective value remembers its source. Wrong names, types and values of all sources are reported together.
"""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from duomesh.core.errors import ConfigError
from duomesh.core.spec.codec import decode
from duomesh.core.training.config import CombinedConfigError, TrainConfig

__all__ = ["FIELDS", "Resolved", "Source", "from_values", "resolve", "values_of"]

Source = Literal["default", "file", "command line", "checkpoint"]

_SECTIONS: dict[str, Any] = get_type_hints(TrainConfig)

# dotted name -> type of every value there is
FIELDS: dict[str, Any] = {
    f"{section}.{name}": hint for section, kind in _SECTIONS.items() for name, hint in get_type_hints(kind).items()
}


@dataclass(frozen=True)
class Resolved:
    """A configuration and the source of each of its values, by dotted name."""

    config: TrainConfig
    sources: Mapping[str, Source]


def values_of(config: TrainConfig) -> dict[str, Any]:
    """Dotted name -> value."""
    return {
        f"{section.name}.{field.name}": getattr(getattr(config, section.name), field.name)
        for section in fields(config)
        for field in fields(getattr(config, section.name))
    }


def from_values(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration with these values by dotted name, defaults elsewhere. Raises CombinedConfigError."""
    sections = {
        section: kind(
            **{f.name: values[f"{section}.{f.name}"] for f in fields(kind) if f"{section}.{f.name}" in values}
        )
        for section, kind in _SECTIONS.items()
    }
    return TrainConfig(**sections)


def resolve(file: Path | None, overrides: Sequence[tuple[str, str]] = ()) -> Resolved:
    """Reads a configuration.

    Args:
        file: a TOML file with the tables [model], [data], [optimizer], [train]; None for defaults alone.
        overrides: (dotted name, text) from the command line; a later one wins.

    Raises:
        ConfigError: the file cannot be read or is no TOML.
        CombinedConfigError: everything that is wrong with the values.
    """
    values: dict[str, Any] = {}
    sources: dict[str, Source] = dict.fromkeys(FIELDS, "default")
    problems: list[str] = []
    wrong: set[str] = set()
    given: list[tuple[Source, str, Any]] = [("file", name, value) for name, value in _read_toml(file)] if file else []
    given += [("command line", name, _parse_text(FIELDS.get(name), text)) for name, text in overrides]
    for source, name, value in given:
        if name not in FIELDS:
            problems.append(f"{_where(source, file)} sets {name!r}, which does not exist. {_suggest(name)}")
            continue
        try:
            values[name] = decode(FIELDS[name], value, path=name, error=ConfigError)
            sources[name] = source
        except ConfigError as error:
            problems.append(f"{_where(source, file)}: {error}")
            wrong.add(name)
    if sources["data.validation_paths"] != "default" and sources["data.validation_fraction"] != "default":
        problems.append("data.validation_paths and data.validation_fraction are both given; keep one of them.")
    try:
        config = from_values(values)
    except CombinedConfigError as error:
        # a value that could not be read was left at its default, which is nobody's fault
        problems += [problem for problem in error.problems if not any(name in problem for name in wrong)]
    if problems:
        raise CombinedConfigError(problems)
    return Resolved(config, sources)


def _where(source: Source, file: Path | None) -> str:
    return str(file) if source == "file" else "the command line"


def _read_toml(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from None
    for section, table in data.items():
        if isinstance(table, dict):
            yield from ((f"{section}.{name}", value) for name, value in table.items())
        else:
            yield section, table


def _suggest(name: str) -> str:
    """The names closest to a wrong one: those spelled alike, and those with its last part in another section."""
    leaf = name.rpartition(".")[2]
    leaves = {known: known.rpartition(".")[2] for known in FIELDS}
    near = difflib.get_close_matches(name, FIELDS, n=3, cutoff=0.8)
    near += [known for known in FIELDS if leaves[known] == leaf and known not in near]
    if not near:
        alike = difflib.get_close_matches(leaf, set(leaves.values()), n=3)
        near = [known for known in FIELDS if leaves[known] in alike]
    if near:
        return f"The closest names are {', '.join(near)}."
    section = name.partition(".")[0]
    if section in _SECTIONS:
        return f"Settings of [{section}] are {', '.join(field.name for field in fields(_SECTIONS[section]))}."
    return f"The sections are {', '.join(_SECTIONS)}."


def _parse_text(hint: Any, text: str) -> Any:
    """The value that a word of the command line stands for, given the type that its name has.

    Strings need no quotes, lists no brackets: `data.paths=a.txt,b.txt`. "none" stands for no value.
    """
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    if str in options or get_origin(hint) is Literal:
        return text
    if get_origin(hint) is tuple and not text.startswith("["):
        if get_args(hint)[0] is str:
            return [part.strip() for part in text.split(",") if part.strip()]
        text = f"[{text}]"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # the type check says what is wrong with it
