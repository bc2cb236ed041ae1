"""A plan: how many ranks there are, what each of them holds, and how a step's batch is cut.

    tp=8,dp=4,zero=1,sequence_parallel

A plan that exists has fields of the right type; whether it fits a model is `validate.py`, and where every tensor lives
follows from `rules.mesh_and_rules`. Nothing here needs a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import prod
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from duomesh.core.errors import PlanError

__all__ = ["ContextKind", "Plan", "PlanDType", "Schedule"]

PlanDType = Literal["float32", "bfloat16", "float64"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"]
ContextKind = Literal["ring", "allgather", "a2a", "a2a_ring"]

_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A parallel layout of one training step.

    Constructing one raises PlanError, with every field that is no value of its kind.

    Attributes:
        tp: ranks that share each layer's heads, ffn and vocabulary.
        dp: ranks that share a batch's samples.
        sequence_parallel: whether the tp ranks also share the positions of the residual stream.
        zero: what the dp ranks share beside samples: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        zero_shard: number of dp ranks that share one copy of it; None for all of dp.
        micro_batches: forward and backward passes of a step; None for as many as a step is given.
        global_batch_size: samples of a step; None for whatever the batch has.
        micro_batch_size: samples of a pass on one rank; None for global_batch_size / (micro_batches * dp).
        precision: dtype of activations and of the weights that they meet; None for that of the session, float32 where
            there is none.
        grad_dtype: dtype in which gradients are kept and summed over ranks; None for float64 in a float64 plan and
            float32 otherwise.
        pp: pipeline stages. vpp: parts that each pipeline rank has of the model. schedule: order of its passes; None
            for no pipeline.
        cp: ranks that share the positions of every sequence. cp_kind: how attention sees the others' keys and values.
        ep: ranks that share the experts. etp: ranks that share one expert's ffn; None for tp.
    """

    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    zero_shard: int | None = None
    micro_batches: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    precision: PlanDType | None = None
    grad_dtype: PlanDType | None = None
    pp: int = 1
    vpp: int = 1
    schedule: Schedule | None = None
    cp: int = 1
    cp_kind: ContextKind | None = None
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        wrong = [fault for name in _HINTS if (fault := _fault(name, getattr(self, name)))]
        if wrong:
            raise PlanError("\n".join(f"plan: {fault}" for fault in wrong))

    @classmethod
    def parse(cls, text: str, *, source: str = "plan") -> Plan:
        """The plan that `str` wrote: `name=value` entries between commas; a bare name of a flag means true.

        source: what was given, such as "train.plan"; every line of an error begins with it.

        Raises PlanError, one line for each entry that is unknown, given twice or no value of its field.
        """
        values: dict[str, Any] = {}
        wrong: list[str] = []
        for entry in (part.strip() for part in text.split(",")):
            if not entry:
                continue
            name, equals, word = (part.strip() for part in entry.partition("="))
            if name not in _HINTS:
                wrong.append(_unknown(name))
            elif name in values:
                wrong.append(f"{name} is given twice; leave one.")
            else:
                values[name] = _value(name, word if equals else None)
                if fault := _fault(name, values[name]):
                    wrong.append(fault)
        if wrong:
            raise PlanError("\n".join(f"{source}: {fault}" for fault in wrong))
        return cls(**values)

    def __str__(self) -> str:
        """What differs from the defaults, in the order of the fields; empty for one rank."""
        entries = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                entries.append(f.name if value is True else f"{f.name}={value}")
        return ",".join(entries)

    @property
    def world_size(self) -> int:
        return prod((self.tp, self.dp, self.cp, self.pp))

    @property
    def resolved_micro_batches(self) -> int:
        return self.micro_batches or 1

    @property
    def resolved_precision(self) -> PlanDType:
        return self.precision or "float32"

    @property
    def resolved_grad_dtype(self) -> PlanDType:
        if self.grad_dtype is not None:
            return self.grad_dtype
        return "float64" if self.precision == "float64" else "float32"

    @property
    def samples_of_a_pass(self) -> int:
        """Samples of a micro-batch over all data ranks; one a rank if the plan does not say."""
        if self.micro_batch_size is None and self.global_batch_size is not None:
            return self.global_batch_size // self.resolved_micro_batches
        return self.dp * (self.micro_batch_size or 1)

    @property
    def resolved_zero_shard(self) -> int:
        return self.dp if self.zero_shard is None else self.zero_shard

    @property
    def resolved_etp(self) -> int:
        return self.tp if self.etp is None else self.etp


_HINTS: dict[str, Any] = get_type_hints(Plan)


def _kinds(name: str) -> tuple[Any, ...]:
    """The alternatives of a field's type."""
    hint = _HINTS[name]
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _value(name: str, word: str | None) -> Any:
    """A word as a value of the field; a word that is none stays as it is, for `_fault` to name."""
    kinds = _kinds(name)
    if bool in kinds:
        return True if word is None else _FLAGS.get(word, word)
    if int in kinds and word is not None and word.isdecimal() and len(word) < 10:  # no size has more digits
        return int(word)
    return "" if word is None else word


def _fault(name: str, value: Any) -> str | None:
    """Why the value does not fit the field, as a sentence."""
    kinds = _kinds(name)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    if kind is bool:
        is_right, needed = isinstance(value, bool), "true or false (or the bare name for true)"
    elif kind is int:
        low, high = (0, 3) if name == "zero" else (1, None)
        is_right = isinstance(value, int) and not isinstance(value, bool)
        is_right = is_right and low <= value and (high is None or value <= high)
        needed = "an integer of at least 1" if high is None else "0, 1, 2 or 3"
    else:
        words = get_args(kind)
        is_right, needed = value in words, f"one of {', '.join(words)}"
    if is_right:
        return None
    shown = "without a value" if value == "" else repr(value)
    return f"{name} is {shown}; it must be {needed}."


def _unknown(name: str) -> str:
    """A name that no field has, with those that it may stand for: alike, or abbreviated to their initials."""
    initials = [known for known in _HINTS if "".join(word[0] for word in known.split("_")) == name.lower()]
    close = initials or get_close_matches(name.lower(), _HINTS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the fields are {', '.join(_HINTS)}."
    return f"there is no field {name!r}; {hint}"
