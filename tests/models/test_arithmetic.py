"""Two ranks that compute with our shards, exchanging over gloo, find the logits of the whole model."""

from __future__ import annotations

import pytest
import torch
import tp_ranks
import transformers
from model_oracle import FIXTURES, fixture

from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

SPEAKING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How classes end that give logits for a text."""
IDS = [[3 + 7 * n % 90 for n in range(start, start + 12)] for start in (0, 12)]


def cases():
    """Every fixture that speaks, and models whose ranks share what there are too few of."""
    found = {name: fixture(name) for name in FIXTURES}
    found = {name: config for name, config in found.items() if config["architectures"][0].endswith(SPEAKING)}
    del found["llama4"]  # transformers 5.24 reads `image_outputs` of an output without it; its text model is below
    # Engines look for the largest columns of each rank, and not of all, where Gemma 3n keeps only these.
    found["gemma3n_text"] = fixture("gemma3n_text", activation_sparsity_pattern=[0.0] * 4)
    few = {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None}
    return found | {
        "llama, one key/value head": fixture("llama", num_key_value_heads=1),
        "phi3, one key/value head": fixture("phi3", num_key_value_heads=1),
        "falcon, multi-query": fixture("falcon", **few),
        "gpt_bigcode, multi-query": fixture("gpt_bigcode", multi_query=True),
        "mamba2, one group": fixture("mamba2", n_groups=1),
    }


CASES = cases()


def write(path, config):
    """A model whose logits depend on every weight, in float32, and its logits."""
    kind = getattr(transformers, config["architectures"][0])
    model = kind(kind.config_class.from_dict(config)).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1 if parameter.ndim == 1 else noise)
        model.save_pretrained(path)
        return tp_ranks.logits_of(model, IDS)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What went wrong in each case, which all run in one pair of processes."""
    folder = tmp_path_factory.mktemp("arithmetic")
    jobs = {}
    for number, (name, config) in enumerate(CASES.items()):
        source, ranks = folder / f"{number}-source", folder / f"{number}-ranks"
        logits = write(source, {**config, "dtype": "float32"})
        assert logits.std() > 0.02, f"{name}: too little for a comparison"
        torch.save(logits, folder / f"{number}.pt")
        reshard(source, ranks, ReshardOptions(mesh=Mesh.of(tp=2)), source_options=SourceOptions(kv_heads="replicate"))
        jobs[name] = {
            "path": str(ranks),
            "config": {**config, "dtype": "float32"},
            "inputs": IDS,
            "expected": str(folder / f"{number}.pt"),
        }
    # A cut without regard for what is fused must not pass: it would show that the comparison sees nothing.
    for name in ("phi3", "gpt2"):
        jobs[f"{name}, cut in two plain halves"] = {**jobs[name], "naively": True}
    return tp_ranks.run(folder / "gloo", jobs)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_find_the_logits_of_the_whole_model(found, name):
    assert found[name] == ""


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_the_comparison_notices_a_cut_through_fused_parts(found, name):
    assert "not close" in found[f"{name}, cut in two plain halves"]
