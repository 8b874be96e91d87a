"""A lens is a state dict of any layout that reads nothing before it is asked, and then no more than it needs."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import transformers
from forward_models import REPLICATE, build, config_of, cut, save
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import CoverageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.models.tables.fusion import FusionPlaces, TensorFusion
from shardctl.running.forward import build_lazy_state_dict
from shardctl.running.forward.lazy_state_dict import FusedTensor, StoredTensor
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill, Manifest, Region, Tensor
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.views import ArrayView


class Counting:
    """A source that counts the bytes that are read."""

    def __init__(self, source):
        self.source, self.nbytes = source, 0

    def read_at(self, path, offset, into):
        self.nbytes += len(into)
        self.source.read_at(path, offset, into)


@contextmanager
def seen(path, *, named=True):
    """The lens of a checkpoint, and what counts its reads."""
    with open_checkpoint(path, REPLICATE) as checkpoint:
        source = Counting(checkpoint.source)
        yield build_lazy_state_dict(checkpoint.manifest, source, checkpoint.model if named else None), source


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lens")


@pytest.fixture(scope="module")
def types(folder):
    """A file with every type that safetensors and torch share, a 0-d and an empty tensor."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 120, (6, 8), generator=generator, dtype=torch.uint8)
    kinds = {d.torch for d in BY_NAME.values() if d.bits >= 8 and d.torch and d.name != "BOOL"}
    state = {name: bits.repeat(1, 16).view(getattr(torch, name)).clone() for name in kinds if hasattr(torch, name)}
    state |= {"bool": bits > 50, "scalar": torch.tensor(-3.5, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}
    save_file(state, folder / "types.safetensors")
    return folder / "types.safetensors", state


def test_every_type_is_read_as_safetensors_reads_it(types):
    path, state = types
    with seen(path) as (found, _), safe_open(path, "pt") as expected:
        assert set(found) == set(state)
        assert len(state) > 15
        for name in found:
            theirs = expected.get_slice(name)
            assert found[name].get_shape() == theirs.get_shape()
            assert found[name].get_dtype() == theirs.get_dtype()
            ours = found[name][...]
            assert ours.dtype == state[name].dtype == found[name].dtype
            assert ours.shape == state[name].shape
            assert torch.equal(ours.reshape(-1).view(torch.uint8), state[name].reshape(-1).view(torch.uint8)), name


INDICES = st.one_of(
    st.integers(-4, 3),
    st.builds(slice, st.none() | st.integers(-6, 6), st.none() | st.integers(-6, 6), st.none() | st.integers(1, 3)),
)


@given(st.lists(INDICES, max_size=3).map(tuple), st.integers(0, 3), st.booleans())
def test_any_index_selects_what_it_selects_of_a_tensor(index, at, dots):
    whole = torch.arange(4 * 5 * 4, dtype=torch.int32).reshape(4, 5, 4)
    if dots:
        index = (*index[:at], Ellipsis, *index[at:])
    data = whole.numpy().tobytes()
    reader = type(
        "Memory", (), {"read_at": lambda _, __, offset, into: into.__setitem__(slice(None), data[offset:][: len(into)])}
    )()
    box, dtype = Box.whole((4, 5, 4)), BY_NAME["I32"]
    tensor = Tensor("x", dtype, (4, 5, 4), (Chunk(box, dtype, Region("f", 0, (80, 16, 4))),))
    assert torch.equal(StoredTensor(tensor, reader)[index], whole[index])


def test_a_slice_reads_its_own_bytes_and_nothing_is_read_before(types):
    path, state = types
    with seen(path) as (found, source):
        lazy = found["float32"]
        assert (lazy.shape, lazy.ndim, lazy.is_floating_point(), source.nbytes) == ((6, 32), 2, True, 0)
        assert torch.equal(lazy[2:4], state["float32"][2:4])
        assert source.nbytes == 2 * 32 * 4
        assert torch.equal(lazy[..., 5], state["float32"][:, 5])
        assert source.nbytes <= 2 * 32 * 4 + 6 * 32 * 4


@pytest.mark.parametrize("index", [(0, 0, 0), (..., ...), 9, slice(None, None, -1)])
def test_an_index_that_does_not_fit_is_an_error(types, index):
    with seen(types[0]) as (found, _), pytest.raises(IndexError):
        found["float32"][index]


def test_a_mask_cannot_select_what_is_not_read(types):
    with seen(types[0]) as (found, _), pytest.raises(TypeError, match="integers and slices"):
        found["float32"][torch.tensor([True])]


def test_a_hole_is_an_error_that_names_the_tensor():
    dtype = BY_NAME["F32"]
    tensor = Tensor("x", dtype, (4,), (Chunk(Box((0,), (2,)), dtype, ConstantFill(b"\0\0\0\0")),))
    with pytest.raises(CoverageError, match=r"x .*stored in no file"):
        StoredTensor(tensor, None)[...]


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "phi3", "qwen2-tied", "t5", "bert", "mixtral", "deepseek_v3", "gpt_oss"]
)
@pytest.mark.parametrize("mesh", [None, "tp=2", "fsdp=2,tp=2"])
def test_from_pretrained_takes_the_lens_of_any_layout(folder, name, mesh):
    """The state dict is that of the class: every tie by all its names, experts in one array."""
    source = folder / name
    config = config_of(name)
    if not source.exists():
        save(source, config)
    path = source
    if mesh:
        path = cut(source, folder / f"{name}-{mesh}", Mesh.parse(mesh))
    kind = getattr(transformers, config["architectures"][0])
    expected = build(config).state_dict()
    with seen(path) as (found, _), warnings.catch_warnings():
        assert {n: tuple(t.get_shape()) for n, t in found.items()} == {n: tuple(t.shape) for n, t in expected.items()}
        loaded, info = kind.from_pretrained(
            None, config=kind.config_class.from_dict(config), state_dict=found, output_loading_info=True
        )
    assert not any(info.values()), info
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[key]), key


def test_without_a_model_the_names_are_those_that_are_stored(folder):
    source = folder / "mixtral-named"
    save(source, config_of("mixtral"))
    with open_checkpoint(source) as checkpoint:
        found = build_lazy_state_dict(checkpoint.stored, checkpoint.source)
        names = set(json.loads(json.dumps(list(found))))
        assert names == set(checkpoint.stored.tensors)
        assert any("experts.0.w1.weight" in name for name in names)


def test_interleaved_parts_of_an_array_are_put_in_their_places():
    """Gate in the even columns and up in the odd ones, as some stacks of experts have them."""
    whole = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    places = FusionPlaces.of([ArrayView((e, 0, h), (2, 1), (2, 1)) for e in range(2) for h in range(2)], [(4, 3)] * 4)

    class Held(StoredTensor):
        def __init__(self, array):
            self.array = torch.from_numpy(array.copy())
            super().__init__(Tensor("part", BY_NAME["F32"], array.shape, ()), None)

        def read(self, box):
            return self.array[box.slices()]

    parts = [Held(whole[e, :, h::2].T) for e in range(2) for h in range(2)]
    fused = FusedTensor(TensorFusion("x", ("a", "b", "c", "d"), places), parts, BY_NAME["F32"])
    assert torch.equal(fused[...], torch.from_numpy(whole))
    assert torch.equal(fused[1, 1:, 2:7], torch.from_numpy(whole[1, 1:, 2:7]))


def test_an_empty_manifest_is_an_empty_state_dict():
    assert dict(build_lazy_state_dict(Manifest("x", {}, {}), None)) == {}
