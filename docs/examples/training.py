"""Training: two MSA layers learn to look up facts that lie far back, first in the warm-up, then sparse. A few seconds on a CPU."""

import openmsa
import torch
from openmsa.nn import MsaAttention
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
# A text has 16 blocks of 16 tokens: 24 facts (a key and its value in one token) somewhere in blocks 0 to 5, then noise, then 48
# questions (a key alone) in blocks 13 to 15. A query reads 3 blocks, so it has to find the right one.
config = openmsa.MsaConfig(num_q_heads=2, num_kv_heads=1, head_dim=32, index_dim=32, block_size=16, top_k=3)
num_facts, num_values, num_questions = 24, 16, 48


def make_texts(count):
    places = torch.rand(count, 96).argsort(-1)[:, :num_facts]
    facts = torch.randint(1, num_values + 1, (count, num_facts))
    asked = torch.randint(0, num_facts, (count, num_questions))
    keys, values = torch.zeros(2, count, 256, dtype=torch.long)  # 0: no key, no value
    keys.scatter_(1, places, torch.arange(1, num_facts + 1).expand(count, -1))
    values.scatter_(1, places, facts)
    keys[:, -num_questions:] = asked + 1
    return keys, values, facts.gather(1, asked) - 1


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.keys, self.values = nn.Embedding(num_facts + 1, width), nn.Embedding(num_values + 1, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.layers = nn.ModuleList(MsaAttention(width, config, rotary_dim=8) for _ in range(2))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, num_values))

    def forward(self, keys, values):
        x, index_kl = self.keys(keys) + self.values(values), 0.0
        for norm, layer in zip(self.norms, self.layers):
            # The loss that teaches this layer's index branch is returned, so it comes through activation checkpoints as well.
            out, layer_kl = checkpoint(layer, norm(x), return_index_kl=True, use_reentrant=False)
            x, index_kl = x + out, index_kl + layer_kl
        return self.head(x[:, -num_questions:]), index_kl


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for phase, num_steps in (("warmup", 120), ("sparse", 80)):
    for layer in model.layers:
        layer.phase = phase
    for _ in range(num_steps):
        keys, values, answers = make_texts(8)
        logits, index_kl = model(keys, values)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        (loss + 1.0 * index_kl).backward()  # the weight is yours; index_kl moves the index branch alone, and loss all the rest
        optimizer.step()
        optimizer.zero_grad()
    print(f"after {phase}: loss {loss:.3f}, index KL {index_kl:.3f}")

keys, values, answers = make_texts(16)
with torch.no_grad():
    right = (model(keys, values)[0].argmax(-1) == answers).float().mean()
print(f"answers found beyond any window: {right:.0%}, by guessing {1 / num_values:.0%}")
assert right > 0.9

# The same without the layer: operators on projected tensors, with the losses put together by hand.
q, k, v = (torch.randn(500, heads, 32, requires_grad=True) for heads in (2, 1, 1))
q_idx, k_idx = torch.randn(500, 1, 32, requires_grad=True), torch.randn(500, 32, requires_grad=True)
batch = openmsa.Batch.packed([127, 1, 372])  # three documents in one pack
out, lse, ids = openmsa.msa_attention(q, k, v, q_idx, k_idx, batch, config, return_lse=True, return_block_ids=True)
out.square().mean().backward()
assert q.grad is not None and q_idx.grad is None
openmsa.index_kl_loss(q, k, lse, q_idx, k_idx, batch, config, block_ids=ids).backward()
print(f"index gradients: q_idx {q_idx.grad.norm():.1e}, k_idx {k_idx.grad.norm():.1e}")
