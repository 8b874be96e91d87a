"""Makes rules for an unknown architecture from transformers' own parallelism plan.

The plan says less than a table: nothing of heads, of what replicas share, or of modules that it leaves whole. Columns
of attention are kept in whole heads here all the same, and what must divide is never cut unevenly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError, format_first_few
from shardctl.models.quantization import find_quantization_config
from shardctl.models.rules.fused_orders import FusedOrders
from shardctl.models.rules.transformers_plan import read_plan
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.family import Row
from shardctl.models.tables.model import Model, ModelTensor
from shardctl.models.tables.name_pattern import LayerPattern, PatternList, list_name_patterns
from shardctl.tensors.placement import AxisPartition, PartitionSection, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.rules.transformers_plan import TransformersPlan
    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.placement import Where

_COLUMN_PARALLEL_STYLES: Final = ("colwise", "colwise_gather_output", "colwise_rep")
_ROW_PARALLEL_STYLES: Final = ("rowwise", "rowwise_split_input", "rowwise_rep")
_EMBEDDING_STYLE_DIMS: Final = {"embedding_rowwise": 0, "embedding_colwise": 1}
_PACKED_STYLE_DIMS: Final = {"packed_colwise": -2, "packed_rowwise": -1}
_REPLICATED_STYLES: Final = (
    "all_reduce",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
)
"""Styles that change a module's forward, and leave its weights whole (distributed/tensor_parallel.py)."""
_MATRIX_NDIM: Final = 2


def build_transformers_model(config: Mapping[str, object], stored: Manifest) -> Model:
    """Build the model that the plan of an installed transformers describes; canonical names are the stored ones.

    Raises UsageError if transformers is not installed, UnsupportedError if it has no plan for this architecture, or one
    that cannot be followed.
    """
    named = ModelConfig(config)
    architecture = named.architecture()
    if find_quantization_config(config) is not None:
        raise UnsupportedError(
            f"the plan that transformers has for {architecture} does not cover quantized weights",
            hint="write a rule file and give it with --rules FILE",
        )
    plan = read_plan(named.text("model_type", ""), architecture)
    return _PlanRules(named, plan, stored).model(architecture)


class _PlanRules:
    """A plan, applied to the tensors of one checkpoint."""

    def __init__(self, config: ModelConfig, plan: TransformersPlan, stored: Manifest) -> None:
        self.config, self.plan, self.stored = config, plan, stored
        self.orders = FusedOrders(config.values)
        self.prefix = _find_prefix(plan, stored)
        modules = {f"{self.prefix}{name}": style for name, style in plan.tp.items()} | plan.head
        self.styles = list(modules.values())
        # A plan names modules, and the parameters that a module such as a stack of experts has of its own.
        self.weights = PatternList([f"{name}.weight" for name in modules])
        self.biases = PatternList([f"{name}.bias" for name in modules])
        self.own = PatternList(list(modules))
        self.attention = [".".join(name.split(".")[:-1]).endswith(("attn", "attention")) for name in modules]
        self.layers = LayerPattern(f"{self.prefix}layers.*")
        self.late = plan.pp[plan.pp.index("layers") + 1 :] if "layers" in plan.pp else ()
        self.whole: list[str] = []

    def model(self, architecture: str) -> Model:
        """Return the model."""
        tensors = {name: self.tensor(tensor) for name, tensor in self.stored.tensors.items()}
        warnings = [f"shardctl has no table for {architecture}; its cuts are those of {self.plan.source}"]
        if self.whole:
            warnings.append(
                f"that plan leaves {format_first_few(list_name_patterns(self.whole))} whole on every tp rank"
            )
        numbers = {n for t in tensors.values() for where, n in t.spec.where if where == "layer"}
        count = max(numbers, default=-1) + 1
        return Model("", architecture, count, tensors, warnings=tuple(warnings))

    def tensor(self, stored: Tensor) -> ModelTensor:
        """Return one tensor, cut as its module's style says."""
        cuts: list[tuple[AxisPartition, ...]] = [() for _ in stored.shape]
        pattern = "**"
        for patterns, kind in ((self.weights, "weight"), (self.biases, "bias"), (self.own, "weight")):
            found = patterns.first(stored.name)
            if found is not None:
                pattern = list_name_patterns([stored.name])[0]
                cut = self.cut(stored, found, kind)
                if cut is not None:
                    cuts[cut[0]] = (cut[1],)
                break
        else:
            if len(stored.shape) >= _MATRIX_NDIM and self.layers.number(stored.name) is not None:
                self.whole.append(stored.name)
        if cuts:
            cuts[0] += (AxisPartition("fsdp"),)
        spec = PartitionSpec(tuple(cuts), (self.where(stored.name),))
        return ModelTensor(stored.name, stored.shape, stored.dtype, spec, Row(pattern, ""))

    def cut(self, stored: Tensor, place: int, kind: str) -> tuple[int, AxisPartition] | None:
        """Return the dim that tp cuts, and how; None if the tensor stays whole."""
        style, dims = self.styles[place], len(stored.shape)
        if style in _REPLICATED_STYLES or not dims:
            return None
        if style in _COLUMN_PARALLEL_STYLES:
            dim, even = max(dims - 2, 0), self.layers.number(stored.name) is not None
            return dim, self.exact(stored.shape[dim], heads=self.attention[place], even=even)
        if style in _ROW_PARALLEL_STYLES:
            return None if kind == "bias" else (dims - 1, self.exact(stored.shape[-1], heads=self.attention[place]))
        if style in _EMBEDDING_STYLE_DIMS:
            return _EMBEDDING_STYLE_DIMS[style], AxisPartition("tp")
        if style in _PACKED_STYLE_DIMS:
            return self.cut_packed(stored, style)
        raise UnsupportedError(
            f"{self.plan.source} cuts {stored.name} as {style!r}, which is not known",
            hint="write a rule file and give it with --rules FILE",
        )

    def cut_packed(self, stored: Tensor, style: str) -> tuple[int, AxisPartition] | None:
        """Return how an array of gate and up is cut: in halves, unless the files have it in an order of their own."""
        dims = len(stored.shape)
        if dims < _MATRIX_NDIM:
            return (0, self.exact(stored.shape[0])) if style == "packed_colwise" else None
        dim = dims + _PACKED_STYLE_DIMS[style]
        extent = stored.shape[dim]
        order = self.orders.find_gated_order(stored.name) if self.orders.is_converted(stored.name) else "joined"
        if order is None:
            self.whole.append(stored.name)
            return None
        half = PartitionSection(extent // 2, noun="columns of each half")
        pairs = (PartitionSection(extent, 2, noun="pairs of columns"),)
        return dim, AxisPartition("tp", pairs if order == "interleaved" else (half, half))

    def exact(self, extent: int, *, heads: bool = False, even: bool = True) -> AxisPartition:
        """Return a cut into equal parts, of whole heads in attention.

        A vocabulary need not be cut into `even` parts.
        """
        if not even:
            return AxisPartition("tp")
        size = self.config.values.get("head_dim")
        count = self.config.values.get("num_attention_heads")
        if not isinstance(size, int) and isinstance(count, int) and count:
            size = self.config.size("hidden_size", 0) // count
        if heads and isinstance(size, int) and size > 0 and extent % size == 0:
            return AxisPartition("tp", (PartitionSection(extent, size, noun="heads"),))
        return AxisPartition("tp", (PartitionSection(extent),))

    def where(self, name: str) -> tuple[Where, int]:
        """Return the stage: a layer's, or the first or last for what comes before or after the layers."""
        number = self.layers.number(name)
        if not self.plan.pp:
            return ("first", 0)  # no plan of stages, and so no layers that pp could place
        if number is not None:
            return ("layer", number)
        inside = name.startswith(self.prefix) if self.prefix else not name.startswith(tuple(self.plan.head))
        child = name.removeprefix(self.prefix).split(".")[0]
        return ("last", 0) if child in self.late or not inside else ("first", 0)


def _find_prefix(plan: TransformersPlan, stored: Manifest) -> str:
    """Find what stands before the base model's names in the checkpoint, with its dot.

    Raises UnsupportedError unless exactly one place in the names fits the plan.
    """
    first = next(iter(plan.tp)).split(".")
    found: dict[str, None] = {}
    for name in stored.tensors:
        words = name.split(".")
        for start in range(len(words) - len(first)):
            run = words[start : start + len(first)]
            if all(a == b or (b == "*" and a.isdecimal()) for a, b in zip(run, first, strict=True)):
                found[".".join([*words[:start], ""])] = None
    if len(found) != 1:
        what = "nowhere" if not found else f"in several places ({', '.join(found)})"
        raise UnsupportedError(
            f"the plan of {plan.source} names {next(iter(plan.tp))}, which the checkpoint has {what}",
            hint="write a rule file and give it with --rules FILE",
        )
    return next(iter(found))
