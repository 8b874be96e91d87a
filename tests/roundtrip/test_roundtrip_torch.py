"""torch and transformers load the rank files natively, into any mesh, and shardctl reads what the two write."""

from __future__ import annotations

import gloo_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny_models import assert_same, config_of, loaded, stored
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

MESHES = {"tp4": Mesh.of(tp=4), "fsdp3-pp2": Mesh.of(fsdp=3, pp=2), "tp2-fsdp2": Mesh.of(tp=2, fsdp=2)}
READ = ["llama", "gpt2", "bert", "t5"]
"""gpt2 has three boxes a name and rank, and an uneven vocabulary; bert and t5 have ties."""
DISTRIBUTED = {
    "tp2": ("llama", {"tp_size": 2, "tp_plan": "auto"}),
    "tp2, tied": ("qwen2-tied", {"tp_size": 2, "tp_plan": "auto"}),
    "tp2, norms of q and k": ("qwen3", {"tp_size": 2, "tp_plan": "auto"}),
    "fsdp2": ("llama", {"fsdp_size": 2}),
}
WRITTEN = {
    "FSDP2-llama": ("write_with_fsdp2", {"config": config_of("llama")}),
    "FSDP2-gpt2": ("write_with_fsdp2", {"config": config_of("gpt2-cross-untied")}),
    "TP-llama": ("write_with_tp", {"config": config_of("llama")}),
    "TP-gpt2": ("write_with_tp", {"config": config_of("gpt2-cross-untied")}),
    "odd-shapes": ("write_odd_shapes", {}),
}
SAVED = {"tp2": ("llama", {"tp_size": 2, "tp_plan": "auto"}), "fsdp2, tied": ("qwen2-tied", {"fsdp_size": 2})}


@pytest.fixture(scope="module")
def cut(tiny, tmp_path_factory):
    """The rank files of a fixture on a mesh, and its state dict; each made once."""
    base, made = tmp_path_factory.mktemp("torch"), {}

    def give(name, mesh):
        ranks, state = base / f"{name}-{mesh}", base / f"{name}.pth"
        if (name, mesh) not in made:
            reshard(tiny(name).path, ranks, ReshardOptions(mesh=MESHES[mesh]))
            torch.save(tiny(name).model.state_dict(), state)
            made[name, mesh] = ranks, state
        return made[name, mesh]

    return give


@pytest.fixture(scope="module")
def outcomes(tiny, cut, tmp_path_factory):
    """Everything the two ranks did, in one go because a rank takes seconds to start."""
    base = tmp_path_factory.mktemp("gloo")
    jobs = {}
    for name in READ:
        for mesh in MESHES:
            for dim in (0, 1):
                ranks, state = cut(name, mesh)
                jobs["read", name, mesh, dim] = (
                    "read_into_dtensors",
                    {"path": str(ranks), "expected": str(state), "dim": dim},
                )
    for case, (name, how) in DISTRIBUTED.items():
        for mesh in MESHES:
            ranks, state = cut(name, mesh)
            jobs["load", case, mesh] = (
                "transformers_loads",
                {"path": str(ranks), "expected": str(state), "how": how},
            )
    for case, (function, arguments) in WRITTEN.items():
        jobs["write", case] = (
            function,
            {"path": str(base / case), "expected": str(base / f"{case}.pth"), **arguments},
        )
    for case, (name, how) in SAVED.items():
        jobs["save", case] = (
            "transformers_saves",
            {
                "path": str(base / case),
                "expected": str(base / f"{case}.pth"),
                "source": str(tiny(name).path),
                "how": how,
            },
        )
    wrong = gloo_ranks.run(base / "ranks", list(jobs.values()))
    return base, dict(zip(jobs, wrong, strict=True))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_rank_files_in_one_process_into_plain_tensors(tiny, cut, name, mesh):
    expected = tiny(name).model.state_dict()
    state = {n: torch.zeros_like(t) for n, t in expected.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(cut(name, mesh)[0])), no_dist=True)
    assert_same(state, expected)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", READ)
def test_torch_reads_rank_files_on_two_ranks_into_dtensors_of_another_mesh(outcomes, name, mesh, dim):
    assert not outcomes[1]["read", name, mesh, dim]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", DISTRIBUTED)
def test_transformers_loads_rank_files_into_a_model_it_distributes(outcomes, case, mesh):
    assert not outcomes[1]["load", case, mesh]


@pytest.mark.parametrize("case", WRITTEN)
def test_shardctl_reads_what_torch_wrote_on_two_ranks(outcomes, tmp_path, case):
    base, wrong = outcomes
    assert not wrong["write", case]
    path, expected = base / case, torch.load(base / f"{case}.pth")
    assert len(list(path.glob("*.safetensors"))) == 2
    reshard(path, tmp_path / "hf")
    assert_same(stored(tmp_path / "hf"), expected)
    assert digest(path).digest == digest(tmp_path / "hf").digest
    assert verify(tmp_path / "hf", VerifyOptions(level="full", against=path)).ok


@pytest.mark.parametrize("case", SAVED)
def test_shardctl_reads_what_transformers_saved_on_two_ranks(tiny, outcomes, tmp_path, case):
    base, wrong = outcomes
    assert not wrong["save", case]
    path, source = base / case, tiny(SAVED[case][0])
    assert digest(path).digest == digest(source.path).digest
    reshard(path, tmp_path / "other", ReshardOptions(mesh=Mesh.of(fsdp=3)))
    assert_same(loaded(tmp_path / "other", source.kind).state_dict(), torch.load(base / f"{case}.pth"))
    found = verify(tmp_path / "other", VerifyOptions(level="full", against=source.path))
    # What transformers saved of ranks has no generation_config.json, and the source has one.
    assert all(each.check == "files" for each in found.findings if each.severity == "error")
