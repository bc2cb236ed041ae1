"""One checkpoint directory into another: Hugging Face <-> neutral, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from duomesh.converters.hf.reader import HfCheckpoint, TieSource
from duomesh.converters.hf.writer import export_hf
from duomesh.converters.values import cast
from duomesh.core.arrays import DTYPES, Array, is_float
from duomesh.core.checkpoint import Checkpoint, write_checkpoint
from duomesh.core.data.tokenizer import BYTES, ByteTokenizer
from duomesh.core.errors import ConfigError, ConversionError
from duomesh.core.ir.build import build_program
from duomesh.core.spec.model import ModelSpec

__all__ = ["ConvertOptions", "Converted", "Format", "convert", "find_format", "weight_dtype"]

Format = Literal["hf", "neutral"]
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How to convert; see `HfCheckpoint` and `export_hf`."""

    to: Format = "hf"
    dtype: str | None = None
    overwrite: bool = False
    allow_nonfinite: bool = False
    allow_missing: bool = False
    tie_source: TieSource | None = None
    saturate: bool = False
    max_shard_bytes: int = 5_000_000_000
    tokenizer_dir: Path | None = None


@dataclass
class Converted:
    """What was made. notes: what the user should know; warnings: what the source said that was not followed."""

    source_format: Format
    target: Path
    num_params: int
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    files: tuple[str, ...] = ()


def weight_dtype(name: str | None) -> str | None:
    """A dtype's full name from it or from a short one such as "bf16". Raises ConversionError."""
    full = _SHORT.get(name or "", name)
    if full is not None and (full not in DTYPES or not is_float(DTYPES[full])):
        known = [*_SHORT, *(d for d, dtype in DTYPES.items() if is_float(dtype))]
        raise ConversionError(f"dtype {name!r} cannot hold weights; choose one of {', '.join(known)}.")
    return full


def find_format(directory: Path) -> Format:
    """What a directory holds. Raises ConversionError if it is no checkpoint."""
    if (directory / "manifest.json").is_file():
        return "neutral"
    if (directory / "config.json").is_file():
        return "hf"
    if not directory.is_dir():
        raise ConversionError(f"there is no directory {directory}; the source must be a checkpoint directory.")
    raise ConversionError(
        f"{directory} holds neither a config.json (Hugging Face) nor a manifest.json (neutral checkpoint)."
    )


def convert(source: Path | str, target: Path | str, options: ConvertOptions) -> Converted:
    """Converts a directory. The target appears whole or not at all.

    Raises:
        DuomeshError: of the class that fits; nothing was written.
    """
    source, target = Path(source), Path(target)
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise ConfigError(f"{target} holds the source {source}; it would be replaced. Choose another directory.")
    if find_format(source) == "neutral":
        return _from_neutral(source, target, options)
    return _from_hf(source, target, options)


def _from_hf(source: Path, target: Path, options: ConvertOptions) -> Converted:
    with HfCheckpoint(
        source,
        allow_nonfinite=options.allow_nonfinite,
        allow_missing=options.allow_missing,
        tie_source=options.tie_source,
    ) as hf:
        out = Converted("hf", target, build_program(hf.spec).num_params, warnings=hf.warnings)
        if options.to == "neutral":
            _write_neutral(out, hf.spec, hf.params(), options)
            if hf.buffers:
                out.notes.append(f"{len(hf.buffers)} buffers that are no weights were left out.")
            return out
        report = export_hf(
            target,
            hf.spec,
            hf.params(),
            dtype=weight_dtype(options.dtype),
            overwrite=options.overwrite,
            max_shard_bytes=options.max_shard_bytes,
            tokenizer_dir=options.tokenizer_dir,
            source=hf,
            saturate=options.saturate,
            allow_missing=options.allow_missing,
        )
        out.notes, out.files = report.notes, report.files
    return out


def _from_neutral(source: Path, target: Path, options: ConvertOptions) -> Converted:
    with Checkpoint(source) as checkpoint:
        out = Converted("neutral", target, build_program(checkpoint.spec).num_params)
        if options.to == "neutral":
            if checkpoint.training is not None:
                out.notes.append("optimizer state and progress were left out: the copy holds weights alone.")
            _write_neutral(out, checkpoint.spec, checkpoint.params(), options)
            return out
        tokenizer = _tokenizer_of_run(checkpoint, options)
        report = export_hf(
            target,
            checkpoint.spec,
            checkpoint.params(),
            dtype=weight_dtype(options.dtype),
            overwrite=options.overwrite,
            max_shard_bytes=options.max_shard_bytes,
            tokenizer_dir=tokenizer.folder,
            tokenizer_note=tokenizer.note,
            token_ids=tokenizer.token_ids,
            saturate=options.saturate,
            allow_nonfinite=options.allow_nonfinite,
        )
        out.notes, out.files = report.notes, report.files
    return out


@dataclass(frozen=True)
class _Tokenizer:
    """What an export needs to know: files to copy, or a note why there are none, and special ids."""

    folder: Path | None = None
    note: str | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)


def _tokenizer_of_run(checkpoint: Checkpoint, options: ConvertOptions) -> _Tokenizer:
    """The tokenizer that was asked for, else that of the run which wrote a checkpoint."""
    if options.tokenizer_dir is not None:
        return _Tokenizer(options.tokenizer_dir)
    data = checkpoint.config.get("data")
    name = data.get("tokenizer") if isinstance(data, dict) else None
    if name == BYTES:
        ids = {"bos_token_id": ByteTokenizer.bos, "eos_token_id": ByteTokenizer.eos, "pad_token_id": ByteTokenizer.pad}
        return _Tokenizer(
            note="the model was trained on bytes, for which there are no tokenizer files: "
            "its ids are the bytes of UTF-8 text, and special tokens after them.",
            token_ids={key: i for key, i in ids.items() if i is not None and i < checkpoint.spec.vocab_size},
        )
    if not isinstance(name, str):
        return _Tokenizer()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _Tokenizer(folder)
    return _Tokenizer(note=f"the tokenizer of the run, {name}, is not there any more: copy its files into the export.")


def _write_neutral(
    out: Converted, spec: ModelSpec, params: Iterable[tuple[str, Array]], options: ConvertOptions
) -> None:
    dtype = weight_dtype(options.dtype)

    def tensors() -> Iterator[tuple[str, str, Array]]:
        for name, array in params:
            converted = array
            if dtype is not None:
                converted, counts = cast(name, array, dtype, saturate=options.saturate)
                out.notes += counts.notes(name, dtype)
            yield "params", name, converted

    write_checkpoint(
        out.target, spec, tensors(), written_by=f"converted from {out.source_format}", overwrite=options.overwrite
    )
    out.files = tuple(sorted(path.name for path in out.target.iterdir()))
