"""What the command line says of training checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
CONFIG = ("--config", FIXTURES / "config.json")


def test_inspect_tells_writer_step_and_optimizer(say):
    place = FIXTURES / "fsdp-tp"
    assert say("inspect", place, *CONFIG) == (
        0,
        (
            "Llama, 5.46 K parameters, fp32, dcp in 4 files, with optimizer states, complete\n"
            f"{place}\n"
            "  format     dcp, 4 files, 470.6 kB\n"
            "  model      LlamaForCausalLM (llama)\n"
            "  weights    5.46 K parameters in 21 tensors, 21.8 kB (21.3 KiB)\n"
            "  dtypes     F32: 21 tensors, 5.46 K parameters, 21.8 kB\n"
            "  writer     torch.distributed.checkpoint (format 1.0.0), 4 ranks\n"
            "  read as    the names of weights are the parts of the keys after 'app.model'\n"
            "  step       2\n"
            "  optimizer  exp_avg: 21 tensors, 21.8 kB\n"
            "             exp_avg_sq: 21 tensors, 21.8 kB\n"
            "             step: 21 tensors, 84 bytes\n"
            "  settings   2 groups of parameters\n"
            "  pieces     21 tensors stored in several boxes\n"
            "  dropped    step\n"
        ),
        "",
    )


def test_inspect_as_json_has_the_training(say):
    document = json.loads(say("inspect", FIXTURES / "flat", "--json").out)
    assert document["training"] == {
        "writer": "torch.distributed.checkpoint (format 1.0.0)",
        "ranks": 2,
        "step": 2,
        "groups": 2,
        "states": {
            "exp_avg": {"tensors": 21, "tensor_bytes": 21_824},
            "exp_avg_sq": {"tensors": 21, "tensor_bytes": 21_824},
            "step": {"tensors": 21, "tensor_bytes": 84},
        },
        "notes": [],
    }


@pytest.mark.parametrize(("options", "tensors"), [((), 21), (("--optimizer-states", "keep"), 84)])
def test_ranks_get_optimizer_states_on_request(say, tmp_path, options, tensors):
    code, out, err = say("reshard", FIXTURES / "fsdp2", tmp_path / "out", "--tp", 2, *CONFIG, *options)
    assert code == 0, err
    assert f"  tensors  {tensors}\n" in out
    assert (tmp_path / "out" / "optimizer.json").exists() == bool(options)


@pytest.mark.parametrize(("options", "tensors"), [((), 84), (("--optimizer-states", "drop"), 21)])
def test_distributed_checkpoints_get_them_unless_told_not_to(say, tmp_path, options, tensors):
    code, out, err = say("reshard", FIXTURES / "fsdp2", tmp_path / "out", "--to", "dcp", *CONFIG, *options)
    assert code == 0, err
    assert f"  tensors  {tensors}\n" in out


def test_hugging_face_has_no_place_for_them(say, tmp_path):
    code, out, err = say("reshard", FIXTURES / "fsdp2", tmp_path / "out", "--optimizer-states", "keep", *CONFIG)
    assert (code, out) == (2, "")
    assert err == (
        "error: layout hf cannot store optimizer states\n"
        "hint:  use --to ranks, dcp, universal, torch_dist, fsdp_dtensor or megatron, or leave --optimizer-states out\n"
    )


def test_a_missing_file_of_a_rank_is_named(say, tmp_path):
    place = shutil.copytree(FIXTURES / "fsdp2", tmp_path / "bad")
    (place / "__3_0.distcp").unlink()
    code, _, err = say("reshard", place, tmp_path / "out", *CONFIG)
    assert code == 4
    assert "error: __3_0.distcp is missing, with parts of " in err
    assert not (tmp_path / "out").exists()
