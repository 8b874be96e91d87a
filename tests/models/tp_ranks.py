"""What two gloo ranks do with rank files: each runs transformers' own modules on its shards, as under tp.

Run as a script, one process a rank. What a module needs of its peers follows from how our rules cut its weight:
output rows cut, it works by itself (and the head's logits are gathered); input columns cut, the ranks add their
results; a vocabulary cut, the ranks add what each looks up. Heads are never told apart here: a rank's attention takes
the shard for the weight of a smaller attention, and only heads that were cut as heads give the right sums.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import traceback
from itertools import product
from pathlib import Path

WORLD = 2
COUNTS = (
    *("num_heads", "n_head", "n_heads", "num_attention_heads", "num_kv_heads", "num_key_value_heads", "n_groups"),
    *("num_k_heads", "num_v_heads", "key_dim", "value_dim", "qkv_dim", "o_groups"),
    *("split_size", "embed_dim", "inner_dim", "intermediate_size"),
)
"""Attributes of attentions and mixers that count heads, groups or channels, of which a rank has its part."""

FUSED = {"qkv_proj": (4, 2, 2), "gate_up_proj": (1, 1), "c_attn": (1, 1, 1)}
"""The relative sizes of the parts of fused projections in the fixtures that are cut wrongly on purpose."""


def run(folder: Path, jobs: dict[str, dict[str, object]], timeout: float = 300) -> dict[str, str]:
    """Carry out `jobs` on all ranks; for each what went wrong on any rank, or an empty text."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in range(WORLD):
        with (folder / f"log-{rank}.txt").open("wb") as log:
            command = [sys.executable, __file__, folder, str(rank)]
            ranks.append(subprocess.Popen(command, env=os.environ | quiet, stdout=log, stderr=log))
    try:
        for rank in ranks:
            rank.wait(timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not any(rank.returncode for rank in ranks), (folder / "log-0.txt").read_text()
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(WORLD)]
    return {name: "\n".join(filter(None, (result[name] for result in results))) for name in jobs}


def shards(path, rank):
    """This rank's part of each tensor, its boxes put together in order, and where the first of them begins."""
    import torch
    from safetensors import safe_open

    found = {}
    for file in sorted(path.glob(f"shard-{rank + 1:05d}-*.safetensors")):
        with safe_open(file, "pt") as opened:
            info = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118 - safe_open is no dict
                found.setdefault(name, []).append((info[name]["saved_offsets"], opened.get_tensor(name)))
    whole = {}
    for name, boxes in found.items():
        boxes.sort(key=lambda box: box[0])
        dims = {d for offsets, _ in boxes for d, offset in enumerate(offsets) if offset}
        assert len(dims) <= 1, name
        whole[name] = torch.cat([part for _, part in boxes], dims.pop()) if len(boxes) > 1 else boxes[0][1]
    return whole, {name: boxes[0][0] for name, boxes in found.items()}


def misplaced(mine, rank):
    """The same shards, but of what is fused the rows (or columns) that a plain cut in two halves would give."""
    import torch
    import torch.distributed as dist

    fused = {name: int("c_attn.weight" in name) for name in mine if name.split(".")[-2] in FUSED}
    both = [None] * WORLD
    dist.all_gather_object(both, {name: mine[name] for name in fused})
    for name, dim in fused.items():
        sections = FUSED[name.split(".")[-2]]
        total = mine[name].shape[dim] * WORLD // sum(sections)
        parts = zip(*(part[name].split([total * s // WORLD for s in sections], dim) for part in both), strict=True)
        mine[name] = torch.cat([half for part in parts for half in part], dim).chunk(WORLD, dim)[rank].contiguous()
    return mine


def gather(part, dim=-1):
    """The parts of all ranks side by side along `dim`, which may differ in length."""
    import torch
    import torch.distributed as dist

    parts = [None] * WORLD
    dist.all_gather_object(parts, part)
    return torch.cat(parts, dim)


def summed(part):
    """The sum over the ranks."""
    import torch.distributed as dist

    part = part.contiguous()
    dist.all_reduce(part)
    return part


def shrink(module, projections):
    """Tell an attention or a mixer, some of whose projections are cut, how many heads, groups or channels it has."""
    owners = [module]
    if hasattr(module, "config"):
        module.config = copy.deepcopy(module.config)
        owners.append(module.config)
    for owner, count in product(owners, COUNTS):
        value = vars(owner).get(count)
        if isinstance(value, int) and value % WORLD == 0:
            setattr(owner, count, value // WORLD)
    if "conv1d" in projections:
        module.conv_dim = module.conv1d.weight.shape[0]
    if hasattr(module, "mup_vector"):  # Falcon-H1: a factor for each row of `in_proj`, all of them 1 by default
        module.mup_vector.data = module.mup_vector[..., : module.in_proj.weight.shape[0]]
        module.groups_time_state_size //= WORLD
    keys = next((name for name in ("k_proj", "kv_proj") if name in projections), None)
    if keys is not None and projections[keys] is None and hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups //= WORLD  # fewer queries share the head that both ranks have


def experts(module, cut, rank):
    """Ranks that each have a part of every expert's inner width add their results, and the last bias once."""
    assert cut["down_proj"] is not None
    if "down_proj_bias" in cut and rank:
        module.down_proj_bias.data.zero_()
    if hasattr(module, "identity_expert") and rank:  # LongCat's idle experts give a token back, which is added once
        module.identity_expert.forward = lambda token: token * 0
    module.forward = added(module.forward)
    for width in ("intermediate_size", "intermediate_dim", "expert_dim"):
        if isinstance(getattr(module, width, None), int):
            setattr(module, width, getattr(module, width) // WORLD)


def own_experts(module, dim):
    """Say whether a module is of a kind of its own, JetMoE's experts or DBRX's, and needs nothing more."""
    kind = type(module).__name__
    if kind == "JetMoeParallelExperts":
        module.forward = added(module.forward) if dim == 2 else module.forward
    elif kind == "DbrxExperts":
        module.ffn_hidden_size //= WORLD
        module.forward = added(module.forward)
    elif kind in {"JetMoeMoA", "DbrxAttention"}:
        module.hidden_size //= WORLD
    elif kind == "RecurrentGemmaRglru":
        module.num_attention_heads //= WORLD
    return kind in {"JetMoeParallelExperts", "DbrxExperts"}


def added(local):
    """A forward whose results the ranks add."""
    return lambda *inputs, **others: summed(local(*inputs, **others))


def distribute(model, mine, offsets, rank):
    """Give each module this rank's shard of its weights, and the exchange that the shard asks for."""
    import torch

    state = dict(model.state_dict(keep_vars=True))
    assert mine.keys() == state.keys()
    cut = {}
    for name, whole in state.items():
        pairs = zip(whole.shape, mine[name].shape, strict=True)
        (cut[name],) = [dim for dim, (all_of_it, some) in enumerate(pairs) if all_of_it != some] or [None]
    for name, whole in state.items():
        whole.data = mine[name]
    assert any(dim is not None for dim in cut.values()), "nothing was cut"
    head = model.get_output_embeddings()
    for prefix, module in list(model.named_modules()):
        projections = {
            name: cut[f"{prefix}.{name}.weight"]
            for name, child in module.named_children()
            if f"{prefix}.{name}.weight" in cut and not isinstance(child, torch.nn.Embedding) and module is not model
        }
        if any(dim is not None for dim in projections.values()):
            shrink(module, projections)
        if own_experts(module, cut.get(f"{prefix}.weight")):
            continue
        if "Experts" in type(module).__name__:
            experts(module, {name: cut[f"{prefix}.{name}"] for name, _ in module.named_parameters(recurse=False)}, rank)
            continue
        weight = cut.get(f"{prefix}.weight") if "weight" in dict(module.named_parameters(recurse=False)) else None
        if prefix.endswith(".ngram_embedding"):
            all_columns(module)  # Qwen4-Exp: other embeddings with cut columns have one for each head
            continue
        exchange(module, weight, offsets.get(f"{prefix}.weight"), rank, is_head=module is head)
    for name, buffer in model.named_buffers():
        if cut.get(name) is not None:
            buffer.data = gather(buffer, cut[name])


def exchange(module, dim, offset, rank, *, is_head):  # noqa: C901 - one case a kind of module
    """Wrap a module's forward as its weight's cut dim asks for."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    kind = type(module).__name__
    if kind == "StableLmLayerNormPerHead":
        share = len(module.norms) // WORLD
        module.norms = module.norms[rank * share : (rank + 1) * share]
    elif "Norm" in kind and getattr(module, "weight", None) is not None and module.weight.ndim == 1:
        over_all_channels(module, dim, rank)
    elif dim is None or "Norm" in kind:
        return  # whole, or a norm for each head, which works on the heads that are here
    elif isinstance(module, nn.Embedding):
        if dim == 0:
            vocabulary(module, offset[0])
    elif isinstance(module, nn.Conv1d):
        assert module.groups == module.in_channels
        module.groups = module.in_channels = module.out_channels = module.weight.shape[0]
    elif kind == "DeepseekV4GroupedLinear":
        module.n_groups //= WORLD
    elif isinstance(module, nn.Linear | Conv1D):
        if dim == (0 if isinstance(module, Conv1D) else 1):
            rowwise(module)
        elif isinstance(module, Conv1D):
            module.nf = module.weight.shape[1]
        elif is_head:
            local = module.forward
            module.forward = lambda x: gather(local(x))
    else:
        raise AssertionError(f"{kind} has a cut weight and no rule here")


def all_columns(module):
    """Each rank looks up its columns of every row."""
    local = module.forward
    module.forward = lambda ids: gather(local(ids))


def over_all_channels(module, dim, rank):
    """A norm over channels of which a rank has a part sees all of them."""
    local = module.forward
    if dim is not None:
        module.weight.data = gather(module.weight.data)

    def forward(x, *others):
        if x.shape[-1] == module.weight.shape[0]:
            return local(x, *others)
        return local(gather(x), *map(gather, others)).chunk(WORLD, -1)[rank]

    module.forward = forward


def vocabulary(module, first):
    """Each rank looks up what it has, the rest are zeros."""
    from torch.nn import functional

    def forward(ids):
        here, rows = ids - first, module.weight.shape[0]
        known = (here >= 0) & (here < rows)
        return summed(scale(module) * functional.embedding(here.clamp(0, rows - 1), module.weight) * known[..., None])

    module.forward = forward


def scale(module):
    """What Gemma multiplies its embeddings with."""
    return getattr(module, "embed_scale", 1.0)


def rowwise(module):
    """The ranks add their results, and the bias once."""
    from torch.nn import functional
    from transformers.pytorch_utils import Conv1D

    def forward(x):
        total = summed(functional.linear(x, module.weight.T if isinstance(module, Conv1D) else module.weight))
        return total if module.bias is None else total + module.bias

    module.forward = forward


def slice_alibi(rank):
    """The positions of BLOOM, MPT and some Falcons are a slope for each head: a rank needs those of its heads."""
    from transformers.models.bloom import modeling_bloom
    from transformers.models.falcon import modeling_falcon
    from transformers.models.mpt import modeling_mpt

    slopes, build = modeling_bloom._get_alibi_slopes, modeling_falcon.build_alibi_tensor
    biases = modeling_mpt.build_mpt_alibi_tensor
    modeling_mpt.build_mpt_alibi_tensor = lambda *given, **named: biases(*given, **named).chunk(WORLD)[rank]
    modeling_bloom._get_alibi_slopes = lambda num_heads, device: slopes(num_heads, device).chunk(WORLD)[rank]
    modeling_falcon.build_alibi_tensor = lambda mask, num_heads, dtype: (
        build(mask, num_heads, dtype).view(len(mask), num_heads, 1, -1).chunk(WORLD, 1)[rank].flatten(0, 1)
    )


def logits_of(model, inputs):
    """The logits for some input ids, of an encoder-decoder for the same ids on both sides, of some after a sound."""
    import torch

    ids = torch.tensor(inputs)
    given = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    if model.config.model_type == "whisper":
        del given["input_ids"]
        size = (len(inputs), model.config.num_mel_bins, 2 * model.config.max_source_positions)
        given["input_features"] = torch.linspace(-1, 1, size[0] * size[1] * size[2]).view(size)
    if model.config.model_type == "voxtral_realtime":
        size = (len(inputs), model.config.audio_config.num_mel_bins, ids.shape[1] * model.config.audio_length_per_tok)
        given["input_features"] = torch.linspace(-1, 1, size[0] * size[1] * size[2]).view(size)
    return model(**given, use_cache=False).logits


def check(rank, path, config, inputs, expected, *, naively=False):
    """Compare what the ranks compute together with the logits of the whole model.

    With `naively`, cut what is fused without regard for its parts, which gives other logits.
    """
    import torch
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    model = kind(kind.config_class.from_dict(config)).eval()
    mine, offsets = shards(Path(path), rank)
    if naively:
        mine = misplaced(mine, rank)
    distribute(model, mine, offsets, rank)
    whole = torch.load(expected)
    torch.testing.assert_close(logits_of(model, inputs), whole, rtol=1e-5, atol=1e-5 * max(1, whole.abs().max().item()))


def _main(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    slice_alibi(rank)
    wrong = {}
    for name, arguments in json.loads((folder / "jobs.json").read_text()).items():
        try:
            check(rank, **arguments)
        except Exception:  # noqa: BLE001 - whatever it is, the test is told
            wrong[name] = f"rank {rank}: {traceback.format_exc()}"
        else:
            wrong[name] = ""
    (folder / f"result-{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the results are written; threads of gloo that still end now and then abort an ordinary exit
