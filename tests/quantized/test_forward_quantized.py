"""Quantized checkpoints run with their decoded values, beside plain torch and the model before the quantization."""

from __future__ import annotations

import json

import pytest
import torch
from codes import CODECS, LLAMA, encoded, write
from transformers import LlamaConfig, LlamaForCausalLM

from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.running.forward.inputs import build_inputs
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

CHECKED = ("fp8-blocks", "fp8-tensor", "modelopt-nvfp4", "gptq-4", "gptq-3", "awq", "quark-mxfp4")


def small_state():
    """Random weights that are no larger than trained ones, so that outputs are not those of one token."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.09).bfloat16()
        for name, shape in describe_model(LLAMA).state().items()
    }


def decoded_state(codec, state):
    """The values of every weight, by the codec's own decoder."""
    found = {}
    for name, tensor in state.items():
        linear = tensor.ndim == 2 and ".layers." in name
        found[name] = codec.decode(codec.encode(tensor)).float() if linear else tensor.float()
    return found


def compute(state):
    model = LlamaForCausalLM(LlamaConfig.from_dict({**LLAMA, "dtype": "float32"})).float().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(**build_inputs(model, "cpu")).logits.flatten(0, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write(tmp_path_factory.mktemp("base") / "base", LLAMA, small_state())


def quantized(path, name):
    codec = CODECS[name]
    return write(path, {**LLAMA, "quantization_config": codec.settings}, encoded(codec, small_state()))


def forward(path, **options):
    return verify(path, VerifyOptions(level="forward", **options)).levels[-1]


@pytest.mark.parametrize("name", CHECKED)
def test_the_decoded_model_is_as_far_from_the_base_as_plain_torch_says(base, tmp_path, name):
    level = forward(quantized(tmp_path / "quantized", name), against=base)
    assert level.status == "passed", (level.reason, level.findings)
    state = small_state()
    right, other = compute({n: t.float() for n, t in state.items()}), compute(decoded_state(CODECS[name], state))
    found = level.forward
    assert (found.change, found.output_error) == ("quantization", 0)
    logs = right.double().log_softmax(-1), other.double().log_softmax(-1)
    assert found.unrounded_distances.kl == pytest.approx(
        float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()), rel=1e-3
    )
    assert found.unrounded_error == pytest.approx(float((right - other).norm() / right.norm()), rel=1e-3)
    assert found.unrounded_distances.top1 == float((right.argmax(-1) == other.argmax(-1)).float().mean())
    assert found.unrounded_distances.kl > 0
    assert any("only the distances from the outputs before the quantization" in note for note in level.notes)
    assert not any("--against SRC" in note for note in level.notes), "it was given"


@pytest.mark.parametrize("name", ["gptq-4", "fp8-blocks"])
def test_without_a_source_it_runs_with_its_values(tmp_path, name):
    path = quantized(tmp_path / "quantized", name)
    file = tmp_path / "golden.json"
    level = forward(path, write_golden=file)
    assert level.status == "passed", (level.reason, level.findings)
    assert any("decoded to fp32, block by block" in note for note in level.notes)
    logits = compute(decoded_state(CODECS[name], small_state()))
    told = json.loads(file.read_text())["sketch"]
    assert told["norm"] == pytest.approx(float(logits.double().norm()), rel=1e-5)
    assert [row[0] for row in told["tokens"]] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("recipe", ["fp8-block", "int8", "mxfp4"])
def test_a_quantization_is_compared_with_its_source_and_with_its_codes(base, tmp_path, recipe):
    reshard(base, tmp_path / "out", ReshardOptions(quantize=recipe))
    found = verify(tmp_path / "out", VerifyOptions(level="forward", against=base))
    assert found.ok, found.findings
    forward = found.levels[-1].forward
    assert (forward.change, forward.output_error, forward.worst.error) == ("quantization", 0, 0)
    assert 0 < forward.unrounded_distances.kl < 0.2


def test_a_wrong_code_is_found_in_its_block(tmp_path):
    source = quantized(tmp_path / "source", "gptq-4")
    state = small_state()
    state["model.layers.1.mlp.up_proj.weight"][3] = 0
    codec = CODECS["gptq-4"]
    wrong = write(tmp_path / "wrong", {**LLAMA, "quantization_config": codec.settings}, encoded(codec, state))
    level = forward(wrong, against=source)
    assert level.status == "failed"
    assert [block.name for block in level.forward.blocks if block.error] == ["model.layers.1"]


def test_quantized_ranks_are_joined_and_a_note_says_so(tmp_path):
    source = quantized(tmp_path / "source", "awq")
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    level = forward(tmp_path / "ranks", against=source)
    assert level.status == "passed", (level.reason, level.findings)
    assert level.forward.output_error == 0
    assert any("no rank computed by itself" in note for note in level.notes)


def test_a_note_says_that_the_model_did_not_run_where_quantized_blocks_were_placed(tmp_path):
    path = quantized(tmp_path / "quantized", "awq")
    load, level = verify(path, VerifyOptions(level="forward", device="cpu", host_memory=1 << 22)).levels[-2:]
    assert {each.place for each in load.placement} == {"cpu"}
    assert level.status == "passed", (level.reason, level.findings)
    assert any("did not run where the level load placed its blocks" in note for note in level.notes)


def test_codes_that_nobody_decodes_are_skipped_with_the_reason(tmp_path):
    path = quantized(tmp_path / "quantized", "gptq-4")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "unheard-of"}
    (path / "config.json").write_text(json.dumps(config))
    level = forward(path)
    assert level.status == "skipped"
    assert level.reason
