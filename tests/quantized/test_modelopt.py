"""What ModelOpt exports is understood, also with `hf_quant_config.json` alone, and ranks read their own parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from codes import E2M1, LLAMA
from reading import assert_same, of, read
from safetensors.torch import load_file, save_file

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.models import describe_model
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "modelopt"
CASES = sorted(path.name for path in FIXTURES.iterdir() if (path / "config.json").is_file())
OUTPUTS = ("int4-awq", "int4-fp8-awq")
"""Cases whose bytes hold two outputs, and not two inputs."""
EACH = {"quant_algo": "NVFP4", "group_size": 16}


def decode(case, arrays):
    """The weight `[out, in]` that arrays of ModelOpt stand for, in float32, for inputs that nobody has multiplied.

    Of two codes in a byte the first is in the lower half; those of INT4 are in two's complement. The second scale of
    INT4 is that of the FP8 codes that a kernel makes of them (`get_weight_scaling_factor_2`).
    """
    codes, scale = arrays["weight"], arrays["weight_scale"]
    if codes.dtype == torch.uint8:
        low, high = (codes & 15).int(), (codes >> 4).int()
        if case in OUTPUTS:
            halves = torch.stack([low, high], 1).reshape(-1, codes.shape[1])
            numbers = (halves - 16 * (halves > 7)).float()
        else:
            numbers = E2M1[torch.stack([low, high], 2).reshape(codes.shape[0], -1)]
    else:
        numbers = codes.float()
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    if case not in OUTPUTS:
        scale = scale * arrays.get("weight_scale_2", torch.tensor(1.0))
    if scale.ndim == 4:
        whole = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale = whole[: numbers.shape[0], : numbers.shape[1]]
    elif scale.ndim == 2:
        scale = scale.repeat_interleave(numbers.shape[1] // scale.shape[1], 1)
    elif scale.ndim == 1:
        scale = scale[:, None]
    return numbers * scale * arrays.get("pre_quant_scale", torch.tensor(1.0)).float()


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_the_identity(tmp_path, case):
    source = FIXTURES / case
    found = inspect(source)
    assert (found.why_no_model, found.warnings) == ("", ())
    for number, mesh in enumerate((Mesh.of(tp=2), Mesh.of(fsdp=3))):
        there, back = tmp_path / f"ranks{number}", tmp_path / f"back{number}"
        reshard(source, there, ReshardOptions(mesh=mesh))
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(read(back), read(source))
        assert digest(there).digest == digest(source).digest
        assert verify(there, VerifyOptions(level="full", against=source)).ok
        for name in ("config.json", "hf_quant_config.json"):
            assert (back / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_its_part_of_the_weight_with_its_own_scales(tmp_path, case):
    source, mesh, compared = FIXTURES / case, Mesh.of(tp=2), 0
    config = json.loads((source / "config.json").read_text())
    plain = describe_model({key: value for key, value in config.items() if key != "quantization_config"})
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=mesh))
    whole = read(source)
    for rank in range(2):
        mine = read(tmp_path / "ranks", rank)
        for tensor in plain.own():
            module = tensor.name.removesuffix(".weight")
            if f"{module}.weight_scale" not in whole:
                continue
            (box,) = compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(rank))
            expected = decode(case, of(module, whole))
            assert expected.shape == tensor.shape
            part = of(module, mine)
            assert torch.equal(decode(case, part), expected[box.slices()]), module
            if "pre_quant_scale" in part:
                assert torch.equal(part["pre_quant_scale"], whole[f"{module}.pre_quant_scale"][box.slices()[1]])
            compared += 1
    assert compared == (20 if case == "nvfp4-experts" else 14)


@pytest.mark.parametrize("case", CASES)
def test_the_config_alone_describes_the_same_bytes(tmp_path, case):
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copy(FIXTURES / case / name, tmp_path)
    with (
        open_checkpoint(FIXTURES / case) as real,
        open_checkpoint(tmp_path, SourceOptions(described=True)) as described,
    ):
        left = ("input_scale", "pre_quant_scale", "k_scale", "v_scale")  # a config does not tell of these
        there = {n: (t.dtype, t.shape) for n, t in real.manifest.tensors.items() if not n.endswith(left)}
        assert {n: (t.dtype, t.shape) for n, t in described.manifest.tensors.items()} == there


@pytest.mark.parametrize("case", CASES)
def test_the_weights_that_the_codes_stand_for(tmp_path, case):
    source, out = FIXTURES / case, tmp_path / "out"
    reshard(source, out, ReshardOptions(to="hf", dtype="fp32"))
    found, stored, compared = read(out), read(source), 0
    for name in stored:
        module = name.removesuffix(".weight_scale")
        if module != name:
            expected = decode("fp8" if case == "mixed" else case, of(module, stored))
            assert torch.equal(found[f"{module}.weight"], expected), module
            compared += 1
    assert compared == (10 if case == "nvfp4-experts" else 7)
    assert not (out / "hf_quant_config.json").exists()
    assert verify(out, VerifyOptions(level="full", against=source)).ok


def test_nvfp4_with_factors_of_its_inputs(tmp_path):
    """NVFP4_AWQ, which ModelOpt quantizes on a GPU only: the arrays of NVFP4, and `pre_quant_scale`."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "nvfp4", source)
    for name in ("config.json", "hf_quant_config.json"):
        (source / name).write_text((source / name).read_text().replace('"NVFP4"', '"NVFP4_AWQ"'))
    state = load_file(source / "model.safetensors")
    down = state["model.layers.0.mlp.down_proj.weight"]
    state["model.layers.0.mlp.down_proj.pre_quant_scale"] = torch.rand(2 * down.shape[1]).bfloat16() + 0.5
    save_file(state, source / "model.safetensors", {"format": "pt"})
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="fp32"))
    found = read(tmp_path / "out")
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        module = f"model.layers.0.{name}"
        assert torch.equal(found[f"{module}.weight"], decode("nvfp4", of(module, state))), name
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2), dtype="fp32"))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), found)


class TestSidecar:
    """ModelOpt up to 0.29 wrote `hf_quant_config.json` and left `config.json` as it was."""

    @pytest.fixture
    def source(self, tmp_path):
        shutil.copytree(FIXTURES / "nvfp4-fp8", tmp_path / "source")
        self.drop(tmp_path / "source" / "config.json")
        return tmp_path / "source"

    @staticmethod
    def drop(path, **changes):
        config = json.loads(path.read_text())
        del config["quantization_config"]
        path.write_text(json.dumps(config | changes))

    def test_it_says_what_the_config_does_not(self, source):
        found, expected = inspect(source), inspect(FIXTURES / "nvfp4-fp8")
        assert (found.tensors, found.rules, found.warnings) == (expected.tensors, expected.rules, ())

    def test_it_travels_and_is_read_again(self, source, tmp_path):
        reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
        reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
        assert_same(read(tmp_path / "back"), read(source))
        assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())

    @pytest.mark.parametrize("name", ["config.json", "org--model_config.json"])
    def test_beside_a_config_that_is_planned_alone(self, source, tmp_path, name):
        (tmp_path / "alone").mkdir()
        shutil.copy(source / "config.json", tmp_path / "alone" / name)
        plain = plan(tmp_path / "alone" / name, ReshardOptions(), plan_options=PlanOptions(use="serve"))
        sidecar = name.replace("config.json", "hf_quant_config.json")
        shutil.copy(source / "hf_quant_config.json", tmp_path / "alone" / sidecar)
        found = plan(tmp_path / "alone" / name, ReshardOptions(), plan_options=PlanOptions(use="serve"))
        scales = sum(t.nbytes for t in inspect(source).tensors if t.name.endswith("input_scale"))
        assert found.weight_bytes == inspect(source).nbytes - scales < plain.weight_bytes / 2

    def test_of_another_config_in_the_folder_it_says_nothing(self, source):
        (source / "model.safetensors").unlink()
        (source / "config.json").rename(source / "small.json")
        assert {share.dtype for share in inspect(source / "small.json").dtypes} == {"BF16"}

    def test_beside_one_file_of_weights(self, source, tmp_path):
        assert inspect(source / "model.safetensors").tensors == inspect(FIXTURES / "nvfp4-fp8").tensors
        reshard(source / "model.safetensors", tmp_path / "out", ReshardOptions(to="hf"))
        (tmp_path / "out" / "shardctl.json").unlink()  # what was written says it all
        assert inspect(tmp_path / "out").tensors == inspect(source).tensors

    def test_beside_the_config_that_an_option_names(self, source, tmp_path):
        shutil.copytree(source, tmp_path / "configs", ignore=shutil.ignore_patterns("*.safetensors"))
        for name in ("config.json", "hf_quant_config.json"):
            (source / name).unlink()
        for config in (tmp_path / "configs", tmp_path / "configs" / "config.json"):
            assert inspect(source, source_options=SourceOptions(config=config)).why_no_model == ""

    def test_in_the_source_whose_config_an_option_names(self, source, tmp_path):
        (source / "config.json").rename(tmp_path / "plain.json")
        assert inspect(source, source_options=SourceOptions(config=tmp_path / "plain.json")).why_no_model == ""

    def test_it_completes_a_config_that_leaves_out_which_layer_has_which_precision(self, tmp_path):
        shutil.copytree(FIXTURES / "mixed", tmp_path / "source")
        config = json.loads((tmp_path / "source" / "config.json").read_text())
        del config["quantization_config"]["quantized_layers"]
        (tmp_path / "source" / "config.json").write_text(json.dumps(config))
        assert inspect(tmp_path / "source").tensors == inspect(FIXTURES / "mixed").tensors
        (tmp_path / "source" / "hf_quant_config.json").unlink()
        with pytest.raises(SourceError, match="no table quantized_layers") as caught:
            inspect(tmp_path / "source")
        assert "hf_quant_config.json" in caught.value.hint

    def test_a_config_that_says_otherwise_is_followed(self, tmp_path):
        shutil.copytree(FIXTURES / "fp8", tmp_path / "source")
        shutil.copy(FIXTURES / "nvfp4" / "hf_quant_config.json", tmp_path / "source")
        found = inspect(tmp_path / "source")
        assert found.tensors == inspect(FIXTURES / "fp8").tensors
        assert found.warnings == (
            "config.json says FP8, and hf_quant_config.json NVFP4: config.json is followed, as vLLM does",
        )

    def test_one_that_is_none_is_refused(self, source):
        (source / "hf_quant_config.json").write_text('{"quant_algo": "FP8"}')
        with pytest.raises(SourceError, match=r"hf_quant_config\.json has no table 'quantization'"):
            inspect(source)
        (source / "hf_quant_config.json").write_text("[")
        with pytest.raises(SourceError, match=r"hf_quant_config\.json is not JSON"):
            inspect(source)

    def test_messages_name_it(self, source):
        said = {"quantization": {"quant_algo": "NVFP4", "group_size": "16"}}
        (source / "hf_quant_config.json").write_text(json.dumps(said))
        with pytest.raises(SourceError, match=r"hf_quant_config\.json has group_size = '16'"):
            inspect(source)


class TestScheme:
    def describe(self, **settings):
        return describe_model({**LLAMA, "quantization_config": {"quant_method": "modelopt", **settings}}).tensors

    def test_only_the_cache_is_quantized(self):
        assert self.describe(quant_algo=None, kv_cache_quant_algo="FP8") == describe_model(LLAMA).tensors

    def test_a_config_that_names_no_method_is_known_by_its_algorithm(self):
        config = {**LLAMA, "quantization_config": {"quant_algo": "FP8", "config_groups": {}, "ignore": ["lm_head"]}}
        assert describe_model(config).tensors == self.describe(quant_algo="FP8", ignore=["lm_head"])

    @pytest.mark.parametrize(("listed", "quantised"), [(None, False), ([], True), (["lm_head"], False)])
    def test_the_head_is_quantized_where_a_list_leaves_it_out(self, listed, quantised):
        said = {} if listed is None else {"exclude_modules": listed}
        assert ("lm_head.weight_scale" in self.describe(quant_algo="FP8", **said)) == quantised

    def test_of_mixed_precision_only_what_is_named_is_quantized(self):
        layers = {"model.layers.0.mlp": EACH, "model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"}}
        found = self.describe(quant_algo="MIXED_PRECISION", quantized_layers=layers)
        assert {n.removesuffix(".weight_scale") for n in found if n.endswith("weight_scale")} == {
            *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
            "model.layers.1.self_attn.q_proj",
        }
        assert found["model.layers.0.mlp.up_proj.weight"].dtype.name == "U8"
        assert found["model.layers.1.self_attn.q_proj.weight"].dtype.name == "F8_E4M3"
        assert found["lm_head.weight"].dtype.name == "BF16"

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"quant_algo": "NVFP5"}, UnsupportedError, "ModelOpt's NVFP5 is not known"),
            ({}, UnsupportedError, "config.json says ModelOpt, but no quant_algo"),
            ({"quant_algo": "MIXED_PRECISION", "quantized_layers": ["up_proj"]}, SourceError, "no table"),
            (
                {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": None}}},
                UnsupportedError,
                "quantized_layers names no precision",
            ),
        ],
    )
    def test_what_is_not_known_is_named(self, settings, error, message):
        with pytest.raises(error, match=message):
            self.describe(**settings)
