"""One process per rank: the same figures as in one process, from each rank's own files, and no rank is waited for."""

from __future__ import annotations

import time
from functools import partial

import pytest
from forward_models import config_of, cut, place, run, save, saved_and_cut, values

from shardctl.running.forward import by_processes
from shardctl.running.processes import NotStartedError, RankError
from shardctl.tensors.mesh import Mesh

CASES = [("llama", "pp=2,tp=2"), ("t5", "tp=2"), ("mixtral", "fsdp=2,ep=2")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return partial(saved_and_cut, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_processes_find_what_one_process_finds(made, monkeypatch, name, mesh):
    files, usual = [], by_processes.run_ranks

    def watched(*args, **kwargs):
        results = usual(*args, **kwargs)
        files.extend(result["files"] for result in results)
        return results

    monkeypatch.setattr(by_processes, "run_ranks", watched)
    together = run(*made(name, mesh))
    apart = run(*made(name, mesh), processes=4)
    world = Mesh.parse(mesh).world
    assert apart.engine == f"{world} processes over gloo ({Mesh.parse(mesh)})"
    assert apart.status == "passed", apart.findings
    assert [block.name for block in apart.blocks] == [block.name for block in together.blocks]
    assert apart.worst.error == pytest.approx(together.worst.error, rel=0.5)
    assert len(files) == world
    for rank, read in enumerate(files):
        assert read, f"rank {rank} read nothing"
        assert all(file.startswith(f"shard-{rank + 1:05d}-") for file in read)


def test_a_mesh_with_more_ranks_than_processes_runs_in_one(made):
    assert run(*made("llama", "tp=2"), processes=1).engine.startswith("2 virtual ranks")


@pytest.mark.parametrize("how", ["start", "meet"])
def test_ranks_that_cannot_begin_in_processes_are_run_in_one_and_that_is_said(made, monkeypatch, how):
    def refused(*_, **__):
        if how == "start":
            raise NotStartedError("no more processes")
        raise RankError("rank 1 raised MeetingError: no interface", ranks=[1], raised="MeetingError")

    monkeypatch.setattr(by_processes, "run_ranks", refused)
    result = run(*made("llama", "pp=2,tp=2"), processes=4)
    assert result.status == "passed"
    assert result.engine.startswith("4 virtual ranks")
    assert result.notes[0].startswith("all ranks ran in one process: ")


def test_ranks_that_find_no_way_to_meet_are_run_in_one(made, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    result = run(*made("llama", "tp=2"), processes=2)
    assert result.status == "passed"
    assert "rank" in result.notes[0]
    assert "MeetingError" in result.notes[0]


def test_a_fault_is_found_and_named_by_processes_too(tmp_path):
    save(tmp_path / "whole", config_of("llama"))
    shards = cut(tmp_path / "whole", tmp_path / "ranks", Mesh.of(tp=2))
    values(shards, "model.layers.1.mlp.up_proj.weight", 1)[3] = 0
    result = run(tmp_path / "whole", shards, processes=2)
    assert result.status == "failed"
    assert [block.name for block in result.blocks if block.error > result.tolerance.warn] == ["model.layers.1"]


def test_a_rank_without_its_part_is_told_to_all_so_that_nobody_waits(tmp_path):
    save(tmp_path / "whole", config_of("llama"))
    shards = cut(tmp_path / "whole", tmp_path / "ranks", Mesh.of(tp=2))
    one, two = sorted(shards.glob("shard-*.safetensors"))
    one.rename(shards / "aside")
    two.rename(one)
    (shards / "aside").rename(two)
    result = run(tmp_path / "whole", shards, processes=2)
    assert result.status == "failed"
    assert any("its files do not" in finding.message for finding in result.findings)


def test_a_rank_whose_file_ends_early_ends_the_run_and_is_named(tmp_path, monkeypatch):
    save(tmp_path / "whole", config_of("llama"))
    shards = cut(tmp_path / "whole", tmp_path / "ranks", Mesh.of(tp=2))
    file, *_ = place(shards, "model.layers.1.mlp.up_proj.weight", 1)
    usual = by_processes.run_ranks

    def truncated(*args, **kwargs):  # after the headers were read
        with file.open("r+b") as data:
            data.truncate(file.stat().st_size // 2)
        return usual(*args, **kwargs)

    monkeypatch.setattr(by_processes, "run_ranks", truncated)
    began = time.monotonic()
    result = run(tmp_path / "whole", shards, processes=2)
    assert result.status == "failed"
    (finding,) = result.findings
    assert finding.check == "processes"
    assert "rank 1 raised SourceError" in finding.message
    assert file.name in finding.message
    assert time.monotonic() - began < 120, "ranks that hang are given up after so long"
