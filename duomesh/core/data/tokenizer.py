"""Text <-> token ids: a byte tokenizer that needs no files, and the tokenizer of a Hugging Face directory.

A tokenizer has two sizes. `base_size` counts its ordinary entries; `full_size` is the smallest number of embedding
rows in which every id fits, added and special tokens included. A model may have more rows than that, never fewer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from duomesh.core.errors import DataError

__all__ = ["BYTES", "ByteTokenizer", "HfTokenizer", "Tokenizer", "check_rows", "load_tokenizer"]

BYTES = "bytes"  # the name by which a configuration asks for the byte tokenizer

Ids = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What training and generation need of a tokenizer.

    name: how messages call it. fingerprint: equal for tokenizers that map every text alike.
    eos: the id that ends a document; None if the tokenizer has none.
    """

    name: str
    fingerprint: str
    base_size: int
    full_size: int
    eos: int | None

    def encode(self, text: str) -> Ids:
        """[n] int64 ids of the text alone: no special token is added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""


class ByteTokenizer:
    """Every UTF-8 byte is its own id; three special tokens follow."""

    bos, pad = 256, 258
    eos: int | None = 257
    name = fingerprint = BYTES
    base_size, full_size = 256, 259

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        # a cut through a multi-byte character shows as a replacement character
        return bytes(i for i in ids if i < self.base_size).decode(errors="replace")


class HfTokenizer:
    """The tokenizer.json of a Hugging Face directory, run by the `tokenizers` library."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(f"{folder} has no tokenizer.json. Name a Hugging Face tokenizer directory, or {BYTES!r}.")
        try:
            import tokenizers
        except ImportError:
            raise DataError(
                f"the tokenizer {folder} needs the `tokenizers` library: pip install 'duomesh[hf]'."
            ) from None
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise DataError(f"cannot read {file}: {error}. Download the tokenizer again.") from None
        self.name = str(folder)
        self.fingerprint = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        self.base_size = int(self._inner.get_vocab_size(with_added_tokens=False))
        # ids may have gaps, so the count of entries can be smaller than the rows that they need
        self.full_size = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos = self._find_eos(folder)

    def _find_eos(self, folder: Path) -> int | None:
        """The end token that the directory's files name, the tokenizer's own files first."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = _json(folder / name).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found = self._inner.token_to_id(token)
                if found is None:
                    raise DataError(f"{folder / name} names the end token {token!r}, which tokenizer.json lacks.")
                return int(found)
        for name in ("generation_config.json", "config.json"):
            ids = _json(folder / name).get("eos_token_id")
            ids = ids[0] if isinstance(ids, list) and ids else ids
            if isinstance(ids, int):
                return ids
        return None

    def encode(self, text: str) -> Ids:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=True))


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}.") from None
    return data if isinstance(data, dict) else {}


def load_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer for "bytes", else the Hugging Face tokenizer of the directory `name`. Raises DataError."""
    if name == BYTES:
        return ByteTokenizer()
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise DataError(f"there is no tokenizer directory {name}. Name one that has a tokenizer.json, or {BYTES!r}.")
    return HfTokenizer(folder)


def check_rows(tokenizer: Tokenizer, rows: int) -> None:
    """Raises DataError if some id of the tokenizer has no row in a model of `rows` rows."""
    if tokenizer.full_size > rows:
        raise DataError(
            f"tokenizer {tokenizer.name} has {tokenizer.base_size} base entries and needs {tokenizer.full_size} rows "
            f"with its added tokens, but the model has {rows}. "
            f"Choose a model with at least {tokenizer.full_size} rows (model.vocab_size)."
        )
