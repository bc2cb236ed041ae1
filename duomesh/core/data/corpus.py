"""Text files -> one stream of tokens, split into training and validation.

One file is one document. Documents follow one another in the sorted order of their names, each closed by the
end token, so that equal files give an equal stream on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from duomesh.core.arrays import Array
from duomesh.core.data.tokenizer import Tokenizer
from duomesh.core.errors import DataError

__all__ = ["Corpus", "Split", "find_files", "pack_tokens", "read_corpus", "token_dtype"]

Split = Literal["tail", "documents"]

# Token files of other trainers hold 16-bit ids for fewer than 65500 entries and int32 from there on.
_SMALL_VOCABULARY = 65500


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """The element type in which ids below `vocab_size` are kept."""
    return np.dtype(np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32)


def pack_tokens(documents: Iterable[Sequence[int] | Array], vocab_size: int) -> Array:
    """One [n] stream of `token_dtype(vocab_size)`. Raises DataError for an id outside [0, vocab_size)."""
    dtype, parts = token_dtype(vocab_size), []
    for number, document in enumerate(documents):
        ids = np.asarray(document, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise DataError(f"document {number} holds token id {bad}, outside the vocabulary of {vocab_size} entries.")
        parts.append(ids.astype(dtype))
    return np.concatenate(parts) if parts else np.empty(0, dtype)


@dataclass(frozen=True)
class Corpus:
    """Two token streams and what was read to make them.

    skipped: number of files left out, by reason.
    fingerprint: equal if and only if the training stream is; a checkpoint's data position is a place in it.
    """

    train: Array
    validation: Array
    num_documents: int
    num_validation_documents: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.train.dtype.str.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.train).data)
        return digest.hexdigest()


def find_files(paths: Sequence[str], patterns: Sequence[str]) -> list[Path]:
    """Files named in `paths`, and those in its folders that match a glob pattern; each once, sorted within a folder.

    Raises:
        DataError: a path does not exist, or a folder has no matching file.
    """
    found: dict[Path, Path] = {}  # resolved -> as named
    for name in paths:
        try:
            path = Path(name).expanduser()
        except RuntimeError as error:
            raise DataError(f"{name}: {error} (data.paths).") from None
        if path.is_file():
            files = [path]
        elif path.is_dir():
            try:
                matches = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
            except (NotImplementedError, ValueError, IndexError) as error:
                raise DataError(
                    f"data.patterns {', '.join(patterns)}: {error}. Use globs relative to a folder."
                ) from None
            files = sorted(matches, key=lambda file: file.relative_to(path).parts)
            if not files:
                raise DataError(f"the folder {path} has no file that matches {', '.join(patterns)} (data.patterns).")
        else:
            raise DataError(f"there is no file or folder {path} (data.paths).")
        for file in files:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _texts(files: Sequence[Path], skipped: dict[str, int]) -> Iterator[str]:
    """The text of each usable file; the others are counted by reason."""
    for file in files:
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}.") from None
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = None
        if text is None or "\0" in text:
            skipped["not UTF-8 text"] = skipped.get("not UTF-8 text", 0) + 1
        elif not text.strip():
            skipped["empty"] = skipped.get("empty", 0) + 1
        else:
            yield text


def _is_held_out(text: str, fraction: float) -> bool:
    """A pure function of the text: adding files moves no other one, and copies of a text stay on one side."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def read_corpus(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    *,
    patterns: Sequence[str] = ("**/*",),
    append_eos: bool = True,
    validation_paths: Sequence[str] = (),
    validation_fraction: float = 0.0,
    validation_split: Split = "tail",
) -> Corpus:
    """Reads, tokenises and splits.

    Args:
        paths: text files and folders.
        patterns: globs that choose files within folders.
        append_eos: close each document with the tokenizer's end token.
        validation_paths: files and folders of validation text; if given, nothing is held out of `paths`.
        validation_fraction: share that is held out for validation.
        validation_split: "tail" holds out the last tokens of the stream; "documents" holds out whole documents,
            chosen by a hash of their text.

    Raises:
        DataError: a path is missing, no file is usable, or an end token is asked for that the tokenizer lacks.
    """
    if append_eos and tokenizer.eos is None:
        raise DataError(
            f"data.append_eos is on, but tokenizer {tokenizer.name} has no end token. "
            "Set data.append_eos=false, or use a tokenizer that has one."
        )
    eos = [tokenizer.eos] if append_eos and tokenizer.eos is not None else []
    skipped: dict[str, int] = {}

    def documents(names: Sequence[str]) -> list[tuple[bool, Array]]:
        by_document = validation_split == "documents" and not validation_paths
        out = []
        for text in _texts(find_files(names, patterns), skipped):
            ids = np.concatenate([tokenizer.encode(text), np.array(eos, np.int64)])
            out.append((by_document and _is_held_out(text, validation_fraction), pack_tokens([ids], size)))
        if not out:
            reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
            raise DataError(f"no usable text in {', '.join(map(str, names))}: {reasons}.")
        return out

    size = tokenizer.full_size
    read = documents(paths)
    train = pack_tokens((ids for held_out, ids in read if not held_out), size)
    validation = pack_tokens((ids for held_out, ids in read if held_out), size)
    num_held_out = sum(held_out for held_out, _ in read)
    if validation_paths:
        extra = documents(validation_paths)
        validation, num_held_out = pack_tokens((ids for _, ids in extra), size), len(extra)
    elif validation_split == "tail":
        cut = train.size - int(train.size * validation_fraction)
        train, validation = train[:cut], train[cut:]
    return Corpus(train, validation, len(read) - (0 if validation_paths else num_held_out), num_held_out, skipped)
