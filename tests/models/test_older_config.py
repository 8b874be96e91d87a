"""A config of transformers 5 gets what transformers 4 reads, and the same from it."""

import pytest
from transformers import AutoConfig

from shardctl.base.errors import UnsupportedError
from shardctl.models.names.hub.older_config import add_older_settings, lacks_older_settings

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("model_type", "parameters", "older"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        ("llama", YARN, {"rope_theta": 7.0, "rope_scaling": {key: YARN[key] for key in YARN if key != "rope_theta"}}),
        (
            "phi",
            {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5},
            {"rope_theta": 5.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
        (
            "gpt_neox",
            {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5},
            {"rotary_emb_base": 5.0, "rotary_pct": 0.5},
        ),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3.0},
            },
            {
                "rope_theta": 5.0,
                "rope_local_base_freq": 3.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
def test_rotary_embeddings_have_the_settings_of_transformers_4(model_type, parameters, older):
    config = {"model_type": model_type, "rope_parameters": parameters}
    found = add_older_settings(config)
    assert {key: found[key] for key in older} == older
    assert lacks_older_settings(config)
    assert not lacks_older_settings(found)


@pytest.mark.parametrize("model_type", ["llama", "phi", "gpt_neox", "gemma3_text", "qwen3_moe", "olmo3", "modernbert"])
def test_transformers_5_reads_the_same_from_both(model_type):
    config = AutoConfig.for_model(model_type).to_dict()
    assert AutoConfig.for_model(**add_older_settings(config)).rope_parameters == config["rope_parameters"]


def test_the_config_of_the_text_model_says_whether_the_head_is_tied():
    text = {"model_type": "qwen3_vl_text", "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5.0}}
    found = add_older_settings({"model_type": "qwen3_vl", "text_config": text, "tie_word_embeddings": False})
    assert found["text_config"]["tie_word_embeddings"] is False
    assert found["text_config"]["rope_theta"] == 5.0


def test_bases_that_transformers_4_cannot_tell_apart_are_refused():
    parameters = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 3.0}}
    with pytest.raises(UnsupportedError, match="olmo3"):
        add_older_settings({"model_type": "olmo3", "rope_parameters": parameters})
