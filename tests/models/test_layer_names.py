"""Layers are counted by names alone; the names here are those of models that people use."""

from __future__ import annotations

import pytest

from shardctl.models.tables.layer_names import count_layers

BLOCK = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")


def name_layers(pattern: str, count: int, parts=BLOCK) -> list[str]:
    return [f"{pattern.format(number)}.{part}" for number in range(count) for part in parts]


def count(*names: str):
    return count_layers(dict.fromkeys(names, (4, 4)))


def test_towers_follow_each_other_in_the_order_of_computation_whatever_that_of_the_file():
    places = count(
        *name_layers("talker.model.layers.{}", 2),
        *name_layers("thinker.model.layers.{}", 3),
        *name_layers("thinker.audio_tower.layers.{}", 2),
        *name_layers("token2wav.dit.transformer_blocks.{}", 1),
    )
    assert str(places) == (
        "2 of thinker.audio_tower.layers.*, then 3 of thinker.model.layers.*, then 2 of talker.model.layers.*, "
        "then 1 of token2wav.dit.transformer_blocks.*"
    )
    assert places.layers == 8
    assert places.find_stage("thinker.model.layers.1.mlp.fc1.weight") == ("layer", 3)


def test_encoders_come_before_decoders():
    places = count(*name_layers("decoder.block.{}", 2), *name_layers("encoder.block.{}", 2))
    assert [tower.patterns for tower in places.towers] == [("encoder.block.*",), ("decoder.block.*",)]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.visual.patch_embed.proj.weight", ("first", 0)),
        ("model.visual.merger.linear_fc1.weight", ("layer", 1)),
        ("model.language_model.embed_tokens.weight", ("layer", 2)),
        ("model.language_model.norm.weight", ("last", 0)),
        ("lm_head.weight", ("last", 0)),
        ("model.gadget.weight", ("first", 0)),
    ],
)
def test_what_is_outside_of_layers_precedes_or_follows_those_of_its_own_tower(name, stage):
    places = count(*name_layers("model.visual.blocks.{}", 2), *name_layers("model.language_model.layers.{}", 3), name)
    assert places.find_stage(name) == stage
    assert places.is_undecided(name) == ("gadget" in name)


def test_a_child_of_the_module_that_has_the_layers_belongs_to_them():
    places = count(*name_layers("model.visual.blocks.{}", 2), *name_layers("model.layers.{}", 3))
    assert places.find_stage("model.embed_tokens.weight") == ("layer", 2)
    assert places.find_stage("model.norm.weight") == ("last", 0)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("transformer.wte.weight", "first"),
        ("transformer.word_embeddings_layernorm.weight", "first"),
        ("model.embed_norm.weight", "first"),
        ("vision.cls_token", "first"),
        ("encoder.post_layernorm.weight", "last"),
        ("transformer.ln_f.bias", "last"),
        ("embed_out.weight", "last"),
        ("cls.predictions.transform.dense.weight", "last"),
        ("score.weight", "last"),
    ],
)
def test_words_say_whether_a_tensor_precedes_or_follows(name, stage):
    assert count(*name_layers("h.{}", 2), name).find_stage(name) == (stage, 0)


def test_the_outermost_number_counts_and_experts_count_no_layers():
    parts = [f"moe.experts.{expert}.{part}.weight" for expert in range(8) for part in ("gate", "up", "down")]
    assert str(count(*name_layers("model.layers.{}", 2, parts))) == "2 of model.layers.*"


def test_lists_of_heads_codebooks_and_projections_count_no_layers():
    names = [f"{name}.{n}.weight" for name in ("lm_heads", "embed_tokens", "visual.merger.mlp") for n in range(4)]
    merged = name_layers("visual.deepstack_merger_list.{}", 3, ("linear_fc1.weight", "linear_fc2.weight"))
    places = count(*names, *merged, *name_layers("layers.{}", 4))
    assert str(places) == "4 of layers.*"
    assert places.find_stage("lm_heads.3.weight") == ("last", 0)
    assert places.find_stage("embed_tokens.3.weight") == ("first", 0)


def test_lists_beside_each_other_that_count_alike_are_parts_of_the_same_layers():
    lists = {"attentions": ("q_lin.weight", "k_lin.weight", "v_lin.weight"), "ffns": ("lin1.weight", "lin2.weight")}
    names = [n for each, parts in lists.items() for n in name_layers(f"transformer.{each}.{{}}", 3, parts)]
    places = count(*names, *(f"transformer.layer_norm1.{n}.weight" for n in range(3)))
    assert places.layers == 3
    assert {places.find_stage(f"transformer.{each}.2.{part}")[1] for each, (part, *_) in lists.items()} == {2}
    assert places.find_stage("transformer.layer_norm1.1.weight") == ("layer", 1)


def test_lists_beside_each_other_that_are_layers_both_follow_each_other():
    places = count(*name_layers("layers.{}", 2), *name_layers("vision_blocks.{}", 2))
    assert str(places) == "2 of vision_blocks.*, then 2 of layers.*"


def test_a_number_may_stand_behind_an_underscore():
    places = count("emb.embedding", *name_layers("encoder.layers_{}", 12))
    assert str(places) == "12 of encoder.layers_*"
    assert places.find_stage("encoder.layers_10.mlp.fc1.weight") == ("layer", 10)


def test_numbers_that_are_missing_leave_no_hole():
    places = count(*name_layers("h.{}", 1), *(name for name in name_layers("h.{}", 9) if name.startswith("h.8")))
    assert places.layers == 2
    assert places.find_stage("h.8.mlp.fc1.weight") == ("layer", 1)


def test_layers_of_few_matrices_count_where_there_are_no_others():
    assert count("mix.0.weight", "mix.1.weight", "head.weight").layers == 2
    assert count("up.weight", "down.weight").layers == 0
