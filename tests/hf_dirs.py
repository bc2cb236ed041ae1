"""Synthetic Hugging Face directories, written and read without the library's own file code.

`D0` is a small dense model: 2 layers, hidden 64, 4 query and 2 kv heads of 16, gated SiLU MLP of 128, vocabulary 512.
Names and shapes are spelled out here a second time on purpose: they are what the converters are checked against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

D0: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "use_cache": True,
}

BF16 = np.dtype(ml_dtypes.bfloat16)
_CODES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    BF16: "BF16",
    np.dtype(np.int64): "I64",
}


def config(**changes: Any) -> dict[str, Any]:
    """D0's config.json with changes; a value of `...` removes the field."""
    merged = {**D0, **changes}
    if "architectures" not in changes:
        names = {"qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "ministral": "Ministral", "llama": "Llama"}
        merged["architectures"] = [f"{names.get(merged['model_type'], 'Llama')}ForCausalLM"]
    return {name: value for name, value in merged.items() if value is not ...}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every weight, in the order of the model."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    kind = config["model_type"]
    bias_out = bool(config.get("attention_bias")) and kind in ("llama", "qwen3")
    bias_qkv = bias_out or kind == "qwen2"
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        out[layer + "input_layernorm.weight"] = (d,)
        for name, rows, cols in (("q", q, d), ("k", kv, d), ("v", kv, d), ("o", d, q)):
            out[f"{layer}self_attn.{name}_proj.weight"] = (rows, cols)
            if bias_out or (bias_qkv and name != "o"):
                out[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        if kind == "qwen3":
            out[layer + "self_attn.q_norm.weight"] = (head,)
            out[layer + "self_attn.k_norm.weight"] = (head,)
        out[layer + "post_attention_layernorm.weight"] = (d,)
        for name, rows, cols in (("gate", f, d), ("up", f, d), ("down", d, f)):
            out[f"{layer}mlp.{name}_proj.weight"] = (rows, cols)
            if config.get("mlp_bias"):
                out[f"{layer}mlp.{name}_proj.bias"] = (rows,)
    out["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    return out


def tensors(config: Mapping[str, Any], *, seed: int = 1234, dtype: Any = np.float32) -> Tensors:
    """Random weights: matrices of spread 0.1, biases too, norm weights around 1."""
    rng = np.random.default_rng(seed)
    return {
        name: (("norm" in name) + 0.1 * rng.standard_normal(shape)).astype(dtype)
        for name, shape in shapes(config).items()
    }


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """A file whose tensors lie in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in tensors.items():
        end = position + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (dtype code, shape, bytes)."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[start + entry["data_offsets"][0] :][: _size(entry)])
        for name, entry in header.items()
    }


def _size(entry: Mapping[str, Any]) -> int:
    return int(entry["data_offsets"][1] - entry["data_offsets"][0])


def read_directory(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a directory's safetensors files; a name in two files is an error."""
    out: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in sorted(path.glob("*.safetensors")):
        found = read_safetensors(file)
        assert not out.keys() & found.keys()
        out |= found
    return out


def as_read(tensors: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What `read_directory` gives for these tensors."""
    return {name: (_CODES[a.dtype], a.shape, np.ascontiguousarray(a).tobytes()) for name, a in tensors.items()}


def write_directory(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], *, shards: int = 1) -> Path:
    """A Hugging Face directory; with several shards, tensors are dealt out in order and an index is written."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return path
    names: Sequence[str] = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        write_safetensors(path / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(path: Path, base: int, added: int) -> None:
    """A word-level tokenizer of `base` entries and `added` special tokens beyond them."""
    path.mkdir(parents=True, exist_ok=True)
    specials = [
        {
            "id": base + i, "content": f"<s{i}>", "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i in range(added)
    ]  # fmt: skip
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(base)}, "unk_token": "w0"},
    }
    (path / "tokenizer.json").write_text(json.dumps(data))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
