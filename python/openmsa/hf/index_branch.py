"""Where index queries and keys come from. A branch is a module

    forward(hidden_states, q, k, position_embeddings) -> q_idx [B, T, Hkv, Di], k_idx [B, T, Di]

with q [B, T, Hq, D] and k [B, T, Hkv, D] after rotary, and an `index_dim`. Its name goes into the saved options, its parameters (if
any) into the state dict, so a learned branch is one more entry of INDEX_BRANCHES.

A branch whose groups each look at their own slice of the index key sets `num_slots = Hkv` and returns q_idx [B, T, Hkv, Di / Hkv]
without the zeros; each group is then scored against its slice alone, which gives the same selection for 1/Hkv of the arithmetic.
"""

from __future__ import annotations

from torch import nn


class KvHeadIndex(nn.Module):
    """The training-free start: k_idx is the KV heads' keys side by side (Di = Hkv * D); a group's q_idx is the mean of its heads'
    queries in the group's own slot, zero elsewhere. So score[t,g,j] is the mean over the group of <q[t,h], k[j,g]>."""

    def __init__(self, config):
        super().__init__()
        self.num_slots = config.num_key_value_heads
        self.index_dim = config.num_key_value_heads * config.head_dim

    def forward(self, hidden_states, q, k, position_embeddings):
        return q.unflatten(2, (self.num_slots, -1)).mean(dim=3), k.flatten(2)


INDEX_BRANCHES: dict[str, type[nn.Module]] = {"kv_heads": KvHeadIndex}
