"""Runs the level of `verify` that asks an engine, which loads the directory with its own loader."""

from __future__ import annotations

import time
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.options.verify_options import is_running
from shardctl.running.engines import engine_client as asking
from shardctl.running.engines import score_check as judging
from shardctl.storage.local import LocalSource
from shardctl.verify import rank_files
from shardctl.verify.engine_result import EngineQuestion, EngineResult
from shardctl.verify.finding import CheckFinding
from shardctl.verify.level import LevelResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.options import VerifyOptions
    from shardctl.verify.engine_result import TokenScores

_CHECK_NAME: Final = "engine"
_PROMPT_COUNT: Final = 4
_PROMPT_LENGTH_TOKENS: Final = 24
_MAX_NEW_TOKENS: Final = 8
_LAYOUTS_BY_ENGINE: Final = {"vllm": ("vllm", "hf"), "transformers": ("hf",), "fsdp2": ("dcp",)}
"""The layouts that an engine loads by itself."""
_DEFAULT_RANKS_BY_ENGINE: Final = {"vllm": 1, "transformers": 2, "fsdp2": 2}
"""Processes, where the directory is not cut and nobody says how many."""


def require_engine(verify_options: VerifyOptions) -> None:
    """Raise UsageError unless the engine that is asked for is installed."""
    if verify_options.engine is not None and not is_running(verify_options.engine):
        asking.find_engine(verify_options.engine, verify_options.engine_python)


def run_engine_level(
    checkpoint: OpenedCheckpoint, other: OpenedCheckpoint | None, verify_options: VerifyOptions, *, strict: bool
) -> LevelResult:
    """Have the engine load the checkpoint, and compare what it says with `other` under transformers.

    Without `other`, the checkpoint's own elements are what it is compared with, as shardctl reads them. Raises
    UsageError for a directory or a model that the engine cannot hold, whatever its weights.
    """
    level, began = LevelResult("engine", strict=strict), time.monotonic()
    question = _build_question(checkpoint, verify_options)
    try:
        question, expected, rounding = _score_source(level, checkpoint, other, question)
    except UnsupportedError as error:
        raise UsageError(f"nothing can be compared with the engine: {error.message}", hint=error.hint) from error
    if other is None:
        level.notes.append("the engine was compared with the same elements; --against SRC compares with the source")
    python, limit = verify_options.engine_python, float(verify_options.engine_timeout)
    try:
        answers, versions = asking.ask_engine(question, python, limit)
    except asking.EngineError as error:
        why = asking.can_hold_model(question, python, limit)
        if why:
            raise UsageError(
                f"{question.engine} cannot hold this model here, even with weights of its own making: {why}",
                hint="another version of it, other --processes or another --dtype may",
            ) from error
        who = f"{question.engine} {error.versions.get(question.engine, '')}".strip()
        level.add(iter([CheckFinding("error", _CHECK_NAME, f"{who} refuses the files: {error.message}")]))
        return _finish(level, checkpoint, began)
    bound = judging.MARGIN * rounding if question.dtype == "bf16" else judging.BOUND
    found = judging.compare_scores(expected, answers, bound)
    if found.other or found.apart > bound:
        found = _ask_about_source(level, other, question, (answers, found), bound, verify_options)
    if found.ties:
        level.notes.append(
            f"{found.ties} of {_PROMPT_COUNT} prompts were followed only until two tokens were as likely"
        )
    level.engine = EngineResult(
        engine=question.engine,
        versions=versions,
        ranks=question.tp * question.pp,
        dtype=question.dtype,
        prompts=len(question.prompts),
        compared=found.compared,
        apart=found.apart,
        allowed=bound,
        tokens=found.tokens,
        same=found.same,
    )
    return _finish(level, checkpoint, began)


def _finish(level: LevelResult, checkpoint: OpenedCheckpoint, began: float) -> LevelResult:
    level.tensors, level.seconds = len(checkpoint.manifest.tensors), time.monotonic() - began
    return level


def _build_question(checkpoint: OpenedCheckpoint, verify_options: VerifyOptions) -> EngineQuestion:
    """Build the question without its prompts; raises UsageError for a directory that the engine does not load."""
    engine = verify_options.engine or ""
    layout = _find_layout(checkpoint)
    if verify_options.dtype not in {"fp32", "bf16"}:
        raise UsageError(f"--engine does not compare in {verify_options.dtype}", hint="use --dtype fp32 or bf16")
    if not isinstance(checkpoint.source, LocalSource) or layout not in _LAYOUTS_BY_ENGINE[engine]:
        raise UsageError(
            f"{engine} does not load {checkpoint.source.name}, which is {layout or 'not a local directory'}",
            hint=f"it loads local directories of {' and '.join(_LAYOUTS_BY_ENGINE[engine])}: see shardctl reshard --to",
        )
    dialect, ranks = checkpoint.stored.dialect, verify_options.processes or _DEFAULT_RANKS_BY_ENGINE[engine]
    question = EngineQuestion(
        engine, str(checkpoint.source.root.resolve()), (), _MAX_NEW_TOKENS, verify_options.dtype, tp=ranks
    )
    if layout == "vllm" and dialect is not None:
        mesh = dialect.mesh
        return replace(question, tp=mesh.degree("tp"), pp=mesh.degree("pp"), ep=mesh.ep > 1, sharded=True)
    return question


def _find_layout(checkpoint: OpenedCheckpoint) -> str:
    """Find the layout by which engines know such files."""
    if not isinstance(checkpoint.source, LocalSource):
        return ""
    kind = checkpoint.stored.format
    if kind == "safetensors":
        return "ranks" if rank_files.list_ranks(checkpoint.stored) else "hf"
    return kind


def _score_source(
    level: LevelResult, checkpoint: OpenedCheckpoint, other: OpenedCheckpoint | None, question: EngineQuestion
) -> tuple[EngineQuestion, list[TokenScores], float]:
    """Return the question with prompts, what the source says to them, and how far bf16 takes it."""
    from shardctl.running.engines.reference import SourceReference

    right = other or checkpoint
    config = right.config or checkpoint.config
    if config is None:
        raise UnsupportedError("there is no config.json, so there is no model to run")
    if config.get("quantization_config"):
        raise UnsupportedError(
            "the weights are quantized, and transformers is not asked to decode them",
            hint="compare with the model before it was quantized, or with reshard --dtype bf16",
        )
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    reference = SourceReference(right.manifest, right.source, right.model or checkpoint.model, config, architecture)
    vocabulary, special = reference.list_special_tokens()
    question = replace(question, prompts=asking.list_prompts(vocabulary, special, _PROMPT_COUNT, _PROMPT_LENGTH_TOKENS))
    expected, rounding = reference.score_prompts(question.prompts, _MAX_NEW_TOKENS, "fp32"), 0.0
    idle, experts = reference.idle
    if idle:
        level.notes.append(f"{idle} of {experts} experts were chosen by no token and were not tested")
    if question.dtype == "bf16":
        if experts:
            raise UnsupportedError(
                "in bf16, rounding alone makes routers choose other experts, so the outputs cannot be compared",
                hint="leave out --dtype bf16",
            )
        rounding = judging.measure_rounding(
            expected, reference.score_prompts(question.prompts, _MAX_NEW_TOKENS, "bf16")
        )
        if not isfinite(rounding):
            raise UnsupportedError(
                "in bf16, the source computes log-probabilities that are not finite, so no bound follows",
                hint="leave out --dtype bf16",
            )
    return question, expected, rounding


def _ask_about_source(
    level: LevelResult,
    other: OpenedCheckpoint | None,
    question: EngineQuestion,
    answered: tuple[Sequence[TokenScores], judging.ScoreComparison],
    bound: float,
    verify_options: VerifyOptions,
) -> judging.ScoreComparison:
    """Judge an engine that says something else than transformers: by what it says of the source, if it loads that.

    An engine may compute otherwise than transformers whatever it loads; that is not the fault of the files.
    """
    answers, found = answered
    if other is not None and _find_layout(other) == "hf" and isinstance(other.source, LocalSource):
        again = replace(question, path=str(other.source.root.resolve()), sharded=False)
        try:
            original, _ = asking.ask_engine(again, verify_options.engine_python, float(verify_options.engine_timeout))
        except asking.EngineError as error:
            level.notes.append(f"{question.engine} does not load the source itself: {error.message}")
        else:
            own = judging.compare_scores(original, answers, bound)
            if not own.other and own.apart <= bound:
                message = (
                    f"{question.engine} says the same of the files and of the source, but transformers says something "
                    f"else: {found.apart:.2e} apart at {found.place}"
                )
                level.add(iter([CheckFinding("warning", _CHECK_NAME, message)]))
                return own
    if found.apart > bound:
        message = (
            f"{question.engine} gives log-probabilities that are {found.apart:.2e} from the source's, at most "
            f"{bound:.0e}; they are furthest apart at {found.place}"
        )
    else:
        message = f"{question.engine} does not say what the source says: {found.other}"
    level.add(iter([CheckFinding("error", _CHECK_NAME, message)]))
    return found
