"""The transformers library as one side of a comparison: logits, loss, gradients and every block's output.

torch and transformers are imported when an oracle is made. A directory is loaded by transformers alone, so that a
mistake of our own reader cannot hide; a spec with parameters is handed over through `write_config`.

Precision: in float32 and bfloat16 the library runs as it is. In float64 its casts to float32 (norms, rotary angles,
softmax) are turned into float64 as well, otherwise no digit beyond the seventh would mean anything; rotary
frequencies are then rounded to float32, which is what a model's table holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from duomesh.converters.hf.config import read_config
from duomesh.converters.hf.config_writer import choose_family, write_config
from duomesh.converters.hf.families import Family
from duomesh.converters.pairing import convert_pairing, with_pairing
from duomesh.core.arrays import DTYPES, Array
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.errors import BackendError
from duomesh.core.ir.build import build_program
from duomesh.core.session import ComputeDType, Trace
from duomesh.core.spec.model import ModelSpec

__all__ = ["HfOracle"]


class HfOracle:
    """A model inside transformers, with eager attention and without dropout or cache.

    Attributes:
        spec: the model, in the pairing that parameters were given in.
    """

    def __init__(
        self, spec: ModelSpec, params: Iterable[tuple[str, Array]], *, dtype: ComputeDType = "float32"
    ) -> None:
        """Builds the model from canonical parameters, each rounded to `dtype`."""
        _require()
        from transformers import AutoConfig, AutoModelForCausalLM

        self.spec = spec
        self._family = choose_family(spec)
        self._dtype = dtype
        config = AutoConfig.for_model(**write_config(spec, family=self._family.model_type))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        self._adopt(model)
        self._load(params)

    @classmethod
    def from_directory(
        cls, directory: Path | str, *, dtype: ComputeDType = "float32", weights: ComputeDType | None = None
    ) -> HfOracle:
        """Loads a Hugging Face directory through transformers alone; only names are translated by our rules.

        weights: dtype that weights are rounded to before they are cast to `dtype`; None for `dtype` itself.
        """
        _require()
        from transformers import AutoModelForCausalLM

        config = read_config(directory)
        out = cls.__new__(cls)
        out.spec, out._family, out._dtype = config.spec, config.family, dtype
        with _quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                str(directory),
                dtype=_torch_dtype(weights or dtype),
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
        # transformers itself goes on with random numbers
        faults = [*found["missing_keys"], *found["mismatched_keys"]]
        if faults:
            raise BackendError(f"transformers does not find all weights in {directory}: {', '.join(map(str, faults))}.")
        out._adopt(model)
        return out

    spec: ModelSpec
    _family: Family
    _dtype: ComputeDType

    def _adopt(self, model: Any) -> None:
        """Casts parameters, never buffers: rotary frequencies stay as wide as the library makes them."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(_torch_dtype(self._dtype))
        if self._dtype == "float64":
            rotary = model.model.rotary_emb
            with _wide():
                fresh = type(rotary)(config=model.config)
            rotary.inv_freq = fresh.inv_freq.float()
            rotary.attention_scaling = fresh.attention_scaling
        self._model = model.eval()

    def _load(self, params: Iterable[tuple[str, Array]]) -> None:
        import torch

        own = self._parameters()
        missing = set(own)
        for name, array in params:
            if name not in own or tuple(own[name].shape) != array.shape:
                raise BackendError(f"transformers: {name} of shape {array.shape} is no parameter of this model.")
            stored = convert_pairing(self.spec, name, array, "half")
            with torch.no_grad():
                own[name].copy_(_to_torch(stored))
            missing.discard(name)
        if missing:
            raise BackendError(f"transformers: parameters were not given: {', '.join(sorted(missing))}.")

    def _parameters(self) -> dict[str, Any]:
        """torch parameters by canonical name; tied ones once, under the embedding's."""
        names = self._family.names
        found = {names.to_canonical(hf): parameter for hf, parameter in self._model.named_parameters()}
        expected = build_program(self.spec).params
        if set(found) != set(expected):
            strangers = sorted(map(str, set(found) ^ set(expected)))
            raise BackendError(f"transformers builds another model than the spec says: {', '.join(strangers)}.")
        return {name: found[name] for name in expected}

    def logits(self, tokens: Array) -> Array:
        """[B, S] ids -> [B, S, V] logits, float32 or float64."""
        batch = Batch(tokens, np.full_like(tokens, IGNORE))
        return self.trace(batch, grads=False).values["head.logits"].astype(self._wide_dtype)

    @property
    def _wide_dtype(self) -> str:
        return "float64" if self._dtype == "float64" else "float32"

    def trace(self, batch: Batch, *, grads: bool) -> Trace:
        """One pass. Values are under the names of our programs, in the compute dtype.

        values: "embed.lookup", "layers.N.mlp_residual", "head.norm", "head.logits".
        loss: sum of weighted target losses / sum of weights, 0 without targets. grads: canonical, tied ones summed.

        Raises:
            BackendError: the batch holds several segments, for which transformers has no exact counterpart.
            DataError: an id is outside the vocabulary.
        """
        if batch.segment_ids is not None:
            raise BackendError("transformers: batches with segment_ids cannot be compared; leave them out.")
        batch.check_vocabulary(self.spec.vocab_size)
        import torch

        values: dict[str, Any] = {}
        with ExitStack() as stack:
            for name, module in self._hooked():
                handle = module.register_forward_hook(_recorder(values, name))
                stack.callback(handle.remove)
            stack.enter_context(torch.enable_grad() if grads else torch.no_grad())
            if self._dtype == "float64":
                stack.enter_context(_wide())
            output = self._model(
                input_ids=_to_torch(batch.tokens.astype(np.int64)),
                position_ids=_to_torch(batch.resolved_positions.astype(np.int64)),
                # given, because without a mask transformers guesses segments from jumps in the positions
                attention_mask=torch.ones(batch.tokens.shape, dtype=torch.int64),
                use_cache=False,
            )
            loss = self._loss(output.logits, batch)
            found = self._gradients(loss) if grads else {}
        arrays = {name: _to_numpy(value) for name, value in values.items()}
        return Trace(values=arrays, loss=float(loss.detach()), grads=found)

    def _hooked(self) -> list[tuple[str, Any]]:
        """(global value name, module that makes it), in order of execution."""
        inner = self._model.model
        layers = [(f"layers.{i}.mlp_residual", layer) for i, layer in enumerate(inner.layers)]
        head = [("head.norm", inner.norm), ("head.logits", self._model.lm_head)]
        return [("embed.lookup", inner.embed_tokens), *layers, *head]

    def _loss(self, logits: Any, batch: Batch) -> Any:
        import torch

        wide = logits.to(getattr(torch, self._wide_dtype)).flatten(0, 1)
        labels = _to_torch(batch.labels.astype(np.int64)).flatten()
        weights = _to_torch(batch.weights.astype(self._wide_dtype)).flatten()
        token_loss = torch.nn.functional.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="none")
        total = weights.sum()
        return (token_loss * weights).sum() / torch.where(total > 0, total, torch.ones_like(total))

    def _gradients(self, loss: Any) -> dict[str, Array]:
        self._model.zero_grad(set_to_none=True)
        loss.backward()
        half = with_pairing(self.spec, "half")
        pairings = [b.attention.rope.pairing for b in self.spec.blocks if b.attention.rope is not None]
        out = {name: _to_numpy(parameter.grad) for name, parameter in self._parameters().items()}
        self._model.zero_grad(set_to_none=True)
        # choose_family has seen to it that all layers share one pairing
        return {name: convert_pairing(half, name, grad, pairings[0]) for name, grad in out.items()}


def _require() -> None:
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise BackendError(f"the transformers side needs {name}: pip install 'duomesh[torch,hf]'.")


def _torch_dtype(dtype: str) -> Any:
    import torch

    return getattr(torch, dtype)


def _to_torch(array: Array) -> Any:
    """A copy as a torch tensor of the same dtype; torch shares no memory with arrays that may be read-only."""
    import torch

    contiguous = np.array(array, order="C")
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(contiguous.view(np.int16)).view(torch.bfloat16)
    if array.dtype.itemsize == 1:  # float8: exact in float32
        contiguous = contiguous.astype(np.float32)
    return torch.from_numpy(contiguous)


def _to_numpy(tensor: Any) -> Array:
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        out: Array = tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
        return out.copy()
    return np.array(tensor.numpy())


def _recorder(values: dict[str, Any], name: str) -> Any:
    def record(module: Any, inputs: Any, output: Any) -> None:
        values[name] = output[0] if isinstance(output, tuple) else output

    return record


def _wide() -> Any:
    """Within it, whatever asks for float32 gets float64."""
    import torch
    from torch.overrides import TorchFunctionMode

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value == torch.float32 else value
        if isinstance(value, tuple):
            return tuple(widen(v) for v in value)
        return value

    class Wide(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            return func(*widen(args), **{key: widen(value) for key, value in (kwargs or {}).items()})

    return Wide()


@contextmanager
def _quiet() -> Any:
    """No progress bars of transformers on the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
