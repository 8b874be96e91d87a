"""Trainers with names of their own: torchtune, OLMo, OLMo-core and nanoGPT, saved as their code names tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from safetensors.torch import load_file
from stored_bits import bits

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
State = dict[str, torch.Tensor]


def rename(state: State, *rules: tuple[str, str]) -> State:
    """Apply the first rule that matches each name."""
    named = {}
    for name, value in state.items():
        rule = next((rule for rule in rules if re.search(rule[0], name)), None)
        named[re.sub(rule[0], rule[1], name) if rule is not None else name] = value
    return named


TUNE = (
    (r"^model\.embed_tokens\.weight", "tok_embeddings.weight"),
    (r"^model\.norm\.weight", "norm.scale"),
    (r"^lm_head", "output"),
    (r"^model\.(.+)\.self_attn\.o_proj", r"\1.attn.output_proj"),
    (r"^model\.(.+)\.self_attn", r"\1.attn"),
    (r"^model\.(.+)\.mlp\.gate_proj", r"\1.mlp.w1"),
    (r"^model\.(.+)\.mlp\.up_proj", r"\1.mlp.w3"),
    (r"^model\.(.+)\.mlp\.down_proj", r"\1.mlp.w2"),
    (r"^model\.(.+)\.input_layernorm\.weight", r"\1.sa_norm.scale"),
    (r"^model\.(.+)\.post_attention_layernorm\.weight", r"\1.mlp_norm.scale"),
)


def permute(weight: torch.Tensor, head: int) -> torch.Tensor:
    """`_permute` of torchtune's `hf_to_tune`."""
    return weight.view(-1, 2, head // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def tune_llama(state: State, config) -> State:
    head = config.hidden_size // config.num_attention_heads
    return rename({n: permute(v, head) if re.search("[qk]_proj", n) else v for n, v in state.items()}, *TUNE)


def tune_qwen2(state: State, config) -> State:
    """Rows stay in their order, and a tied head is left out."""
    del config
    return rename({name: value for name, value in state.items() if name != "lm_head.weight"}, *TUNE)


def tune_phi3(state: State, config) -> State:
    """What transformers has in one is divided."""
    rows = config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    parted = {}
    for name, value in state.items():
        if "qkv_proj" in name:
            parts = value.split([config.hidden_size, rows, rows])
            parted |= {name.replace("qkv_proj", f"{part}_proj"): v for part, v in zip("qkv", parts, strict=True)}
        elif "gate_up_proj" in name:
            gate, up = value.chunk(2)
            parted |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            parted[name] = value
    return rename({name: value.clone() for name, value in parted.items()}, *TUNE)


def olmo2(state: State, config) -> State:
    """Queries, keys and values are one array, and so are up and gate, in that order."""
    joined = {}
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}.", f"transformer.blocks.{layer}."
        joined[f"{theirs}att_proj.weight"] = torch.cat([state[f"{ours}self_attn.{p}_proj.weight"] for p in "qkv"])
        joined[f"{theirs}ff_proj.weight"] = torch.cat([state[f"{ours}mlp.{p}_proj.weight"] for p in ("up", "gate")])
    rest = {n: v for n, v in state.items() if not re.search(r"\.([qkv]|up|gate)_proj", n)}
    named = rename(
        rest,
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"^lm_head", "transformer.ff_out"),
        (r"^model\.layers\.(\d+)\.self_attn\.o_proj", r"transformer.blocks.\1.attn_out"),
        (r"^model\.layers\.(\d+)\.mlp\.down_proj", r"transformer.blocks.\1.ff_out"),
        (r"^model\.layers\.(\d+)\.self_attn\.([qk]_norm)", r"transformer.blocks.\1.\2"),
        (r"^model\.layers\.(\d+)\.post_attention_layernorm", r"transformer.blocks.\1.attn_norm"),
        (r"^model\.layers\.(\d+)\.post_feedforward_layernorm", r"transformer.blocks.\1.ff_norm"),
    )
    return {**named, **joined}


def olmo_core(state: State, config) -> State:
    del config
    return rename(
        state,
        (r"^model\.embed_tokens", "embeddings"),
        (r"^model\.norm", "lm_head.norm"),
        (r"^lm_head", "lm_head.w_out"),
        (r"^model\.layers\.(\d+)\.self_attn\.o_proj", r"blocks.\1.attention.w_out"),
        (r"^model\.layers\.(\d+)\.self_attn\.([qkv])_proj", r"blocks.\1.attention.w_\2"),
        (r"^model\.layers\.(\d+)\.self_attn\.([qk]_norm)", r"blocks.\1.attention.\2"),
        (r"^model\.layers\.(\d+)\.mlp\.gate_proj", r"blocks.\1.feed_forward.w1"),
        (r"^model\.layers\.(\d+)\.mlp\.down_proj", r"blocks.\1.feed_forward.w2"),
        (r"^model\.layers\.(\d+)\.mlp\.up_proj", r"blocks.\1.feed_forward.w3"),
        (r"^model\.layers\.(\d+)\.post_attention_layernorm", r"blocks.\1.attention_norm"),
        (r"^model\.layers\.(\d+)\.post_feedforward_layernorm", r"blocks.\1.feed_forward_norm"),
    )


def nano_gpt(state: State, config) -> State:
    """nanoGPT has linear layers where transformers' GPT-2 has `Conv1D`, and `torch.compile` wraps the model."""
    del config
    turned = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {f"_orig_mod.{n}": v.t().contiguous() if n.endswith(turned) else v for n, v in state.items()}


TRAINERS: dict[str, tuple[str, Callable[..., State], str]] = {
    "torchtune-llama": ("llama", tune_llama, "torchtune's names and arrays"),
    "torchtune-qwen2": ("qwen2-tied", tune_qwen2, "torchtune's names and arrays"),
    "torchtune-phi3": ("phi3", tune_phi3, "torchtune's names and arrays"),
    "olmo": ("olmo2", olmo2, "OLMo's names and arrays"),
    "olmo-core": ("olmo2", olmo_core, "OLMo-core's names and arrays"),
    "nanogpt": ("gpt2", nano_gpt, "matrices are [out, in], as nanoGPT has them"),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_weights_and_states_are_those_of_transformers(trainer, tmp_path):
    """The moments are the weights halved, so each must come out where its weight does."""
    name, translate, note = TRAINERS[trainer]
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | {"dtype": "float32"}
    kind = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    model = kind(kind.config_class.from_dict(config)).float()
    model.save_pretrained(tmp_path / "hf")
    state = {n: v.clone() for n, v in model.state_dict().items()}
    state |= {"lm_head.weight": state["lm_head.weight"]} if "lm_head.weight" in state else {}
    saved = translate(state, model.config)
    moments = {n: {"exp_avg": v * 0.5, "step": torch.tensor(3.0)} for n, v in saved.items()}
    groups = [{"lr": 1e-3, "params": list(saved)}]
    torch.save({"model": saved, "optimizer": {"state": moments, "param_groups": groups}}, tmp_path / "ckpt.pt")
    read = SourceOptions(config=tmp_path / "hf")
    reshard(tmp_path / "ckpt.pt", tmp_path / "out", ReshardOptions(to="hf"), source_options=read)
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert {n: bits(v) for n, v in found.items() if n in expected} == {n: bits(v) for n, v in expected.items()}
    assert found.keys() - expected.keys() <= {"lm_head.weight"}
    reshard(tmp_path / "ckpt.pt", tmp_path / "dcp", ReshardOptions(to="dcp"), source_options=read)
    assert verify(tmp_path / "dcp", VerifyOptions(level="full", against=tmp_path / "ckpt.pt"), source_options=read).ok
    with open_checkpoint(tmp_path / "ckpt.pt", read) as checkpoint:
        training = checkpoint.manifest.training
        assert any(note in each for each in training.notes)
        assert {f"optimizer.exp_avg.{n}" for n in expected} <= training.states.keys()
        assert {t.shape for n, t in training.states.items() if ".step." in n} == {()}


def test_names_of_another_trainer_stay_as_they_are(tmp_path):
    """One tensor that no table has keeps all from being translated: nothing is guessed."""
    config = transformers.LlamaConfig.from_dict(json.loads((CONFIGS / "llama.json").read_text()))
    state = transformers.LlamaForCausalLM(config).state_dict()
    torch.save({**tune_llama(state, config), "layers.0.attn.gate.weight": torch.ones(2, 2)}, tmp_path / "model.pt")
    with open_checkpoint(tmp_path / "model.pt", SourceOptions(config=CONFIGS / "llama.json")) as checkpoint:
        assert checkpoint.model is None
        assert "tok_embeddings.weight" in checkpoint.manifest.tensors
