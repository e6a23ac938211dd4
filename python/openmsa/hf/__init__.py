"""OpenMSA in Hugging Face transformers.

convert(model) gives a Llama-family model MSA layers; use_openmsa(model) runs MiniMax-M3's own layers through our operators. Both keep
generate(), chunked prefill and padded batches working, refuse what they cannot do right, and count what ran (msa_stats, assert_sparse).
"""

from .cache import MsaCache, MsaCacheLayer
from .llama import MsaLlamaConfig, MsaLlamaForCausalLM, MsaLlamaModel, convert
from .minimax_m3 import use_openmsa
from .options import MsaOptions
from .runtime import LayerStats, Recorder, Selection, assert_sparse, msa_stats, record_selection, why_not_on_gpu

__all__ = [
    "LayerStats",
    "MsaCache",
    "MsaCacheLayer",
    "MsaLlamaConfig",
    "MsaLlamaForCausalLM",
    "MsaLlamaModel",
    "MsaOptions",
    "Recorder",
    "Selection",
    "assert_sparse",
    "convert",
    "msa_stats",
    "record_selection",
    "use_openmsa",
    "why_not_on_gpu",
]
