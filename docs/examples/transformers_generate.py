"""A transformers model with MSA layers: python transformers_generate.py [MODEL_FOLDER]; without one, a tiny random Llama."""

import sys

import openmsa.hf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
if len(sys.argv) > 1:
    dense = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
else:
    dense = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, bos_token_id=1, eos_token_id=None)).eval()

# convert() shares the weights and leaves `dense` as it is. The first layer stays dense; the others keep 8 blocks of 64 tokens.
sparse = openmsa.hf.convert(dense, block_size=64, top_k=8, dense_layers=1)

prompt = torch.randint(3, dense.config.vocab_size, (1, 1500))
options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
with torch.inference_mode():
    written = sparse.generate(prompt, **options)
    in_chunks = sparse.generate(prompt, prefill_chunk_size=400, **options)
print("written:", written[0, prompt.shape[1]:].tolist())
assert torch.equal(written, in_chunks), "reading the prompt in chunks gives the same text"

# Did the sparse layers really run sparse, and were there blocks to leave out? Raises if not.
openmsa.hf.assert_sparse(sparse, dropped=True)
for layer, stats in openmsa.hf.msa_stats(sparse).items():
    print(f"layer {layer}: {stats.sparse_queries} sparse queries, {stats.dense_queries} dense; {stats.dropped_queries} left blocks unread")

# How good is the choice? Block recall: how many of the blocks that dense attention looks at most were chosen; score recall: what
# share of their attention. And what is it worth: how far the two models' predictions are apart.
with torch.inference_mode(), openmsa.hf.record_selection(sparse, max_queries=64) as recorder:
    sparse_logits = sparse(prompt).logits[0, -1]
    dense_logits = dense(prompt).logits[0, -1]
quality = recorder.quality()
print(f"block recall {quality.block_recall:.2f}, score recall {quality.score_recall:.2f}")
divergence = torch.nn.functional.kl_div(sparse_logits.log_softmax(-1), dense_logits.log_softmax(-1), log_target=True, reduction="sum")
print(f"KL divergence of the next-token prediction from the dense model's: {divergence:.2e} nats")

# Save and load like any model; `import openmsa.hf` makes the type known to transformers.
if len(sys.argv) == 1:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        sparse.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        assert torch.equal(loaded(prompt).logits[0, -1], sparse_logits)
    print("saved, loaded, and the same")
