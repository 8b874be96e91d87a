"""The oracle of kept bytes: what autograd saves of each layer of a tiny model of transformers, counted by storage.

The models compute on a CPU. Three things are replaced by what a GPU has instead: fused attention, of which a CPU has no
kernel with dropout, other widths of values or learned biases; dropout, whose masks have a byte an element on a GPU; and
the kernels of recurrent layers (`recurrent_kernels.py`).
"""

from __future__ import annotations

import re
import sys
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import transformers
from recurrent_kernels import list_kernels
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from transformers.integrations import flash_attention

from shardctl.models import describe_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.estimate.workload import AttentionKernel

CHECK = "_check_and_adjust_attn_implementation"
"""What asks whether the package of an attention is installed."""


class FusedAttention(torch.autograd.Function):
    """Attention that keeps what the kernels of sdpa and FlashAttention do, by torch's derivatives.yaml and flash_attn's
    `FlashAttnFunc`: queries, keys, values, the result, and a number for each row."""

    @staticmethod
    def forward(ctx, queries, keys, values, mask):
        batch, heads, tokens, width = queries.shape
        if mask is None and values.shape[-1] == width:
            made = torch.empty_like(queries)  # FlashAttention's, in the order of the queries
        else:
            made = queries.new_empty(batch, tokens, heads, values.shape[-1]).transpose(1, 2)
        made.zero_()
        sums = torch.zeros(batch, heads, tokens)
        ctx.save_for_backward(queries, keys, values, made, sums, *([] if mask is None else [mask]))
        return made

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


def attend(queries, keys, values, attn_mask=None, **_):
    if torch.is_autocast_enabled("cpu"):
        queries, keys, values = (one.to(torch.bfloat16) for one in (queries, keys, values))
    return FusedAttention.apply(queries, keys, values, attn_mask)


def attend_flash(queries, keys, values, *_, **__):
    made = FusedAttention.apply(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), None)
    return made.transpose(1, 2)


def drop(x, p=0.5, training=True, inplace=False):  # noqa: FBT002, ARG001 - torch's own signature
    return torch.native_dropout(x, p, True)[0] if training and p else x


@contextmanager
def gpu_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Keep of attention and dropout what a GPU's kernels keep."""
    replaced = [
        (functional, "scaled_dot_product_attention", attend),
        (functional, "dropout", drop),
        (flash_attention, "_flash_attention_forward", attend_flash),
    ]
    own = sys.modules[type(model).__module__]
    if hasattr(own, "_flash_attention_forward"):  # older classes call it themselves
        replaced.append((own, "_flash_attention_forward", attend_flash))
    replaced += list_kernels(model)
    with ExitStack() as stack:
        for where, name, instead in replaced:
            stack.enter_context(mock.patch.object(where, name, instead))
        yield


def compute_wide(function: Any) -> Any:
    """What autocast makes of a function that a GPU computes in fp32."""

    def run(x, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            return function(x.float(), *args, **kwargs)

    return run


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """Autocast to bf16 on a CPU, with softmax and LayerNorm in fp32 as on a GPU."""
    with torch.autocast("cpu", torch.bfloat16), ExitStack() as stack:
        for where, name in ((functional, "softmax"), (torch, "softmax"), (functional, "layer_norm")):
            stack.enter_context(mock.patch.object(where, name, compute_wide(getattr(where, name))))
        yield


@dataclass(frozen=True)
class SavedTensor:
    """A storage that autograd keeps."""

    layer: int | str
    """The layer that saved it first; ``before``, ``between`` and ``after`` layers, or ``shared`` by them."""
    module: str
    kind: str
    """The class of that module."""
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def layer_paths(config: dict[str, Any]) -> list[str]:
    """The modules of the pipeline layers, in order."""
    model = describe_model(config)
    paths: dict[int, str] = {}
    for tensor in model.own():
        where, number = tensor.spec.where[0]
        if where == "layer" and not tensor.row.on:
            depth = tensor.row.name.split("}")[0].lstrip(".").count(".") + 1
            base = model.prefix.count(".") + 1 if model.prefix and tensor.row.name.startswith(".") else 0
            paths.setdefault(number, ".".join(tensor.name.split(".")[: base + depth]))
    return [paths[number] for number in sorted(paths)]


def build_model(
    config: dict[str, Any], kind: AttentionKernel, dtype: torch.dtype = torch.bfloat16
) -> torch.nn.Module | None:
    """The model of a config, whose layers attend in one way; None if transformers has no such attention for it."""
    cls = getattr(transformers, config["architectures"][0])
    if not (cls._supports_sdpa if kind == "sdpa" else kind == "eager" or cls._supports_flash_attn):
        return None
    values = cls.config_class.from_dict(config)
    chosen = "flash_attention_2" if kind == "flash" else kind
    with (
        mock.patch.object(transformers.PreTrainedModel, CHECK, return_value=chosen)
        if kind == "flash"
        else nullcontext()
    ):
        asked: Any = kind if kind != "flash" else "eager"
        if kind == "sdpa" and "audio_config" in config:  # of towers that hear only some have it
            asked = {"": kind, "audio_config": "eager"}
        model = cls._from_config(values, attn_implementation=asked, dtype=dtype)
    for module in model.modules() if kind == "flash" else ():
        if isinstance(getattr(module, "config", None), transformers.PreTrainedConfig):
            module.config._attn_implementation_internal = chosen
    kept = model._get_dtype_plan(dtype)  # as from_pretrained does: some weights are fp32 in 16 bits, too
    for name, weight in model.named_parameters() if kept else ():
        if re.search("|".join(key.replace("*", ".*") for key in kept), name):
            weight.data = weight.data.float()
    return model.train()


def ask(model: torch.nn.Module, batch: int, tokens: int) -> dict[str, Any]:
    """The arguments of a model for training."""
    config = model.config
    ids = torch.randint(3, 60, (batch, tokens))
    if model.main_input_name == "pixel_values":
        size = config.image_size
        return {"pixel_values": torch.zeros(batch, 3, size, size, dtype=next(model.parameters()).dtype)}
    found: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "add_cross_attention", False):
        found["encoder_hidden_states"] = torch.zeros(batch, tokens, config.hidden_size, dtype=torch.bfloat16)
    if config.is_encoder_decoder:
        found["decoder_input_ids"] = ids
    if config.model_type == "voxtral_realtime":
        heard = batch, tokens * config.downsample_factor, config.audio_config.hidden_size
        found["encoder_inputs_embeds"] = torch.zeros(heard, dtype=next(model.parameters()).dtype)
    if config.model_type == "mllama":
        parts = (config.vision_config.image_size // config.vision_config.patch_size) ** 2 + 1
        seen = batch, config.vision_config.max_num_tiles * parts, config.text_config.hidden_size
        found["cross_attention_mask"] = torch.ones(batch, tokens, 1, config.vision_config.max_num_tiles)
        found["cross_attention_states"] = torch.zeros(seen, dtype=next(model.parameters()).dtype)
    if getattr(model, "lm_head", None) is not None:
        found |= {"labels": ids, "use_cache": False}
    return found


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor that autograd keeps, for as long as it does."""

    tensor: torch.Tensor


class SavedList:
    """Lists what autograd keeps of a forward pass, each storage once, without parameters and buffers."""

    def __init__(self, model: torch.nn.Module, paths: list[str]) -> None:
        self.own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.place: list[int | str] = ["before"]
        self.inside = [("", "")]
        self.given: set[int] = set()
        self.held: list[object] = []  # so that no storage has the address of one that is gone
        self.found: dict[int, SavedTensor] = {}
        self.alive: dict[int, list[weakref.ref[HeldTensor]]] = {}
        self.handles = []
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self.enter(name)))
            self.handles.append(module.register_forward_hook(lambda *_: self.inside.pop() and None))
        for number, path in enumerate(paths):
            module = model.get_submodule(path)
            behind = "after" if number == len(paths) - 1 else "between"
            self.handles.append(module.register_forward_pre_hook(self.begin(number), with_kwargs=True))
            self.handles.append(module.register_forward_hook(lambda *_, behind=behind: self.place.append(behind)))

    def pack(self, tensor: torch.Tensor) -> HeldTensor:
        storage, held = tensor.untyped_storage(), HeldTensor(tensor.detach())
        self.alive.setdefault(storage._cdata, []).append(weakref.ref(held))
        if storage._cdata not in self.own and storage._cdata not in self.found:
            where = "shared" if storage._cdata in self.given else self.place[-1]
            name, kind = self.inside[-1]
            self.found[storage._cdata] = SavedTensor(
                where, name, kind, storage.nbytes(), tuple(tensor.shape), tensor.dtype
            )
            self.held.append(storage)
        return held

    def list_alive(self) -> list[SavedTensor]:
        """List what is still kept: what an indexer computed is not, of which only the choice of tokens goes on."""
        return [
            one
            for key, one in self.found.items()
            if "indexer" not in one.module or any(held() is not None for held in self.alive[key])
        ]

    def enter(self, name: str) -> Any:
        return lambda module, _: self.inside.append((name, type(module).__name__))

    def begin(self, number: int) -> Any:
        """Begin a layer, which is given masks, positions and what an encoder made, as others are."""

        def note(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self.place.append(number)
            wide = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
            encoded = kwargs.get("encoder_hidden_states", wide[1] if len(wide) > 1 else None)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and (not leaf.requires_grad or leaf is encoded):
                    self.given.add(leaf.untyped_storage()._cdata)
                    self.held.append(leaf.untyped_storage())

        return note


def list_saved(
    model: torch.nn.Module, paths: list[str], batch: int, tokens: int, *, replaced: bool = True
) -> list[SavedTensor]:
    """List what autograd keeps of a forward pass of so many sequences, with kernels of a CPU unless `replaced`."""
    saved = SavedList(model, paths)
    kernels = gpu_kernels(model) if replaced else nullcontext()
    with kernels, torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
        made = model(**ask(model, batch, tokens))
    for handle in saved.handles:
        handle.remove()
    assert made is not None  # the graph is alive with it
    return saved.list_alive()
