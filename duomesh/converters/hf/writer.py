"""Canonical tensors -> a Hugging Face directory that is complete in itself, published whole or not at all.

Tensors stream through: memory holds one at a time, whatever the shard size. config.json is written last, because it
states what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from duomesh.converters.hf.config_writer import choose_family, write_config
from duomesh.converters.hf.families import Family
from duomesh.converters.hf.reader import HfCheckpoint
from duomesh.converters.hf.rotary import Dialect
from duomesh.converters.hf.shards import Shards, write_json
from duomesh.converters.pairing import convert_pairing
from duomesh.converters.values import cast, find_nonfinite
from duomesh.core.arrays import DTYPES, Array, dtype_name, is_float
from duomesh.core.errors import ConversionError, DataError
from duomesh.core.ir.build import build_program
from duomesh.core.publish import publish_directory
from duomesh.core.spec.model import ModelSpec

__all__ = ["TOKENIZER_FILES", "ExportReport", "export_hf"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WITHOUT = "so the export has none: copy tokenizer files into it before text is put through the model."
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"


@dataclass
class ExportReport:
    """What was written.

    dtypes: number of parameters (elements) by stored dtype. notes: what the user should know.
    """

    directory: Path
    family: str
    files: tuple[str, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def export_hf(
    directory: Path | str,
    spec: ModelSpec,
    params: Iterable[tuple[str, Array]],
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    tokenizer_dir: Path | str | None = None,
    tokenizer_note: str | None = None,
    source: HfCheckpoint | None = None,
    saturate: bool = False,
    allow_missing: bool = False,
    allow_nonfinite: bool = False,
    token_ids: Mapping[str, int | list[int] | None] | None = None,
    dialect: Dialect | None = None,
) -> ExportReport:
    """Writes config.json, generation_config.json, safetensors shards with an index, and tokenizer files.

    Args:
        params: (canonical name, array), each parameter once, in any order; shards follow it.
        dtype: cast every weight to this float dtype; None keeps each tensor's own. Buffers are never cast.
        overwrite: replace a directory that is not empty; none of its old files remains.
        tokenizer_dir: where tokenizer files are copied from; None takes those of `source`.
        tokenizer_note: what the report says if there are none, instead of a request to copy some.
        source: the HF directory that the model came from: its model type and dialect, token ids, unknown fields,
            buffers, and whether a tied head is stored, are kept.
        saturate: replace values that overflow in a cast by the largest number, instead of stopping.
        allow_missing: write although parameters are absent.
        allow_nonfinite: write NaN and Inf as they are (a `source` has checked its own).
        token_ids: bos_token_id, eos_token_id, pad_token_id.

    Raises:
        ConversionError: no family can represent the spec, parameters are missing or unknown, a cast overflows.
        OutputError: the directory cannot be written, or is not empty. Nothing half-written stays behind.
    """
    if dtype is not None and (dtype not in DTYPES or not is_float(DTYPES[dtype])):
        floats = ", ".join(name for name, d in DTYPES.items() if is_float(d))
        raise ConversionError(f"dtype {dtype!r} cannot hold weights; choose one of {floats}.")
    family = choose_family(spec, None if source is None else source.config.family.model_type)
    report = ExportReport(Path(directory), family.model_type)
    tokenizer_files, note = _find_tokenizer(tokenizer_dir, source, spec)
    report.notes += [tokenizer_note or note] if note else []
    if spec.dropout:
        report.notes.append(f"dropout={spec.dropout} acts in training only, and config.json has no field for it.")
    with publish_directory(Path(directory), overwrite=overwrite) as work:
        tensors = _Tensors(spec, family, report, source, dtype=dtype, saturate=saturate)
        if source is None and not allow_nonfinite:
            params = _finite(params)
        shards = Shards(work, max_shard_bytes, tensors.names)
        try:
            for hf_name, array in tensors.stream(params, allow_missing=allow_missing):
                shards.add(hf_name, array)
            files = shards.close()
        finally:
            shards.abort()
        written = report.dtypes.most_common(1)[0][0]
        ids: dict[str, Any] = dict(token_ids or {})
        write_json(work / "config.json", _config(spec, family, written, ids, source, dialect))
        _write_generation_config(work, ids, source)
        for file in tokenizer_files:
            _copy(file, work)
        report.files = tuple(sorted(path.name for path in work.iterdir()))
        report.num_bytes = sum((work / name).stat().st_size for name in files)
    return report


class _Tensors:
    """Turns canonical parameters into the tensors of the files, and counts what it does."""

    def __init__(
        self,
        spec: ModelSpec,
        family: Family,
        report: ExportReport,
        source: HfCheckpoint | None,
        *,
        dtype: str | None,
        saturate: bool,
    ) -> None:
        self._spec, self._family, self._report = spec, family, report
        self._dtype, self._saturate, self._source = dtype, saturate, source
        self._buffers = () if source is None else source.buffers

    @property
    def names(self) -> list[str]:
        """HF names of everything that may be stored."""
        params = [*build_program(self._spec).params, "head.weight"]
        return [*map(self._family.names.to_hf, params), *self._buffers]

    def stream(self, params: Iterable[tuple[str, Array]], *, allow_missing: bool) -> Iterator[tuple[str, Array]]:
        """(HF name, array) of everything that is stored."""
        wanted = build_program(self._spec).params
        seen: set[str] = set()
        for name, array in params:
            if name not in wanted or name in seen:
                fault = "given twice" if name in seen else "no parameter of this model"
                raise ConversionError(f"cannot export {name}: it is {fault}.")
            if array.shape != wanted[name].shape:
                raise ConversionError(f"cannot export {name}: shape {array.shape} instead of {wanted[name].shape}.")
            seen.add(name)
            out = self._cast(name, convert_pairing(self._spec, name, array, "half"))
            yield self._count(self._family.names.to_hf(name), out)
            if name == "embed.weight" and self._source is not None and self._source.has_tied_head:
                yield self._count(self._family.names.to_hf("head.weight"), out)
        missing = [name for name in wanted if name not in seen]
        if missing and not allow_missing:
            raise ConversionError(f"cannot export: {len(missing)} parameters were not given, first {missing[0]}.")
        if missing:
            self._report.notes.append(f"left out, because they were missing: {', '.join(missing)}.")
        for buffer in self._buffers:
            assert self._source is not None
            self._report.num_tensors += 1
            yield buffer, self._source.read_buffer(buffer)

    def _cast(self, name: str, array: Array) -> Array:
        if self._dtype is None:
            return array
        out, counts = cast(name, array, self._dtype, saturate=self._saturate)
        self._report.notes += counts.notes(name, self._dtype)
        return out

    def _count(self, hf_name: str, array: Array) -> tuple[str, Array]:
        self._report.num_tensors += 1
        self._report.dtypes[dtype_name(array.dtype)] += array.size
        return hf_name, array


def _finite(params: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    for name, array in params:
        bad = find_nonfinite(array)
        if bad is not None:
            raise ConversionError(
                f"{name} holds values that are not finite: {bad}. Export an earlier checkpoint, "
                "or allow non-finite weights to write them as they are."
            )
        yield name, array


def _config(
    spec: ModelSpec,
    family: Family,
    dtype: str,
    token_ids: dict[str, Any],
    source: HfCheckpoint | None,
    dialect: Dialect | None,
) -> dict[str, Any]:
    """config.json: what the spec says, and what the source says beside it."""
    if dialect is None:
        dialect = "v4" if source is None else source.config.dialect
    out = write_config(spec, family=family.model_type, dtype=dtype, dialect=dialect, token_ids=token_ids)
    if source is not None:
        out |= source.config.bookkeeping
        # ids that the source leaves to the family's defaults stay there
        out = {name: value for name, value in out.items() if name not in _TOKEN_IDS or name in source.config.raw}
    return out | token_ids


def _write_generation_config(work: Path, token_ids: dict[str, Any], source: HfCheckpoint | None) -> None:
    if source is not None and (source.path / _GENERATION).is_file():
        _copy(source.path / _GENERATION, work)
        return
    known: dict[str, Any] = {} if source is None else {name: source.config.raw.get(name) for name in _TOKEN_IDS}
    ids = {name: value for name, value in (known | token_ids).items() if value is not None}
    write_json(work / _GENERATION, {"_from_model_config": True, **ids})


def _find_tokenizer(
    given: Path | str | None, source: HfCheckpoint | None, spec: ModelSpec
) -> tuple[list[Path], str | None]:
    """(files to copy, a note). A given tokenizer must fit the model; the source's own is kept, with a note if not."""
    folder = Path(given) if given is not None else None if source is None else source.path
    if folder is None:
        return [], f"no tokenizer was given, {_WITHOUT}"
    if not folder.is_dir():
        raise ConversionError(f"there is no tokenizer directory {folder}.")
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not any(file.name in _VOCABULARIES for file in found):
        return found, f"{folder} holds no Hugging Face tokenizer, {_WITHOUT}"
    if (folder / "tokenizer.json") in found and find_spec("tokenizers") is not None:
        from duomesh.core.data.tokenizer import check_rows, load_tokenizer

        try:
            check_rows(load_tokenizer(str(folder)), spec.vocab_size)
        except DataError as error:
            if given is not None:
                raise
            return found, str(error)
    return found, None


def _copy(file: Path, folder: Path) -> None:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConversionError(f"cannot read {file}: {error.strerror}.") from error
    (folder / file.name).write_bytes(data)
