"""Published models' sizes, and their inventories, for the tests of estimates."""

from __future__ import annotations

from functools import cache

from shardctl.estimate.model.inventory import build_inventory
from shardctl.models import describe_model
from shardctl.tensors.manifest import Tensor


def _llama(hidden, ffn, layers, heads, kv_heads, vocab, **more):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        **more,
    }


LLAMA_2_7B = _llama(4096, 11008, 32, 32, 32, 32000)
LLAMA_3_8B = _llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_3_70B = _llama(8192, 28672, 80, 64, 8, 128256)
LLAMA_3_405B = _llama(16384, 53248, 126, 128, 8, 128256)
QWEN2_7B = {
    **_llama(3584, 18944, 28, 28, 4, 152064),
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
}
GPT_3 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "dtype": "float32",
    "vocab_size": 50257,
    "n_positions": 2048,
    "n_embd": 12288,
    "n_layer": 96,
    "n_head": 96,
}
MIXTRAL_8X7B = {
    **_llama(4096, 14336, 32, 32, 8, 32000),
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3 = {
    **_llama(7168, 18432, 61, 128, 128, 129280),
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
}


def stock(config, *, kv_heads="replicate"):
    """The inventory of a model, without what only some checkpoints have; its kind is cheap to make again."""
    model = describe_model(config, kv_heads=kv_heads)
    tensors = [Tensor(t.name, t.dtype, t.shape, ()) for t in model.own()]
    return build_inventory(tensors, {t.name: model.tensors[t.name].spec for t in tensors}, model.layers)


def even(layers, mesh):
    """Layers of each pipeline stage, the first ones having one more where they cannot be shared out equally."""
    pp = mesh.degree("pp")
    return [layers // pp + (n < layers % pp) for n in range(pp)]


@cache
def llama_405b():
    return stock(LLAMA_3_405B)


@cache
def deepseek_v3():
    return stock(DEEPSEEK_V3)
