"""What caches hold: bytes of transformers' own after a forward pass, published bytes per token, what meshes divide."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from cache_bytes import bytes_per_source_token, bytes_per_token, hold_layers, state_bytes
from hypothesis import given
from hypothesis import strategies as st
from transformers import EncoderDecoderCache

from shardctl.base.errors import UsageError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.serving.kv_cache import list_cache_terms
from shardctl.estimate.term import sum_terms
from shardctl.estimate.workload import ServingWorkload
from shardctl.tensors.mesh import Mesh

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
ONE = Mesh.of()
BATCH, TOKENS = 2, 11
WINDOW = 5
SHORT = {"sliding_window": WINDOW, "attention_chunk_size": WINDOW, "attention_window_size": WINDOW}
SWITCH = {"use_sliding_window": True, "max_window_layers": 1}
ENCODED = {"t5", "longt5", "mt5", "umt5", "bart", "marian", "mbart", "m2m_100", "pegasus"}
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def fixture(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


def shortened(name):
    """A fixture with a window that is shorter than the tokens, where its family has windows."""
    config = fixture(name)
    text = config.get("text_config", config)
    short = {key: size for key, size in SHORT.items() if key in text or "sliding_window" not in text}
    switched = "qwen" in config["model_type"] and config["model_type"] != "qwen3_next"
    text.update(short | (SWITCH if switched else {}))
    return config


def cases():
    """Every model that generates; and once more with a short window, if it has any."""
    for path in sorted(CONFIGS.glob("*.json")):
        if path.stem == "llama4":
            continue  # transformers 5.24 reads `image_outputs` of an output without it; llama4_text is here
        shape = build_layer_graph(fixture(path.stem))
        if not shape.generates or any(layer.streams > 1 for layer in shape.layers):
            continue  # DeepSeek-V4's caches are of four kinds, and have a test of their own
        yield pytest.param(fixture(path.stem), id=path.stem)
        layers = build_layer_graph(shortened(path.stem)).layers
        if any(layer.attention is not None and layer.attention.window == WINDOW for layer in layers):
            yield pytest.param(shortened(path.stem), id=f"{path.stem} with a short window")


def build(config):
    kind = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(kind.config_class.from_dict(json.loads(json.dumps(config))))
    return model.to(getattr(torch, config.get("dtype", "float32"))).eval()


def tensors(cache):
    """Every tensor that a cache keeps of tokens."""
    for layer in cache.layers:
        for name in ("keys", "values", "indexer_keys"):
            if isinstance(getattr(layer, name, None), torch.Tensor):
                yield getattr(layer, name)
        for name in ("conv_states", "recurrent_states"):
            yield from (state for state in getattr(layer, name, {}).values() if state is not None)


def nbytes(cache):
    if isinstance(cache, EncoderDecoderCache):
        return nbytes(cache.self_attention_cache) + nbytes(cache.cross_attention_cache)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(cache))


def cached(model, config):
    """Bytes of the cache that a forward pass makes."""
    ids = torch.randint(3, 90, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    ids %= config.get("decoder_vocab_size", 90)
    given = {"input_ids": ids}
    if config["model_type"] == "whisper":
        features = torch.zeros(BATCH, config["num_mel_bins"], 2 * config["max_source_positions"])
        given = {"input_features": features, "decoder_input_ids": ids}
    elif config["model_type"] in ENCODED:
        given["decoder_input_ids"] = ids
    elif config["model_type"] == "gpt2" and config.get("add_cross_attention"):
        given["encoder_hidden_states"] = torch.zeros(BATCH, TOKENS, config["n_embd"])
        given["past_key_values"] = EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    elif config["model_type"] == "gemma3":
        given["token_type_ids"] = torch.zeros_like(ids)
    elif config["model_type"] == "voxtral_realtime":  # a sound for every token
        frames = TOKENS * model.config.audio_length_per_tok
        given["input_features"] = torch.zeros(BATCH, config["audio_config"]["num_mel_bins"], frames)
    elif config["model_type"] == "mllama":
        tiles, side = config["vision_config"]["max_num_tiles"], config["vision_config"]["image_size"]
        given["pixel_values"] = torch.zeros(BATCH, 1, tiles, 3, side, side)
        given |= {"aspect_ratio_ids": torch.ones_like(ids[:, :1]), "aspect_ratio_mask": torch.ones(BATCH, 1, tiles)}
    elif config["model_type"] == "recurrent_gemma":  # whose modules keep the states themselves
        given["past_key_values"] = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = model(**given, use_cache=True)
    if config["model_type"] == "recurrent_gemma":
        held = [
            getattr(module, name, None) for module in model.modules() for name in ("conv1d_state", "recurrent_states")
        ]
        return nbytes(given["past_key_values"]) + sum(t.numel() * t.element_size() for t in held if t is not None)
    return nbytes(made.past_key_values if "past_key_values" in made else made.cache_params)


def as_transformers(terms):
    """The bytes of transformers' own cache: of a window the past, of the rest all."""
    return sum(term.low if "window" in term.name else term.nbytes for term in terms)


@pytest.mark.parametrize("config", list(cases()))
def test_bytes_are_those_of_the_cache_of_transformers(config):
    """Two sequences of eleven tokens; of MLA, transformers 5 caches the latents."""
    shape = build_layer_graph(config)
    dtype = SAFETENSORS[config.get("dtype", "float32")]
    terms = list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(TOKENS, BATCH, page=1), dtype=dtype)
    expected = cached(build(config), config)
    if config.get("new_decoder_architecture"):
        # transformers' Falcon repeats keys and values for every query before it caches them; vLLM's does not.
        expected = expected * config["num_kv_heads"] // config["num_attention_heads"]
    if config["model_type"].startswith("minimax_m3"):
        # transformers works out the keys of its indexer anew at each step; vLLM caches them.
        terms = [term for term in terms if term.name != "keys of the indexer"]
    assert as_transformers(terms) == expected
    assert {term.category for term in terms} == {"kv cache"}
    free = any(
        layer.state
        or (layer.attention.window or TOKENS) < TOKENS
        or any(some.packed for some in layer.attention.besides)
        for layer in shape.layers
    )
    assert any(not term.exact for term in terms) == free


def llama(hidden, layers, heads, kv):
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }


MIXTRAL = {
    **llama(4096, 32, 32, 8),
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
GPT3 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 12288, "n_layer": 96, "n_head": 96}
PUBLISHED = {
    # Grattafiori et al. 2024, Table 3: layers 32, 80, 126; heads 32, 64, 128 of 128; 8 key/value heads.
    "Llama-3.1-8B": (llama(4096, 32, 32, 8), 131_072),
    "Llama-3.1-70B": (llama(8192, 80, 64, 8), 327_680),
    "Llama-3.1-405B": (llama(16384, 126, 128, 8), 516_096),
    # Jiang et al. 2024, Table 1.
    "Mixtral-8x7B": (MIXTRAL, 131_072),
    # DeepSeek-AI 2024, sec. 4.2: 61 layers, a latent of 512 and a rotary key of 64.
    "DeepSeek-V3": (DEEPSEEK_V3, 70_272),
    # Brown et al. 2020, Table 2.1: 96 layers, 96 heads of 128.
    "GPT-3": (GPT3, 4_718_592),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_bytes_per_token(name):
    config, expected = PUBLISHED[name]
    assert bytes_per_token(build_layer_graph(config), dtype="BF16") == expected
    assert bytes_per_token(build_layer_graph(config), dtype="F8_E4M3") == expected // 2
    assert bytes_per_token(build_layer_graph(config), dtype="F32") == expected * 2


def test_a_published_cache_of_the_llama_3_1_series():
    """128k tokens in fp16: 15.62 and 39.06 GB (huggingface.co/blog/llama31, "Inference Memory Requirements")."""
    for name, gib in (("Llama-3.1-8B", 15.62), ("Llama-3.1-70B", 39.06)):
        assert bytes_per_token(build_layer_graph(PUBLISHED[name][0]), dtype="F16") * 128_000 / 2**30 == pytest.approx(
            gib, abs=0.01
        )


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        ("Llama-3.1-70B", 2, 327_680 // 2),
        ("Llama-3.1-70B", 8, 327_680 // 8),
        ("Llama-3.1-70B", 16, 327_680 // 8),  # each head is on two ranks
        ("Llama-3.1-70B", 64, 327_680 // 8),
        ("Llama-3.1-70B", 5, 327_680 // 4),  # the heaviest rank has two heads
        ("GPT-3", 8, 4_718_592 // 8),
        ("DeepSeek-V3", 8, 70_272),  # all heads share the latent
    ],
)
def test_tp_divides_heads_replicates_scarce_ones_and_leaves_latents_whole(name, tp, expected):
    assert bytes_per_token(build_layer_graph(PUBLISHED[name][0]), dtype="BF16", tp=tp) == expected


def test_a_stage_holds_its_own_layers_only():
    shape = build_layer_graph(PUBLISHED["Llama-3.1-405B"][0])
    stages = [range(8), range(8, 126)]
    each = [bytes_per_token(shape, dtype="BF16", layers=stage) for stage in stages]
    assert each == [8 * 4096, 118 * 4096]
    terms = [
        list_cache_terms(shape, hold_layers(shape, stage), Mesh.of(pp=2), ServingWorkload(64, 3), dtype="BF16")
        for stage in stages
    ]
    assert [sum_terms(some).nbytes for some in terms] == [n * 64 * 3 for n in each]
    assert (
        list_cache_terms(
            shape, hold_layers(shape, range(126, 126)), Mesh.of(pp=2), ServingWorkload(64, 3), dtype="BF16"
        )
        == ()
    )


def test_pages_round_up_and_cp_divides_them():
    shape = build_layer_graph(PUBLISHED["Llama-3.1-8B"][0])

    def needed(context, page, **mesh):
        work = ServingWorkload(context, 1, page=page)
        (term,) = list_cache_terms(shape, hold_layers(shape), Mesh.of(**mesh), work, dtype="BF16")
        assert term.exact
        return term.nbytes // 131_072

    assert needed(100, 1) == 100
    assert needed(100, 16) == 112
    assert needed(112, 16) == 112
    assert needed(113, 64) == 128
    assert needed(100, 16, cp=2) == 4 * 16  # seven pages on two ranks
    assert needed(100, 16, tp=4) == 28


def test_the_type_of_the_cache_can_be_chosen():
    shape = build_layer_graph(PUBLISHED["Llama-3.1-8B"][0])
    (bf16,) = list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(4096), dtype="BF16")
    (fp8,) = list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(4096, kv_dtype="F8_E4M3"), dtype="BF16")
    assert bf16.nbytes == 2 * fp8.nbytes == 131_072 * 4096
    with pytest.raises(UsageError, match="no element type 'fp8'"):
        list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(1, kv_dtype="fp8"), dtype="BF16")


GEMMA3_27B = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
PER_LAYER = 2 * 16 * 128 * 2
"""Bytes of a token in a layer of Gemma 3 27B."""


def test_a_window_caps_the_cache_at_its_tokens_and_those_of_a_batch():
    """vLLM, v1/kv_cache_interface.py, SlidingWindowSpec: the past, the new tokens, and a page to begin within."""
    shape = build_layer_graph(GEMMA3_27B)
    assert sum(layer.attention.window is not None for layer in shape.layers) == 52

    def window(context, batch, new):
        work = ServingWorkload(context, batch, batched_tokens=new)
        full, sliding = list_cache_terms(shape, hold_layers(shape), ONE, work, dtype="BF16")
        assert full.nbytes == 10 * PER_LAYER * batch * context
        return [nbytes / 52 / PER_LAYER for nbytes in (sliding.low, sliding.nbytes, sliding.high)]

    assert window(131072, 1, 8192) == [1023, 1024 + 16 + 8192, 131072]
    assert window(131072, 4, 8192) == [4 * 1023, 4 * (1024 + 16) + 8192, 4 * 131072]
    assert window(2048, 1, 8192) == [1023, 2048, 2048]  # never more than there are
    assert window(512, 8, 64) == [8 * 512] * 3


def test_states_do_not_grow_with_the_context():
    for name in ("mamba", "mamba2", "falcon_mamba"):
        shape = build_layer_graph(fixture(name))
        assert bytes_per_token(shape, dtype="F32") == 0
        short, long = (
            sum_terms(list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(n, 3), dtype="F32"))
            for n in (1, 1_000_000)
        )
        assert short == long
        assert short.nbytes == 3 * state_bytes(shape, dtype="F32")


def test_a_state_in_the_type_of_the_model_is_the_least():
    """vLLM keeps recurrent states in the model's type by default and one token less of the convolution's window."""
    shape = build_layer_graph(fixture("qwen3_next"))
    (state,) = [
        t
        for t in list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(8), dtype="BF16")
        if "states" in t.name
    ]
    assert state.nbytes == 2 * (80 * 4 * 2 + 8 * 4 * 6 * 4)
    assert state.interval == (2 * (80 * 3 * 2 + 8 * 4 * 6 * 2), state.nbytes)


def test_tp_divides_states_but_not_beyond_the_groups_of_b_and_c():
    """64 channels, 4 groups of 8 for each of B and C (vLLM, mamba_utils.py, extra_groups_for_head_shards)."""
    shape = build_layer_graph(fixture("mamba2"))
    whole = 2 * ((64 + 64) * 4 + 64 * 8) * 4
    assert [state_bytes(shape, dtype="F32", tp=tp) for tp in (1, 2, 4)] == [whole, whole // 2, whole // 4]
    assert state_bytes(shape, dtype="F32", tp=8) == 2 * ((8 + 16) * 4 + 64) * 4


def test_an_encoder_decoder_has_two_caches():
    """T5: the decoder's own grows with the answer, that of the encoder's keys and values with the prompt."""
    config = fixture("t5")
    shape, model = build_layer_graph(config), build(config)
    prompt, answer = torch.randint(3, 90, (1, 9)), torch.randint(3, 90, (1, 4))
    with torch.no_grad():
        made = model(input_ids=prompt, decoder_input_ids=answer, use_cache=True).past_key_values
    own, cross = made.self_attention_cache, made.cross_attention_cache
    assert nbytes(own) == 4 * bytes_per_token(shape, dtype="F32")
    assert nbytes(cross) == 9 * bytes_per_source_token(shape, dtype="F32")
    assert bytes_per_source_token(build_layer_graph(fixture("llama")), dtype="F32") == 0


def test_the_encoder_of_whisper_always_has_as_many_moments():
    """Whisper large-v3: 1500 moments, 32 layers of 20 heads of 64 (Radford et al. 2022, Table 1)."""
    shape = build_layer_graph({
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": 51866, "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
        "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120, "max_source_positions": 1500, "max_target_positions": 448,
    })  # fmt: skip
    own, cross = list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(448, 1, page=4), dtype="F16")
    assert own.nbytes == 448 * 32 * 2 * 1280 * 2
    assert cross.nbytes == 1500 * 32 * 2 * 1280 * 2


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "vit", "clip", "siglip"])
def test_encoders_cache_nothing(name):
    shape = build_layer_graph(fixture(name))
    assert bytes_per_token(shape, dtype="F32") == 0
    assert list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(512, 8), dtype="F32") == ()


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForSequenceClassification"])
def test_decoders_without_a_head_for_texts_cache_nothing(architecture):
    shape = build_layer_graph({**fixture("llama"), "architectures": [architecture]})
    assert list_cache_terms(shape, hold_layers(shape), ONE, ServingWorkload(512, 8), dtype="BF16") == ()


@given(
    st.sampled_from(["llama", "deepseek_v3", "gemma2", "qwen3_next", "mamba2", "t5"]),
    st.integers(1, 1 << 20), st.integers(1, 512), st.integers(1, 64), st.integers(1, 1 << 14), st.integers(1, 8),
)  # fmt: skip
def test_more_tokens_sequences_or_wider_pages_never_need_less(name, context, batch, page, new, cp):
    shape = build_layer_graph(fixture(name))

    def needed(**changes):
        work = ServingWorkload(**{"context": context, "batch": batch, "page": page, "batched_tokens": new, **changes})
        some = sum_terms(list_cache_terms(shape, hold_layers(shape), Mesh.of(cp=cp), work, dtype="BF16"))
        assert some.low <= some.nbytes <= some.high
        return some.nbytes

    least = needed()
    assert needed(context=context + 1) >= least
    assert needed(batch=batch + 1) >= least
    assert needed(batched_tokens=new + 1) >= least
    assert needed(page=1, context=math.ceil(context / page) * page) <= least
