"""Names that files have and transformers moved since mean the same tensors."""

from __future__ import annotations

import pytest
from model_oracle import fixture, stored

from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest


def layout(manifest):
    """All that a digest depends on."""
    return [(t.name, t.dtype, t.shape, t.ties) for t in manifest.tensors.values()]


def llava_of_2023(name):
    """As llava-hf has them: the text model is a causal language model, the vision model below a name of its own."""
    name = name.removeprefix("model.")
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    return name.replace("language_model.", "language_model.model.").replace(
        "vision_tower.", "vision_tower.vision_model."
    )


def qwen_of_2024(name):
    """As Qwen has them: the text model has no name."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def vit_of_2020(name):
    """BERT's names for the layers."""
    for new, old in (
        ("layers.", "encoder.layer."),
        ("attention.q_proj", "attention.attention.query"),
        ("attention.k_proj", "attention.attention.key"),
        ("attention.v_proj", "attention.attention.value"),
        ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
    ):
        name = name.replace(new, old)
    return name


def neox(name):
    """As the state dict has them."""
    return name.replace("embed_out", "lm_head")


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("llava", llava_of_2023),
        ("llava_next", llava_of_2023),
        ("paligemma", llava_of_2023),
        ("gemma3", llava_of_2023),
        ("qwen2_vl", qwen_of_2024),
        ("qwen2_5_vl", qwen_of_2024),
        ("gpt_neox", neox),
        ("vit", vit_of_2020),
        ("clip_text_model", lambda name: f"text_model.{name}"),
        ("clip_vision_model", lambda name: f"vision_model.{name}"),
    ],
)
def test_older_names_mean_the_same_tensors(name, older):
    model = describe_model(fixture(name))
    now = {t.name: t.shape for t in model.own()}
    then = {older(n): shape for n, shape in now.items()}
    assert then.keys() != now.keys()
    assert layout(bind_manifest(model, stored(then.items()))) == layout(bind_manifest(model, stored(now.items())))


def test_a_position_table_that_older_clips_stored_is_known():
    model = describe_model(fixture("clip"))
    shapes = {t.name: t.shape for t in model.own()}
    ids = {"text_model.embeddings.position_ids": (1, 16), "vision_model.embeddings.position_ids": (1, 5)}
    assert set(bind_manifest(model, stored((shapes | ids).items())).tensors) == set(shapes | ids)
