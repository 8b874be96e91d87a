"""Estimates what training keeps for the backward pass on one rank, and the peak while that pass runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from shardctl.dtype import BY_NAME
from shardctl.errors import UnsupportedError
from shardctl.estimate.byte_amount import ByteAmount
from shardctl.estimate.kept_tensors import GROUPS
from shardctl.estimate.layer_flags import list_layer_flags, list_model_flags
from shardctl.estimate.profiles import get_runtime
from shardctl.estimate.recurrent import PLAN_HINT, compute_recurrent_sizes
from shardctl.estimate.schedule import count_in_flight, count_losses
from shardctl.estimate.sizes import MicrobatchShare, compute_head_sizes, compute_layer_sizes
from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.estimate.holding import RankHolding
    from shardctl.estimate.kept_tensors import Flag, Group, KeptTensor, PeakMoment, RuntimeProfile
    from shardctl.estimate.sizes import Size
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.mesh import Mesh
    from shardctl.models.anatomy import ModelAnatomy, ModelLayer


_NAMES: Final[Mapping[Group, str]] = {
    "norms": "kept by norms",
    "attention": "kept by attention",
    "recurrent": "kept by recurrent layers and their kernels",
    "mlp": "kept by MLPs",
    "experts": "kept by experts",
    "dropout": "dropout masks",
}
_SKEW: Final = 1.3
"""How much more than an even part of the tokens a rank's experts are expected to get at most; routers are trained to
balance, and do so within some tens of percent."""


def estimate_activations(
    anatomy: ModelAnatomy,
    holding: RankHolding,
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
    return tuple(_RankActivations(anatomy, holding, mesh, work, stages).terms())


@dataclass(frozen=True, slots=True)
class _PeakCandidate:
    """A candidate for the worst moment."""

    name: str
    besides: ByteAmount
    """What is alive besides what the layers keep."""
    freed: float
    """Bytes that later layers kept, and that are freed by then."""
    with_head: bool
    """Whether what the head keeps is still alive."""

    @property
    def nbytes(self) -> float:
        return self.besides.nbytes - self.freed


@dataclass(frozen=True, slots=True)
class _AlikeLayers:
    """Layers that are alike."""

    numbers: tuple[int, ...]
    kept: Mapping[str, ByteAmount]
    """Of one of them, by the name of the term."""
    moments: tuple[tuple[str, ByteAmount], ...]
    """What is alive in each moment of the backward pass of one, besides what all keep."""

    @property
    def nbytes(self) -> float:
        """That one of them keeps."""
        return sum(amount.nbytes for amount in self.kept.values())


class _RankActivations:
    """Works it out for one rank."""

    def __init__(
        self, anatomy: ModelAnatomy, holding: RankHolding, mesh: Mesh, work: TrainingWorkload, stages: Sequence[int]
    ) -> None:
        self.work = work
        recurrent = any(layer.state is not None for layer in anatomy.layers)
        self.runtime: RuntimeProfile = get_runtime(work.profile, recurrent=recurrent)
        self.style = anatomy.style
        self.width = BY_NAME[work.dtype].bits // 8
        self.share = MicrobatchShare.of(mesh, work)
        self.first = holding.stage == 0
        self.last = holding.stage == len(stages) - 1
        self.numbers = holding.layers
        self.anatomy = anatomy
        divided = self.runtime.sequence_parallel and work.sequence_parallel
        self.parts = mesh.degree("tp") if divided else 1
        microbatches = work.microbatches or len(stages)
        virtual = work.virtual_stages
        self.flights = count_in_flight(holding.stage, len(stages), microbatches, work.schedule, virtual)
        self.losses = count_losses(len(stages), microbatches, work.schedule)
        self.flags = list_model_flags(anatomy, work, mesh, parts=self.parts)

    def terms(self) -> Iterator[MemoryTerm]:
        """Yield the terms, in the order of the groups."""
        if self.style.unmodelled:
            raise UnsupportedError(
                f"what training keeps of this model is not known: it has {self.style.unmodelled}", hint=PLAN_HINT
            )
        alike: dict[ModelLayer, list[int]] = {}
        for number in self.numbers:
            alike.setdefault(self.anatomy.layers[number], []).append(number)
        kinds = [self._alike(layer, numbers) for layer, numbers in alike.items()]
        kept: dict[str, ByteAmount] = {}
        for kind in kinds:
            for name, amount in kind.kept.items():
                kept[name] = kept.get(name, ByteAmount()) + amount.times(len(kind.numbers))
        for name, amount in kept.items():
            yield from self._term(name, amount, skewed=name == _NAMES["experts"])
        if self.first:
            yield from self._term("dropout mask of the embedding", self._embedding())
        yield from self._worst(kinds)

    def _alike(self, layer: ModelLayer, numbers: Sequence[int]) -> _AlikeLayers:
        """Return what all layers like `layer` keep, and what is alive in the moments of the backward pass of one."""
        sizes = dict(compute_layer_sizes(layer, self.style, self.share))
        flags = self.flags | list_layer_flags(layer, self.style.norm)
        if why := _find_unknown_part(layer):
            raise UnsupportedError(f"what training keeps of layer {numbers[0]} is not known: {why}", hint=PLAN_HINT)
        if layer.state is not None:
            sizes |= compute_recurrent_sizes(layer.state, self.share, numbers[0], self.runtime.recurrence)
        full, selective = self.work.recompute == "full", self.work.recompute == "selective"
        groups = self.runtime.kept
        again = ByteAmount()
        if full:
            kept = {"inputs of layers": self._amount(self.runtime.checkpoint, sizes, flags)}
            for tensors in groups.values():
                again += self._amount(tensors, sizes, flags)
            again += self._amount(self.runtime.shared, sizes, flags).without()
        else:
            kept = {_NAMES[g]: self._amount(groups.get(g, ()), sizes, flags, core=not selective) for g in GROUPS}
        if selective:
            again = self._amount([saved for g in groups.values() for saved in g if saved.core], sizes, flags)
        moments = []
        for moment in self.runtime.layer:
            alive = self._amount(moment.alive, sizes, flags)
            for group in moment.gone:
                alive += self._amount(groups[group], sizes, flags).without()
            if alive.nbytes > 0:
                moments.append((moment.name + (" of a layer computed again" if full else ""), again + alive))
        return _AlikeLayers(tuple(numbers), kept, tuple(moments))

    def _worst(self, kinds: Sequence[_AlikeLayers]) -> Iterator[MemoryTerm]:
        """Yield the head's terms and that of the worst moment."""
        head = self._head() if self.last and self.anatomy.generates else ByteAmount()
        peaks = [*self._layer_peaks(kinds), *self._head_peaks()]
        if not peaks:
            return
        worst = max(peaks, key=lambda peak: peak.nbytes + (head.nbytes if peak.with_head else 0))
        yield from self._term("kept by the head and the loss", head, self.losses - (not worst.with_head))
        if worst.nbytes > 0:
            inputs = worst.besides.collect_inputs()
            formula = worst.besides.format_formula() + (" - freed" if worst.freed else "")
            yield self._made(
                f"alive in the {worst.name}",
                "workspace",
                worst.nbytes,
                formula,
                {**inputs, "freed": worst.freed} if worst.freed else inputs,
                skewed="experts" in worst.name,
            )

    def _layer_peaks(self, kinds: Sequence[_AlikeLayers]) -> Iterator[_PeakCandidate]:
        """Yield peaks: of alike layers, the last has its backward pass first, when all before it still keep theirs."""
        for kind in kinds:
            last = kind.numbers[-1]
            freed = sum(other.nbytes * sum(number > last for number in other.numbers) for other in kinds)
            for name, alive in kind.moments:
                yield _PeakCandidate(name, alive, freed, with_head=False)

    def _head_peaks(self) -> Iterator[_PeakCandidate]:
        if not (self.last and self.anatomy.generates):
            return
        sizes = compute_head_sizes(self.anatomy.hidden, self.anatomy.vocabulary, self.share)
        yield self._moment(self.runtime.loss, sizes, with_head=True)
        yield self._moment(self.runtime.norm, sizes, with_head=False)

    def _moment(self, moment: PeakMoment, sizes: Mapping[Size, float], *, with_head: bool) -> _PeakCandidate:
        return _PeakCandidate(moment.name, self._amount(moment.alive, sizes, self.flags), 0, with_head)

    def _head(self) -> ByteAmount:
        sizes = compute_head_sizes(self.anatomy.hidden, self.anatomy.vocabulary, self.share)
        return self._amount((*self.runtime.kept["norms"], *self.runtime.head), sizes, self.flags)

    def _embedding(self) -> ByteAmount:
        sizes = compute_head_sizes(
            self.anatomy.layers[0].hidden if self.anatomy.layers else self.anatomy.hidden, 0, self.share
        )
        return self._amount(self.runtime.embedding, sizes, self.flags)

    def _amount(
        self, tensors: Iterable[KeptTensor], sizes: Mapping[Size, float], flags: frozenset[Flag], *, core: bool = True
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

    def _term(
        self, name: str, amount: ByteAmount, times: float | None = None, *, skewed: bool = False
    ) -> Iterator[MemoryTerm]:
        """Yield a term of what all microbatches in flight keep, if anything."""
        factor = self.flights if times is None else times
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
        low, high = self.runtime.spread
        return MemoryTerm(
            name,
            category,
            round(nbytes),
            formula,
            inputs,
            f"profile {self.work.profile}: {self.runtime.source}",
            (round(nbytes * low), round(nbytes * high * (_SKEW if skewed else 1))),
        )


def _find_unknown_part(layer: ModelLayer) -> str:
    """What a layer has of which nobody measured what training keeps; an empty string if there is nothing."""
    if layer.attention is not None and layer.attention.chosen is not None:
        return "it attends to tokens that an indexer chooses"
    if layer.attention is not None and layer.attention.compressed:
        return "it attends to compressed tokens"
    if layer.halves > 1:
        return "it has attention twice, with experts across both halves"
    return "it mixes several states of each token" if layer.streams > 1 else ""
