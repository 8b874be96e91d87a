"""What a training rank keeps is what the papers' tables say, and what the libraries allocate, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import lcm
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_models import even, stock

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.estimate.model.inventory import build_inventory
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.training.scheme import choose_scheme
from shardctl.estimate.training.states import list_state_terms
from shardctl.estimate.training.step_phase import StepPosition
from shardctl.estimate.training.transients import STEP, build_passing_hold
from shardctl.estimate.workload import PROFILES, TrainingWorkload
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import AxisPartition, PartitionSpec

GB = 10**9
CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
KEPT = ("weights", "gradients", "optimizer")
PASSING = ("gathered", "casts", "largest layer", "small tensors", "buckets", "gradients before")
"""What the names of what is held for moments say."""


def one_tensor(elements, dtype="BF16"):
    tensor = Tensor("w", BY_NAME[dtype], (elements,), ())
    return build_inventory([tensor], {"w": PartitionSpec(((AxisPartition("fsdp"),),))}, 1)


def of_config(name, **changes):
    return stock(json.loads((CONFIGS / f"{name}.json").read_text()) | changes)


def terms(inventory, mesh, rank=0, **options):
    mesh = Mesh.parse(mesh)
    found = {h.rank: h for h in list_rank_shards(inventory, mesh, even(inventory.layers, mesh))}
    return list_state_terms(found[rank], mesh, TrainingWorkload(128, **options))


def passing(inventory, mesh, phase, layer=0, **options):
    """What the runtime holds besides at a place of a step, by name."""
    mesh, work = Mesh.parse(mesh), TrainingWorkload(128, **options)
    holding = list_rank_shards(inventory, mesh, even(inventory.layers, mesh))[0]
    hold = build_passing_hold(holding, mesh, work, choose_scheme(mesh, work))
    place = StepPosition(phase, layer, later=bool(work.microbatches))
    found = {t.name: t for t in hold.list_terms(place)}
    assert sum(t.nbytes for t in found.values()) == hold.count_bytes(place)
    return found


def lasting(found, tier="device"):
    """Bytes of what is kept between steps."""
    return sum(
        t.nbytes for t in found if t.tier == tier and t.category in KEPT and not any(p in t.name for p in PASSING)
    )


ZERO = {
    7.5e9: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128e9: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1e12: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
"""Rajbhandari et al. 2020, Table 1, in GB: model states by parameters and data-parallel degree, for the stages."""
CELLS = [(size, n, stage, ZERO[size][n][stage - 1]) for size in ZERO for n in ZERO[size] for stage in (1, 2, 3)]


def printed(nbytes, cell):
    """The number with as many digits as the table has; numbers of at least 100 are cut off there, not rounded."""
    digits = len(cell.partition(".")[2])
    scale = 10**digits
    found = nbytes / GB * scale
    return f"{(int(found) if found >= 100 * scale else int(found + 0.5)) / scale:.{digits}f}"


def test_the_table_is_whole():
    assert len(CELLS) == 54


@pytest.mark.parametrize(("size", "ranks", "stage", "cell"), CELLS)
def test_zero_table_1(size, ranks, stage, cell):
    """Rajbhandari et al. 2020 (ZeRO), Table 1."""
    found = terms(one_tensor(int(size)), f"dp={ranks}", profile="deepspeed", zero=stage)
    assert all(t.exact for t in found if t.category == "optimizer")
    assert printed(lasting(found), cell) == cell


def test_zero_figure_1():
    """Rajbhandari et al. 2020, Figure 1: 7.5B parameters over 64 ranks; 120 GB without ZeRO."""
    inventory = one_tensor(7_500_000_000)
    assert lasting(terms(inventory, "dp=64", profile="deepspeed")) == 120 * GB
    for stage, gigabytes in ((1, 31.4), (2, 16.6), (3, 1.9)):
        found = lasting(terms(inventory, "dp=64", profile="deepspeed", zero=stage))
        assert found / GB == pytest.approx(gigabytes, abs=0.05)


def test_sizes_everyone_knows():
    """GPT-3 175B is 700 GB in fp32, a 70B model 140 GB in bf16."""
    weights = terms(one_tensor(175_000_000_000, "F32"), "dp=1", profile="megatron", dtype="F32")[0]
    assert (weights.name, weights.nbytes) == ("F32 weights", 700 * GB)
    weights = terms(one_tensor(70_000_000_000), "dp=1", profile="megatron")[0]
    assert (weights.name, weights.nbytes) == ("BF16 weights", 140 * GB)


@pytest.mark.parametrize(("dtype", "gradients", "plain", "first", "rest"), [
    ("F16", "F16", 20, 4, 16), ("BF16", None, 18, 6, 12), ("F32", None, 16, 8, 8),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_megatron_bytes_per_parameter(dtype, gradients, plain, first, rest, ranks):
    """Megatron-LM, docs/user-guide/features/dist_optimizer.md: the table of theoretical bytes per parameter."""
    count = 8 * 1000
    options = {"profile": "megatron", "dtype": dtype, "gradient_dtype": gradients}
    assert lasting(terms(one_tensor(count), f"dp={ranks}", **options)) == plain * count
    shared = terms(one_tensor(count), f"dp={ranks}", **options, zero=1)
    assert lasting(shared) == first * count + rest * count // ranks


def test_megatron_shares_experts_among_the_ranks_that_have_them():
    """Megatron-LM, theoretical_memory_usage.py: d is dp * cp, for experts world / (etp * ep * pp)."""
    inventory = of_config("mixtral")
    mesh = Mesh.parse("dp=2,cp=2,tp=2,ep=2,etp=1")
    (holding,) = (h for h in list_rank_shards(inventory, mesh, [inventory.layers]) if h.rank == 0)
    dense, experts = holding.elements(expert=False), holding.elements(expert=True)
    found = list_state_terms(holding, mesh, TrainingWorkload(128, profile="megatron", zero=1))
    moment = next(t for t in found if t.name == "first moment")
    assert moment.nbytes == 4 * (-(-dense // 4) + -(-experts // 4))
    assert moment.inputs["N"] == 2 * 2
    assert moment.inputs["N of experts"] == 8 // 2
    assert not moment.exact
    assert moment.low == moment.nbytes < moment.high


@pytest.mark.parametrize(("mesh", "profile", "zero", "ranks", "parts"), [
    ("dp=2", "hf", 0, 2, 1), ("dp=2,fsdp=2", "fsdp2", 0, 2, 2), ("dp=2,cp=2", "fsdp2", 0, 4, 1),
])  # fmt: skip
def test_shampoo_spreads_blocks_over_replicas(mesh, profile, zero, ranks, parts):
    """facebookresearch/optimizers f606606: the replicas keep together what one of them would keep alone."""
    inventory = one_tensor(16 * 1024 * 1024, "F32")
    options = {"profile": profile, "zero": zero, "optimizer": "shampoo", "precision": "fp32", "dtype": "F32"}
    sizes = {t.name: t.nbytes for t in terms(inventory, mesh, **options)}
    alone = {t.name: t.nbytes for t in terms(inventory, f"fsdp={parts}", **options)}
    for name in ("momentum", "preconditioners", "their inverse roots"):
        assert sizes[name] * ranks == alone[name]
    assert sizes["updates gathered from the ranks that compute them"] == 4 * 16 * 1024 * 1024 // parts
    assert "updates gathered from the ranks that compute them" not in alone
    assert sizes[STEP] * ranks == alone[STEP]


@pytest.mark.parametrize(("mesh", "profile", "zero", "message"), [
    ("dp=2", "deepspeed", 1, "flat partitions"), ("dp=2", "deepspeed", 0, "flat partitions"),
    ("dp=2", "hf", 3, "flat partitions"), ("dp=2", "megatron", 0, "Megatron-LM has no shampoo"),
])  # fmt: skip
def test_shampoo_is_refused_without_matrices(mesh, profile, zero, message):
    with pytest.raises(UsageError, match=message):
        terms(one_tensor(4096), mesh, profile=profile, zero=zero, optimizer="shampoo")


def megatron_layout(sizes, ranks, *, overlap):
    """Elements of the buffer and of each rank's shard as Megatron-LM lays them out (optimizer/param_layout.py).

    Tensors come last to first, each from a multiple of 64; a bucket ends when it has 40 million elements or, where
    reduction does not overlap, with the last tensor, at a multiple of the ranks and of 128.
    """
    divisor, ends, spans, at, start = lcm(ranks, 128), [], [], 0, 0
    for n, size in enumerate(reversed(sizes)):
        at = -(-at // 64) * 64
        spans.append((at, at + size))
        at += size
        if n == len(sizes) - 1 or (overlap and at - start >= 40_000_000):
            at = start = -(-at // divisor) * divisor
            ends.append(at)
    shards = [0] * ranks
    for low, high in zip([0, *ends], ends, strict=False):
        part = (high - low) // ranks
        for rank in range(ranks):
            a, b = low + rank * part, low + (rank + 1) * part
            shards[rank] += sum(max(0, min(b, stop) - max(a, begin)) for begin, stop in spans)
    return at, shards


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.integers(1, 5000), st.integers(1, 60_000_000)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 8, 48]),
    st.booleans(),
)
def test_megatron_pads_within_the_interval(sizes, ranks, overlap):
    tensors = [Tensor(f"w{n}", BY_NAME["BF16"], (size,), ()) for n, size in enumerate(sizes)]
    inventory = build_inventory(tensors, {t.name: PartitionSpec(()) for t in tensors}, 1)
    found = {t.name: t for t in terms(inventory, f"dp={ranks}", profile="megatron", zero=1)}
    buffer, shards = megatron_layout(sizes, ranks, overlap=overlap)
    assert sum(shards) == sum(sizes)
    assert found["BF16 weights"].low <= 2 * buffer <= found["BF16 weights"].high
    moment = found["first moment"]
    assert moment.low <= 4 * max(shards) <= moment.high
    assert moment.high <= moment.nbytes + 4 * (64 * len(sizes) + 128 * 48 * (3 + sum(sizes) // 40_000_000))


def test_deepspeed_zero_3_as_its_documentation_counts():
    """DeepSpeed, docs/code-docs/source/memory.rst: 18 bytes per parameter over all ranks, and 4 * largest layer.

    16 of them are the paper's, of which 2 for gradients become 4 when a step copies them.
    """
    inventory = of_config("llama")
    largest = max(h.gathered for h in list_rank_shards(inventory, Mesh.of(dp=4), [inventory.layers])[0].parts)
    found = terms(inventory, "dp=4", profile="deepspeed", zero=3)
    shared = next(t for t in found if t.name == "first moment").nbytes // 4
    assert lasting(found) == 16 * shared
    assert inventory.elements / 4 <= shared <= inventory.elements / 4 + len(inventory.kinds) * 4
    held = passing(inventory, "dp=4", "layer", profile="deepspeed", zero=3)
    gathered = held["gathered weights that are used again soon, and gradients of the largest"]
    assert (gathered.low, gathered.nbytes) == (4 * largest, 2 * (min(inventory.elements, 500_000_000) + largest))
    step = next(t for t in found if t.name == STEP)
    assert step.low == 4 * shared
    assert lasting(found) - 2 * shared + step.low == 18 * shared
    offloaded = terms(inventory, "dp=4", profile="deepspeed", zero=3, offload="cpu")
    assert (lasting(offloaded), lasting(offloaded, "host")) == (2 * shared, 16 * shared)
    everything = terms(inventory, "dp=4", profile="deepspeed", zero=3, offload="cpu", offload_parameters=True)
    assert (lasting(everything), lasting(everything, "host")) == (0, 18 * shared)


@pytest.mark.parametrize("elements", [1, 7, 63, 4096, 100_001])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_partitions_cover_every_element(elements, ranks):
    """DeepSpeed: one partition of `ceil(P / 2N) * 2` with ZeRO-1 and 2, `ceil(n / N)` of each tensor with 3."""
    for stage in (1, 2, 3):
        found = terms(one_tensor(elements), f"dp={ranks}", profile="deepspeed", zero=stage)
        share = next(t for t in found if t.name == "first moment").nbytes // 4
        assert share == (-(-elements // ranks) if stage == 3 else -(-elements // (2 * ranks)) * 2)
        weights = next(t for t in found if t.name == "BF16 weights")
        assert weights.nbytes == 2 * share * (1 if stage == 3 else ranks)


def test_optimizer_without_fp32_copies():
    found = terms(one_tensor(1000), "dp=1", profile="deepspeed", optimizer="adamw-bf16")
    assert lasting(found) == 8 * 1000


AUTOCAST = (("loss",), ("layer", 1), ("layer", 0), ("step",))


def test_autocast_keeps_fp32_and_casts():
    """transformers, docs: 6 bytes per parameter for weights in mixed precision, 4 for gradients, 8 for AdamW."""
    inventory = of_config("llama")
    found = terms(inventory, "dp=1", profile="hf")
    assert lasting(found) == 16 * inventory.elements
    casts = [passing(inventory, "dp=1", *at, profile="hf")["BF16 casts of the weights"] for at in AUTOCAST]
    assert all(some.interval == (0, some.nbytes) for some in casts)
    assert casts[0].nbytes <= 2 * inventory.elements
    assert casts[0].nbytes > casts[1].nbytes > casts[2].nbytes > casts[3].nbytes == 0
    again = [passing(inventory, "dp=1", *at, profile="hf", recompute="full") for at in AUTOCAST]
    layers = [some["BF16 casts of the weights"].nbytes for some in again]
    assert layers[1] == layers[2] == casts[2].nbytes
    assert layers[0] == casts[0].nbytes - casts[1].nbytes
    buckets = terms(inventory, "dp=2", profile="hf")
    assert next(t for t in buckets if "buckets" in t.name).high == 4 * inventory.elements


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "ddp"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "t5", "gpt2", "mamba"])
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=3", "dp=2,fsdp=2"])
def test_more_sharing_is_never_more(profile, name, mesh):
    inventory = of_config(name)
    totals = [lasting(terms(inventory, mesh, profile=profile, zero=stage)) for stage in (0, 1, 2, 3)]
    slack = 4 * 4 * sum(kind.count for kind in inventory.kinds)  # of rounding up: elements and states of each tensor
    if profile != "fsdp2":  # whose stages 0 and 1 differ from FSDP2's own way by what is gathered
        assert all(b <= a + slack for a, b in pairwise(totals))
    assert totals[3] <= totals[0] / 2 + slack or Mesh.parse(mesh).degree("dp") == 1
    for stage in (0, 1, 2, 3):
        names = [t.name for t in terms(inventory, mesh, profile=profile, zero=stage)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(("mesh", "zero"), [("dp=2", 2), ("fsdp=3", 0)])
def test_ddp_shares_nothing(mesh, zero):
    with pytest.raises(UsageError, match="DDP shares no states"):
        terms(of_config("llama"), mesh, profile="ddp", zero=zero)


def test_codes_are_not_trained():
    codes = Tensor("q", BY_NAME["I8"], (64, 64), ())
    norm = Tensor("n", BY_NAME["BF16"], (64,), ())
    specs = {"q": PartitionSpec(()), "n": PartitionSpec(())}
    found = terms(build_inventory([codes, norm], specs, 1), "dp=1", profile="deepspeed")
    assert next(t for t in found if t.name == "weights that are not trained").nbytes == 64 * 64
    assert lasting(found) == 64 * 64 + 16 * 64
    with pytest.raises(UsageError, match=r"can be trained: its tensors are I8") as raised:
        terms(build_inventory([codes], specs, 1), "dp=1")
    assert "unquantized" in raised.value.hint


@pytest.mark.parametrize(("options", "message"), [
    ({"optimizer": "adam"}, "unknown optimizer 'adam'"),
    ({"dtype": "F8_E4M3"}, "cannot train in F8_E4M3"),
    ({"zero": 4}, "no ZeRO stage 4"),
    ({"offload": "nvme"}, "fsdp2 profile has no offload to NVMe"),
    ({"offload_parameters": True}, "needs --offload"),
    ({"profile": "deepspeed", "offload": "cpu"}, "needs sharded states"),
    ({"profile": "deepspeed", "zero": 2, "offload": "cpu", "offload_parameters": True}, "only with ZeRO-3"),
    ({"profile": "megatron", "offload": "cpu", "offload_parameters": True}, "not parameters"),
])  # fmt: skip
def test_what_no_runtime_does_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        terms(one_tensor(64), "dp=2", **options)


@pytest.mark.parametrize("name", ["adamw-8bit", "paged-adamw", "adafactor", "soap", "lion"])
def test_megatron_has_few_optimizers(name):
    """megatron-core 0.16, optimizer/__init__.py and muon.py."""
    with pytest.raises(UsageError, match=f"Megatron-LM has no {name}"):
        terms(one_tensor(64), "dp=2", profile="megatron", optimizer=name)


@pytest.mark.parametrize("profile", ["deepspeed", "hf"])
def test_deepspeed_pipelines_share_optimizer_states_alone(profile):
    """DeepSpeed 0.19, runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"."""
    inventory = of_config("llama")
    assert terms(inventory, "pp=2,dp=2", profile=profile, zero=1)
    for zero in (2, 3):
        with pytest.raises(UsageError, match=f"does not support pipelines with ZeRO {zero}"):
            terms(inventory, "pp=2,dp=2", profile=profile, zero=zero)
    with pytest.raises(UsageError, match="does not support pipelines with ZeRO 3"):
        terms(inventory, "pp=2,fsdp=2", profile="deepspeed")


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,fsdp=2", "fsdp=4", "dp=2,cp=2"])
def test_fsdp2_with_zero_3_shares_over_dp_as_over_fsdp(mesh):
    """torchtitan's mesh: FSDP2 shards over dp and cp together."""
    inventory = of_config("llama")
    found = {t.name: t.nbytes for t in terms(inventory, mesh, zero=3)}
    assert found == {t.name: t.nbytes for t in terms(inventory, "fsdp=4")}


def test_fsdp2_without_resharding_and_without_reducing():
    """torch 2.13: `reshard_after_forward=False` keeps weights, `set_requires_gradient_sync(False)` gradients, too."""
    inventory = of_config("llama")
    several = [passing(inventory, "dp=4", "layer", 1, zero=zero, microbatches=2) for zero in (1, 2, 3)]
    whole = 4 * inventory.elements
    assert several[0]["gradients before they are shared"].nbytes > whole > sum(t.nbytes for t in several[2].values())
    assert several[0]["gathered weights"] == several[1]["gathered weights"]
    one = [passing(inventory, "dp=4", "layer", 1, zero=zero) for zero in (1, 2)]
    assert one[0] == one[1] == several[1]  # the only microbatch is the last
    assert passing(inventory, "pp=2,fsdp=2", "layer", 0, microbatches=4).keys() == several[0].keys()
    found = [terms(inventory, "dp=4", zero=zero) for zero in (0, 1, 2, 3)]
    assert lasting(found[0]) == 16 * inventory.elements
    assert [lasting(s) for s in found[1:]] == [lasting(found[3])] * 3


def test_units_that_are_gathered():
    """FSDP2: two units and the root backward, the root alone in the loss; one device gathers nothing ahead."""
    inventory = of_config("llama")
    (holding,) = list_rank_shards(inventory, Mesh.of(), [inventory.layers])
    sizes = {unit: sum(p.gathered_bytes for p in parts) for unit, parts in holding.units().items()}
    layers = [size for unit, size in sizes.items() if unit is not None]
    found = passing(inventory, "fsdp=2", "layer", 1)["gathered units"]
    assert found.nbytes == found.low == sizes[None] + 2 * layers[0]
    assert passing(inventory, "fsdp=2", "loss")["gathered units"].nbytes == sizes[None]
    assert passing(inventory, "fsdp=1", "layer", 1)["gathered units"].nbytes == sizes[None] + layers[0]
    kept = passing(inventory, "fsdp=2,dp=2", "loss", zero=2)
    assert kept["gathered weights"].nbytes == sum(sizes.values())


SHARDED = Path(__file__).with_name("fsdp2_states.py")
CODED = {"vocab_size": 150}
"""Enough rows for states in 8 bits."""
DEEPER = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
PLACES = [(1, 0), (7, 0), (7, 6)]
"""Ranks, and which of them; among 7 nothing divides evenly, and the last has nothing of some tensors."""


def fsdp2(place, changes, *ranks):
    """What torch says of a Llama that FSDP2 shards."""
    path = place / "config.json"
    path.write_text(json.dumps(json.loads((CONFIGS / "llama.json").read_text()) | changes))
    said = subprocess.run([sys.executable, SHARDED, path, *ranks], check=True, capture_output=True, text=True)
    return json.loads(said.stdout.splitlines()[-1])


def test_fsdp2_states_to_the_byte(tmp_path):
    """torch 2.13, fully_shard: storage of parameters and gradients, and states of optimizers, bitsandbytes' too."""
    inventory = of_config("llama", **CODED)
    said = fsdp2(tmp_path, CODED, *(f"{ranks}/{rank}" for ranks, rank in PLACES))
    for (ranks, rank), sizes in zip(PLACES, said, strict=True):
        for name, nbytes in sizes["optimizers"].items():
            found = terms(inventory, f"fsdp={ranks}", rank=rank, optimizer=name)
            by_name = {t.name: t for t in found}
            assert by_name["F32 weights"].nbytes == sizes["parameters"]
            assert by_name["F32 gradients"].nbytes == sizes["gradients"]
            assert sum(t.nbytes for t in found if t.category == "optimizer") == nbytes, (name, ranks, rank)
            assert all(t.exact for t in found if t.category == "optimizer")


def test_fsdp2_units_as_torch_tracks_them(tmp_path):
    """torch 2.13, FSDPMemTracker: what is gathered and what waits to be reduced at the peak of a backward pass.

    The tracker counts the gradients of activations with those of parameters that are not yet reduced.
    """
    places = [passing(of_config("llama", **DEEPER), "fsdp=4", "reduce", n, optimizer="sgd") for n in range(6)]
    found = max(places, key=lambda held: sum(t.nbytes for t in held.values()))
    peak = fsdp2(tmp_path, DEEPER)
    assert found["gathered units"].nbytes == peak["UNSHARDED_PARAM"] + peak["ALL_GATHER"]
    waiting = peak["UNSHARDED_GRAD"] + peak["TEMP"] + peak["REDUCE_SCATTER"]
    assert found["gradients before they are shared"].nbytes == pytest.approx(waiting, rel=0.03)


@pytest.mark.parametrize(
    ("dtypes", "gradients", "ours"),
    # megatron-core 0.16, optimizer_config.py: bf16 weights, main gradients, 16-bit remainders, both moments.
    [(("BF16", "BF16"), "BF16", 2 + 2 + 2 + 2 + 2), (("F8_E4M3", "F32"), None, 2 + 4 + 2 + 1 + 4)],
)
def test_megatrons_precision_aware_optimizer(dtypes, gradients, ours):
    work = TrainingWorkload(8, profile="megatron", zero=1, moment_dtypes=dtypes, gradient_dtype=gradients)
    count = 8 * 1000
    (holding,) = list_rank_shards(one_tensor(count), Mesh.of(), [1])
    terms = list_state_terms(holding, Mesh.of(), work)
    assert lasting(terms) == ours * count
    (copies,) = (term for term in terms if "F32 copies" in term.name)
    assert copies.high >= 2 * copies.nbytes
    for wrong in ({"zero": 0}, {"optimizer": "sgd"}, {"profile": "deepspeed"}, {"precision": "bf16"}):
        with pytest.raises(UsageError, match="precision-aware"):
            list_state_terms(holding, Mesh.of(), replace(work, **wrong))
