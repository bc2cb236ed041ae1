"""A Hugging Face directory as a spec and canonical tensors, checked whole before the first tensor is handed out.

Opening reads config.json and every header: files, names, shapes and dtypes must fit the spec. Data is read by slice
on demand. Values are never altered; what is not finite is an error unless it was asked to be let through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from duomesh.converters.hf.config import read_config
from duomesh.converters.hf.names import is_buffer
from duomesh.converters.pairing import Pairing, convert_pairing, with_pairing
from duomesh.converters.values import NonFinite, find_nonfinite, largest_difference
from duomesh.core.arrays import DTYPES, Array, is_float
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
_ROWS = 1 << 14  # rows of an embedding compared at once


class HfCheckpoint(Closing):
    """An open Hugging Face directory.

    Args:
        allow_nonfinite: hand out tensors with NaN or Inf as they are, with a warning.
        allow_missing: open although parameters are absent; they are listed in `missing` and in a warning.
        tie_source: which member counts if a tied embedding and head are both stored and differ.
        pairing: the rotary pairing that spec and tensors shall have; files hold half-split ones.

    Attributes:
        spec: the model. config: config.json, understood.
        names: canonical names of the parameters that are there, in the program's order.
        missing: canonical names of those that are not.
        buffers: HF names of tensors that are no weights (rotary tables of old files).
        has_tied_head: whether a tied model's head is stored as well.
        warnings: one sentence each; grows while tensors are read.

    Raises:
        ConversionError, TensorFileError: naming what is wrong, before any tensor is handed out.
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

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Array:
        """A parameter, or its rows [start, stop) of dim 0, in its stored dtype.

        Raises:
            ConversionError: values that are not finite, unless they were allowed.
        """
        array = self._read(name, rows)
        bad = find_nonfinite(array, first_row=0 if rows is None else rows[0])
        if bad is not None:
            self._report_nonfinite({name: bad})
        return array

    def params(self) -> Iterator[tuple[str, Array]]:
        """Every parameter that is there, in the program's order.

        The first one that is not finite ends the sequence with an error, which names all of those that follow too.
        """
        for i, name in enumerate(self.names):
            array = self._read(name, None)
            bad = find_nonfinite(array)
            if bad is not None:
                found = {name: bad}
                if not self._allow_nonfinite:
                    rest = ((other, find_nonfinite(self._read(other, None))) for other in self.names[i + 1 :])
                    found |= {other: fault for other, fault in rest if fault is not None}
                self._report_nonfinite(found)
            yield name, array

    def read_buffer(self, hf_name: str) -> Array:
        """One of `buffers`."""
        return self._tensors.read(hf_name)

    def _read(self, name: str, rows: tuple[int, int] | None) -> Array:
        stored = self._hf_name[name]
        if self._pairing == "half":
            return self._tensors.read(stored, rows)
        # whole heads are needed to reorder their channels
        whole = convert_pairing(self.config.spec, name, self._tensors.read(stored), self._pairing)
        return whole if rows is None else whole[rows[0] : rows[1]]

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
        return self._resolve_tie(found, tie_source) if self.has_tied_head else found

    def _resolve_tie(self, found: dict[str, str], tie_source: TieSource | None) -> dict[str, str]:
        """A tied group is read from whichever member exists; two that differ need a choice."""
        head = found.pop(_HEAD)
        if _EMBED not in found or tie_source == "head":
            return {**found, _EMBED: head}
        if tie_source is None:
            self._check_tie(found[_EMBED], head)
        return found

    def _check_tie(self, embed: str, head: str) -> None:
        shape, other = self._tensors.info(embed).shape, self._tensors.info(head).shape
        difference = 0.0
        if shape == other:
            for start in range(0, shape[0], _ROWS):
                rows = (start, min(start + _ROWS, shape[0]))
                a, b = self._tensors.read(embed, rows), self._tensors.read(head, rows)
                difference = max(difference, largest_difference(a, b))
            if difference == 0.0:
                return
        what = f"the largest difference is {difference:g}" if shape == other else f"shapes are {shape} and {other}"
        raise ConversionError(
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
