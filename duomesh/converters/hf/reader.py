"""A Hugging Face directory as a spec and canonical tensors, of which only the slices that are asked for are read.

Opening reads config.json and every header: files, names, shapes and dtypes must fit the spec. Values are checked as far
as they are read, and never altered: one that is not finite, and a tied head that differs, is an error unless it was
asked to be let through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

from duomesh.converters.hf.config import read_config
from duomesh.converters.hf.names import is_buffer
from duomesh.converters.pairing import Pairing, convert_pairing, with_pairing
from duomesh.converters.values import NonFinite, find_nonfinite, largest_difference
from duomesh.core.arrays import DTYPES, Array, is_float
from duomesh.core.boxes import Deferred, whole, within
from duomesh.core.closing import Closing
from duomesh.core.errors import ConversionError
from duomesh.core.ir.build import build_program
from duomesh.core.spec.model import ModelSpec
from duomesh.core.tensordir import TensorDirectory
from duomesh.core.tensorfile import TensorInfo

__all__ = ["HfCheckpoint", "TieSource"]

TieSource = Literal["embed", "head"]
_EMBED, _HEAD = "embed.weight", "head.weight"
_LISTED = 8  # names spelled out in a message
_ROWS = 1 << 10  # of an embedding, compared at once


class HfCheckpoint(Closing):
    """An open Hugging Face directory.

    Args:
        allow_nonfinite: hand out tensors with NaN or Inf as they are, with a warning.
        allow_missing: open although parameters are absent; they are listed in `missing` and in a warning.
        tie_source: which member counts if a tied embedding and head are both stored; None compares them, so that of
            the head is read what is read of the embedding.
        pairing: the rotary pairing that spec and tensors shall have. Files hold half-split ones; with the other, a
            tensor is read whole for any part of it.

    Attributes:
        spec: the model. config: config.json, understood.
        names: canonical names of the parameters that are there, in the program's order.
        missing: canonical names of those that are not.
        buffers: HF names of tensors that are no weights (rotary tables of old files).
        has_tied_head: whether a tied model's head is stored as well.
        warnings: one sentence each; grows while tensors are read.

    Raises:
        ConversionError, TensorFileError: naming what is wrong with files, names, shapes or dtypes.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        allow_nonfinite: bool = False,
        allow_missing: bool = False,
        tie_source: TieSource | None = None,
        pairing: Pairing = "half",
    ) -> None:
        self.path = Path(directory)
        self.config = read_config(self.path)
        self.spec: ModelSpec = with_pairing(self.config.spec, pairing)
        self._pairing = pairing
        self._allow_nonfinite = allow_nonfinite
        self.warnings: list[str] = list(self.config.warnings)
        self._params = build_program(self.spec).params
        with ExitStack() as stack:
            self._tensors = stack.enter_context(TensorDirectory(self.path))
            self.warnings += self._tensors.warnings
            self._hf_name = self._map_names(tie_source)
            self.buffers = tuple(name for name in self._tensors.names if is_buffer(name))
            self.names = tuple(name for name in self._params if name in self._hf_name)
            self.missing = tuple(name for name in self._params if name not in self._hf_name)
            self._check_missing(allow_missing)
            self._check_shapes()
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def info(self, name: str) -> TensorInfo:
        """Stored dtype and shape of a parameter."""
        return self._tensors.info(self._hf_name[name])

    def read(self, name: str, box: Sequence[tuple[int, int]] = ()) -> Array:
        """A parameter, or a rectangle of it, [start, stop) along its first dims, in its stored dtype.

        Raises:
            ConversionError: values that are not finite, unless they were allowed; after a parameter that was read whole
                the error names all that follow too. A tied head that differs, unless a source was chosen.
        """
        array = self._read(name, box)
        bad = find_nonfinite(array, origin=[start for start, _ in box])
        if bad is not None:
            found = {name: bad}
            # who reads slices does not wait for the rest
            if array.shape == self._params[name].shape and not self._allow_nonfinite:
                following = self.names[self.names.index(name) + 1 :]
                rest = ((other, find_nonfinite(self._read(other))) for other in following)
                found |= {other: fault for other, fault in rest if fault is not None}
            self._report_nonfinite(found)
        return array

    def deferred_params(self) -> Iterator[tuple[str, Deferred]]:
        """Every parameter that is there, in the program's order, of which `read` reads what is used."""
        return ((name, Deferred(self._params[name].shape, partial(self.read, name))) for name in self.names)

    def params(self) -> Iterator[tuple[str, Array]]:
        """`deferred_params`, whole."""
        return ((name, whole(tensor)) for name, tensor in self.deferred_params())

    def read_buffer(self, hf_name: str) -> Array:
        """One of `buffers`."""
        return self._tensors.read(hf_name)

    def _read(self, name: str, box: Sequence[tuple[int, int]] = ()) -> Array:
        stored = self._hf_name[name]
        if self._pairing == "half":
            array = self._tensors.read(stored, box)
        else:
            # whole heads are needed to reorder their channels
            full = convert_pairing(self.config.spec, name, self._tensors.read(stored), self._pairing)
            array = full[tuple(slice(start, stop) for start, stop in box)]
        if name == _EMBED and self._compared_head is not None:
            self._check_tie(array, box)
        return array

    def _report_nonfinite(self, found: Mapping[str, NonFinite]) -> None:
        listed = "; ".join(f"{self._hf_name[name]}: {bad}" for name, bad in found.items())
        if not self._allow_nonfinite:
            raise ConversionError(
                f"{self.path} holds weights that are not finite: {listed}. Repair the checkpoint, "
                "or allow non-finite weights to take them as they are."
            )
        self.warnings.append(f"{self.path}: weights that are not finite were taken as they are: {listed}.")

    def _map_names(self, tie_source: TieSource | None) -> dict[str, str]:
        """Canonical name -> stored name, ties resolved. Raises for names that the model does not have."""
        rules = self.config.family.names
        found: dict[str, str] = {}
        unexpected: list[str] = []
        for hf_name in self._tensors.names:
            if is_buffer(hf_name):
                continue
            name = rules.to_canonical(hf_name)
            if name is None or (name not in self._params and name != _HEAD):
                unexpected.append(hf_name)
            else:
                found[name] = hf_name
        if unexpected:
            raise ConversionError(
                f"{self.path} holds tensors that a {self.config.family.model_type} of this config.json does not have: "
                f"{_some(unexpected)}."
            )
        self.has_tied_head = self.spec.tie_embeddings and _HEAD in found
        self._compared_head: str | None = None
        return self._resolve_tie(found, tie_source) if self.has_tied_head else found

    def _resolve_tie(self, found: dict[str, str], tie_source: TieSource | None) -> dict[str, str]:
        """A tied group is read from whichever member exists; two that differ need a choice."""
        head = found.pop(_HEAD)
        if _EMBED not in found or tie_source == "head":
            return {**found, _EMBED: head}
        if tie_source is None:
            shape, other = self._tensors.info(found[_EMBED]).shape, self._tensors.info(head).shape
            if shape != other:
                raise self._tie_fault(found[_EMBED], head, f"shapes are {shape} and {other}")
            self._compared_head = head
        return found

    def _check_tie(self, part: Array, box: Sequence[tuple[int, int]]) -> None:
        """Compares a rectangle of the embedding with the same one of the stored head."""
        assert self._compared_head is not None
        full = within(box, self._params[_EMBED].shape)
        assert full is not None
        (first, stop), columns = full
        difference = 0.0
        for start in range(first, stop, _ROWS):
            rows = (start, min(start + _ROWS, stop))
            head = self._tensors.read(self._compared_head, (rows, columns))
            difference = max(difference, largest_difference(part[start - first : rows[1] - first], head))
        if difference != 0.0:
            what = f"the largest difference is {difference:g}"
            raise self._tie_fault(self._hf_name[_EMBED], self._compared_head, what)

    def _tie_fault(self, embed: str, head: str, what: str) -> ConversionError:
        return ConversionError(
            f"{self.path}: tie_word_embeddings is true, but {embed} and {head} differ ({what}). Choose which one "
            "counts (tie source embed or head), or set tie_word_embeddings to false in config.json."
        )

    def _check_missing(self, allow_missing: bool) -> None:
        if not self.missing:
            return
        names = _some([self.config.family.names.to_hf(name) for name in self.missing])
        if not allow_missing:
            hint = " (tie_word_embeddings is false)" if self.missing == (_HEAD,) else ""
            raise ConversionError(
                f"{self.path} lacks {len(self.missing)} of {len(self._params)} parameters: {names}{hint}. "
                "Complete it, or allow missing parameters to leave them out."
            )
        self.warnings.append(f"{self.path}: missing parameters were left uninitialised: {names}.")

    def _check_shapes(self) -> None:
        for name in self.names:
            info, wanted = self.info(name), self._params[name].shape
            if info.shape != wanted:
                raise ConversionError(f"{self.path}: {self._shape_fault(name, info.shape, wanted)}.")
            if not is_float(DTYPES[info.dtype]):
                raise ConversionError(
                    f"{self.path}: {self._hf_name[name]} is stored as {info.dtype}; a weight must be floating point."
                )

    def _shape_fault(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
        stored = self._hf_name[name]
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            attention = self.spec.blocks[int(name.split(".")[1])].attention
            heads = attention.num_heads if "q_norm" in name else attention.num_kv_heads
            return (
                f"{stored} has shape {shape}; a norm of every head has length head_dim = {attention.head_dim}, a norm "
                f"over the full width has {heads} x {attention.head_dim} = {heads * attention.head_dim}, and only "
                f"the norm of every head belongs to a {self.config.family.model_type}"
            )
        return f"{stored} has shape {shape}; config.json asks for {wanted}"


def _some(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
