"""transformers' MiniMax-M3 with its attention run by our operators. Weights, config and state dict stay transformers' own."""

from __future__ import annotations

import torch
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLAttention,
    MiniMaxM3VLTextModel,
    apply_rotary_pos_emb,
)

import openmsa

from .plan import ATTN_NAME, refuse_attention_weights, require_plan
from .runtime import Runtime, cache_layer_of, run_dense, run_sparse


class MsaMiniMaxM3Attention(MiniMaxM3VLAttention):
    """Stands in for MiniMaxM3VLAttention, dense or sparse, with the same submodules."""

    def __init__(self, other: MiniMaxM3VLAttention, runtime: Runtime):
        config = other.config
        with torch.device("meta"):
            super().__init__(config, other.layer_idx)
        for name, child in other.named_children():
            setattr(self, name, child)
        sparse = self.indexer is not None
        if sparse and config.index_n_heads != config.num_key_value_heads:
            raise openmsa.UnsupportedError(
                f"index_n_heads is {config.index_n_heads}, num_key_value_heads is {config.num_key_value_heads}: MSA selects once per KV "
                "head, so they must be equal"
            )
        if config.attention_dropout:
            raise openmsa.UnsupportedError(f"attention_dropout is {config.attention_dropout}; MSA layers support 0 only")
        self.msa_config = openmsa.MsaConfig(
            num_q_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=self.head_dim,
            index_dim=config.index_head_dim if sparse else 0,
            block_size=config.index_block_size,
            top_k=config.index_topk_blocks,
            num_local_blocks=config.index_local_blocks,
            softmax_scale=self.scaling,
        )
        self.openmsa_runtime = runtime
        runtime.register(self.layer_idx, sparse)
        self.train(other.training)

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        name = f"layer {self.layer_idx}"
        refuse_attention_weights(kwargs, name)
        plan = require_plan(attention_mask, name)
        tokens = hidden_states.shape[:-1]
        q = self.q_norm(self.q_proj(hidden_states).view(*tokens, -1, self.head_dim))
        k = self.k_norm(self.k_proj(hidden_states).view(*tokens, -1, self.head_dim))
        v = self.v_proj(hidden_states).view(*tokens, -1, self.head_dim)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        cache_layer = cache_layer_of(past_key_values, self.layer_idx)
        runtime = self.openmsa_runtime
        if self.indexer is None:
            out = run_dense(runtime, self.layer_idx, self.msa_config, plan, q, k, v, cache_layer)
        else:
            index, dim = self.indexer, self.indexer.head_dim
            q_idx = index.q_norm(index.q_proj(hidden_states).view(*tokens, -1, dim))
            k_idx = index.k_norm(index.k_proj(hidden_states).view(*tokens, 1, dim))
            q_idx, k_idx = apply_rotary_pos_emb(q_idx, k_idx, cos[..., :dim], sin[..., :dim], unsqueeze_dim=2)
            out = run_sparse(runtime, self.layer_idx, self.msa_config, plan, q, k, v, q_idx, k_idx[:, :, 0], cache_layer)
        return self.o_proj(out.flatten(2)), None


def use_openmsa(model, *, backend: str = "auto"):
    """Run the attention layers of a MiniMax-M3 model (any model that holds a MiniMaxM3VLTextModel) through OpenMSA; returns the model.

    The change is in place and not saved: call it again after from_pretrained. generate() works with the cache transformers makes; for
    batches, `past_key_values=openmsa.hf.MsaCache(model.config)` spares the copy that packing each step costs.
    """
    text_models = [m for m in model.modules() if isinstance(m, MiniMaxM3VLTextModel)]
    if len(text_models) != 1:
        raise openmsa.UnsupportedError(
            f"{type(model).__name__} holds {len(text_models)} MiniMax-M3 text models; use_openmsa() needs exactly one. For Llama-family "
            "models use openmsa.hf.convert(model)"
        )
    text_model = text_models[0]
    if not any(layer.self_attn.indexer is not None for layer in text_model.layers):
        raise openmsa.InvalidArgumentError(
            f"config.layer_types names no 'minimax_m3_sparse' layer ({sorted(set(text_model.config.layer_types))}), so nothing would be "
            "sparse. Check that sparse_attention_config or layer_types stands in the text config"
        )
    runtime = Runtime(backend)
    prepared = [MsaMiniMaxM3Attention(layer.self_attn, runtime) for layer in text_model.layers]
    text_model.set_attn_implementation(ATTN_NAME)
    for layer, attention in zip(text_model.layers, prepared, strict=True):
        layer.self_attn = attention
    return model
