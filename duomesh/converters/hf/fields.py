"""Every field of a config.json that has a known meaning, and a reader that leaves none unclassified.

A field is *used* (the reader asks for it), *harmless* (it changes no number that the model computes), *refused* (it
changes the maths in a way that these families do not have, unless it holds a value that switches it off), or
unknown, which is announced. JSON null is the same as absence, except where a reader asks for the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from duomesh.core.errors import ConversionError

__all__ = ["HARMLESS", "REFUSED", "USED", "Fields", "classify"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


USED = frozenset(
    _words("""
    architectures attention_bias attention_dropout dtype head_dim hidden_act hidden_size initializer_range
    intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias model_type num_attention_heads
    num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor rms_norm_eps
    rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings torch_dtype use_sliding_window
    vocab_size
    """)
)

# Fields that change nothing that the model computes from token ids: bookkeeping, token ids, generation settings,
# classification heads that a causal language model does not have, and switches of the software.
HARMLESS = frozenset(
    _words("""
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label is_decoder is_encoder_decoder label2id length_penalty max_length max_new_tokens max_sequence_length
    min_length mask_token_id name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
    torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache
    """)
)

_OFF: tuple[Any, ...] = (False, 0, [], {})
_ONE: tuple[Any, ...] = (1, 1.0)

# Fields that change the maths, with the values under which they do not (null is always one of them).
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _words("""
        add_cross_attention alibi attention_chunk_size attention_k_eq_v attention_sinks attn_logit_softcapping auto_gptq
        block_configs clip_qkv compression_config cross_attention_hidden_size experts_per_token
        final_logit_softcapping first_k_dense_replace global_attn_every_n_layers hidden_activation hybrid_layer_ids
        kv_lora_rank layernorm_epsilon mamba_d_state mlp_layer_types mlp_only_layers moe_intermediate_size mup_scale
        n_routed_experts n_shared_experts no_rope_layer_interval no_rope_layers norm_type num_experts
        num_experts_per_tok num_kv_shared_layers num_local_experts num_mtp_layers num_nextn_predict_layers
        parallel_attn per_layer_config pruned_heads q_lora_rank qk_layernorm quantization quantization_config
        query_pre_attn_scalar rope_interleave rope_local_base_freq rotary_dim scale_emb scale_depth
        sliding_window_pattern text_config use_mrope use_parallel_residual use_qk_norm vision_config
        """),
        _OFF,
    ),
    **dict.fromkeys(
        _words("""
        attention_multiplier embedding_multiplier key_multiplier lm_head_multiplier logit_scale logits_scaling
        residual_multiplier rotary_pct
        """),
        _ONE,
    ),
    "position_embedding_type": ("rope", "rotary"),
    "is_causal": (True,),
    "use_bias": _OFF,
}


def classify(raw: Mapping[str, Any], where: str) -> list[str]:
    """Warnings about unknown fields. Raises ConversionError for the first field that changes the maths."""
    warnings = []
    for name, value in raw.items():
        if value is None or name in USED or name in HARMLESS:
            continue
        if name in REFUSED:
            # True == 1 in Python, but a switch is no factor
            off = [v for v in REFUSED[name] if v == value and isinstance(v, bool) == isinstance(value, bool)]
            if not off:
                raise ConversionError(
                    f"{where}: {name} = {value!r} changes what the model computes and is not supported for "
                    f"model_type {raw.get('model_type')!r}."
                )
        elif name == "auto_map":
            warnings.append(f"{where}: auto_map names custom code, which is never run; model_type alone counts.")
        else:
            warnings.append(f"{where}: the field {name} is unknown and was ignored.")
    return warnings


class Fields:
    """Typed access to config.json. Absent fields take the family's default, announced in `warnings`."""

    def __init__(
        self, raw: Mapping[str, Any], where: str, defaults: Mapping[str, Any], quiet_defaults: Mapping[str, Any]
    ) -> None:
        self.raw = raw
        self.where = where
        self.warnings: list[str] = []
        self._defaults = defaults
        self._quiet = quiet_defaults

    def has(self, name: str) -> bool:
        """Whether the field is there and says something."""
        return self.raw.get(name) is not None

    def fault(self, name: str, needed: str) -> ConversionError:
        return ConversionError(f"{self.where}: {name} is {self.raw.get(name)!r}; {needed}.")

    def _get(self, name: str, needed: str, accepts: Callable[[Any], bool]) -> Any:
        if not self.has(name):
            if name in self._quiet:
                return self._quiet[name]
            if name not in self._defaults:
                raise ConversionError(f"{self.where}: the field {name} is missing; {needed}.")
            value = self._defaults[name]
            self.warnings.append(f"{self.where}: {name} is absent; the documented default {value!r} was taken.")
            return value
        value = self.raw[name]
        if not accepts(value):
            raise self.fault(name, needed)
        return value

    def integer(self, name: str, *, otherwise: int | None = None) -> int:
        """A positive integer. `otherwise` stands in for a quiet default of None."""
        if otherwise is not None and not self.has(name) and self._quiet.get(name, ...) is None:
            return otherwise
        return int(self._get(name, "it must be a positive integer", lambda v: is_integer(v) and v > 0))

    def number(self, name: str) -> float:
        """A positive number."""
        return float(self._get(name, "it must be a positive number", lambda v: is_number(v) and v > 0))

    def flag(self, name: str) -> bool:
        return bool(self._get(name, "it must be true or false", lambda v: isinstance(v, bool)))

    def text(self, name: str) -> str:
        return str(self._get(name, "it must be a string", lambda v: isinstance(v, str)))


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
