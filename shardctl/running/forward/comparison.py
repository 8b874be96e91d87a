"""Compares what the shards compute with what the source computes, in this process, which may be one of a team."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import CoverageError, MachineError, ShardctlError, UnsupportedError, format_first_few
from shardctl.base.value import value_class
from shardctl.base.workers import NullWatcher
from shardctl.models.names.hub.conversion_table import find_class_name
from shardctl.running.device import use_device
from shardctl.running.forward.adapter import WeightConversion, build_bare_model
from shardctl.running.forward.compared_checkpoints import CandidateCheckpoint, ComparedSides, OriginalCheckpoint
from shardctl.running.forward.executor import ModelExecutor, PartError
from shardctl.running.forward.generate import continue_prompt, decode_with_cache, measure_perplexity
from shardctl.running.forward.inputs import (
    build_inputs,
    count_positions,
    decode_inputs,
    encode_inputs,
    list_position_limits,
    list_towers,
)
from shardctl.running.forward.skeleton import ModelSkeleton
from shardctl.running.forward.stacks import count_idle_experts, record_chosen_experts
from shardctl.running.forward.streamed_modules import ComputePrecision
from shardctl.running.forward.team import ProcessTeam, RankTeam
from shardctl.running.forward.verdict import (
    count_flips,
    find_large_divergence,
    find_lost_outputs,
    judge_result,
    measure_outputs,
    select_output,
)
from shardctl.tensors.mesh import Mesh
from shardctl.verify.finding import CheckFinding
from shardctl.verify.forward_result import BlockError, ComputedShare, ForwardResult, GeneratedTexts, JoinedWeights
from shardctl.verify.golden import CHECK, compare_with_golden, sketch_output
from shardctl.verify.tolerance import MeasuredRounding, choose_tolerance, has_nan, measure_distance
from shardctl.verify.transformers_classes import get_model_class, list_versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.workers import ProgressWatcher
    from shardctl.models import Model
    from shardctl.running.forward.rank_runner import RankRunner
    from shardctl.running.forward.skeleton import TensorSlot
    from shardctl.running.forward.weights import ModelWeights
    from shardctl.verify.forward_result import CachedDecoding, TextPerplexity
    from shardctl.verify.golden import GoldenComparison, GoldenOutput, Values
    from shardctl.verify.tolerance import ChangeKind

Torch = Any
_MAX_LOADED_WEIGHT_BYTES: Final = 128 << 20
"""Bytes of one weight that are held at once; a matrix of 4096 x 8192 in fp32, and enough rows of any other."""

_UNREACHED_REASON: Final = "not computed with: these inputs do not reach it"
_OUTSIDE_BLOCKS_REASON: Final = "joined: it is no part of a block, and code of the whole model uses it"

_WINDOW: Final = 256
"""Tokens of a window of a text: their logits of 256,000 tokens in fp32 are 250 MiB."""


@value_class
class ForwardOptions:
    """How the pass is run."""

    dtype: str = "fp32"
    """`fp32`, or `bf16` or `fp16`, where rounding is measured."""
    device: str = "cpu"
    places: tuple[str, ...] = ()
    """The devices that ranks with a process of their own are spread over; by default `device` alone."""
    prompt: str = ""
    """A text that both are to continue."""
    tokens: int = 16
    """How many tokens of it."""
    second_opinion: bool = False
    """Whether transformers' own tensor parallelism is asked as well."""
    processes: int = 0
    """Ranks have a process of their own if there are at most so many; else all are run in this one."""
    limit: int = _MAX_LOADED_WEIGHT_BYTES
    """Bytes of one weight that are held at once."""
    seq_len: int | None = None
    """Tokens of each sequence; None for 32, and for windows of 256 of a text."""
    decode: int = 0
    """How many tokens of each sequence are decoded with a KV cache."""
    text: str = ""
    """A text whose perplexity is measured."""
    golden: GoldenOutput | None = None
    """What the shards are to compute, from its inputs."""
    sketched: bool = False
    """Whether a sketch of the output is returned, for a golden file."""
    watcher: ProgressWatcher = field(default_factory=NullWatcher, compare=False)
    """Is told which part of the model runs."""


def compare_in_process(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint, options: ForwardOptions, team: RankTeam | None = None
) -> ForwardResult:
    """Compare the two in this process, which may be one of a team; a model that cannot be run is `skipped`."""
    try:
        with use_device(options.device):
            return ForwardComparison(candidate, original, options, team).run()
    except UnsupportedError as error:
        reason = f"{error.message}; {error.hint}" if error.hint else error.message
        return ForwardResult("skipped", reason, dtype=options.dtype, device=options.device)


class ForwardComparison:
    """Two checkpoints, and how they are run."""

    def __init__(
        self,
        candidate: CandidateCheckpoint,
        original: OriginalCheckpoint,
        options: ForwardOptions,
        team: RankTeam | None = None,
    ) -> None:
        self.team = team or RankTeam()
        self.sides, self.options = ComparedSides(original, candidate, self.team), options
        self.config = _get_runnable_config(original)

    def run(self) -> ForwardResult:
        """Return everything, and the verdict."""
        architecture = _find_architecture(self.config, self.sides.original.model)
        kind = get_model_class(architecture)
        release_freed_memory()
        executor = self.executor(kind, self.options.dtype)
        if self.options.dtype != "fp32" and _has_experts(executor.skeleton):
            raise UnsupportedError(
                f"in {self.options.dtype}, rounding alone makes routers choose other experts, "
                "so the outputs cannot be compared",
                hint="leave --dtype out",
            )
        source, shards = self.sides.fill(executor)
        model = executor.skeleton.model
        golden = self.options.golden
        inputs = (
            decode_inputs(golden.inputs, self.options.device)
            if golden
            else build_inputs(model, self.options.device, self.options.seq_len)
        )
        self._prepare_executor(executor, source, shards)
        self.options.watcher.begin(0, phase="forward")
        with record_chosen_experts(model) as seen:
            reference = executor.run(inputs, source, beside=shards)
        self._note_idle_experts(*count_idle_experts(model, seen))
        name, expected = select_output(reference)
        before = self.sides.original.before
        exact = self._run_unrounded(kind, inputs) if source.rounded is not None or before is not None else expected
        if has_nan(exact):
            raise UnsupportedError(
                f"in {self.options.dtype}, the source itself computes {name} that are not a number, so nothing can be "
                "compared with them",
                hint="" if self.options.dtype == "fp32" else "leave --dtype out",
            )
        self._look(executor, source, shards)
        own = (executor, shards) if self.sides.candidate.config is None else self._build_own()
        found = self._run_shards_alone(own[0], inputs, own[1]) if own is not None else None
        apart = measure_distance(expected, found) if found is not None else inf
        generated = self._generate_texts(executor, source, shards) if self.options.prompt else None
        rounding = (
            self._measure_rounding(kind, executor, inputs, shards, expected) if self.options.dtype != "fp32" else None
        )
        lost = list(find_lost_outputs(name, exact, found, allowed=self.sides.candidate.overflow_allowed))
        if rounding is not None and rounding.output == inf and not lost:
            raise UnsupportedError(
                f"the source computes {name} that are not finite in {self.options.dtype}, so that no bound follows",
                hint="leave --dtype out",
            )
        flips, positions = count_flips(expected, found) if name == "logits" else (0, 0)
        mesh = self.sides.candidate.mesh or Mesh.of()
        held = self._collect_findings(shards)
        compared = None
        if golden is not None and found is not None:
            compared = compare_with_golden(golden, name, _as_array(found))
            lost += self._judge_golden(golden, compared)
        change: ChangeKind = "rounding" if executor.ranks is not None else "equal"
        unrounded = None
        if exact is not expected:
            change = "quantization" if before is not None else "cast"
            unrounded = measure_outputs(name, exact, found)
            lost += find_large_divergence(change, unrounded)
        self._note_unreached_positions(model, inputs)
        sketched = self.options.sketched and found is not None
        result = ForwardResult(
            status="passed",
            engine=_describe_engine(mesh, shards, self.team),
            share=_measure_share(executor, shards),
            dtype=self.options.dtype,
            device=", ".join(dict.fromkeys([self.options.device, *(unit.device for unit in executor.skeleton.units)])),
            architecture=architecture,
            versions=list_versions(),
            blocks=_list_block_errors(executor, sound=not held),
            output=name,
            output_error=apart,
            unrounded_error=measure_distance(exact, found) if exact is not expected and found is not None else None,
            flips=flips,
            positions=positions,
            tolerance=choose_tolerance(
                self.options.dtype,
                summed=executor.ranks is not None,
                rounding=rounding,
                stable=not executor.unstable,
            ),
            generated=generated,
            distances=measure_outputs(name, expected, found),
            unrounded_distances=unrounded,
            change=change,
            perplexity=self._measure_perplexity((executor, source), own) if self.options.text else None,
            decoding=self._decode((executor, source), own, inputs, expected) if self.options.decode else None,
            read_bytes=self.sides.read_bytes,
            golden=compared,
            sketch=sketch_output(name, _as_array(found)) if sketched else None,
            inputs=encode_inputs(inputs) if sketched else {},
            portable_bound=choose_tolerance(self.options.dtype, summed=True, rounding=rounding).logits,
        )
        self._note_unreached_units(executor)
        extra = [*executor.findings, *self._judge_drift(executor), *self.sides.findings, *held, *lost]
        return judge_result(result, list(dict.fromkeys(extra)), [*self.sides.notes, *executor.notes])

    def _judge_golden(self, golden: GoldenOutput, compared: GoldenComparison) -> list[CheckFinding]:
        """Return an error if the output of the shards is farther from the golden one than its file allows."""
        versions = list_versions()
        other = [f"{name} {old} there, {versions.get(name)} here" for name, old in golden.versions.items()
                 if versions.get(name) != old]  # fmt: skip
        if other:
            self.sides.notes.append(f"the golden output was written with other versions: {', '.join(other)}")
        if compared.error <= compared.bound:
            return []
        message = (
            f"{golden.sketch.output} are {compared.error:.2e} from the golden output, at most {compared.bound:g}"
            if compared.error < inf
            else f"the output is not finite, or not {golden.sketch.output} of shape {list(golden.sketch.shape)} as the "
            "golden output is"
        )
        return [CheckFinding("error", CHECK, message)]

    def _run_unrounded(self, kind: Torch, inputs: Mapping[str, Torch]) -> Torch:
        """Return the output of the source with its weights as they were before a cast or a quantization."""
        executor = self.executor(kind, self.options.dtype)
        source, _ = ComparedSides(
            self.sides.original.before or self.sides.original, self.sides.candidate, self.team
        ).fill(executor)
        source.rounded, executor.source = None, source
        return select_output(executor.run(inputs, source))[1]

    def executor(self, kind: Torch, dtype: str, config: Mapping[str, Any] | None = None) -> ModelExecutor:
        """Return a model of class `kind` without weights that computes in `dtype`.

        The default of `config` is the source's.
        """
        import torch

        wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
        if wanted is None:
            raise UnsupportedError(f"the forward pass computes in fp32, bf16 or fp16, not in {dtype}")
        model = build_bare_model(kind, config or self.config, wanted)
        skeleton = ModelSkeleton.of(model, self.options.device)
        precision = ComputePrecision(self.options.device, wanted, self.options.limit)
        watcher = self.options.watcher
        return ModelExecutor(skeleton, WeightConversion(model), precision, self.team, watcher=watcher)

    def _run_shards_alone(
        self, executor: ModelExecutor, inputs: Mapping[str, Torch], shards: ModelWeights
    ) -> Torch | None:
        """Return the output of the shards by themselves, each part fed what the one before it gave."""
        try:
            return select_output(executor.run(inputs, shards))[1]
        except CoverageError as error:
            self.sides.findings.append(CheckFinding("error", "forward", error.message))
        except PartError as error:
            self.sides.findings.append(CheckFinding("error", "forward", str(error)))
        return None

    def _build_own(self) -> tuple[ModelExecutor, ModelWeights] | None:
        """Build the model that the shards' own config describes, with their weights; None if that cannot be built."""
        candidate = self.sides.candidate
        assert candidate.config is not None  # noqa: S101 - asked before
        self.sides.notes.append(
            f"the shards ran with their own config.json, which differs in {format_first_few(candidate.config_changes)}"
        )
        try:
            kind = get_model_class(_find_architecture(candidate.config, candidate.model))
            executor = self.executor(kind, self.options.dtype, candidate.config)
            source, shards = ComparedSides(self.sides.original, candidate, self.team).fill(executor)
            self._prepare_executor(executor, source, shards)
        except MachineError:
            raise
        except (ShardctlError, ValueError, TypeError, KeyError, AttributeError) as error:
            message = f"the shards' own config.json describes a model that cannot be built with them: {error}"
            self.sides.findings.append(CheckFinding("error", "forward", message))
            return None
        return executor, shards

    def _measure_perplexity(
        self, right: tuple[ModelExecutor, ModelWeights], own: tuple[ModelExecutor, ModelWeights] | None
    ) -> TextPerplexity | None:
        """Return the perplexity of the text by both, or note why there is none."""
        if own is None:
            return None
        try:
            window = min(self.options.seq_len or _WINDOW, count_positions(right[0].skeleton.model))
            return measure_perplexity((right, own), self.sides.original.folder, self.options.text, window)
        except (UnsupportedError, CoverageError, PartError) as error:
            reason = error.message if isinstance(error, ShardctlError) else str(error)
            message = f"the perplexity of the text was not measured: {reason}"
            self.sides.findings.append(CheckFinding("error", "forward", message))
            return None

    def _decode(
        self,
        right: tuple[ModelExecutor, ModelWeights],
        own: tuple[ModelExecutor, ModelWeights] | None,
        inputs: Mapping[str, Torch],
        expected: Torch,
    ) -> CachedDecoding | None:
        """Return how far decoding with a KV cache is from the source's, or say why it was not done."""
        if own is None:
            return None
        try:
            return decode_with_cache((right, own), inputs, expected, self.options.decode)
        except (UnsupportedError, CoverageError, PartError) as error:
            reason = error.message if isinstance(error, ShardctlError) else str(error)
            message = f"nothing was decoded with a KV cache: {reason}"
            self.sides.findings.append(CheckFinding("error", "forward", message))
            return None

    def _note_unreached_positions(self, model: Torch, inputs: Mapping[str, Torch]) -> None:
        """Note sliding windows and long rotary tables that sequences of this length do not reach."""
        ids = inputs.get("input_ids")
        if ids is None:
            return
        longer = "--seq-len N" if self.options.golden is None else "a golden output written with --seq-len N"
        for what, reached in list_position_limits(model):
            if ids.shape[-1] <= reached:
                self.sides.notes.append(
                    f"sequences of {ids.shape[-1]} tokens do not reach {what} {reached:,}; {longer} runs longer ones"
                )

    def _measure_rounding(
        self, kind: Torch, narrow: ModelExecutor, inputs: Mapping[str, Torch], shards: ModelWeights, expected: Torch
    ) -> MeasuredRounding:
        """Return what rounding does to the source: in its own order of sums, and in that of ranks."""
        executor = self.executor(kind, "fp32")
        source, _ = ComparedSides(self.sides.original, self.sides.candidate, self.team).fill(executor)
        executor.source = source
        exact = select_output(executor.run(inputs, source))[1]
        found = measure_distance(exact, expected.float())
        if narrow.alike is None:
            self.sides.notes.append("the order of sums of ranks was not measured: the source has other names")
            return MeasuredRounding(2 * found)
        mine, narrow.ranks = narrow.ranks, narrow.alike
        try:
            other = select_output(narrow.run(inputs, shards))[1]
        except PartError as error:
            self.sides.notes.append(f"the order of sums of ranks was not measured: {error}")
            return MeasuredRounding(2 * found)
        finally:
            narrow.ranks = mine
        found += measure_distance(exact, other.float())
        return MeasuredRounding(found, max(narrow.order.values(), default=inf))

    def _judge_drift(self, executor: ModelExecutor) -> list[CheckFinding]:
        """Return where ranks compute otherwise than with the source's weights in their place: bits must be equal."""
        if executor.unstable or executor.ranks is None:
            return []
        views = executor.ranks.views.views
        return [
            CheckFinding(
                "error",
                "forward",
                f"{name} computes something else on {views[rank].label} than the source's weights in the same place: "
                f"{found:.2e}, bits must be equal",
                name,
            )
            for name, (found, rank) in executor.drift.items()
            if found
        ]

    def _generate_texts(
        self, executor: ModelExecutor, source: ModelWeights, shards: ModelWeights
    ) -> GeneratedTexts | None:
        try:
            return continue_prompt(
                executor, (source, shards), self.sides.original.folder, self.options.prompt, self.options.tokens
            )
        except (UnsupportedError, CoverageError, PartError) as error:
            reason = error.message if isinstance(error, ShardctlError) else str(error)
            self.sides.notes.append(f"the prompt was not continued: {reason}")
            return None

    def _look(self, executor: ModelExecutor, source: ModelWeights, shards: ModelWeights) -> None:
        """Run what sees images by itself, where the model was given text alone."""
        for name, tower, inputs in list_towers(
            executor.skeleton.model, self._find_idle_units(executor), self.options.device
        ):
            try:
                executor.run(inputs, source, shards, model=tower)
            except (PartError, UnsupportedError) as error:
                self.sides.notes.append(f"{name} was not run: {error}")

    def _prepare_executor(self, executor: ModelExecutor, source: ModelWeights, shards: ModelWeights) -> None:
        """Have the executor run the source, and the shards as ranks where they compute with parts."""
        executor.source, executor.ranks = source, self.sides.gather_ranks(executor, shards)
        executor.known = shards.shards is not None and bool(shards.shards.model.family)
        executor.suspect = choose_tolerance(self.options.dtype, summed=True).warn
        if self.options.dtype != "fp32":
            executor.alike = self.sides.cut_source(executor, source, shards)

    def _collect_findings(self, shards: ModelWeights) -> list[CheckFinding]:
        """Return what was found while reading shards, by any process, and the copies that differ between them."""
        if shards.shards is None:
            return []
        held = shards.shards
        for sums in self.team.collect(list(held.sums.items())):
            held.compare_copies(dict(sums))
        return [each for findings in self.team.collect(held.findings) for each in findings]

    def _note_idle_experts(self, unused: int, experts: int) -> None:
        """Say which experts were read and not computed with."""
        if unused:
            text = "experts were chosen by no token of these inputs and were not tested"
            self.sides.notes.append(f"{unused} of {experts} {text}")

    def _find_idle_units(self, executor: ModelExecutor) -> list[str]:
        """Return the parts that no input reached, and whose weights no other part has."""
        skeleton = executor.skeleton
        used = {id(slot) for unit in skeleton.units if unit.name in executor.reached for slot in unit.slots}
        return [
            unit.name
            for unit in skeleton.units
            if unit.name not in executor.reached
            and any(used.isdisjoint(map(id, skeleton.slots[slot.names[0]])) for slot in unit.slots)
        ]

    def _note_unreached_units(self, executor: ModelExecutor) -> None:
        idle = self._find_idle_units(executor)
        if executor.unstable:
            self.sides.notes.append(
                f"on {self.options.device} these kernels do not give the same bits each time, so bits need not be "
                f"equal: {', '.join(executor.unstable)}"
            )
        if idle:
            self.sides.notes.append(
                f"{len(idle)} parts of the model were not reached by these inputs: {format_first_few(idle)}"
            )


def _get_runnable_config(original: OriginalCheckpoint) -> Mapping[str, Any]:
    """Return the config; raises UnsupportedError if weights are stored in a form that is not computed with here."""
    if original.config is None:
        raise UnsupportedError("the source has no config.json, so there is no model to run")
    quantised = original.config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "some way") if isinstance(quantised, dict) else "some way"
        raise UnsupportedError(f"the weights are quantized ({method}) and cannot be run here")
    return original.config


def _as_array(output: Torch) -> Values:
    values: Values = output.detach().double().cpu().numpy()
    return values


def _find_architecture(config: Mapping[str, Any], model: Model | None) -> str:
    named = config.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    named = first or (model.architecture if model is not None else "")
    return find_class_name(named, config) if named else ""


def _list_block_errors(executor: ModelExecutor, *, sound: bool) -> tuple[BlockError, ...]:
    """List how far parts are off; only if what ranks hold is `sound` can it be the cuts that are wrong."""
    views = executor.ranks.views.views if executor.ranks is not None else ()
    return tuple(
        BlockError(
            name,
            error.error,
            views[executor.farthest[name]].label if executor.farthest[name] >= 0 else "",
            sound and name in executor.miscut,
            error.cosine,
            error.largest,
        )
        for name, error in executor.errors.items()
    )


def _describe_engine(mesh: Mesh, shards: ModelWeights, team: RankTeam) -> str:
    if shards.shards is None:
        return "one process, whole tensors"
    if isinstance(team, ProcessTeam):
        return f"{mesh.world} processes over gloo ({mesh})"
    return f"{mesh.world} virtual ranks in one process ({mesh})"


def _has_experts(skeleton: ModelSkeleton) -> bool:
    return any(
        "Experts" in type(module).__name__ or "MoE" in type(module).__name__ for module in skeleton.model.modules()
    )


def release_freed_memory() -> None:
    """Have glibc give freed weights back to the system: by default it keeps more after each large one."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, 1 << 20)
            mallopt(_ARENA_MAX, 1)


_MMAP_THRESHOLD: Final = -3
"""`M_MMAP_THRESHOLD` of malloc.h: what is larger has pages of its own, which go back when it is freed."""
_ARENA_MAX: Final = -8
"""`M_ARENA_MAX`: threads that take turns need no heaps of their own, each of which would keep what it once had."""


def _measure_share(executor: ModelExecutor, shards: ModelWeights) -> ComputedShare | None:
    """Measure the share of weights that ranks computed with; None if no rank computes with a part."""
    ranks = executor.ranks
    if ranks is None:
        return None
    total, reasons = 0, dict[str, dict[str, int]]()
    for slot, reason in _list_reasons(executor, ranks):
        if not shards.has_weights_for(slot):
            continue
        size = slot.empty.numel()
        total += size
        if reason:
            reasons.setdefault(reason, {})[slot.names[0]] = size
    joined = [
        JoinedWeights(reason, sum(sizes.values()) / total, tuple(sizes)) for reason, sizes in reasons.items() if total
    ]
    return ComputedShare(1.0 - sum(each.share for each in joined), tuple(joined))


def _list_reasons(executor: ModelExecutor, ranks: RankRunner) -> Iterator[tuple[TensorSlot, str]]:
    """List every slot with why ranks did not compute with their own; an empty text if they did."""
    for slot in executor.skeleton.loose:
        spec = ranks.views.specs.get(slot)
        yield slot, _OUTSIDE_BLOCKS_REASON if spec is not None and spec.axes else ""  # else each rank has all of it
    skeleton = executor.skeleton
    used = {id(slot) for unit in skeleton.units if unit.name in executor.reached for slot in unit.slots}
    for unit in skeleton.units:
        apart = ranks.joined.get(unit.name)
        for slot in unit.slots:
            reached = not used.isdisjoint(map(id, skeleton.slots[slot.names[0]]))  # by one of its names, if it is tied
            yield slot, f"joined: {apart}" if apart else ("" if reached else _UNREACHED_REASON)
