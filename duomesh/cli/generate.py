"""`duomesh generate MODEL --prompt TEXT`: a greedy continuation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from duomesh.api import ModelSource, new_session, open_model
from duomesh.core.data.tokenizer import BYTES, Tokenizer, check_rows, load_tokenizer
from duomesh.core.errors import ConfigError
from duomesh.core.generate import greedy
from duomesh.core.session import ComputeDType

__all__ = ["Args", "run"]


@dataclass(frozen=True)
class Args:
    """Continue a prompt greedily."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset's name or a checkpoint directory."""
    prompt: str
    """Text to continue."""
    backend: Literal["torch", "jax"] = "torch"
    """What runs the model."""
    max_new_tokens: int = 64
    """Tokens to add at most."""
    dtype: ComputeDType = "float32"
    """Compute dtype."""
    device: str | None = None
    """Such as cpu or cuda; the backend chooses if left out."""
    tokenizer: str | None = None
    """A directory with tokenizer.json, or "bytes"; left out: the model's own directory, else bytes."""
    seed: int = 0
    """Seed of a preset's weights."""


def _tokenizer(args: Args, source: ModelSource) -> Tokenizer:
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer)
    if source.directory is not None and (source.directory / "tokenizer.json").is_file():
        return load_tokenizer(str(source.directory))
    return load_tokenizer(BYTES)


def run(args: Args) -> int:
    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {args.max_new_tokens}; it must be at least 1.")
    source = open_model(args.model, seed=args.seed)
    tokenizer = _tokenizer(args, source)
    check_rows(tokenizer, source.spec.vocab_size)
    session = new_session(source.spec, backend=args.backend, dtype=args.dtype, device=args.device)
    session.load_params(source.tensors())
    if source.kind == "preset":
        print(f"{args.model} is a preset: its weights are random, and so is what it says.", file=sys.stderr)
    prompt = tokenizer.encode(args.prompt).tolist()
    stop = [] if tokenizer.eos is None else [tokenizer.eos]
    print(args.prompt, end="", flush=True)
    made: list[int] = []
    shown = ""
    for token in greedy(session, prompt, max_new_tokens=args.max_new_tokens, stop=stop):
        made.append(token)
        text = tokenizer.decode(made)
        # a character whose bytes are not all there yet is held back
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(made)[len(shown) :])
    return 0
