"""What compiled layers keep is what AOTAutograd's partitioner leaves of the graph of forward and backward pass."""

from __future__ import annotations

import fsdp2_moments
import pytest
import torch
from known_models import stock
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel.loss import _nll_loss_and_log_softmax_backward
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardctl.base.errors import UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.training.activations import RankActivations
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import Mesh

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 512, 1792, 8, 2, 64, 4096
BATCH, TOKENS = 2, 256


@pytest.fixture(autouse=True)
def _compiler(monkeypatch):
    """Forget what other tests of this process compiled: beyond a limit torch runs a function without compiling it.

    Makers of fixtures switch the compiler off for their whole process.
    """
    torch._dynamo.reset()
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


def ours(model_type="llama", *, tp=1, **options):
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]],
        "model_type": model_type, "vocab_size": VOCABULARY, "num_key_value_heads": KV_HEADS, "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    mesh = Mesh.of(tp=tp)
    holding, *_ = list_rank_shards(stock(config), mesh, [1])
    return RankActivations(build_layer_graph(config), holding, mesh, TrainingWorkload(TOKENS, BATCH, **options), [1])


def layer_bytes(model_type="llama", **options):
    (kind,) = ours(model_type, **options).kinds
    return kind.nbytes


class Layer(fsdp2_moments.Layer):
    def __init__(self):
        super().__init__(HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)


def compile_partitioned(module):
    """As Inductor compiles, but for its kernels."""
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    return torch.compile(module, backend=backend, fullgraph=True)


def kept(function, *inputs, besides):
    """Count bytes of the storages that a forward pass keeps, `besides` those of parameters and constants."""
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(storage.nbytes() for storage in found.values())


def torchs(layer, *, selected=False):
    torch._dynamo.reset()
    inputs = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    turns = torch.ones(TOKENS, 1, HEAD_DIM)
    if selected:
        layer = checkpoint_wrapper(layer, context_fn=fsdp2_moments.policy, preserve_rng_state=False)
    return kept(compile_partitioned(layer), inputs, turns, turns, besides=[*layer.parameters(), turns])


def test_a_compiled_layer_keeps_what_the_partitioner_leaves():
    layer = Layer().to(torch.bfloat16)
    assert layer_bytes(compiled="layers") == torchs(layer)
    assert layer_bytes() - layer_bytes(compiled="layers") == 2 * BATCH * TOKENS * INTERMEDIATE


def test_a_compiled_layer_of_torchtitans_list_does_not_keep_what_nobody_reads():
    layer = Layer().to(torch.bfloat16)
    assert layer_bytes(compiled="layers", recompute="selective") == torchs(layer, selected=True)
    less = layer_bytes(recompute="selective") - layer_bytes(compiled="layers", recompute="selective")
    assert less == 2 * BATCH * TOKENS * HIDDEN


def test_norms_of_heads_are_kept_as_without_a_compiler():
    class Normed(nn.Linear):
        def __init__(self, linear, width):
            super().__init__(linear.in_features, linear.out_features, bias=False)
            self.norm, self.width = nn.RMSNorm(width), width

        def forward(self, x):
            return self.norm(super().forward(x).unflatten(-1, (-1, self.width))).flatten(-2)

    layer = Layer()
    layer.attention.wq, layer.attention.wk = (Normed(w, HEAD_DIM) for w in (layer.attention.wq, layer.attention.wk))
    # What differs are the norms' statistics, one number for each head.
    assert layer_bytes("qwen3", compiled="layers") == pytest.approx(torchs(layer.to(torch.bfloat16)), rel=0.003)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_layer_in_float8_keeps_what_torchao_keeps(recipe):
    float8 = pytest.importorskip("torchao.float8")
    layer = Layer().to(torch.bfloat16)
    float8.convert_to_float8_training(layer, config=float8.Float8LinearConfig.from_recipe_name(recipe))
    assert layer_bytes(compiled="layers", float8=recipe) == pytest.approx(torchs(layer), rel=0.001)
    selected = layer_bytes(compiled="layers", float8=recipe, recompute="selective")
    assert selected == pytest.approx(torchs(layer, selected=True), rel=0.002)


def test_float8_without_a_compiler_spares_nothing():
    assert layer_bytes(float8="tensorwise") == layer_bytes()


def test_a_compiled_loss_keeps_the_logits():
    torch._dynamo.reset()
    logits = torch.randn(BATCH, TOKENS, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    loss = compile_partitioned(lambda x, y: functional.cross_entropy(x.flatten(0, 1).float(), y.flatten(0, 1)))
    rows = BATCH * TOKENS
    theirs = kept(loss, logits, labels, besides=[labels])
    assert theirs - 2 * rows * VOCABULARY <= 12 * rows  # the largest logit of each token, and its sum
    eager, compiled = (ours(compiled=what).head.nbytes for what in ("layers", "all"))
    assert eager - compiled == 2 * rows * VOCABULARY


def test_a_loss_that_tp_ranks_share_holds_four_copies_of_its_logits(fake_mesh):
    mesh, rows = fake_mesh, BATCH * TOKENS
    tracker = fsdp2_moments.Tracker()
    tracker.armed = True
    with tracker:
        logarithms = torch.zeros(rows, VOCABULARY // 2)
        labels, shape = torch.zeros(rows, dtype=torch.long), torch.Size((rows, VOCABULARY))
        one = torch.tensor(1.0)
        _nll_loss_and_log_softmax_backward(one, logarithms, labels, None, 1, -100, one, shape, 1, mesh, 0)
    ranks = ours(tp=2)
    moment = next(moment for moment in ranks.list_moments() if moment.with_head)
    assert max(tracker.most.values()) / logarithms.nbytes == pytest.approx(4, rel=0.02)
    assert moment.besides.nbytes == 3 * logarithms.nbytes


@pytest.fixture
def fake_mesh():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_what_is_not_known_of_compiled_layers_is_said():
    with pytest.raises(UnsupportedError, match="attention holds its scores"):
        ours(compiled="layers", attention="eager")
    with pytest.raises(UnsupportedError, match="tp ranks share"):
        ours(tp=2, compiled="all")
