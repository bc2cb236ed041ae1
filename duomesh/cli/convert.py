"""`duomesh convert SOURCE TARGET`: a checkpoint directory into another format, dtype or sharding."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from duomesh.converters.convert import Converted, ConvertOptions, convert, find_format
from duomesh.core.errors import ConfigError

__all__ = ["Args", "run"]


@dataclass(frozen=True)
class Args:
    """Convert a checkpoint directory (Hugging Face, or a neutral checkpoint of duomesh). Values keep their bytes
    unless a dtype is asked for."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Directory to read."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to write; it appears whole or not at all."""
    to: Literal["hf", "neutral"] = "hf"
    """Format to write."""
    dtype: str | None = None
    """Cast every weight: fp32, bf16, fp16, float8_e4m3fn, ... By default each tensor keeps its own dtype."""
    overwrite: bool = False
    """Replace a target that is not empty; none of its files remains."""
    allow_nonfinite: bool = False
    """Take weights that are NaN or infinite as they are, instead of stopping."""
    allow_missing: bool = False
    """Go on although parameters are missing, and leave them out."""
    tie_source: Literal["embed", "head"] | None = None
    """Which tensor counts if a tied embedding and output weight are both stored and differ."""
    saturate: bool = False
    """Set values that overflow in a cast to the largest number, instead of stopping."""
    max_shard_gb: float = 5.0
    """Largest size of a safetensors file, in units of 10^9 bytes."""
    tokenizer: Path | None = None
    """Directory to copy tokenizer files from; by default that of the source."""


def _refuse_idle_options(args: Args) -> None:
    """An option that this conversion would not look at is a misunderstanding. Raises ConfigError."""
    is_neutral_source = find_format(args.source) == "neutral"
    idle = {
        "--saturate": args.saturate and args.dtype is None,
        "--tie-source": args.tie_source is not None and is_neutral_source,
        "--allow-missing": args.allow_missing and (is_neutral_source or args.to == "neutral"),
        "--max-shard-gb": args.max_shard_gb != Args.max_shard_gb and args.to == "neutral",
        "--tokenizer": args.tokenizer is not None and args.to == "neutral",
    }
    for option, is_idle in idle.items():
        if is_idle:
            raise ConfigError(f"{option} has no effect in this conversion; leave it out.")


def run(args: Args) -> int:
    if not 0 < args.max_shard_gb < float("inf"):
        raise ConfigError(f"--max-shard-gb is {args.max_shard_gb}; it must be positive and finite.")
    _refuse_idle_options(args)
    options = ConvertOptions(
        to=args.to,
        dtype=args.dtype,
        overwrite=args.overwrite,
        allow_nonfinite=args.allow_nonfinite,
        allow_missing=args.allow_missing,
        tie_source=args.tie_source,
        saturate=args.saturate,
        max_shard_bytes=int(args.max_shard_gb * 1e9),
        tokenizer_dir=args.tokenizer,
    )
    converted = convert(args.source, args.target, options)
    for warning in converted.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for note in converted.notes:
        print(f"note: {note}", file=sys.stderr)
    _print_summary(args, converted)
    return 0


def _print_summary(args: Args, converted: Converted) -> None:
    from rich.console import Console
    from rich.markup import escape

    size = sum((converted.target / name).stat().st_size for name in converted.files)
    console = Console(highlight=False, soft_wrap=True)
    source, target = escape(str(args.source)), escape(str(args.target))
    console.print(f"[bold]{source}[/] ({converted.source_format}) -> [bold]{target}[/] ({args.to})")
    console.print(f"{converted.num_params:,} parameters, {len(converted.files)} files, {size / 1e6:,.1f} MB")
