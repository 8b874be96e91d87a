"""Fine-tuning in part: PEFT's own counts, bitsandbytes' own bytes, and what is frozen has no gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardctl.api import Mesh, PlanOptions, ReshardOptions, plan
from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.estimate.model.inventory import TensorInventory, TensorKind
from shardctl.estimate.model.narrower_types import narrow_inventory
from shardctl.tensors.placement import PartitionSpec

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRAINED = json.loads((FIXTURES / "peft/trained_parameters.json").read_text())
LLAMA = FIXTURES / "configs_public/llama-3.1-8b.json"


def tuned(path=LLAMA, mesh=None, **options):
    """A plan of training, of which the second microbatch finds the gradients of the first."""
    return plan(path, ReshardOptions(mesh=mesh), plan_options=PlanOptions(use="train", microbatches=2, **options))


def nbytes(planned, *categories):
    terms = planned.forecast.estimate.binding.terms
    return sum(term.nbytes for term in terms if term.category in categories)


def find_mlps(planned):
    return next(term for term in planned.forecast.estimate.binding.terms if term.name == "kept by MLPs")


@pytest.mark.parametrize("one", TRAINED, ids=lambda one: f"{one['config'].rpartition('/')[2]} {one['targets']}")
def test_an_adapter_has_the_parameters_that_peft_says(one):
    found = tuned(FIXTURES / f"{one['config']}.json", lora_rank=one["rank"], lora_targets=one["targets"])
    assert found.parameters == one["trained"]


def test_peft_was_asked_about_many_families():
    assert len({one["config"] for one in TRAINED}) > 15


@pytest.mark.parametrize(("profile", "zero", "parts"), [
    ("deepspeed", 3, 8), ("hf", 3, 8), ("fsdp2", 3, 8), ("deepspeed", 2, 1), ("fsdp2", 0, 1),
])  # fmt: skip
def test_zero_3_shares_the_base(profile, zero, parts):
    """DeepSpeed 0.19.8, zero/parameter_offload.py, and FSDP2 share all parameters, whether they are trained or not."""
    found = tuned(mesh=Mesh.of(dp=8), profile=profile, zero=zero, lora_rank=16)
    base = next(t for t in found.forecast.estimate.binding.terms if t.name == "weights that are not trained")
    assert base.nbytes == 16_060_522_496 // parts == found.adapter.base_rank_bytes
    alike = tuned(mesh=Mesh.of(fsdp=8), lora_rank=16).forecast.estimate.binding.total().nbytes
    assert (found.forecast.estimate.binding.total().nbytes == alike) == ((profile, zero) == ("fsdp2", 3))


@pytest.mark.parametrize("mesh", [Mesh.of(tp=4), Mesh.of(pp=2, tp=2), Mesh.of(fsdp=8)], ids=str)
def test_ranks_together_have_the_whole_adapter(mesh):
    """tp cuts A or B, whichever lies along the cut, and has copies of the other."""
    found = tuned(mesh=mesh, lora_rank=16)
    held = sum(r.holding.elements(trainable=True) for r in found.forecast.estimate.ranks)
    assert 41943040 <= held <= 41943040 * mesh.degree("tp")
    assert mesh.degree("tp") > 1 or held < 41943040 * 1.01


def test_frozen_weights_have_no_gradients_and_no_states():
    found, whole = tuned(lora_rank=16, profile="hf"), tuned(profile="hf")
    terms = {term.name: term.nbytes for term in found.forecast.estimate.binding.terms}
    assert terms["weights that are not trained"] == 2 * whole.parameters
    assert terms["F32 weights"] == terms["F32 gradients"] == terms["first moment"] == 4 * 41943040
    assert found.adapter.base == "LlamaForCausalLM"
    assert found.forecast.strategies[0].inputs["P"] == 41943040


def test_some_layers_alone_are_trained():
    found = tuned(train_only=r"layers\.31\.", profile="hf")
    assert found.parameters == 218_112_000
    assert nbytes(found, "gradients") == 4 * found.parameters
    assert found.adapter is None


def test_layers_before_the_first_that_is_trained_keep_nothing():
    """Autograd records nothing below: of 32 layers two keep what they did."""
    part, whole = tuned(train_only=r"layers\.3[01]\.", profile="hf"), tuned(profile="hf")
    kept = [
        next(t.nbytes for t in one.forecast.estimate.binding.terms if t.name == "kept by MLPs") for one in (part, whole)
    ]
    assert kept[0] * 16 == kept[1]
    first = tuned(train_only=r"layers\.0\.", profile="hf")
    # Layers behind it keep all that they did but the input of the projection down, one of four tensors.
    assert find_mlps(first).nbytes * 4 * 32 == find_mlps(whole).nbytes * (31 * 3 + 4)


def test_the_input_of_a_frozen_matrix_is_not_kept():
    part, whole = (find_mlps(one) for one in (tuned(lora_rank=8, lora_targets="q_proj"), tuned()))
    assert part.nbytes * 4 == whole.nbytes * 3
    assert part.low / part.nbytes == pytest.approx(whole.low / whole.nbytes)


def test_where_nobody_knows_what_is_frozen_the_interval_goes_down():
    gpt2 = FIXTURES / "configs/gpt2.json"
    part, whole = (find_mlps(one) for one in (tuned(gpt2, lora_rank=8, lora_targets="c_attn"), tuned(gpt2)))
    assert part.nbytes == whole.nbytes
    assert part.low == pytest.approx(0.6 * whole.low, rel=0.001)


def test_a_step_of_frozen_weights_computes_no_gradients_of_them():
    from shardctl.hardware.devices import get_device

    device = get_device("h100")
    part, whole = (tuned(device=device, **some).forecast.cost.share("compute") for some in ({"lora_rank": 1}, {}))
    assert 0.65 < part / whole < 0.72
    late = tuned(device=device, train_only=r"layers\.31\.").forecast.cost.share("compute")
    assert 1 / 3 < late / whole < 0.4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora_rank": 8, "train_only": "mlp"}, "--lora-rank and --train-only train different parts"),
        ({"lora_targets": "q_proj"}, "--lora-targets needs an adapter"),
        ({"base_dtype": "nf4"}, "--base-dtype needs an adapter"),
        ({"lora_rank": 8, "lora_targets": "c_attn"}, "no linear layer is called c_attn"),
        ({"train_only": "nothing"}, "no tensor matches 'nothing'"),
        ({"train_only": "("}, "is no regular expression"),
    ],
)
def test_what_cannot_be_trained_is_said(options, says):
    with pytest.raises(UsageError, match=says.replace("(", r"\(")):
        tuned(**options)


@pytest.mark.parametrize("shape", [(4096, 14336), (1024, 4096), (512, 256)])
@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_base_has_the_bytes_of_bitsandbytes(name, shape):
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes")
    weight = torch.randn(shape, dtype=torch.bfloat16)
    if name == "nf4":
        codes, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        stored = [codes, state.absmax, state.state2.absmax]
    else:
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
        stored = [codes, scales]
    spec = PartitionSpec(((), ()), (("layer", 0),))
    kind = TensorKind("layers.0.mlp.up_proj.weight", shape, BY_NAME["BF16"], spec, (1,), trainable=True)
    found = narrow_inventory(TensorInventory((kind,), 1), name)
    assert found.nbytes == sum(one.nbytes for one in stored)


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("bf16", "adamw", 2 + 2 + 4),
        ("bf16", "sgd", 2 + 2),
        ("bf16", "sgd-momentum", 2 + 2 + 2),
        ("bf16", "lion", 2 + 2 + 4),
        ("fp32", "adamw", 4 + 4 + 8),
        ("mixed", "adamw", 4 + 4 + 8),
    ],
)
def test_everything_in_one_type(precision, optimizer, per_parameter):
    """torch's states have the type of the parameters; Lion is bitsandbytes', whose states are fp32."""
    found = tuned(precision=precision, optimizer=optimizer, profile="hf")
    casts = "casts of the weights" in " ".join(term.name for term in found.forecast.estimate.binding.terms)
    assert casts == (precision == "mixed")
    states = [t for t in found.forecast.estimate.binding.terms if t.exact]
    assert sum(t.nbytes for t in states) == per_parameter * found.parameters


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_muon_keeps_what_torch_keeps(dtype):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.randn(64, 32, dtype=getattr(torch, dtype)))
    optimizer = torch.optim.Muon([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.ndim)
    found = tuned(FIXTURES / "configs/llama.json", optimizer="muon", precision={"bfloat16": "bf16"}.get(dtype, "fp32"))
    momentum = next(t for t in found.forecast.estimate.binding.terms if t.name == "momentum of matrices")
    assert kept == weight.nbytes
    assert momentum.nbytes == momentum.inputs["elements"] * weight.element_size()


@pytest.mark.parametrize("mesh", [Mesh.of(fsdp=8), Mesh.of(pp=2, tp=4)], ids=str)
def test_models_beside_the_trained_one_add_their_weights(mesh):
    """A policy, its reference and a reward model: the sum of a plan of training and two of weights."""
    alone = tuned(mesh=mesh)
    both = tuned(mesh=mesh, beside=(LLAMA, LLAMA))
    own = max(rank.holding.nbytes for rank in alone.forecast.estimate.ranks)
    added = [t for t in both.forecast.estimate.binding.terms if t.name.startswith("weights of llama-3.1-8b.json")]
    assert len({term.name for term in added}) == 2
    assert all(0.9 * own <= term.nbytes <= own for term in added)
    assert nbytes(both, "optimizer") == nbytes(alone, "optimizer")


def test_a_model_beside_serves_nothing():
    with pytest.raises(UsageError, match="--extra-model applies to training"):
        plan(LLAMA, ReshardOptions(), plan_options=PlanOptions(use="serve", beside=(LLAMA,)))
