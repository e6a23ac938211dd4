"""Llama-family models with MSA layers: MsaLlamaForCausalLM and convert(), which makes one from a dense model."""

from __future__ import annotations

import copy

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

import openmsa

from .cache import DENSE_LAYER, SPARSE_LAYER
from .index_branch import INDEX_BRANCHES
from .options import MsaOptions
from .plan import ATTN_NAME, refuse_attention_weights, require_plan
from .runtime import Runtime, cache_layer_of, run_dense, run_sparse


@strict  # collects the validate_ methods anew, ours in place of the inherited one
class MsaLlamaConfig(LlamaConfig):
    """LlamaConfig plus `msa`, the options. The model type is its own, so that a saved model is either loaded with its MSA layers or
    not at all: transformers without openmsa.hf does not know the type, and says so."""

    model_type = "openmsa_llama"

    msa: dict | None = None
    layer_types: list[str] | None = None  # derived from `msa`; tells DynamicCache which layers store index keys

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for name in MsaOptions.names():
            # transformers keeps unknown keys without a word; an option at the wrong level must not look as if it had engaged.
            if name in kwargs or name in vars(self):
                raise openmsa.InvalidArgumentError(
                    f"config.{name} stands at the top level; MSA options belong under config.msa: {{'msa': {{'{name}': ...}}}}",
                    name,
                )
        options = self.msa_options
        self.msa = options.to_dict()
        dense = set(options.dense_layers)
        self.layer_types = [DENSE_LAYER if i in dense else SPARSE_LAYER for i in range(self.num_hidden_layers)]

    @property
    def msa_options(self) -> MsaOptions:
        return MsaOptions.of(self.msa, num_layers=self.num_hidden_layers)

    def validate_layer_type(self):
        """layer_types is derived, and its names are ours rather than transformers'."""


class MsaLlamaAttention(LlamaAttention):
    """Llama attention with an index branch in front. On a dense layer the branch is absent and every visible key is read."""

    def __init__(self, config: MsaLlamaConfig, layer_idx: int, runtime: Runtime):
        super().__init__(config, layer_idx)
        if config.attention_dropout:
            raise openmsa.UnsupportedError(f"attention_dropout is {config.attention_dropout}; MSA layers support 0 only")
        options = config.msa_options
        sparse = layer_idx not in options.dense_layers
        if options.index_branch not in INDEX_BRANCHES:
            raise openmsa.InvalidArgumentError(
                f"unknown index_branch '{options.index_branch}'; known are {', '.join(INDEX_BRANCHES)}"
            )
        self.index = INDEX_BRANCHES[options.index_branch](config) if sparse else None
        self.msa_config = openmsa.MsaConfig(
            num_q_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=self.head_dim,
            index_dim=self.index.index_dim if sparse else 0,
            block_size=options.block_size,
            top_k=options.top_k,
            num_init_blocks=options.num_init_blocks,
            num_local_blocks=options.num_local_blocks,
            softmax_scale=self.scaling,
        )
        self.openmsa_runtime = runtime
        runtime.register(layer_idx, sparse)

    def adopt(self, other: LlamaAttention) -> None:
        """Take over the projections of a layer, shared and not copied."""
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(other, name))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        name = f"layer {self.layer_idx}"
        refuse_attention_weights(kwargs, name)
        plan = require_plan(attention_mask, name)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape)
        k = self.k_proj(hidden_states).view(shape)
        v = self.v_proj(hidden_states).view(shape)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        cache_layer = cache_layer_of(past_key_values, self.layer_idx)
        if self.index is None:
            out = run_dense(self.openmsa_runtime, self.layer_idx, self.msa_config, plan, q, k, v, cache_layer)
        else:
            q_idx, k_idx = self.index(hidden_states, q, k, position_embeddings)
            out = run_sparse(
                self.openmsa_runtime,
                self.layer_idx,
                self.msa_config,
                plan,
                q,
                k,
                v,
                q_idx,
                k_idx,
                cache_layer,
                self.index.num_slots,
            )
        return self.o_proj(out.flatten(2)), None


def _claim_attention(config: MsaLlamaConfig) -> None:
    if config._attn_implementation not in (None, ATTN_NAME):
        raise openmsa.UnsupportedError(
            f"attn_implementation='{config._attn_implementation}': an MSA model runs with '{ATTN_NAME}' only; leave it out"
        )
    config._attn_implementation = ATTN_NAME


class MsaLlamaModel(LlamaModel):
    config_class = MsaLlamaConfig

    def __init__(self, config: MsaLlamaConfig):
        _claim_attention(config)
        super().__init__(config)
        runtime = Runtime()
        for i, layer in enumerate(self.layers):
            dense = layer.self_attn
            with torch.device("meta"):
                layer.self_attn = MsaLlamaAttention(config, i, runtime)
            layer.self_attn.adopt(dense)


class MsaLlamaForCausalLM(LlamaForCausalLM):
    config_class = MsaLlamaConfig

    def __init__(self, config: MsaLlamaConfig):
        _claim_attention(config)
        super(LlamaForCausalLM, self).__init__(config)  # past Llama's own __init__, which would build a dense model first
        self.model = MsaLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(MsaLlamaConfig.model_type, MsaLlamaConfig)
AutoModel.register(MsaLlamaConfig, MsaLlamaModel)
AutoModelForCausalLM.register(MsaLlamaConfig, MsaLlamaForCausalLM)


def convert(model, config=None, *, backend: str = "auto", **overrides) -> MsaLlamaForCausalLM:
    """A Llama-family model (Llama, SmolLM, TinyLlama, ...) with MSA attention layers, training-free.

    The result shares its weights with `model`, which stays as it is, so the two can be compared side by side. `config` is MsaOptions,
    openmsa.MsaConfig, a dict or None; overrides are block_size, top_k, num_init_blocks, num_local_blocks, dense_layers (indices, or an
    int n for the first n) and index_branch. The options are saved with the model and restored by from_pretrained.

    >>> sparse = openmsa.hf.convert(model, block_size=64, top_k=16, dense_layers=2)
    >>> sparse.generate(**inputs)
    >>> openmsa.hf.assert_sparse(sparse)
    """
    if isinstance(model, MsaLlamaForCausalLM):
        raise openmsa.InvalidArgumentError("model has MSA layers already; convert the dense model again with the new options")
    if type(model) is not LlamaForCausalLM:
        raise openmsa.UnsupportedError(
            f"model is a {type(model).__name__}; convert() takes LlamaForCausalLM. For MiniMax-M3 use openmsa.hf.use_openmsa(model)"
        )
    quantization = getattr(model.config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if quantization and method != "gguf":  # transformers loads GGUF weights dequantised; they are plain tensors by now
        raise openmsa.UnsupportedError(f"model is quantised ({method}); convert() takes plain weights. Dequantise the model first")
    options = MsaOptions.of(config, num_layers=model.config.num_hidden_layers, **overrides)
    not_ours = ("model_type", "architectures", "transformers_version", "quantization_config")
    values = {k: v for k, v in model.config.to_dict().items() if k not in not_ours}
    msa_config = MsaLlamaConfig(**values, msa=options.to_dict())
    with torch.device("meta"):
        sparse = MsaLlamaForCausalLM(msa_config)
    sparse.lm_head = model.lm_head
    for name in ("embed_tokens", "norm", "rotary_emb"):
        setattr(sparse.model, name, getattr(model.model, name))
    for new, old in zip(sparse.model.layers, model.model.layers, strict=True):
        for name in ("mlp", "input_layernorm", "post_attention_layernorm"):
            setattr(new, name, getattr(old, name))
        new.self_attn.adopt(old.self_attn)
        new.self_attn.openmsa_runtime.backend = backend
    sparse.generation_config = copy.deepcopy(model.generation_config)
    return sparse.train(model.training)
