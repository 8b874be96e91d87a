"""Binding finds the global tensor behind every stored name, and refuses what it cannot explain."""

from __future__ import annotations

import json

import pytest
import transformers
from family_checks import FamilyChecks
from model_oracle import FIXTURES, fixture, list_classes, on_meta, state, stored
from safetensors import safe_open

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest

EACH = FamilyChecks()
HEADS = ("lm_head", "qa_outputs")


def saved(config, folder):
    """A checkpoint as transformers itself saves it."""
    kind = getattr(transformers, config["architectures"][0])
    kind(kind.config_class.from_dict(config)).save_pretrained(folder)
    return read(folder / "model.safetensors")


def read(path):
    """Names and shapes as the safetensors library reads them."""
    with safe_open(path, "np") as file:
        return stored((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118 - no mapping


def layout(manifest):
    """All that a digest depends on."""
    return [(t.name, t.dtype, t.shape, t.ties) for t in manifest.tensors.values()]


@EACH.add()
def check_what_transformers_saves_binds_to_the_whole_model(name, tmp_path):
    config = fixture(name)
    # transformers would save the T5 that it has just made with a tied head, whatever the config says.
    checkpoint = stored(state(on_meta(config)).items()) if name == "t5-gated-untied" else saved(config, tmp_path)
    model = describe_model(config)
    bound = bind_manifest(model, checkpoint)
    assert list(bound.tensors) == [t.name for t in model.own()]
    for tensor in bound.tensors.values():
        names = tuple(c.name for c in tensor.chunks)
        transposed = tensor.name in model.fusions  # which keeps its name, as transformers saves Qwen3-VL's experts
        assert tensor.spelling == (() if names == (tensor.name, *tensor.ties) and not transposed else names)
    arrays = [c.name for t in bound.tensors.values() for c in t.chunks]
    assert sorted(set(arrays)) == sorted(checkpoint.tensors)
    assert len(arrays) == len(set(arrays)) or any(len(fusion.tensors) > 1 for fusion in model.fusions.values())
    assert bound.warnings == ()


@EACH.add(list_classes)
def check_the_binding_is_the_same_with_and_without_the_base_prefix(name, architecture):
    config = fixture(name, architectures=[architecture])
    model = describe_model(config)
    plain = {t.name: t.shape for t in model.own()}
    outer = model.prefix or next(iter(model.prefixes), "model")  # Llama 4's class has none: a trainer's is removed
    if model.prefix:
        other = {n.removeprefix(f"{model.prefix}."): s for n, s in plain.items()}
    else:
        other = {n if n.startswith(HEADS) else f"{outer}.{n}": s for n, s in plain.items()}
    assert set(other) != set(plain)
    one, two = bind_manifest(model, stored(plain.items())), bind_manifest(model, stored(other.items()))
    assert layout(one) == layout(two)
    assert {n for t in two.tensors.values() for n in t.spelling} <= set(other)


@EACH.add()
def check_the_stored_order_does_not_matter(name):
    model = describe_model(fixture(name))
    shapes = [(t.name, t.shape) for t in model.own()]
    assert layout(bind_manifest(model, stored(shapes))) == layout(bind_manifest(model, stored(reversed(shapes))))


def test_the_hubs_gpt2_has_no_prefix_and_has_masks():
    model = describe_model(fixture("gpt2"))
    bare = {t.name.removeprefix("transformer."): t.shape for t in model.own()}
    masks = {f"h.{n}.attn.bias": (1, 1, 64, 64) for n in range(2)} | {f"h.{n}.attn.masked_bias": () for n in range(2)}
    bound = bind_manifest(model, stored((bare | masks).items()))
    mask = bound.tensors["transformer.h.1.attn.bias"]
    assert mask.spelling == ("h.1.attn.bias",)
    assert mask.shape == (1, 1, 64, 64)
    assert bound.tensors["transformer.h.0.attn.masked_bias"].shape == ()
    assert bound.tensors["transformer.wte.weight"].spelling == ("wte.weight",)
    assert bound.tensors["transformer.wte.weight"].ties == ("lm_head.weight",)


def test_the_hubs_bert_spells_norms_gamma_and_beta_and_brings_the_heads_of_pretraining():
    config = fixture("bert")
    model = describe_model(config)
    modern = {t.name: t.shape for t in describe_model(fixture("bert", architectures=["BertForPreTraining"])).own()}
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): s
        for n, s in modern.items()
    }
    bound = bind_manifest(model, stored(old.items()))
    assert set(bound.tensors) == set(modern)
    assert bound.tensors["bert.embeddings.LayerNorm.weight"].spelling == ("bert.embeddings.LayerNorm.gamma",)
    assert model.tensors["bert.pooler.dense.weight"].optional
    assert model.tensors["cls.seq_relationship.weight"].optional


def test_a_sentence_transformer_is_a_bert_model_without_prefix_and_with_position_ids():
    model = describe_model(fixture("bert", architectures=["BertModel"]))
    shapes = {t.name: t.shape for t in model.own()} | {"embeddings.position_ids": (1, 64)}
    bound = bind_manifest(model, stored(shapes.items()))
    assert set(bound.tensors) == set(shapes)
    assert all(t.spelling == () for t in bound.tensors.values())


def test_a_question_answering_llama_stored_as_other_decoders_are_is_found_under_its_own_prefix():
    model = describe_model(fixture("llama", architectures=["LlamaForQuestionAnswering"]))
    shapes = {n.replace("transformer.", "model."): t.shape for n, t in model.tensors.items() if not t.optional}
    assert "transformer.norm.weight" in bind_manifest(model, stored(shapes.items())).tensors


def test_the_published_all_minilm_binds_under_its_own_names(minilm):
    checkpoint = read(minilm / "model.safetensors")
    bound = bind_manifest(describe_model(json.loads((minilm / "config.json").read_text())), checkpoint)
    assert set(bound.tensors) == set(checkpoint.tensors)
    assert bound.warnings == ()


def test_several_names_of_a_tie_become_replicas_of_one_tensor():
    model = describe_model(fixture("t5"))
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    shapes = {t.name: t.shape for t in model.own()} | dict.fromkeys(names, (96, 32))
    shared = bind_manifest(model, stored(reversed(shapes.items()))).tensors["shared.weight"]
    assert (shared.name, *shared.ties) == names
    assert [chunk.name for chunk in shared.chunks] == list(names)
    assert shared.spelling == ()


def test_a_tie_stored_only_under_its_second_name_is_found():
    model = describe_model(fixture("qwen2-tied"))
    shapes = {t.name: t.shape for t in model.own()}
    shapes["lm_head.weight"] = shapes.pop("model.embed_tokens.weight")
    tensor = bind_manifest(model, stored(shapes.items())).tensors["model.embed_tokens.weight"]
    assert tensor.spelling == ("lm_head.weight",)


def test_the_head_of_a_tied_model_in_a_base_models_checkpoint_is_the_embedding():
    model = describe_model(fixture("gemma", architectures=["GemmaModel"]))
    shapes = {f"model.{t.name}": t.shape for t in model.own()} | {"lm_head.weight": (96, 32)}
    tensor = bind_manifest(model, stored(shapes.items())).tensors["embed_tokens.weight"]
    assert tensor.ties == ()
    assert tensor.spelling == ("model.embed_tokens.weight", "lm_head.weight")


def test_an_untied_head_stays_a_tensor_of_its_own():
    model = describe_model(fixture("t5-gated-untied"))
    assert "lm_head.weight" in model.tensors
    assert model.tensors["shared.weight"].ties == ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def bind(name, change, **config):
    model = describe_model(fixture(name, **config))
    shapes = {t.name: t.shape for t in model.own()}
    change(shapes)
    return bind_manifest(model, stored(shapes.items()))


def test_a_missing_tensor_is_named():
    with pytest.raises(SourceError, match=r"lacks 1 tensor of LlamaForCausalLM: lm_head\.weight"):
        bind("llama", lambda s: s.pop("lm_head.weight"))


def test_many_missing_tensors_are_counted_and_some_named():
    with pytest.raises(SourceError, match=r"lacks 9 tensors of LlamaForCausalLM: .*q_proj.*, .* and 6 more"):
        bind("llama", lambda s: [s.pop(n) for n in list(s) if "layers.1." in n])


def test_a_wrong_shape_is_named_with_both_shapes():
    with pytest.raises(SourceError, match=r"model\.norm\.weight has shape \[33\], but config\.json gives it \[32\]"):
        bind("llama", lambda s: s.update({"model.norm.weight": (33,)}))


def test_tensors_that_a_whole_model_does_not_have_are_extra_ones_and_named_with_their_sizes():
    extra = {f"model.layers.0.adapter.{n}": (2,) for n in range(10)}
    bound = bind("llama", lambda s: s.update(extra))
    assert bound.extra.keys() == extra.keys()
    assert bound.tensors.keys().isdisjoint(extra)
    (warning,) = bound.warnings
    assert warning.startswith("extra tensors, which LlamaForCausalLM does not have: model.layers.0.adapter.0 (8 bytes)")
    assert warning.endswith(" and 2 more")


def test_unknown_tensors_of_a_model_that_lacks_others_are_named_and_rules_are_the_hint():
    def change(shapes):
        del shapes["model.norm.weight"]
        shapes |= {f"model.layers.0.adapter.{n}": (2,) for n in range(7)}

    with pytest.raises(
        UnsupportedError, match=r"LlamaForCausalLM has no tensors .*adapter\.0, .* and 4 more"
    ) as caught:
        bind("llama", change)
    assert "--rules" in caught.value.hint


def test_what_transformers_ignores_is_extra_and_not_reported():
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,), "mtp.layers.0.aux.weight": (4,)}
    bound = bind("nemotron_h", lambda s: s.update(extra))
    assert bound.extra.keys() == extra.keys()
    assert bound.warnings == ()


def test_a_layer_too_many_is_said_to_be_the_configs_doing():
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM has no tensors model\.layers\.2\.") as caught:
        bind("llama", lambda s: s.update({n.replace("layers.1.", "layers.2."): t for n, t in s.items()}))
    assert caught.value.hint.startswith("config.json counts fewer layers or experts than there are")


def test_a_bias_that_the_config_denies_is_unknown():
    with pytest.raises(UnsupportedError, match=r"q_proj\.bias"):
        bind("llama", lambda s: s.update({"model.layers.0.self_attn.q_proj.bias": (32,)}))


def test_two_stored_names_of_one_tensor_without_a_tie_are_refused():
    with pytest.raises(SourceError, match=r"are both transformer\.wpe\.weight"):
        bind("gpt2", lambda s: s.update({"wpe.weight": (64, 32)}))


def test_a_base_model_may_lack_its_whole_pooler_but_not_half_of_it():
    def both(shapes):
        del shapes["pooler.dense.weight"], shapes["pooler.dense.bias"]

    bound = bind("bert", both, architectures=["BertModel"])
    assert "pooler.dense.weight, pooler.dense.bias" in bound.warnings[0]
    with pytest.raises(SourceError, match=r"lacks 1 tensor of BertModel: pooler\.dense\.bias"):
        bind("bert", lambda s: s.pop("pooler.dense.bias"), architectures=["BertModel"])


def test_the_head_of_another_class_may_have_any_number_of_labels_and_ones_own_may_not():
    bound = bind("llama", lambda s: s.update({"score.weight": (7, 32)}))
    assert bound.tensors["score.weight"].shape == (7, 32)
    with pytest.raises(SourceError, match=r"score\.weight has shape \[7, 32\]"):
        bind("llama", lambda s: s.update({"score.weight": (7, 32)}), architectures=["LlamaForSequenceClassification"])


@pytest.mark.parametrize(
    ("name", "buffer", "shape"),
    [
        ("llama", "model.layers.1.self_attn.rotary_emb.inv_freq", (4,)),
        ("roberta", "roberta.embeddings.position_ids", (1, 66)),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (8, 4)),
    ],
)
def test_buffers_of_older_checkpoints_are_known_and_kept_whole(name, buffer, shape):
    bound = bind(name, lambda s: s.update({buffer: shape}))
    assert bound.tensors[buffer].shape == shape
    assert describe_model(fixture(name)).tensors[buffer].optional


def test_everything_else_of_the_manifest_travels_along():
    model = describe_model(fixture("llama"))
    source = stored((t.name, t.shape) for t in model.own())
    bound = bind_manifest(model, source)
    assert (bound.format, bound.files, bound.objects, bound.metadata) == (
        source.format,
        source.files,
        source.objects,
        source.metadata,
    )


@pytest.mark.parametrize("name", FIXTURES)
def test_each_config(name, subtests, tmp_path):
    EACH.run(subtests, name, tmp_path=tmp_path)
