"""What a plan says of files of ranks that it did not pack is what packing gives."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardctl import Mesh, ReshardOptions
from shardctl.base.errors import PartitionError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.conversion.conversion_plan import draft_conversion
from shardctl.libraries.safetensors import ranks_writing
from shardctl.options import SourceOptions

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"
NAMES = ("llama", "deepseek_v3", "gpt2", "mixtral", "t5", "qwen3_next", "gemma2", "bert")
MESHES = (Mesh.of(tp=2), Mesh.of(fsdp=3), Mesh.of(pp=2, dp=2, ep=2), Mesh.of(dp=2))


def draft(name, mesh, **options):
    given = SourceOptions(described=True, kv_heads="replicate")
    with open_checkpoint(CONFIGS / f"{name}.json", given) as checkpoint:
        return draft_conversion(checkpoint, ReshardOptions(mesh=mesh, to="ranks", **options)).request


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_packed_files(name):
    compared = 0
    for mesh in MESHES:
        for options in ({}, {"dtype": "fp16"}, {"experts": "keep", "names": "keep"}):
            try:
                request = draft(name, mesh, **options)
            except PartitionError:
                continue
            measured = ranks_writing.measure_ranks(request)
            if measured is None:
                continue
            packed = ranks_writing.pack_ranks(request)
            assert measured.files == {path: file.size for path, file in packed.files.items()}, (mesh, options)
            assert measured.chunks == sum(len(tensor.chunks) for tensor in packed.tensors.values())
            compared += 1
    assert compared


def test_what_is_not_plain_is_packed():
    request = draft("llama", Mesh.of(tp=2))
    assert ranks_writing.measure_ranks(request) is not None
    assert ranks_writing.measure_ranks(replace(request, max_shard_size=1000)) is None
    odd = {name: (f'{name}"é',) for name in request.form.names}
    placed = replace(request.placed, names=odd)
    assert ranks_writing.measure_ranks(replace(request, placed=placed)) is None
    same = replace(request.placed, names=dict.fromkeys(odd, ("one",)))
    assert ranks_writing.measure_ranks(replace(request, placed=same)) is None
    metadata = replace(request.have, metadata={"written_by": "é"})
    assert ranks_writing.measure_ranks(replace(request, have=metadata)) is None


def test_a_plan_can_be_asked_for_what_goes_where(tmp_path):
    from shardctl import plan, reshard

    source = Path(__file__).parents[2] / "fixtures/trtllm/llama_pp3/source"
    options = ReshardOptions(mesh=Mesh.of(tp=2))
    planned = plan(source, options)
    reshard(source, tmp_path / "out", options)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    assert {name: size for rank in planned.ranks for name, size in [(rank.files[0], rank.file_bytes)]} == sizes
    assert {path: file.size for path, file in planned.copy_plan.want.files.items()} == sizes
    assert planned.conversion.read_bytes == planned.copy_plan.read_bytes
