"""What travels along with the weights and what stays behind."""

from __future__ import annotations

import pytest

from shardctl.base.errors import HostileError
from shardctl.libraries.files.side_files import list_side_files
from shardctl.storage.local import LocalSource

CARRIED = """
config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json
vocab.txt merges.txt chat_template.jinja preprocessor_config.json modeling_custom.py configuration_custom.py
README.md LICENSE .gitattributes USE_POLICY.md modules.json config_sentence_transformers.json trainer_state.json
1_Pooling/config.json 2_Dense/config.json 2_Dense/model.safetensors 2_Dense/pytorch_model.bin
text_encoder/model.safetensors text_encoder/model.safetensors.index.json assets/logo.png original/params.json
original/tokenizer.model voices/af.pt additional_chat_templates/tool.jinja adapter_config.json
adapter_model.safetensors tokenizer.json.index.json sub/shardctl.json model_index.json
""".split()  # noqa: SIM905 - a list of paths
LEFT = """
model.onnx model.onnx_data model.onnx.data model.onnx_data_1 onnx/model.onnx onnx/config.json onnx/tokenizer.json
tf_model.h5 flax_model.msgpack rust_model.ot model.tflite model-Q4_K_M.gguf gguf/model.gguf coreml/x/weights.bin
openvino/openvino_model.xml openvino/openvino_model.bin openvino_model.bin openvino_model.xml flax/params.msgpack
optimizer.pt optimizer.bin scheduler.pt scaler.pt training_args.bin rng_state.pth rng_state_3.pth
random_states_0.pkl model.ckpt.index model.ckpt.data-00000-of-00001 model.ckpt-1000.meta original/consolidated.00.pth
original/model.safetensors metal/model.bin sharded/shard-00001-model-00001-of-00001.safetensors 2_Dense/model.onnx
""".split()  # noqa: SIM905 - a list of paths
LEFT_AND_SAID = """
pytorch_model.bin pytorch_model-00001-of-00002.bin consolidated.safetensors model.fp16.safetensors consolidated.00.pth
model.pt model.ckpt __0_0.distcp .metadata
checkpoint-500/model.safetensors checkpoint-500/config.json checkpoint-500/optimizer.pt
global_step100/mp_rank_00_model_states.pt pytorch_model_fsdp_0/__0_0.distcp optimizer_0/.metadata
""".split()  # noqa: SIM905 - a list of paths
REMADE = """
shardctl.json SHA256SUMS model.safetensors.index.json pytorch_model.bin.index.json model.fp16.safetensors.index.json
tf_model.h5.index.json .git/config .cache/huggingface/download/model.safetensors.metadata __pycache__/x.pyc
.shardctl/stage/x 2_Dense/__pycache__/y.pyc
""".split()  # noqa: SIM905 - a list of paths


def listed(tmp_path, *paths, weights=("model.safetensors",)):
    for path in (*paths, *weights):
        full = tmp_path / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(b"x" * 7)
    return list_side_files(LocalSource(tmp_path), set(weights))


@pytest.mark.parametrize("path", CARRIED)
def test_carried(tmp_path, path):
    ((found,), warnings) = listed(tmp_path, path)
    assert (found.name, found.policy, found.file, found.offset, found.size) == (path, "carry", path, 0, 7)
    assert warnings == ()


@pytest.mark.parametrize("path", LEFT)
def test_left_behind(tmp_path, path):
    ((found,), warnings) = listed(tmp_path, path)
    assert (found.name, found.policy) == (path, "drop")
    assert warnings == ()


@pytest.mark.parametrize("path", LEFT_AND_SAID)
def test_left_behind_with_a_warning(tmp_path, path):
    ((found,), (warning,)) = listed(tmp_path, path)
    assert (found.name, found.policy) == (path, "drop")
    assert path.split("/")[0] in warning


@pytest.mark.parametrize("path", REMADE)
def test_not_even_listed(tmp_path, path):
    assert listed(tmp_path, path) == ((), ())


def test_weights_are_no_side_files(tmp_path):
    assert listed(tmp_path, weights=("pytorch_model.bin", "a.safetensors")) == ((), ())


def test_unused_weights_share_a_warning(tmp_path):
    assert listed(tmp_path, "a.bin", "b.bin")[1] == (
        "a.bin, b.bin hold weights that are not part of this checkpoint; they are left behind",
    )
    assert listed(tmp_path, "c.bin")[1] == (
        "a.bin, b.bin, c.bin hold weights that are not part of this checkpoint; they are left behind",
    )


@pytest.mark.parametrize(
    "marker",
    [
        *("universal/mp_rank_00_model_states.pt", "step9/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        *("universal/zero/lm_head.weight/fp32.pt", "dist/.metadata", "dist/__3_0.distcp", "iter_0000010/common.pt"),
        *("iter_0000010/mp_rank_00/model_optim_rng.pt", "pipe/layer_00-model_00-model_states.pt"),
    ],
)
def test_a_folder_with_the_checkpoint_of_a_trainer_is_left_behind_with_what_names_it(tmp_path, marker):
    folder = marker.split("/")[0]
    found, warnings = listed(tmp_path, marker, f"{folder}/more.txt", "latest", "notes/latest", "config.json")
    kept = {one.name: one.policy for one in found}
    assert {name for name, policy in kept.items() if policy == "carry"} == {"notes/latest", "config.json"}
    assert warnings == (f"{folder}/ is left behind: 2 files of another checkpoint",)
    assert {one.name: one.policy for one in listed(tmp_path, weights=(marker,))[0]}["latest"] == "carry", "its own"


def test_a_folder_left_behind_is_named_once(tmp_path):
    objects, warnings = listed(tmp_path, "checkpoint-1/a.bin", "checkpoint-1/b.json", "checkpoint-2/a.bin")
    assert len(objects) == 3
    assert warnings == (
        "checkpoint-1/ is left behind: 2 files of another checkpoint",
        "checkpoint-2/ is left behind: 1 file of another checkpoint",
    )


def test_nothing_travels_with_a_single_file(tmp_path):
    listed(tmp_path, "config.json")
    assert list_side_files(LocalSource(tmp_path / "model.safetensors"), {"model.safetensors"}) == ((), ())


def test_a_link_to_a_secret_is_not_published(tmp_path):
    (tmp_path / "id_rsa").write_text("secret")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(HostileError, match=r"tokenizer\.json is a link that leaves"):
        listed(tmp_path / "model")


def test_a_link_that_would_be_dropped_does_not_matter(tmp_path):
    (tmp_path / "elsewhere").write_text("weights")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.onnx").symlink_to(tmp_path / "elsewhere")
    assert [found.policy for found in listed(tmp_path / "model")[0]] == ["drop"]
