"""Cuts circuits: decides from shapes and heads whether one can be cut, and how each of its tensors then is."""

from __future__ import annotations

import re
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class
from shardctl.models.derived.derivation import ORDER_UNKNOWN, SHAPES, TensorRule
from shardctl.models.derived.head_counts import HeadLayout
from shardctl.models.derived.module_groups import (
    AttentionGroup,
    FeedForwardGroup,
    FusedAttentionGroup,
    LatentAttentionGroup,
    SharedAttentionGroup,
)
from shardctl.tensors.placement import AxisPartition, GroupMember, PartitionSection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardctl.models.derived.head_counts import ConfigSizes
    from shardctl.models.derived.library_styles import LibraryStyle
    from shardctl.models.derived.module_groups import Circuit
    from shardctl.models.derived.stored_modules import ModuleTree, StoredModule
    from shardctl.models.rules.fused_orders import FusedOrders
    from shardctl.models.tables.model import ModelTensor

_EXPERT_NUMBER_PATTERN: Final = re.compile(r"(?P<group>(?:.*\.)?(?:\w*experts?))\.(?P<number>\d+)")
_QUERY_NORMS: Final = re.compile(r"(q|query)_?(layer_?)?norm|q_ln")
_KEY_NORMS: Final = re.compile(r"(k|key)_?(layer_?)?norm|k_ln")
_INNER_NORMS: Final = re.compile(r".*(sub|inner).*(norm|ln)")
"""What norms are called that stand between heads and their output, and need all of them."""
_ATTENTION_GATE_NAMES: Final = ("g_proj", "gate_proj", "linear_gate", "gate_attn")
"""What linears in attention are called whose output multiplies that of the heads."""
_LAMBDA_PARAMETER_PATTERN: Final = re.compile(r"lambda_\w+")
"""What parameters are called by which pairs of heads are subtracted from each other (differential attention)."""
_ONE_EACH: Final = (*("sinks", "attn_sink", "attention_sinks", "learnable_sink_param", "gate_bias", "softmax_offset"),)
"""What parameters are called that have one number for each head."""
_ROW_EACH: Final = ("bias_u", "bias_v", "pos_bias_u", "pos_bias_v")
"""What parameters are called that have a row for each head: what Transformer-XL adds to queries."""
_RELATIVE_KEY_MODULES: Final = ("linear_pos", "relative_k_proj", "pos_proj")
"""What linears are called that make keys of relative positions."""
_REPLICATED_ATTENTION_MODULES: Final = ("indexer", "rotary_emb", "rotary_pos_emb")
"""What stands in attention and works by itself, on every rank alike."""
_BIASES_BY_HEAD: Final = ("relative_attention_bias",)
_CONV1D_MODULE_NAMES: Final = ("c_fc", "c_attn")
"""What modules are called that are Conv1D in some models and Linear in others."""
_EXPERT_COLUMNS: Final = "columns of each expert"
_MATRIX_NDIM: Final = 2
_STACKED_MATRIX_NDIM: Final = 3


def find_expert_number(name: str) -> int | None:
    """Return the number of the expert that a tensor is of, if its name says one.

    >>> find_expert_number("model.layers.0.mlp.experts.12.up_proj.weight")
    12
    """
    found = _EXPERT_NUMBER_PATTERN.match(name)
    return int(found["number"]) if found else None


class UnshardedGroupError(Exception):
    """Why a circuit stays whole."""


@state_class
class GroupPartitioner:
    """Cuts the circuits of one checkpoint."""

    tree: ModuleTree
    sizes: ConfigSizes
    share: bool
    """Whether neighbouring ranks may hold the same key/value head."""
    orders: FusedOrders
    styles: Mapping[str, LibraryStyle]
    """What transformers does with tensors, by name."""
    rules: dict[str, TensorRule] = field(default_factory=dict)
    """By name of tensor: what is cut, and what is known to stay whole."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By name of tensor: why it stays whole although its circuit is known."""

    def cut(self, circuit: Circuit) -> None:
        """Add the rules of a circuit, or the reason why there are none."""
        parts = list(_list_modules(circuit))
        if any(t.name in self.rules or t.name in self.reasons for m in parts for t in _list_tensors(m)):
            return
        try:
            if isinstance(circuit, AttentionGroup):
                rules = self._cut_attention(circuit)
            elif isinstance(circuit, FusedAttentionGroup):
                rules = self._cut_fused(circuit)
            elif isinstance(circuit, LatentAttentionGroup):
                rules = self._cut_latent(circuit)
            elif isinstance(circuit, SharedAttentionGroup):
                rules = self._cut_shared(circuit)
            else:
                rules = self._cut_forward(circuit)
            rules = self._confirm_rules(circuit, rules)
        except UnshardedGroupError as error:
            self.reasons |= {t.name: str(error) for m in parts for t in _list_tensors(m)}
        else:
            self.rules |= rules

    def _confirm_rules(self, circuit: Circuit, rules: dict[str, TensorRule]) -> dict[str, TensorRule]:
        """Take the rules for transformers' if its plan says the same of all that it speaks of.

        Raises UnshardedGroupError where the plan says something else: then one of the two is wrong.
        """
        sources: dict[str, None] = {}
        for module in _list_modules(circuit):
            said, rule = self.styles.get(module.weight.name), rules.get(module.weight.name)
            if said is None or rule is None or not said.cut:
                continue
            dims = [n for n, dim in enumerate(rule.cuts) if any(cut.axis != "ep" for cut in dim)]
            cut, inputs = bool(dims), module is circuit.output
            if len(module.shape) == _STACKED_MATRIX_NDIM:  # where a plan says which dim is cut, counted from the last
                inputs = dims == [_STACKED_MATRIX_NDIM - 1]
            mine = "nothing" if not cut else "inputs" if inputs else "outputs"
            if mine != said.cut and cut:
                raise UnshardedGroupError(f"{said.source} has {said.style} for {module.path.rpartition('.')[2]}")
            sources[said.source] = None
        origin = next(iter(sources), SHAPES)
        return {name: replace(rule, origin=origin) for name, rule in rules.items()}

    def _has_style(self, module: StoredModule, *styles: str) -> bool:
        said = self.styles.get(module.weight.name)
        return said is not None and said.style in styles

    def _cut_attention(self, circuit: AttentionGroup) -> dict[str, TensorRule]:
        q, k, v, o = circuit.queries, circuit.keys, circuit.values, circuit.output
        layout = self.sizes.find_heads(q.path, q.shape[0], k.shape[0], o.shape[1])
        if layout is None and q.shape[0] == 2 * o.shape[1] and self._has_style(q, "colwise"):
            layout = self.sizes.find_heads(q.path, o.shape[1], k.shape[0], o.shape[1])  # with a gate in each head
        if layout is None:
            raise UnshardedGroupError(f"no number of heads in the config fits {list(q.shape)} and {list(k.shape)}")
        value, rest = divmod(v.shape[0], layout.key_heads)
        if rest or value * layout.heads != o.shape[1]:
            raise UnshardedGroupError(f"{list(v.shape)} of values do not fit {list(o.shape)} of the output")
        heads = PartitionSection(q.shape[0], q.shape[0] // layout.heads, noun="heads")
        share = self.share and layout.key_heads < layout.heads
        keys, values = (
            PartitionSection(m.shape[0], m.shape[0] // layout.key_heads, share, "key/value heads") for m in (k, v)
        )
        rules = _cut_rows(q, (heads,), "queries by heads")
        rules |= _cut_rows(k, (keys,), "keys by heads") | _cut_rows(v, (values,), "values by heads")
        rules |= _cut_columns(o, PartitionSection(o.shape[1], value, noun="heads"), "the sum over heads")
        return rules | self._cut_beside(circuit, layout, heads, keys)

    def _cut_fused(self, circuit: FusedAttentionGroup) -> dict[str, TensorRule]:
        fused, o = circuit.fused, circuit.output
        if fused.path.rpartition(".")[2] == "in_proj_weight":
            raise UnshardedGroupError("nn.MultiheadAttention, which computes with its weights without calling a linear")
        if not fused.is_matrix:
            raise UnshardedGroupError("queries, keys and values in one array that is no matrix")
        transposed = _has_inputs_for_rows(fused)
        rows, inner = (fused.shape[1], o.shape[0]) if transposed else (fused.shape[0], o.shape[1])
        layout = self.sizes.find_fused_heads(fused.path, rows, inner)
        if layout is None:
            raise UnshardedGroupError(f"no number of heads in the config fits the fused {list(fused.shape)}")
        order = self.orders.find_attention_order(fused.weight.name, layout)
        if order is None and self._has_style(fused, "colwise") and not self.orders.is_converted(fused.weight.name):
            order = "grouped"  # transformers cuts the class's own array as one contiguous range
        if order is None:
            raise UnshardedGroupError(ORDER_UNKNOWN)
        q, kv = layout.heads * layout.size, layout.key_heads * layout.size
        if order == "joined":
            keys = PartitionSection(kv, layout.size, self.share and layout.key_heads < layout.heads, "key/value heads")
            sections: tuple[PartitionSection, ...] = (PartitionSection(q, layout.size, noun="heads"), keys, keys)
        else:
            sections = (PartitionSection(rows, rows // layout.key_heads, noun="groups of heads"),)
        note = "queries, keys and values by heads"
        if transposed:
            return _cut_columns(fused, sections, note, bias=True) | _cut_rows(
                o, (PartitionSection(inner, layout.size, noun="heads"),), "the sum over heads", bias=False
            )
        rules = _cut_rows(fused, sections, note)
        rules |= _cut_columns(o, PartitionSection(inner, layout.size, noun="heads"), "the sum over heads")
        heads = PartitionSection(q, layout.size, noun="heads")
        return rules | self._cut_beside(
            circuit, layout, heads, PartitionSection(kv, layout.size, self.share, "key/value heads")
        )

    def _cut_latent(self, circuit: LatentAttentionGroup) -> dict[str, TensorRule]:
        o = circuit.output
        heads = self.sizes.count_heads(o.path, circuit.expanding[0].shape[0], o.shape[1])
        if heads is None or any(m.shape[0] % heads for m in circuit.expanding):
            raise UnshardedGroupError("no number of heads in the config fits the latent attention")
        rules: dict[str, TensorRule] = {}
        for module in circuit.expanding:
            rows = module.shape[0]
            rules |= _cut_rows(
                module, (PartitionSection(rows, rows // heads, noun="heads"),), "what a latent becomes, by heads"
            )
        rules |= _cut_columns(o, PartitionSection(o.shape[1], o.shape[1] // heads, noun="heads"), "the sum over heads")
        for module in circuit.latent:
            rules |= {t.name: _leave_whole(t, "a latent, whole") for t in _list_tensors(module)}
        queries, keys = (PartitionSection(m.shape[0], m.shape[0] // heads, noun="heads") for m in circuit.expanding)
        return rules | self._cut_beside(circuit, HeadLayout(heads, heads, o.shape[1] // heads), queries, keys)

    def _cut_shared(self, circuit: SharedAttentionGroup) -> dict[str, TensorRule]:
        q, o = circuit.queries, circuit.output
        if not self.sizes.shares_keys:
            raise UnshardedGroupError("where its keys and values are is not known")
        heads = self.sizes.count_heads(q.path, q.shape[0], o.shape[1])
        if heads is None:
            raise UnshardedGroupError(f"no number of heads in the config fits {list(q.shape)}")
        queries, values = (PartitionSection(n, n // heads, noun="heads") for n in (q.shape[0], o.shape[1]))
        rules = _cut_rows(q, (queries,), "queries by heads") | _cut_columns(o, values, "the sum over heads")
        return rules | self._cut_beside(circuit, HeadLayout(heads, heads, queries.unit), queries, queries)

    def _cut_beside(
        self, circuit: Circuit, layout: HeadLayout, heads: PartitionSection, keys: PartitionSection
    ) -> dict[str, TensorRule]:
        """Cut what else stands in the attention; raises UnshardedGroupError for what may depend on heads."""
        rules: dict[str, TensorRule] = {}
        mine = {m.path for m in _list_modules(circuit)}
        dependent = {layout.heads, layout.key_heads, heads.size, keys.size, circuit.output.shape[-1]} - {1}
        for module in self.tree.within(circuit.owner):
            last = module.path.rpartition(".")[2]
            if module.path in mine or any(word in _REPLICATED_ATTENTION_MODULES for word in module.path.split(".")):
                continue
            section = heads if _QUERY_NORMS.fullmatch(last) else keys if _KEY_NORMS.fullmatch(last) else None
            if section is not None:
                rules |= self._cut_norm(module, section)
            elif (last in _ONE_EACH and module.shape == (layout.heads,)) or (
                last in _ROW_EACH and module.shape == (layout.heads, heads.unit)
            ):
                rules |= _cut_rows(module, (PartitionSection(layout.heads, noun="heads"),), "one for each head")
            elif last in _RELATIVE_KEY_MODULES and module.is_matrix and module.shape[0] == heads.size:
                rules |= _cut_rows(module, (heads,), "keys of relative positions by heads")
            elif last in _BIASES_BY_HEAD and module.is_matrix and module.shape[1] == layout.heads:
                rules |= _cut_columns(module, PartitionSection(layout.heads, noun="heads"), "a bias for each head")
            elif (
                last in _ATTENTION_GATE_NAMES
                and module.is_matrix
                and module.shape[0] in {layout.heads, circuit.output.shape[1]}
            ):
                unit = module.shape[0] // layout.heads
                rules |= _cut_rows(
                    module, (PartitionSection(module.shape[0], unit, noun="heads"),), "a gate for each head"
                )
            elif (
                _depends(module, dependent, circuit.output.shape[0])
                or _INNER_NORMS.fullmatch(last)
                or _LAMBDA_PARAMETER_PATTERN.fullmatch(last)
            ):
                raise UnshardedGroupError(f"what {last} {list(module.shape)} does with its heads is not known")
        return rules

    def _cut_norm(self, module: StoredModule, section: PartitionSection) -> dict[str, TensorRule]:
        """Cut a norm of queries or keys: of each head alike, of each with weights of its own, or across heads."""
        units = section.size // section.unit
        if module.shape == (section.size,) and units > 1:
            return {
                t.name: _leave_whole(t, "a norm across heads, which needs all of them") for t in _list_tensors(module)
            }
        if module.shape == (units, section.unit) and units > 1:
            return _cut_rows(module, (PartitionSection(units, 1, section.shared, section.noun),), "a norm of each head")
        return {t.name: _leave_whole(t, "a norm of every head alike") for t in _list_tensors(module)}

    def _cut_forward(self, circuit: FeedForwardGroup) -> dict[str, TensorRule]:
        first, output = circuit.inputs[0], circuit.output
        if any(m.shape != first.shape for m in circuit.inputs) or len(first.shape) != len(output.shape):
            raise UnshardedGroupError("the shapes of its linears do not fit each other")
        if len(first.shape) == _STACKED_MATRIX_NDIM:
            return self._cut_stack(circuit)
        if not first.is_matrix:
            raise UnshardedGroupError("its weights are no matrices")
        expert = _EXPERT_NUMBER_PATTERN.fullmatch(circuit.owner)
        transposed = _has_inputs_for_rows(first)
        width = output.shape[0 if transposed else 1]
        rows = first.shape[1 if transposed else 0]
        joined = rows == 2 * width and circuit.joinable and not transposed
        if rows != width and not joined:
            raise UnshardedGroupError(f"{list(first.shape)} does not fit {list(output.shape)}")
        if width != first.shape[0 if transposed else 1]:
            self._require_alone(circuit, width)
        sections = self._find_gated_sections(first, PartitionSection(width)) if joined else (PartitionSection(width),)
        if expert is None:
            if sections is None:
                raise UnshardedGroupError(ORDER_UNKNOWN)
            return _cut_linears(circuit, sections, PartitionSection(width), "tp", "an MLP", transposed=transposed)
        member = self._find_member(expert["group"], int(expert["number"]))
        if sections is None:  # its experts are divided by ep all the same
            tensors = (t for m in _list_modules(circuit) for t in _list_tensors(m))
            rules = {t.name: _leave_whole(t, f"an expert; {ORDER_UNKNOWN}") for t in tensors}
        else:
            sections = tuple(replace(each, noun=_EXPERT_COLUMNS) for each in sections)
            columns = PartitionSection(width, noun=_EXPERT_COLUMNS)
            rules = _cut_linears(circuit, sections, columns, "etp", "an expert", transposed=transposed)
        return {name: replace(rule, member=member) for name, rule in rules.items()}

    def _require_alone(self, circuit: FeedForwardGroup, width: int) -> None:
        """Raise UnshardedGroupError if something beside an MLP may depend on its columns."""
        shape, mine = circuit.inputs[0].shape, {m.path for m in _list_modules(circuit)}
        for module in self.tree.children(circuit.owner):
            if module.path not in mine and module.shape in {shape, shape[::-1]}:
                raise UnshardedGroupError(f"what {module.path.rpartition('.')[2]} beside it does is not known")
            if module.shape == (width,):
                raise UnshardedGroupError(f"{module.path.rpartition('.')[2]} may need all of its columns")

    def _find_gated_sections(
        self, module: StoredModule, section: PartitionSection
    ) -> tuple[PartitionSection, ...] | None:
        """Return how the rows of a gate and an up in one array are cut; None if their order is not known."""
        order = self.orders.find_gated_order(module.weight.name)
        if order == "interleaved":
            return (PartitionSection(2 * section.size, 2, noun=section.noun),)
        return (section, section) if order == "joined" else None

    def _find_member(self, group: str, number: int) -> GroupMember:
        count = self.tree.count_numbered(group)
        if not count:
            raise UnshardedGroupError("its experts are not numbered from 0")
        return GroupMember("ep", number, count)

    def _cut_stack(self, circuit: FeedForwardGroup) -> dict[str, TensorRule]:
        first, output = circuit.inputs[0], circuit.output
        experts, a, b = first.shape
        if output.shape[0] != experts:
            raise UnshardedGroupError("its stacks are of different heights")
        _, c, d = output.shape
        joined, transposed = False, False
        if circuit.joinable and (a == 2 * d and b == c):
            joined = True
        elif circuit.joinable and (b == 2 * c and a == d):
            joined = transposed = True
        elif a == d and b == c and a != b and not circuit.joinable:
            transposed = self._is_hidden(circuit.owner, a)
            if transposed == self._is_hidden(circuit.owner, b):
                raise UnshardedGroupError("which dim of its stacks are columns is not known")
        else:
            raise UnshardedGroupError(f"{list(first.shape)} does not fit {list(output.shape)}")
        ep = AxisPartition("ep", (PartitionSection(experts, noun="experts"),))
        width = c if transposed else d
        section = PartitionSection(width, noun=_EXPERT_COLUMNS)
        sections = self._find_gated_sections(first, section) if joined else (section,)
        # A class that adds biases to fused experts may alternate gate and up, as that of gpt-oss does.
        sure = sections is not None and (len(sections) == 1 or first.bias is None)
        etp = AxisPartition("etp", sections or ())
        last = AxisPartition("etp", (section,))
        rules: dict[str, TensorRule] = {}
        note = "experts" if sure else f"experts; {ORDER_UNKNOWN}"
        for module in circuit.inputs:
            cuts: tuple[tuple[AxisPartition, ...], ...] = ((ep,), (), (etp,)) if transposed else ((ep,), (etp,), ())
            rules[module.weight.name] = TensorRule(cuts if sure else ((ep,), (), ()), SHAPES, note)
            if module.bias is not None:
                rules[module.bias.name] = TensorRule(((ep,), (etp,) if sure else ()), SHAPES, note)
        cuts = ((ep,), (last,), ()) if transposed else ((ep,), (), (last,))
        rules[output.weight.name] = TensorRule(cuts if sure else ((ep,), (), ()), SHAPES, note)
        if output.bias is not None:
            rules[output.bias.name] = TensorRule(((ep,), ()), SHAPES, note)
        return rules

    def _is_hidden(self, owner: str, extent: int) -> bool:
        """Tell whether something beside the experts, such as their router, takes inputs of this width."""
        above = owner.rpartition(".")[0]
        return any(m.is_matrix and m.shape[1] == extent for m in self.tree.within(above) if m.shape)


def _list_modules(circuit: Circuit) -> Iterator[StoredModule]:
    if isinstance(circuit, AttentionGroup):
        yield from (circuit.queries, circuit.keys, circuit.values)
    elif isinstance(circuit, FusedAttentionGroup):
        yield circuit.fused
    elif isinstance(circuit, SharedAttentionGroup):
        yield circuit.queries
    elif isinstance(circuit, LatentAttentionGroup):
        yield from (*circuit.expanding, *circuit.latent)
    else:
        yield from circuit.inputs
    yield circuit.output


def _list_tensors(module: StoredModule) -> Iterable[ModelTensor]:
    return (module.weight,) if module.bias is None else (module.weight, module.bias)


def _cut_linears(
    circuit: FeedForwardGroup,
    sections: tuple[PartitionSection, ...],
    columns: PartitionSection,
    axis: str,
    what: str,
    *,
    transposed: bool,
) -> dict[str, TensorRule]:
    """Return the linears before the activation cut by `sections` of their outputs, and the last by its inputs."""
    cut_inputs, cut_output = (_cut_columns, _cut_rows) if transposed else (_cut_rows, _cut_columns)
    rules: dict[str, TensorRule] = {}
    for module in circuit.inputs:
        rules |= cut_inputs(module, sections, f"columns of {what}", axis=axis, bias=True)
    return rules | cut_output(circuit.output, (columns,), f"the sum over columns of {what}", axis=axis, bias=False)


def _has_inputs_for_rows(module: StoredModule) -> bool:
    """Tell whether a matrix has inputs for rows, as that of Conv1D: only the length of its bias says so.

    Raises UnshardedGroupError where that says nothing and the name is one of Conv1D's.
    """
    rows, columns = module.shape
    if module.bias is not None and rows != columns:
        return module.bias.shape == (columns,)
    if module.path.rpartition(".")[2] in _CONV1D_MODULE_NAMES:
        raise UnshardedGroupError("whether its rows are inputs or outputs is not known")
    return False


def _depends(module: StoredModule, dependent: set[int], hidden: int) -> bool:
    """Tell whether the extents of a tensor say that it may have something for each head."""
    if len(module.shape) >= _MATRIX_NDIM:
        return bool(dependent & set(module.shape))
    return bool(module.shape) and module.shape[0] in dependent and module.shape[0] != hidden


def _leave_whole(tensor: ModelTensor, note: str) -> TensorRule:
    return TensorRule(((),) * len(tensor.shape), SHAPES, note)


def _cut_rows(
    module: StoredModule, sections: tuple[PartitionSection, ...], note: str, *, axis: str = "tp", bias: bool = True
) -> dict[str, TensorRule]:
    """Return a weight cut along dim 0, and its bias along with it unless it is added to a sum."""
    cut = AxisPartition(axis, sections)
    rules = {module.weight.name: TensorRule(((cut,), *((),) * (len(module.shape) - 1)), SHAPES, note)}
    if module.bias is not None:
        rules[module.bias.name] = TensorRule(((cut,) if bias else (),), SHAPES, note)
    return rules


def _cut_columns(
    module: StoredModule,
    sections: PartitionSection | tuple[PartitionSection, ...],
    note: str,
    *,
    axis: str = "tp",
    bias: bool = False,
) -> dict[str, TensorRule]:
    """Return a matrix cut along dim 1, and its bias along with it if that is the dim of its outputs."""
    cut = AxisPartition(axis, sections if isinstance(sections, tuple) else (sections,))
    rules = {module.weight.name: TensorRule(((), (cut,)), SHAPES, note)}
    if module.bias is not None:
        rules[module.bias.name] = TensorRule(((cut,) if bias else (),), SHAPES, note)
    return rules
