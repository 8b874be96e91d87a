"""Counts what every device sends, by mesh axis and collective, per optimizer step or forward pass.

Volumes are those of ring algorithms (Thakur et al. 2005; NVIDIA, nccl-tests, doc/PERFORMANCE.md): of n ranks each sends
`(n - 1) / n` of a message in an all-gather, a reduce-scatter and an all-to-all, and twice that in an all-reduce.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.dtype import BY_NAME
from shardctl.base.value import value_class
from shardctl.estimate.training.scheme import choose_scheme
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.mesh import EXPERT_FSDP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.estimate.model.layer_graph import LayerGraph, ModelLayer
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.workload import ServingWorkload
    from shardctl.tensors.mesh import Mesh

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
_SHARE_ALL: Final = 3
"""The ZeRO stage that shares parameters, too."""
_ZERO_PAPER_SOURCE: Final = "Rajbhandari et al. 2020, sec. 7"
_TENSOR_PARALLEL_SOURCE: Final = "Shoeybi et al. 2019, sec. 3; Korthikanti et al. 2022, sec. 4.2.2"
_PIPELINE_PARALLEL_SOURCE: Final = "Narayanan et al. 2021, sec. 3.2 and 4.1"
_EXPERT_PARALLEL_SOURCE: Final = "Lepikhin et al. 2020, sec. 3.2; DeepSeek-AI 2024, sec. 3.2.2"
_CONTEXT_PARALLEL_SOURCE: Final = "Liu et al. 2023 (ring attention), sec. 3"


@value_class
class RankTraffic:
    """Messages of one kind that one rank sends."""

    name: str
    """What travels, such as ``gradients``."""
    axes: tuple[str, ...]
    """The mesh axes whose ranks take part; `replica` and `efsdp` are those of the experts."""
    collective: Collective
    ranks: int
    """How many take part."""
    nbytes: int
    """Bytes that this rank sends, in the whole step or pass."""
    messages: int
    """Collectives, or messages to one neighbour, in the whole step or pass."""
    times: int = 1
    """Over how many microbatches they are spread; 1 for what happens once a step."""
    hidden: bool = False
    """Whether runtimes send while they compute."""
    formula: str = ""
    inputs: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


def compute_sent_bytes(collective: Collective, nbytes: float, ranks: int) -> float:
    """Compute bytes that each of `ranks` sends.

    `nbytes` is the whole of what is reduced, gathered, scattered or exchanged.

    Of an all-to-all it is what one rank has for all others and itself.

    >>> (compute_sent_bytes("all-reduce", 100, 4), compute_sent_bytes("all-gather", 100, 4),
    ...  compute_sent_bytes("send", 100, 4), compute_sent_bytes("all-to-all", 100, 1))
    (150.0, 75.0, 100, 0.0)
    """
    if collective == "send":
        return nbytes
    return (2 if collective == "all-reduce" else 1) * nbytes * (ranks - 1) / ranks


def list_traffic(
    anatomy: LayerGraph,
    holding: RankShards,
    mesh: Mesh,
    work: ServingWorkload | TrainingWorkload,
    *,
    dtype: str = "BF16",
    tokens: int | None = None,
) -> tuple[RankTraffic, ...]:
    """List what a rank with `holding` sends: in training in one optimizer step, in serving in one forward pass.

    `dtype` is that of activations in serving. A pass of serving has `tokens` new tokens, by default one of each
    sequence. Only what moves bytes is listed.
    Raises UsageError for what the profile's runtime cannot do.
    """
    if isinstance(work, TrainingWorkload):
        found = _ActivationSender(
            anatomy,
            holding,
            mesh,
            tokens=work.sequence * work.micro_batch / mesh.degree("cp"),
            width=BY_NAME[work.dtype].bits // 8,
            times=work.count_passes(mesh.degree("pp")),
            forward=2 if work.recompute == "full" else 1,
            backward=1,
            scattered=work.sequence_parallel,
            chunks=work.virtual_stages if work.schedule == "interleaved" else 1,
            overlapped=work.overlapped_all_to_all,
        )
        each = (*_list_parameter_traffic(holding, mesh, work, found.times), *found.of_activations())
    else:
        new = (work.batch if tokens is None else tokens) / mesh.degree("cp")
        found = _ActivationSender(anatomy, holding, mesh, tokens=new, width=BY_NAME[dtype].bits // 8)
        each = (*_list_serving_gathers(holding, mesh), *found.of_activations())
    return tuple(one for one in each if one.nbytes)


def _list_parameter_traffic(
    holding: RankShards, mesh: Mesh, work: TrainingWorkload, times: int
) -> Iterator[RankTraffic]:
    """List parameters and gradients: dense ones among dp, fsdp and cp, those of experts among their replicas."""
    stage = mesh.world // mesh.degree("pp")
    shards = mesh.degree(EXPERT_FSDP)
    copies = stage // (mesh.ep * mesh.etp) // shards
    dense = (("dp", "cp"), mesh.degree("dp") * mesh.degree("cp"), ("fsdp",), mesh.degree("fsdp"))
    expert = (("replica",), copies, (EXPERT_FSDP,), shards)
    parameter = BY_NAME[work.dtype].bits / 8
    gradient = choose_scheme(mesh, work).gradient.bits / 8
    for of, is_expert, (over, replicas, sharing, shared) in (("", False, dense), ("expert ", True, expert)):
        weights, gradients = f"{of}parameters", f"{of}gradients"
        gathered = holding.gathered(expert=is_expert, trainable=True)
        kept = holding.elements(expert=is_expert, trainable=True)
        some = (part for part in holding.parts if part.kind.spec.of_expert == is_expert)
        frozen = sum(part.gathered_bytes for part in some if not part.kind.trainable)
        # Ranks that share parameters gather them for the forward and again for the backward pass.
        yield _build_collective(weights, sharing, "all-gather", shared, gathered * parameter + frozen, times, rounds=2)
        yield _build_collective(gradients, sharing, "reduce-scatter", shared, gathered * gradient, times)
        if not work.zero:
            yield _build_collective(gradients, over, "all-reduce", replicas, kept * gradient, 1)
            continue
        all_shared = work.zero >= _SHARE_ALL
        # From ZeRO-2 on, no rank keeps the gradients of others, so that those of every microbatch are reduced.
        often = times if work.zero > 1 else 1
        yield _build_collective(gradients, over, "reduce-scatter", replicas, kept * gradient, often)
        rounds = 2 if all_shared else 1
        yield _build_collective(
            weights, over, "all-gather", replicas, kept * parameter, times if all_shared else 1, rounds=rounds
        )


def _build_collective(
    name: str,
    axes: tuple[str, ...],
    collective: Collective,
    ranks: int,
    nbytes: float,
    times: int,
    *,
    rounds: int = 1,
) -> RankTraffic:
    """Build a collective over `nbytes` in each of `times` microbatches, `rounds` times."""
    factor = rounds * (2 if collective == "all-reduce" else 1)
    return RankTraffic(
        name,
        axes,
        collective,
        ranks,
        round(compute_sent_bytes(collective, nbytes, ranks) * rounds * times),
        rounds * times,
        times,
        hidden=True,
        formula=f"{factor if factor > 1 else ''}(n-1)/n * whole * m",
        inputs={"n": ranks, "whole": nbytes, "m": times},
        source=_ZERO_PAPER_SOURCE,
    )


def _list_serving_gathers(holding: RankShards, mesh: Mesh) -> Iterator[RankTraffic]:
    """List the gathering of weights that fsdp ranks share, which every pass needs."""
    for name, is_expert, axis in (("weights", False, "fsdp"), ("expert weights", True, EXPERT_FSDP)):
        nbytes = sum(part.gathered_bytes for part in holding.parts if part.kind.spec.of_expert == is_expert)
        yield _build_collective(name, (axis,), "all-gather", mesh.degree(axis), nbytes, 1)


@value_class
class _ActivationSender:
    """One rank that sends activations."""

    anatomy: LayerGraph
    holding: RankShards
    mesh: Mesh
    tokens: float
    """Of one microbatch, on one cp rank."""
    width: int
    """Bytes of an activation's element."""
    times: int = 1
    forward: int = 1
    """Passes forward, recomputation included."""
    backward: int = 0
    scattered: bool = False
    """Whether tp ranks share the tokens between their matrices (sequence parallelism)."""
    chunks: int = 1
    """Model chunks per stage."""
    overlapped: bool = False
    """Whether the all-to-all of experts is hidden behind the computation of another microbatch."""

    @property
    def layers(self) -> tuple[ModelLayer, ...]:
        return self.anatomy.layers[self.holding.layers.start : self.holding.layers.stop]

    @property
    def first(self) -> bool:
        return self.holding.stage == 0

    @property
    def last(self) -> bool:
        return self.holding.stage == self.mesh.degree("pp") - 1

    @property
    def alike(self) -> bool:
        """Whether experts are cut as all else is, and need no messages of their own."""
        return self.mesh.ep == 1 and self.mesh.etp == self.mesh.degree("tp")

    @property
    def common(self) -> bool:
        """Whether the ranks that divide the experts all have the same tokens, so that sums over tp do for both.

        So vLLM serves without data parallelism: each rank applies its experts to all tokens.
        """
        return not self.backward and self.mesh.ep * self.mesh.etp == self.mesh.degree("tp")

    def of_activations(self) -> Iterator[RankTraffic]:
        yield from self.over_tp()
        yield from self.over_pp()
        yield from self.over_ep()
        yield from self.over_cp()

    def compute_traffic(
        self,
        name: str,
        axis: str,
        collective: Collective,
        nbytes: float,
        messages: int,
        formula: str,
        source: str,
        *,
        hidden: bool = False,
    ) -> RankTraffic:
        """`nbytes` is the whole of all messages of one microbatch."""
        ranks = self.mesh.degree(axis)
        return RankTraffic(
            name,
            (axis,),
            collective,
            ranks,
            round(compute_sent_bytes(collective, nbytes, ranks) * self.times),
            messages * self.times,
            self.times,
            hidden=hidden,
            formula=formula,
            inputs={"n": ranks, "m": self.times, "tokens": self.tokens, "bytes": self.width},
            source=source,
        )

    def over_tp(self) -> Iterator[RankTraffic]:
        """Yield sums after each pair of matrices, forward and backward.

        Of the embedding forward, of the head backward.
        """
        if self.mesh.degree("tp") == 1:
            return
        passes = self.forward + self.backward
        sums = [(layer.hidden, passes * self.sums(layer)) for layer in self.layers]
        if self.anatomy.vocabulary and self.first:
            sums.append((sums[0][0] if sums else self.anatomy.hidden, 1))
        if self.anatomy.vocabulary and self.anatomy.generates and self.last:
            sums.append((self.anatomy.hidden, self.backward))
        nbytes = sum(hidden * count for hidden, count in sums) * self.tokens * self.width
        count = sum(count for _, count in sums)
        kinds: tuple[Collective, ...] = ("all-gather", "reduce-scatter") if self.scattered else ("all-reduce",)
        for kind in kinds:
            yield self.compute_traffic(
                "activations between tp ranks",
                "tp",
                kind,
                nbytes,
                count,
                formula=f"{'' if self.scattered else '2'}(n-1)/n * sums * tokens * hidden * bytes * m",
                source=_TENSOR_PARALLEL_SOURCE,
            )
        if not self.backward and self.last and self.anatomy.generates:
            logits = self.tokens * self.anatomy.vocabulary * self.width
            yield self.compute_traffic(
                "logits",
                "tp",
                "all-gather",
                logits,
                1,
                formula="(n-1)/n * tokens * V * bytes",
                source=_TENSOR_PARALLEL_SOURCE,
            )

    def sums(self, layer: ModelLayer) -> int:
        """Return sums over tp in one forward pass of a layer."""
        attention = 2 if layer.attention and layer.attention.cross else 1
        experts = layer.experts
        routed = experts is not None and (self.alike or self.common)
        mlp = bool(layer.mlp) or routed or (experts is not None and experts.shared > 0)
        if layer.halves > 1:
            return layer.halves * (attention + mlp) + routed
        return attention + mlp

    def over_pp(self) -> Iterator[RankTraffic]:
        """Yield activations to the next stage, and gradients of them to the one before.

        Of chunks around, but at the ends.
        """
        ahead = self.chunks - self.last
        back = self.backward * (self.chunks - self.first)
        if self.mesh.degree("pp") == 1 or not (ahead or back) or not self.layers:
            return
        shared = self.mesh.degree("tp") if self.scattered else 1
        nbytes = (ahead + back) * self.tokens * self.layers[-1].hidden * self.width / shared
        yield self.compute_traffic(
            "activations between stages",
            "pp",
            "send",
            nbytes,
            ahead + back,
            formula="chunks sent * tokens * hidden * bytes * m" + (" / tp" if shared > 1 else ""),
            source=_PIPELINE_PARALLEL_SOURCE,
        )

    def over_ep(self) -> Iterator[RankTraffic]:
        """Yield the traffic of tokens to experts and back, forward and backward, and what etp ranks share of it."""
        if self.alike or self.common:
            return
        own = self.tokens / self.mesh.degree("tp")
        routed = (
            sum(one.chosen * (one.width or layer.hidden) for layer in self.layers if (one := layer.experts))
            * own
            * self.width
        )
        count = 2 * (self.forward + self.backward) * sum(1 for layer in self.layers if layer.experts)
        passes = self.forward + self.backward
        yield self.compute_traffic(
            "tokens to experts and back",
            "ep",
            "all-to-all",
            2 * passes * routed,
            count,
            formula="2 * passes * (n-1)/n * tokens / tp * chosen * hidden * bytes * m",
            source=_EXPERT_PARALLEL_SOURCE,
            hidden=self.overlapped,
        )
        shared: tuple[Collective, ...] = ("all-gather", "reduce-scatter")
        for kind in shared:
            yield self.compute_traffic(
                "tokens of one expert",
                "etp",
                kind,
                passes * routed * self.mesh.etp,
                count // 2,
                formula="passes * (n-1) * tokens / tp * chosen * hidden * bytes * m",
                source=_EXPERT_PARALLEL_SOURCE,
            )

    def over_cp(self) -> Iterator[RankTraffic]:
        """Yield the traffic of keys and values around the ring: forward, and backward with their gradients."""
        ranks, tp = self.mesh.degree("cp"), self.mesh.degree("tp")
        wide = sum(-(-a.kv_heads // tp) * (a.head_dim + a.value_dim) for layer in self.layers if (a := layer.attention))
        rounds = self.forward + 2 * self.backward
        yield self.compute_traffic(
            "keys and values",
            "cp",
            "send",
            rounds * (ranks - 1) * self.tokens * wide * self.width,
            rounds * (ranks - 1) * len(self.layers),
            hidden=True,
            formula="rounds * (n-1) * tokens * (keys + values) / tp * bytes * m",
            source=_CONTEXT_PARALLEL_SOURCE,
        )
