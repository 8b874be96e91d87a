"""Which degrees a model allows is what placement says of each of its tensors."""

from __future__ import annotations

import pytest
from known_models import GPT_3, LLAMA_3_8B, QWEN2_7B, deepseek_v3, llama_405b, stock

from shardctl.base.errors import PartitionError
from shardctl.estimate.model.allowed_degrees import AllowedDegrees
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.search.mesh_comparison import WeightTotals
from shardctl.tensors.mesh import Mesh


def test_llama_405b_runs_on_the_mesh_that_meta_trained_it_on():
    mesh = Mesh.of(tp=8, pp=16, dp=128)
    assert AllowedDegrees(llama_405b()).refuse(mesh) is None
    stages = WeightTotals(llama_405b()).stages(mesh)
    assert sum(stages) == 126
    assert set(stages) == {7, 8}
    # Grattafiori et al. 2024, sec. 3.3.2: the first and the last stage have one layer less.
    assert (stages[0], stages[-1]) == (7, 7)


def test_28_heads_are_not_cut_in_8():
    refusal = AllowedDegrees(stock(QWEN2_7B)).refuse(Mesh.of(tp=8))
    assert (refusal.axis, refusal.degree, refusal.works) == ("tp", 8, (1, 2, 4))
    assert str(refusal) == (
        "cannot split model.layers.0.self_attn.q_proj.weight [3584, 3584] over tp=8: 28 attention heads; "
        "tp can be 1, 2, 4"
    )


def test_key_and_value_heads_are_copied_only_if_they_may_be():
    assert AllowedDegrees(stock(LLAMA_3_8B)).degrees("tp", 64) == (1, 2, 4, 8, 16, 32)
    assert AllowedDegrees(stock(LLAMA_3_8B, kv_heads="error")).degrees("tp", 64) == (1, 2, 4, 8)


def test_experts_are_divided_whole():
    law = AllowedDegrees(deepseek_v3())
    assert law.degrees("ep", 300) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert "256 experts; ep can be 1, 2, 4" in str(law.refuse(Mesh.of(dp=3, ep=3)))
    assert {"ep", "etp", "tp", "fsdp"} <= law.axes


def test_each_stage_has_a_layer():
    law = AllowedDegrees(llama_405b())
    assert law.degrees("pp", 130) == tuple(range(1, 127))
    assert str(law.refuse(Mesh.of(pp=128))) == (
        "pp=128 needs at least 128 layers, but the model has 126; pp can be 1 to 126"
    )


def test_a_ring_shares_out_the_sequence():
    law = AllowedDegrees(stock(LLAMA_3_8B), sequence=24)
    assert law.degrees("cp", 12) == (1, 2, 3, 4, 6, 12)
    assert "cp=5 divides a sequence into 10 equal parts, but it has 24 tokens" in str(law.refuse(Mesh.of(cp=5)))
    assert AllowedDegrees(stock(LLAMA_3_8B)).allows_degree("cp", 5)


def test_blocks_of_quantized_weights_stay_whole():
    plain = {**LLAMA_3_8B, "num_hidden_layers": 1, "intermediate_size": 1280}
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert AllowedDegrees(stock(plain)).allows_degree("tp", 4)
    refusal = AllowedDegrees(stock({**plain, "quantization_config": settings})).refuse(Mesh.of(tp=4))
    assert refusal.works == (1, 2)
    assert "10 blocks of 128" in refusal.reason


@pytest.mark.parametrize("config", [QWEN2_7B, LLAMA_3_8B, GPT_3], ids=["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("axis", ["tp", "fsdp", "ep"])
def test_what_is_allowed_can_be_held_and_what_is_not_cannot(config, axis):
    inventory = stock({**config, "num_hidden_layers": 2, "n_layer": 2})
    law = AllowedDegrees(inventory)
    for degree in range(1, 13):
        mesh = Mesh.of(dp=degree, ep=degree) if axis == "ep" else Mesh.of(**{axis: degree})
        if law.refuse(mesh) is None:
            assert list_rank_shards(inventory, mesh, (inventory.layers,))
        else:
            with pytest.raises(PartitionError):
                list_rank_shards(inventory, mesh, (inventory.layers,))
