"""What the table says of each optimizer is what the real ones keep after a step, to the byte."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from math import ceil, prod

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.estimate.training.optimizers import OptimizedTensor, get_optimizer, list_optimizers
from shardctl.estimate.training.preconditioner_blocks import count_blocks, count_gathered_bytes, spread_blocks

SHAPES = ((70, 64), (64, 70), (4096,), (4095,), (257, 16), (16, 8), (1, 5), (3,), (2, 64, 64), ())
"""Around the sizes from which states have 8 bits, whose blocks are 256 elements."""
MATRICES = [shape for shape in SHAPES if len(shape) == 2]


def parameters(shapes, dtype):
    found = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.ones_like(parameter)
    return found


def kept(real):
    """Bytes of all states but the single numbers of each tensor, each storage once."""
    storages = {}
    for state in real.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and name not in {"step", "RMS"}:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


def told(name, shapes, dtype="F32", *, hidden=False):
    known = get_optimizer(name)
    seen = [OptimizedTensor(shape, torch.Size(shape).numel(), hidden=hidden) for shape in shapes]
    slots = sum(BY_NAME[slot.dtype or dtype].nbytes((slot.elements(s),)) for slot in known.slots for s in seen)
    return slots + known.constant


REAL = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}
BITSANDBYTES = {
    "adamw-8bit": "AdamW8bit",
    "paged-adamw": "PagedAdamW32bit",
    "paged-adamw-8bit": "PagedAdamW8bit",
    "lion": "Lion",
    "lion-8bit": "Lion8bit",
}


@pytest.mark.parametrize("name", [*REAL, *BITSANDBYTES])
def test_states_after_a_step(name):
    """torch 2.13 and bitsandbytes 0.50; on a CPU pages are ordinary memory of the same size."""
    if name in BITSANDBYTES:
        make = getattr(pytest.importorskip("bitsandbytes").optim, BITSANDBYTES[name])
    else:
        make = REAL[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = [shape for shape in SHAPES if shape] if "8bit" in name else SHAPES
        real = make(parameters(shapes, torch.float32))
        real.step()
    assert kept(real) == told(name, shapes)


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ((70, 64), 107808), ((4096,), 32768), ((257, 16), 563336), ((1, 5), 248), ((3,), 24), ((2, 64, 64), 131104),
        ((10001, 3), 240096),
    ],
)  # fmt: skip
def test_soap(shape, nbytes):
    """Bytes that pytorch_optimizer 4.1.0's SOAP has after two steps with torch 2.13, in fp32."""
    assert told("soap", [shape]) == nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((70, 64), "F32", 72360), ((64, 70), "F32", 72360), ((257, 16), "F32", 299208), ((16, 8), "F32", 67072),
        ((1, 5), "F32", 160), ((3,), "F32", 72), ((4096,), "F32", 16826368), ((2, 64, 64), "F32", 148224),
        ((2500, 1), "F32", 9235824), ((1500, 30), "F32", 5474048), ((2048, 1100), "F32", 43259616),
        ((70, 64), "BF16", 54440), ((32, 3, 64, 64), "F32", 3314816),
    ],
)  # fmt: skip
def test_shampoo(shape, dtype, nbytes):
    """Bytes that facebookresearch/optimizers f606606's DistributedShampoo has after a step with torch 2.13.

    Its settings: betas=(0.9, 0.999), max_preconditioner_dim=1024, grafting_config=AdamPreconditionerConfig(0.999); the
    number of steps is left out.
    """
    assert told("shampoo", [shape], dtype) == nbytes


ODD = ((70, 64), (4096,), (2048, 1100), (1500, 30))
TALL = ((2048, 1100), (1100, 2048), (300, 256), (256,))


@pytest.mark.parametrize(
    ("shapes", "ranks", "buffer"),
    [
        (ODD, (26077688, 39554704), 9256960), ((*ODD, (2500, 1), (3,)), (16785408, 16785408, 41297472), 12582912),
        (TALL, (33570816, 27712976, 26739424), 25165824), (((3,), (1, 5)), (72, 160), 128),
        (((35, 64), (2048,), (1024, 1100), (750, 30)), (16785408, 15733904), 8388608),
    ],
)  # fmt: skip
def test_shampoo_over_replicas(shapes, ranks, buffer):
    """Bytes that each rank has after a step, and those of its `_global_dist_buffer`, as above on gloo processes.

    With DDPDistributedConfig, and HybridShardDistributedConfig for the third; the last is the part that the ranks
    (0, 0) and (1, 0) of a mesh of 2 x 2 have of `ODD`.
    """
    blocks = sum((count_blocks(shape) for shape in shapes), Counter())
    loads, each = spread_blocks(tuple(blocks.items()), len(ranks))
    seen = [OptimizedTensor((0,), 0, hidden=False, blocks=tuple(some.items())) for some in each]
    assert tuple(sum(4 * slot.elements(one) for slot in get_optimizer("shampoo").slots) for one in seen) == ranks
    assert count_gathered_bytes(loads) == buffer


@given(
    st.lists(st.tuples(st.tuples(st.integers(1, 40), st.integers(1, 8)), st.integers(1, 50)), min_size=1, max_size=9),
    st.integers(1, 9),
)
def test_blocks_are_spread_as_one_by_one(blocks, ranks):
    """Rounds of equal blocks leave each rank as many bytes as `distribute_buffer_sizes` does, block after block."""
    loads = [0] * ranks
    for block, count in sorted(blocks, key=lambda one: -ceil(prod(one[0]) / 16)):
        for _ in range(count):
            loads[loads.index(min(loads))] += ceil(prod(block) / 16) * 64
    found, each = spread_blocks(tuple(blocks), ranks)
    assert sorted(found) == sorted(loads)
    assert sum(each, Counter()) == sum((Counter({block: count}) for block, count in blocks), Counter())


def test_transformers_adafactor():
    """transformers 5.23, optimization.Adafactor, without first moment as by default."""
    real = transformers.optimization.Adafactor(parameters(SHAPES, torch.float32))
    real.step()
    assert kept(real) == told("adafactor", SHAPES)


def test_states_in_the_type_of_the_parameters():
    real = torch.optim.AdamW(parameters(SHAPES, torch.bfloat16))
    real.step()
    assert kept(real) == told("adamw-bf16", SHAPES, "BF16")


def test_muon_for_matrices_and_adamw_for_the_others():
    others = [shape for shape in SHAPES if len(shape) != 2]
    real = [
        torch.optim.Muon(parameters(MATRICES, torch.float32)),
        torch.optim.AdamW(parameters(others, torch.float32)),
    ]
    for each in real:
        each.step()
    assert sum(map(kept, real)) == told("muon", MATRICES, hidden=True) + told("muon", others)


def test_every_optimizer_is_checked_here():
    assert {o.name for o in list_optimizers()} == {*REAL, *BITSANDBYTES, "adamw-bf16", "muon", "soap", "shampoo"}
    assert all(o.source and o.title for o in list_optimizers())


@pytest.mark.parametrize(("name", "bytes_per_element"), [
    ("adamw", 8), ("adamw-bf16", 4), ("adamw-8bit", 2 + 2 * 4 / 256), ("sgd", 0), ("sgd-momentum", 4), ("lion", 4),
    ("muon", 4), ("adafactor", 4 * 2 / 4096),
])  # fmt: skip
def test_bytes_per_element_of_a_large_matrix(name, bytes_per_element):
    """Dettmers et al. 2022, sec. 2: 8 bits per state, and 32 for each block."""
    shape = (4096, 4096)
    found = told(name, [shape], "BF16", hidden=True) - get_optimizer(name).constant
    assert found == bytes_per_element * 4096 * 4096


class Live(TorchDispatchMode):
    """Counts the bytes that kernels make and that are alive."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if torch.is_tensor(leaf) and id(leaf) not in given and not leaf._is_view():
                self._add(leaf.untyped_storage().nbytes())
                weakref.finalize(leaf.untyped_storage(), self._add, -leaf.untyped_storage().nbytes())
        return made

    def _add(self, nbytes):
        self.now += nbytes
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd-momentum", "adafactor"])
def test_a_step_of_foreach_kernels_makes_one_copy_of_the_parameters(name):
    """torch 2.13, torch.optim: `foreach` takes about the size of the parameters more, if anything."""
    shapes = [(256, 256)] * 4
    real = REAL[name](parameters(shapes, torch.float32))
    real.param_groups[0]["foreach"] = True
    real.step()
    with Live() as live:
        real.step()
    copies = live.most / (4 * 4 * 256 * 256)
    assert copies == pytest.approx(1 if get_optimizer(name).temporary else 0, abs=0.01)


def test_only_large_states_are_paged():
    for name, share in (("paged-adamw", 8), ("paged-adamw-8bit", 2)):
        slots = get_optimizer(name).slots
        for elements, paged in ((99_999, False), (100_000, True)):
            seen = OptimizedTensor((elements,), elements, hidden=False)
            found = sum(BY_NAME[s.dtype].nbytes((s.elements(seen),)) for s in slots if s.paged)
            assert found == (share * elements if paged else 0)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match="unknown optimizer 'adma'") as raised:
        get_optimizer("adma")
    assert "adamw, adamw-bf16, adamw-8bit" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "meant"), [("AdamW", "adamw"), ("adam", "adamw"), ("adamw_bnb_8bit", "adamw-8bit"), ("shampo", "shampoo")]
)
def test_a_name_of_another_library_gets_a_hint(name, meant):
    with pytest.raises(UsageError) as raised:
        get_optimizer(name)
    assert raised.value.hint.startswith(f"did you mean {meant}? ")
