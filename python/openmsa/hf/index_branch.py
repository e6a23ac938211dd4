"""Where index queries and keys come from. A branch is a module

    forward(hidden_states, q, k, position_embeddings) -> q_idx [B, T, Hkv, Di], k_idx [B, T, Di]

with q [B, T, Hq, D] and k [B, T, Hkv, D] after rotary, and an `index_dim`. Its name goes into the saved options, its parameters (if
any) into the state dict, so a learned branch is one more entry of INDEX_BRANCHES.
"""

from __future__ import annotations

import torch
from torch import nn


class KvHeadIndex(nn.Module):
    """The training-free start: k_idx is the KV heads' keys side by side (Di = Hkv * D); a group's q_idx is the mean of its heads'
    queries in the group's own slot, zero elsewhere. So score[t,g,j] is the mean over the group of <q[t,h], k[j,g]>."""

    def __init__(self, config):
        super().__init__()
        self.num_kv_heads = config.num_key_value_heads
        self.index_dim = config.num_key_value_heads * config.head_dim

    def forward(self, hidden_states, q, k, position_embeddings):
        batch, tokens, _, head_dim = q.shape
        mean = q.view(batch, tokens, self.num_kv_heads, -1, head_dim).mean(dim=3)
        q_idx = q.new_zeros(batch, tokens, self.num_kv_heads, self.num_kv_heads, head_dim)
        # The diagonal of the two head axes, as a view [B, T, D, Hkv].
        torch.diagonal(q_idx, dim1=2, dim2=3).copy_(mean.transpose(2, 3))
        return q_idx.flatten(3), k.flatten(2)


INDEX_BRANCHES: dict[str, type[nn.Module]] = {"kv_heads": KvHeadIndex}
