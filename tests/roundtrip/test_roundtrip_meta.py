"""Meta to Hugging Face: the same bits as by the rule of transformers, and the same logits as by the model of Meta."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from fixtures.meta import make as make_meta
from shardctl.base.errors import ShardctlError, UnsupportedError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"

NAMES = tuple(make_meta.PARAMS)


def in_hf_order(name: str) -> dict[str, torch.Tensor]:
    """A model as transformers' `convert_llama_weights_to_hf.py` makes it: names, and `permute` of queries and keys."""
    params, whole = make_meta.PARAMS[name], make_meta.weights(name)
    dim = params["dim"]

    def permute(w: torch.Tensor, heads: int) -> torch.Tensor:
        rows = w.shape[0]
        return w.view(heads, rows // heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim)

    state = {}
    for n in range(params["n_layers"]):
        meta, hf = f"layers.{n}", f"model.layers.{n}"
        q, k = whole[f"{meta}.attention.wq.weight"], whole[f"{meta}.attention.wk.weight"]
        state |= {
            f"{hf}.self_attn.q_proj.weight": permute(q, params["n_heads"]),
            f"{hf}.self_attn.k_proj.weight": permute(k, params.get("n_kv_heads", params["n_heads"])),
            f"{hf}.self_attn.v_proj.weight": whole[f"{meta}.attention.wv.weight"],
            f"{hf}.self_attn.o_proj.weight": whole[f"{meta}.attention.wo.weight"],
            f"{hf}.mlp.gate_proj.weight": whole[f"{meta}.feed_forward.w1.weight"],
            f"{hf}.mlp.down_proj.weight": whole[f"{meta}.feed_forward.w2.weight"],
            f"{hf}.mlp.up_proj.weight": whole[f"{meta}.feed_forward.w3.weight"],
            f"{hf}.input_layernorm.weight": whole[f"{meta}.attention_norm.weight"],
            f"{hf}.post_attention_layernorm.weight": whole[f"{meta}.ffn_norm.weight"],
        }
    ends = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    return state | {f"{hf}.weight": whole[f"{meta}.weight"] for hf, meta in ends.items()}


def meta_logits(name: str, tokens: torch.Tensor) -> torch.Tensor:
    """What Meta's model computes in float32: rotary embeddings of neighbouring pairs, as complex numbers."""
    params, w = make_meta.PARAMS[name], {key: t.float() for key, t in make_meta.weights(name).items()}
    heads, dim = params["n_heads"], params["dim"]
    head, kv_heads = dim // heads, params.get("n_kv_heads", heads)
    frequencies = 1.0 / params.get("rope_theta", 10000.0) ** (torch.arange(0, head, 2).float() / head)
    if params.get("use_scaled_rope"):
        frequencies = scaled(frequencies, params["rope_scaling_factor"])
    length = tokens.shape[1]
    angles = torch.outer(torch.arange(length).float(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def norm(x: torch.Tensor, key: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * w[key]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)

    x = w["tok_embeddings.weight"][tokens]
    mask = torch.full((length, length), float("-inf")).triu(1)
    for n in range(params["n_layers"]):
        at = norm(x, f"layers.{n}.attention_norm.weight")
        q, k, v = (
            (at @ w[f"layers.{n}.attention.{part}.weight"].T).unflatten(-1, (-1, head)) for part in ("wq", "wk", "wv")
        )
        q, k = rotated(q), rotated(k).repeat_interleave(heads // kv_heads, 2)
        v = v.repeat_interleave(heads // kv_heads, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / head**0.5 + mask
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2)
        x = x + mixed @ w[f"layers.{n}.attention.wo.weight"].T
        inner = norm(x, f"layers.{n}.ffn_norm.weight")
        gate = torch.nn.functional.silu(inner @ w[f"layers.{n}.feed_forward.w1.weight"].T)
        up = inner @ w[f"layers.{n}.feed_forward.w3.weight"].T
        x = x + (gate * up) @ w[f"layers.{n}.feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ w["output.weight"].T


def scaled(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """The frequencies of Llama 3.1 (llama-models `llama3/model.py`, `apply_scaling`)."""
    lengths = 2 * torch.pi / frequencies
    smooth = ((8192 / lengths - 1) / (4 - 1)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.int16), value.contiguous().view(torch.int16)), name


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Path]:
    places = {}
    for name in NAMES:
        places[name] = tmp_path_factory.mktemp("converted") / name
        reshard(FIXTURES / "meta" / name, places[name])
    return places


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> dict[str, Path]:
    """The models as transformers itself saves them."""
    places = {}
    for name in NAMES:
        places[name] = tmp_path_factory.mktemp("original") / name
        params, state = make_meta.PARAMS[name], in_hf_order(name)
        config = LlamaConfig(
            hidden_size=params["dim"],
            intermediate_size=state["model.layers.0.mlp.up_proj.weight"].shape[0],
            num_hidden_layers=params["n_layers"],
            num_attention_heads=params["n_heads"],
            num_key_value_heads=params.get("n_kv_heads", params["n_heads"]),
            vocab_size=make_meta.VOCABULARY,
        )
        model = LlamaForCausalLM(config).to(make_meta.DTYPES[name])
        model.load_state_dict(state)
        model.save_pretrained(places[name])
    return places


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_that_transformers_makes(name, converted):
    same(load_file(converted[name] / "model.safetensors"), in_hf_order(name))
    assert {path.name for path in converted[name].iterdir()} == {
        *("config.json", "model.safetensors", "shardctl.json", "tokenizer.model")
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_is_that_of_the_original(name, converted, original):
    assert digest(FIXTURES / "meta" / name).digest == digest(original[name]).digest == digest(converted[name]).digest
    assert verify(converted[name], VerifyOptions(level="full", against=FIXTURES / "meta" / name)).ok


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_are_those_of_metas_model(name, converted):
    tokens = torch.randint(0, make_meta.VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
    model = LlamaForCausalLM.from_pretrained(converted[name], dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        found = model(input_ids=tokens).logits
    expected = meta_logits(name, tokens)
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4), (found - expected).abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_to_ranks(name, converted, tmp_path):
    reshard(FIXTURES / "meta" / name, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2, pp=2)))
    checked = verify(tmp_path / "ranks", VerifyOptions(level="full", against=converted[name]))
    assert checked.ok, checked.findings
    assert checked.digest == digest(converted[name]).digest


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama2", 1), ("llama2", 4), ("llama3", 1), ("llama3", 2), ("llama31", 2)]
)
def test_however_many_ranks_it_has(name, ranks, converted, tmp_path):
    make_meta.write(name, tmp_path / "meta", ranks)
    assert digest(tmp_path / "meta").digest == digest(converted[name]).digest


def test_the_config_says_what_the_params_say(converted):
    config = json.loads((converted["llama31"] / "config.json").read_text())
    assert config == config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 112,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 131_072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    assert config["rope_scaling"]["factor"] == 8.0


def test_a_config_of_its_own_wins(original, tmp_path):
    result = reshard(
        FIXTURES / "meta" / "llama2", tmp_path / "out", source_options=SourceOptions(config=original["llama2"])
    )
    assert result.warnings == ()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == json.loads((original["llama2"] / "config.json").read_text())


# Back to Meta's layout


@pytest.mark.parametrize("name", NAMES)
def test_back_to_the_very_tensors_of_meta(name, converted, tmp_path):
    ranks = make_meta.RANKS[name]
    mesh = Mesh.of(tp=ranks) if ranks > 1 else None
    reshard(
        converted[name],
        tmp_path / "meta",
        ReshardOptions(to="meta", mesh=mesh),
        source_options=SourceOptions(kv_heads="replicate"),
    )
    for rank in range(ranks):
        file = f"consolidated.{rank:02d}.pth"
        found = torch.load(tmp_path / "meta" / file, weights_only=True, mmap=True)
        expected = torch.load(FIXTURES / "meta" / name / file, weights_only=True)
        expected.pop("rope.freqs", None)
        same(found, expected)
    assert verify(tmp_path / "meta", VerifyOptions(level="full", against=FIXTURES / "meta" / name)).ok
    assert digest(tmp_path / "meta").digest == digest(converted[name]).digest


@pytest.mark.parametrize("name", NAMES)
def test_the_params_it_writes_describe_the_same_model(name, converted, tmp_path):
    reshard(converted[name], tmp_path / "meta", ReshardOptions(to="meta"))
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    given = make_meta.PARAMS[name]
    same_fields = set(given) - {"multiple_of", "ffn_dim_multiplier", "vocab_size"}
    assert {key: params[key] for key in same_fields} == {key: given[key] for key in same_fields}
    inner = int(params.get("ffn_dim_multiplier", 1) * int(8 * params["dim"] / 3))
    inner = -(-inner // params["multiple_of"]) * params["multiple_of"]
    assert inner == make_meta.weights(name)["layers.0.feed_forward.w1.weight"].shape[0]
    (tmp_path / "meta" / "config.json").unlink()
    (tmp_path / "meta" / "shardctl.json").unlink()
    assert digest(tmp_path / "meta").digest == digest(converted[name]).digest


def test_a_tied_embedding_is_written_under_both_names(tmp_path):
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meta", ReshardOptions(to="meta", mesh=Mesh.of(tp=2)))
    parts = [torch.load(tmp_path / "meta" / f"consolidated.{rank:02d}.pth") for rank in range(2)]
    whole = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    for name in ("tok_embeddings.weight", "output.weight"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole)
    assert digest(tmp_path / "meta").digest == digest(tmp_path / "hf").digest


@pytest.mark.parametrize(
    ("change", "reshard_options", "message"),
    [
        ({"attention_bias": True}, ReshardOptions(to="meta"), "has no place for model.layers.0.self_attn.q_proj.bias"),
        (
            {"mlp_bias": True},
            ReshardOptions(to="meta", mesh=Mesh.of(pp=2)),
            "has no place for model.layers.0.mlp.gate_proj.bias",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
            ReshardOptions(to="meta"),
            "does not support this config's rotary embeddings of type 'default'",
        ),
        ({"head_dim": 6}, ReshardOptions(to="meta"), "heads that together are as wide as the model, 16, not 24"),
        ({"hidden_act": "gelu"}, ReshardOptions(to="meta"), "has the activation silu, not gelu"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            ReshardOptions(to="meta"),
            "rotary embeddings of type 'linear'",
        ),
        ({}, ReshardOptions(to="meta", mesh=Mesh.of(pp=2)), "the mesh is pp2"),
        ({}, ReshardOptions(to="meta", exclude="norm"), "was left out"),
        ({}, ReshardOptions(to="meta", max_shard_size=1000), "--to meta does not use --max-shard-size"),
        ({}, ReshardOptions(to="meta", optimizer_states="keep"), "no optimizer states"),
        (
            {"vocab_size": 33},
            ReshardOptions(to="meta", mesh=Mesh.of(tp=2)),
            r"lm_head.weight \[33, 16\] cannot be divided into 2 equal parts",
        ),
    ],
)
def test_what_metas_code_has_no_place_for_is_refused(change, reshard_options, message, tmp_path):
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "architectures": ["LlamaForCausalLM"],
    }
    LlamaForCausalLM(LlamaConfig(**(small | change))).save_pretrained(tmp_path / "hf")
    with pytest.raises(ShardctlError, match=message):
        reshard(tmp_path / "hf", tmp_path / "meta", reshard_options)


def test_another_model_is_refused_by_its_name(converted, tmp_path):
    config = json.loads((converted["llama2"] / "config.json").read_text())
    other = tmp_path / "config.json"
    other.write_text(json.dumps(config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    reshard_options, source_options = ReshardOptions(to="meta", mesh=Mesh.of(tp=2)), SourceOptions(config=other)
    with pytest.raises(UnsupportedError, match="is for Llama 2, 3 and 4, not for MistralForCausalLM"):
        reshard(
            converted["llama2"] / "model.safetensors", tmp_path / "meta", reshard_options, source_options=source_options
        )
