"""Estimates what training keeps for the backward pass on one rank, and the peak while that pass runs."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.estimate.byte_amount import ByteAmount
from shardctl.estimate.model.inventory import FLOATING
from shardctl.estimate.model.narrower_types import is_module_scale, is_scale
from shardctl.estimate.model.sizes import MicrobatchShare, compute_head_sizes, compute_layer_sizes
from shardctl.estimate.term import MemoryTerm
from shardctl.estimate.training.chunked_losses import count_chunk_tokens, replace_loss
from shardctl.estimate.training.compiled_layers import COMPILING_HINT, find_uncompiled_part, widen_for_compiler
from shardctl.estimate.training.layer_flags import list_layer_flags, list_model_flags
from shardctl.estimate.training.profiles import choose_modules, get_runtime
from shardctl.estimate.training.recomputed_modules import MODULES_HINT, find_unknown_module, list_checkpoints
from shardctl.estimate.training.recurrent import PLAN_HINT, compute_recurrent_sizes
from shardctl.estimate.training.saved_activations import GROUPS, SavedActivation
from shardctl.estimate.training.schedule import count_in_flight, count_losses
from shardctl.estimate.training.selective import SELECTIVE_HINT, find_unselected_part
from shardctl.estimate.training.trained_weights import ALL_TRAINED, find_trained_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.estimate.model.layer_graph import LayerGraph, ModelLayer
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.model.sizes import Size
    from shardctl.estimate.training.saved_activations import Flag, Group, RuntimeProfile
    from shardctl.estimate.training.trained_weights import TrainedWeights
    from shardctl.estimate.workload import Recompute, TrainingWorkload
    from shardctl.tensors.mesh import Mesh


_ACTIVATION_GROUP_LABELS: Final[Mapping[Group, str]] = {
    "norms": "kept by norms",
    "attention": "kept by attention",
    "recurrent": "kept by recurrent layers and their kernels",
    "mlp": "kept by MLPs",
    "experts": "kept by experts",
    "further": "kept by what other families have not",
    "dropout": "dropout masks",
}
_EXPERT_LOAD_SKEW: Final = 1.3
"""How much more than an even part of the tokens a rank's experts are expected to get at most; routers are trained to
balance, and do so within some tens of percent."""


def estimate_activations(
    anatomy: LayerGraph,
    holding: RankShards,
    mesh: Mesh,
    work: TrainingWorkload,
    *,
    stages: Sequence[int],
) -> tuple[MemoryTerm, ...]:
    """Estimate what the ranks of `holding` keep for the backward pass, and what is alive besides when they need most.

    Terms of the category ``activations`` are what microbatches in flight keep; the one of ``workspace`` is what comes
    on top in the worst moment of the backward pass, which its name says. Together they are the peak, in bytes, without
    parameters, their gradients and what is gathered of them. `stages` are the layers of each pipeline stage.

    Raises UnsupportedError for layers whose activations are not known.
    """
    found = RankActivations(anatomy, holding, mesh, work, stages)
    worst = max(found.list_moments(), key=found.count_bytes, default=None)
    return found.list_terms(worst) if worst is not None else ()


@value_class
class BackwardEvent:
    """A moment of a stage's backward pass, as far as activations go."""

    name: str
    """In words, such as ``backward pass of an MLP``."""
    layer: int | None
    """The layer whose backward pass runs; None in those of the head and the loss."""
    alive: int
    """The layers with lower numbers still keep what they did."""
    besides: ByteAmount
    """What is alive besides what is kept."""
    with_head: bool
    """Whether what the head keeps is still alive."""
    flights: float
    """Microbatches in flight, this one included."""


_FROZEN_LOWER_BOUND_FACTOR: Final = 0.6
"""The least of it that a model keeps of which some matrices are not trained, where nobody knows what those read."""


@value_class
class _AlikeLayers:
    """Layers that are alike."""

    numbers: tuple[int, ...]
    kept: Mapping[str, ByteAmount]
    """Of one of them, by the name of the term."""
    worst: tuple[str, ByteAmount]
    """The worst moment of the backward pass of one, and what is alive then besides what all keep."""

    @property
    def nbytes(self) -> float:
        """That one of them keeps."""
        return sum(amount.nbytes for amount in self.kept.values())


class RankActivations:
    """What one rank keeps for the backward pass in each moment of it.

    Raises UnsupportedError for layers whose activations are not known.
    """

    def __init__(
        self, anatomy: LayerGraph, holding: RankShards, mesh: Mesh, work: TrainingWorkload, stages: Sequence[int]
    ) -> None:
        self.work = work
        self.mesh = mesh
        recurrent = any(layer.state is not None for layer in anatomy.layers)
        further = any(layer.further for layer in anatomy.layers)
        found = get_runtime(choose_modules(work), recurrent=recurrent, further=further)
        self.runtime: RuntimeProfile = replace_loss(found, work)
        self.style = anatomy.style
        self.width = BY_NAME[work.dtype].bits // 8
        self.share = MicrobatchShare.of(mesh, work)
        self.first = holding.stage == 0
        self.last = holding.stage == len(stages) - 1
        self.numbers = list_kept_layers(holding)
        frozen = any(part.kind.matrix and not part.kind.trainable for part in holding.parts)
        self.unsure = frozen and any(not anatomy.layers[n].weights or anatomy.layers[n].further for n in self.numbers)
        self.held = holding.parts
        self.anatomy = anatomy
        divided = self.runtime.sequence_parallel and work.sequence_parallel
        self.parts = mesh.degree("tp") if divided else 1
        microbatches = work.count_passes(len(stages))
        virtual = work.virtual_stages
        self.flights = count_in_flight(
            holding.stage,
            len(stages),
            microbatches,
            work.schedule,
            virtual,
            overlapped=work.overlapped_all_to_all,
        )
        self.losses = count_losses(len(stages), microbatches, work.schedule)
        vectors = [p.kind for p in holding.parts if not p.kind.matrix and not is_scale(p.kind)]
        narrow = bool(vectors) and not any(v.trainable or v.dtype.bits > BY_NAME[work.dtype].bits for v in vectors)
        self.flags = list_model_flags(anatomy, work, mesh, parts=self.parts, narrow_base=narrow)
        wide_router = anatomy.style.wide_router
        self.ends = [p.kind for p in self.held if not p.kind.layers and ("last", 0) in p.kind.spec.where]
        if any(kind.matrix and not kind.trainable for kind in self.ends):
            self.flags |= {"frozen head"}
        elif self.ends:
            self.flags |= {"trained head"}
        coded = any(p.kind.layers and p.kind.matrix and p.kind.dtype.name not in FLOATING for p in self.held)
        if "autocast" in self.flags and coded:
            self.flags |= {"fp32 products"}
        frozen_experts = any(p.kind.spec.of_expert and p.kind.matrix and not p.kind.trainable for p in self.held)
        if "autocast" in self.flags and not frozen_experts and not self.style.cast_experts:
            self.flags |= {"wide experts"}
        # An expert of modules that bitsandbytes made runs by itself, and its results have the type of what it reads.
        looped = any(p.kind.spec.of_expert and is_module_scale(p.kind) for p in self.held)
        self.flags |= {"looped experts"} if looped else {"joined experts"}
        if looped and "fp32 products" in self.flags:
            self.flags |= {"wide experts"}
        self.trained = find_trained_weights(anatomy.layers, self.numbers, holding.parts, wide_router=wide_router)
        self.kinds = self._list_kinds()
        self.kind_of = {number: kind for kind in self.kinds for number in kind.numbers}
        self.head = self._compute_head_bytes() if self.last and anatomy.generates else ByteAmount()
        self.embedding = self._compute_embedding_bytes() if self.first else ByteAmount()
        self.predicting = self._build_predicting_amount() if self.last and anatomy.predicting else ByteAmount()

    def _build_predicting_amount(self) -> ByteAmount:
        """Return what multi-token prediction layers keep: as much as the last layer each, and the head once more.

        Their losses are part of the loss: their backward pass comes between the head's and that of the last layer
        (Megatron-LM, core/transformer/multi_token_prediction.py, `MTPLossAutoScaler`).
        """
        kept = sum(self.kind_of[self.numbers[-1]].kept.values(), ByteAmount()) + self.head
        return kept.times(self.anatomy.predicting)

    def _count_predicting(self, moment: BackwardEvent) -> float:
        """Count the forward passes whose multi-token prediction layers keep what they did."""
        return max(0, moment.flights - (moment.layer is not None))

    def _list_kinds(self) -> list[_AlikeLayers]:
        if self.style.unmodelled:
            raise UnsupportedError(
                f"what training keeps of this model is not known: it has {self.style.unmodelled}", hint=PLAN_HINT
            )
        if self.work.compiled == "all" and self.mesh.degree("tp") > 1:
            raise UnsupportedError(
                "what a compiled loss keeps that tp ranks share is not known", hint="give --compile layers"
            )
        alike: dict[tuple[ModelLayer, Recompute, TrainedWeights], list[int]] = {}
        for place, number in enumerate(self.numbers, 1):
            recompute: Recompute = "none" if place % self.work.recompute_every else self.work.recompute
            trained = self.trained.get(number, ALL_TRAINED)
            alike.setdefault((self.anatomy.layers[number], recompute, trained), []).append(number)
        return [self._measure_identical_layers(*kind, numbers) for kind, numbers in alike.items()]

    def list_moments(self, flights: float | None = None) -> Iterator[BackwardEvent]:
        """Yield the moments of a backward pass in the order of time, with as many in `flights` as can be."""
        flights = self.flights if flights is None else flights
        stop = self.numbers.stop
        if self.last and self.anatomy.generates:
            sizes = self._compute_head_sizes()
            for moment, with_head in ((self.runtime.loss, True), (self.runtime.norm, False)):
                amount = self._sum_tensor_bytes(moment.alive, sizes, self.flags)
                yield BackwardEvent(moment.name, None, stop, amount, with_head, flights)
        for number in reversed(self.numbers):
            name, amount = self.kind_of[number].worst
            yield BackwardEvent(name, number, number + 1, amount, with_head=False, flights=flights)

    def build_forward_end(self, flights: float) -> BackwardEvent:
        """Build the moment in which the loss is computed; an encoder alone has no logits."""
        moment, alive = self.runtime.forward_end, ByteAmount()
        if self.last and self.anatomy.generates:
            alive = self._sum_tensor_bytes(moment.alive, self._compute_head_sizes(), self.flags)
        return BackwardEvent(moment.name, None, self.numbers.stop, alive, with_head=True, flights=flights)

    def count_kept(self, moment: BackwardEvent) -> float:
        """Count bytes that the forward passes in flight keep in a moment."""
        kept = self.embedding.nbytes * moment.flights
        for kind in self.kinds:
            kept += kind.nbytes * self._count_alive(kind, moment)
        kept += self.predicting.nbytes * self._count_predicting(moment)
        return kept + self.head.nbytes * max(0, self.losses - (not moment.with_head))

    def count_bytes(self, moment: BackwardEvent) -> float:
        """Count all bytes of activations that are alive in a moment."""
        return self.count_kept(moment) + max(0, moment.besides.nbytes)

    def _count_alive(self, kind: _AlikeLayers, moment: BackwardEvent) -> float:
        """Count layers like `kind` that keep what they did, once for each microbatch in flight."""
        here = bisect_left(kind.numbers, moment.alive)
        return here + len(kind.numbers) * max(0, moment.flights - 1)

    def list_terms(self, moment: BackwardEvent) -> tuple[MemoryTerm, ...]:
        """List the terms of a moment, in the order of the groups."""
        return tuple(self._list_terms(moment))

    def list_holes(self, moment: BackwardEvent) -> Iterator[MemoryTerm]:
        """List what the allocator cannot use in a moment, though it is free."""
        if (
            not moment.with_head
            or self.work.profile != "fsdp2"
            or "eager loss" not in self.flags
            or self.work.chunked_loss
        ):
            return
        yield self._build_hole(
            "hole that the logits leave",
            SavedActivation("logits", "logits"),
            "torch's caching allocator: logits and their fp32 copy, once freed, have room for one fp32 gradient",
        )
        if "gathers" in self.flags and self.share.batch > 1:
            yield self._build_hole(
                "hole that the head's input leaves",
                SavedActivation("what tp ranks gathered, before it is put in order", "hidden"),
                "torch 2.13, distributed/_functional_collectives.py, `all_gather_tensor`: what is gathered along a dim "
                "that is not the first is copied; logits in fp32 are larger than the hole",
            )

    def _build_hole(self, name: str, tensor: SavedActivation, source: str) -> MemoryTerm:
        """Build the term of what a tensor of the head leaves free, into which nothing fits that comes after it."""
        hole = self._sum_tensor_bytes((tensor,), self._compute_head_sizes(), self.flags)
        return MemoryTerm(
            name,
            "runtime",
            round(hole.nbytes),
            hole.format_formula(),
            hole.collect_inputs(),
            source,
            interval=(0, round(hole.nbytes)),
            counter="reserved",
            spared=True,
        )

    def _list_terms(self, moment: BackwardEvent) -> Iterator[MemoryTerm]:
        whole = moment.alive >= self.numbers.stop
        kept: dict[str, ByteAmount] = {}
        for kind in self.kinds:
            times = len(kind.numbers) if whole else self._count_alive(kind, moment)
            for name, amount in kind.kept.items() if times else ():
                kept[name] = kept.get(name, ByteAmount()) + amount.times(times)
        for name, amount in kept.items():
            yield from self._build_term(
                name, amount, moment.flights if whole else 1, skewed=name == _ACTIVATION_GROUP_LABELS["experts"]
            )
        yield from self._build_term("dropout mask of the embedding", self.embedding, moment.flights)
        yield from self._build_term("kept by the head and the loss", self.head, self.losses - (not moment.with_head))
        yield from self._build_term(
            "kept by multi-token prediction layers", self.predicting, self._count_predicting(moment)
        )
        if moment.besides.nbytes > 0:
            yield self._made(
                f"alive in the {moment.name}",
                "workspace",
                moment.besides.nbytes,
                moment.besides.format_formula(),
                moment.besides.collect_inputs(),
                skewed="experts" in moment.name,
            )

    def _measure_identical_layers(
        self, layer: ModelLayer, recompute: Recompute, trained: TrainedWeights, numbers: Sequence[int]
    ) -> _AlikeLayers:
        """Return what all layers like `layer` keep, and what is alive in the moments of the backward pass of one."""
        sizes = trained.limit_sizes(compute_layer_sizes(layer, self.style, self.share))
        flags = self.flags | list_layer_flags(layer, self.style, self.work, recompute)
        flags |= frozenset(trained.list_flags(flags))
        if why := _find_unknown_part(layer, self.work):
            raise UnsupportedError(f"what training keeps of layer {numbers[0]} is not known: {why}", hint=PLAN_HINT)
        if layer.state is not None:
            sizes |= compute_recurrent_sizes(layer.state, self.share, numbers[0], self.runtime.recurrence)
        kept, again = self._count_layer(recompute, sizes, flags, self._count_further(layer, sizes, flags))
        kept = {name: amount.times(layer.runs) for name, amount in kept.items()}
        late = ByteAmount()
        if self.work.compiled != "none" and (why := find_uncompiled_part(layer, self.held, self.style, self.work)):
            message = f"what torch.compile keeps of layer {numbers[0]} is not known: {why}"
            raise UnsupportedError(message, hint=COMPILING_HINT)
        if recompute == "selective" and self.runtime.selected and (why := find_unselected_part(layer, self.held)):
            message = f"what selective recomputation keeps of layer {numbers[0]} is not known: {why}"
            raise UnsupportedError(message, hint=SELECTIVE_HINT)
        if recompute == "selective" and (why := find_unknown_module(layer, self.work, self.mesh)):
            message = f"what layer {numbers[0]} keeps with these --recompute-modules is not known: {why}"
            raise UnsupportedError(message, hint=MODULES_HINT)
        if recompute == "selective" and not self.runtime.selected:
            less, more, late = self._count_modules(layer, sizes, flags)
            kept = {name: amount + less.get(name, ByteAmount()) for name, amount in kept.items()}
            again += more
        moments = [("backward pass of a layer", again + late)]
        behind = " of a layer computed again" if self._is_whole_layer(recompute) else ""
        for moment in filter(lambda one: flags.issuperset(one.when), self.runtime.layer):
            alive = self._sum_tensor_bytes(moment.alive, sizes, flags)
            for group in moment.gone:
                alive += self._sum_tensor_bytes(self.runtime.kept[group], sizes, flags).without()
            if alive.nbytes > 0:
                moments.append((moment.name + behind, again + alive))
        return _AlikeLayers(tuple(numbers), kept, max(moments, key=lambda one: one[1].nbytes))

    def _is_whole_layer(self, recompute: Recompute) -> bool:
        """Return whether a layer's forward pass runs again, from its input and what else was kept."""
        return recompute == "full" or (recompute == "selective" and bool(self.runtime.selected))

    def _count_further(self, layer: ModelLayer, sizes: Mapping[Size, float], flags: frozenset[Flag]) -> ByteAmount:
        """Return what a layer keeps besides what layers of other families do."""
        factors = []
        known: dict[str, float] = dict(sizes.items())
        for tensor in layer.further:
            count = known.get(tensor.size, 0) * tensor.elements / (self.share.tp if tensor.divided else 1)
            if count and flags.issuperset(tensor.given):
                name = tensor.size if not tensor.dims else f"{tensor.size}_{tensor.dims}"
                factors.append((name, self.width if tensor.width is None else tensor.width, count))
        return ByteAmount() + ByteAmount(tuple(factors))

    def _count_layer(
        self, recompute: Recompute, sizes: Mapping[Size, float], flags: frozenset[Flag], further: ByteAmount
    ) -> tuple[dict[str, ByteAmount], ByteAmount]:
        """Return what a layer keeps, by the name of the term, and what its backward pass computes again at first."""
        groups, runtime = self.runtime.kept, self.runtime
        if self._is_whole_layer(recompute):
            name, some, shared = "inputs of layers", runtime.checkpoint, runtime.shared
            if recompute == "selective":
                name, some, shared = "results of selected operations", runtime.selected, runtime.selected_shared
            again = further + self._sum_tensor_bytes(shared, sizes, flags).without()
            for tensors in groups.values():
                again += self._sum_tensor_bytes(tensors, sizes, flags)
            if self.work.offload_checkpoints:  # one input is fetched, and the next is on its way
                fetched = self._sum_tensor_bytes(some, sizes, flags)
                return {name: ByteAmount()}, again + fetched.times(2)
            return {name: self._sum_tensor_bytes(some, sizes, flags)}, again
        selective = recompute == "selective" and "core_attn" in self.work.recompute_modules
        kept = {
            _ACTIVATION_GROUP_LABELS[g]: self._sum_tensor_bytes(groups.get(g, ()), sizes, flags, core=not selective)
            for g in GROUPS
        }
        kept[_ACTIVATION_GROUP_LABELS["further"]] += further
        core = [saved for g in groups.values() for saved in g if saved.core] if selective else []
        return kept, self._sum_tensor_bytes(core, sizes, flags)

    def _count_modules(
        self, layer: ModelLayer, sizes: Mapping[Size, float], flags: frozenset[Flag]
    ) -> tuple[dict[str, ByteAmount], ByteAmount, ByteAmount]:
        """Return by what modules that are recomputed change the terms of a layer, and what is computed again.

        The last is what attention computes again, which is after the MLP's backward pass.
        """
        less: dict[str, ByteAmount] = {}
        again: dict[bool, ByteAmount] = {False: ByteAmount(), True: ByteAmount()}
        gone: set[SavedActivation] = set()
        for checkpoint in list_checkpoints(layer, self.work.recompute_modules):
            for group in {**checkpoint.dropped, **checkpoint.partly}:
                names = checkpoint.dropped.get(group)
                whole = [
                    saved
                    for saved in self.runtime.kept[group]
                    if names is not None and saved not in gone and (not names or saved.name in names)
                ]
                gone.update(whole)
                amount = self._sum_tensor_bytes((*whole, *checkpoint.partly.get(group, ())), sizes, flags)
                less[_ACTIVATION_GROUP_LABELS[group]] = (
                    less.get(_ACTIVATION_GROUP_LABELS[group], ByteAmount()) + amount.without()
                )
                again[group == "attention"] += amount.times(2 if checkpoint.frees_output else 1)
            more = self._sum_tensor_bytes(checkpoint.instead, sizes, flags)
            less[_ACTIVATION_GROUP_LABELS["attention"]] = (
                less.get(_ACTIVATION_GROUP_LABELS["attention"], ByteAmount()) + more
            )
        return less, again[False], again[True]

    def _compute_head_bytes(self) -> ByteAmount:
        sizes = self._compute_head_sizes()
        flags: frozenset[Flag] = self.flags | {"wide products"}
        if all(kind.trainable for kind in self.ends if not kind.matrix):
            flags |= {"norms trained"}
        if "frozen head" in flags:
            sizes = {**sizes, "inputs": 0}
        return self._sum_tensor_bytes((*self.runtime.kept["norms"], *self.runtime.head), sizes, flags)

    def _compute_head_sizes(self) -> Mapping[Size, float]:
        hidden, vocabulary = self.anatomy.hidden, self.anatomy.vocabulary
        batch, queries = self.share.batch, self.share.queries
        chunk = count_chunk_tokens(self.work, batch=batch, queries=queries, hidden=hidden, vocabulary=vocabulary)
        return compute_head_sizes(hidden, vocabulary, self.share, chunk)

    def _compute_embedding_bytes(self) -> ByteAmount:
        sizes = compute_head_sizes(
            self.anatomy.layers[0].hidden if self.anatomy.layers else self.anatomy.hidden, 0, self.share
        )
        return self._sum_tensor_bytes(self.runtime.embedding, sizes, self.flags)

    def _sum_tensor_bytes(
        self,
        tensors: Iterable[SavedActivation],
        sizes: Mapping[Size, float],
        flags: frozenset[Flag],
        *,
        core: bool = True,
    ) -> ByteAmount:
        """Return the bytes of those of `tensors` that are there; those of attention's core only if `core`."""
        found: dict[tuple[str, float], float] = {}
        for saved in tensors:
            count = sizes.get(saved.size, 0)
            if count and flags.issuperset(saved.when) and (core or not saved.core):
                name, parts = (
                    (f"{saved.size}_per_tp", self.parts) if saved.sequence and self.parts > 1 else (saved.size, 1)
                )
                width = self.width if saved.width is None else saved.width
                found[name, count / parts] = found.get((name, count / parts), 0) + width
        return ByteAmount(tuple((name, width, count) for (name, count), width in found.items()))

    def _build_term(
        self, name: str, amount: ByteAmount, factor: float, *, skewed: bool = False
    ) -> Iterator[MemoryTerm]:
        """Yield a term of what `factor` microbatches keep, if anything."""
        if not amount.nbytes or not factor:
            return
        inputs = {"m": factor, **amount.collect_inputs()}
        yield self._made(
            name, "activations", amount.nbytes * factor, f"m * ({amount.format_formula()})", inputs, skewed=skewed
        )

    def _made(
        self,
        name: str,
        category: Literal["activations", "workspace"],
        nbytes: float,
        formula: str,
        inputs: Mapping[str, float],
        *,
        skewed: bool,
    ) -> MemoryTerm:
        low, high = widen_for_compiler(self.runtime.spread, self.work)
        low *= _FROZEN_LOWER_BOUND_FACTOR if self.unsure else 1
        return MemoryTerm(
            name,
            category,
            round(nbytes),
            formula,
            inputs,
            f"profile {self.work.profile}: {self.runtime.source}",
            (round(nbytes * low), round(nbytes * high * (_EXPERT_LOAD_SKEW if skewed else 1))),
        )


def list_kept_layers(holding: RankShards) -> range:
    """List the layers of a rank that keep anything: none do before the first that is trained.

    Of a later stage all do, because layers of earlier ones may be trained.
    """
    layers = holding.layers
    if holding.stage:
        return layers
    trained = [part.kind for part in holding.parts if part.kind.trainable]
    if not trained or any(("first", 0) in kind.spec.where for kind in trained):
        return layers
    first = min(min(kind.layers, default=layers.stop) for kind in trained)
    return range(max(layers.start, first), layers.stop)


def _find_unknown_part(layer: ModelLayer, work: TrainingWorkload) -> str:
    """What a layer has of which nobody measured what training keeps; an empty string if there is nothing."""
    listed = bool(layer.further) and work.profile != "megatron"
    if layer.attention is not None and layer.attention.chosen is not None and not listed:
        return "it attends to tokens that an indexer chooses"
    if layer.attention is not None and layer.attention.compressed and not listed:
        return "it attends to compressed tokens"
    if layer.streams > 1 and not listed:
        return "it mixes several states of each token"
    if layer.further and not listed:
        return f"only what transformers keeps of such layers is, such as {layer.further[0].name}"
    return ""
