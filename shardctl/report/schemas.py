"""Declares the JSON document of each verb as a type, from which `shardctl schema` makes its JSON Schema.

The functions that build documents are in `documents`, `several` and `plan_document`; tests check what the commands
print against these types. Types of other modules say what `asdict` makes of their fields. There are no postponed
annotations, because the types are inspected.
"""

import json
from importlib.resources import files
from typing import Any, Final, Literal, NotRequired, TypedDict, cast

import msgspec

from shardctl.base.errors import UsageError
from shardctl.checkpoint.adapters.adapter_checkpoint import AdapterSummary
from shardctl.checkpoint.companion_comparison import FileChange
from shardctl.checkpoint.pipeline_parts import PipelinePart
from shardctl.models import RuleRow
from shardctl.report.documents import format_schema_name
from shardctl.verify.cast_losses import UnroundedDistance
from shardctl.verify.config_comparison import ConfigChange
from shardctl.verify.download_hashes import DownloadHashes
from shardctl.verify.finding import CheckFinding
from shardctl.verify.forward_result import JoinedWeights, OutputDistances, PromptContinuation
from shardctl.verify.level import SignatureCheck
from shardctl.verify.library_headers import LibraryHeaders
from shardctl.verify.tolerance import ChangeKind

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


class SettingFields(TypedDict):
    """An option that a file or a variable set."""

    option: str
    verb: str
    value: str | bool | list[str]
    origin: str


class DocumentHead(TypedDict):
    """What every document has."""

    schema: str
    status: Literal["ok", "no", "error"]
    exit_code: int
    settings: NotRequired[list[SettingFields]]


class FailureDocument(TypedDict):
    """The last record of a run that failed."""

    schema: str
    status: Literal["error"]
    exit_code: int
    error: str
    hint: str
    settings: NotRequired[list[SettingFields]]


class MeshFields(TypedDict):
    """A mesh: the degree of each axis, and the number of ranks."""

    axes: dict[str, int]
    ranks: int


class ExtraTensorFields(TypedDict):
    """A tensor that the model's class does not have."""

    name: str
    dtype: str
    shape: list[int]
    tensor_bytes: int
    kept: bool


class ConsumerFields(TypedDict):
    """Whether a program loads the checkpoint, and the command that starts it."""

    consumer: str
    version: str
    loads: bool
    verdict: str
    reasons: list[str]
    unknown: list[str]
    notes: list[str]
    command: str


class HashFields(TypedDict):
    """Which files were compared with the hashes that their place promises, and why others were not."""

    verified: list[str]
    unverified: dict[str, str]


class DTypeFields(TypedDict):
    """How much of a checkpoint has one type."""

    dtype: str
    tensors: int
    parameters: int
    tensor_bytes: int


class SubtreeFields(TypedDict):
    """One of the models in the files."""

    prefix: str
    tensors: int
    tensor_bytes: int


class StateFields(TypedDict):
    """One kind of optimizer state."""

    tensors: int
    tensor_bytes: int


class TrainingFields(TypedDict):
    """What a training checkpoint has next to the weights."""

    writer: str
    ranks: int | None
    step: int | None
    groups: int
    states: dict[str, StateFields]
    notes: list[str]


class TensorFields(TypedDict):
    """One tensor, with `--tensors`."""

    name: str
    dtype: str
    shape: list[int]
    tensor_bytes: int
    ties: list[str]
    stored: list[str]
    chunks: int
    files: list[str]


class UncutFields(TypedDict):
    """Tensors that derived rules leave whole."""

    pattern: str
    reason: str


DerivationFields = TypedDict("DerivationFields", {"from": list[str], "whole": list[UncutFields], "rule_file": str})
"""Where derived rules come from."""


class ValueFields(TypedDict):
    """What values are. Norm, mean and largest absolute value are those of the finite ones."""

    elements: int
    norm: float | None
    mean: float
    largest: float
    zeros: int
    nans: int
    infinities: int


class LayerValueFields(ValueFields):
    """What the values of a layer are, or of a module outside of layers."""

    name: str
    tensors: int


class TensorValueFields(TypedDict):
    """What the values of a tensor are; null for packed types of 6 bits."""

    name: str
    dtype: str
    values: ValueFields | None


class StatisticsFields(TypedDict):
    """What the values of a checkpoint are, with `--stats`."""

    total: ValueFields
    layers: list[LayerValueFields]
    tensors: list[TensorValueFields]
    notes: list[str]


class InspectDocument(DocumentHead):
    """What `inspect --json` prints."""

    path: str
    verdict: str
    format: str
    layout: str
    family: str
    architecture: str
    why_no_model: str
    mesh: MeshFields | None
    stages: list[int]
    parameters: int
    tensor_bytes: int
    file_bytes: int
    files: list[str]
    dtypes: list[DTypeFields]
    ties: dict[str, list[str]]
    carried: list[str]
    dropped: list[str]
    extra_tensors: list[ExtraTensorFields]
    digest: str
    warnings: list[str]
    subtrees: NotRequired[list[SubtreeFields]]
    address: NotRequired[str]
    drafter: NotRequired[str]
    adapter: NotRequired[AdapterSummary]
    parts: NotRequired[list[PipelinePart]]
    training: NotRequired[TrainingFields]
    tensors: NotRequired[list[TensorFields]]
    statistics: NotRequired[StatisticsFields]
    rules: NotRequired[list[RuleRow]]
    derivation: NotRequired[DerivationFields | None]


class ProgressDocument(TypedDict):
    """How far `reshard --json` is: every record but the last."""

    schema: str
    status: Literal["running"]
    phase: str
    done_bytes: int
    total_bytes: int
    kept_bytes: int
    files_done: int
    files: int
    rate_bytes: int
    seconds_left: float | None
    held_bytes: int


class ShareFields(TypedDict):
    """With which share of the weights ranks computed as they hold them."""

    own: float
    joined: list[JoinedWeights]


class WorstFields(TypedDict):
    """The part of the model that is farthest off; null is a distance that is infinite."""

    name: str
    error: float | None


class BlockFields(TypedDict):
    """One part of the model, fed the source's inputs."""

    name: str
    error: float | None
    rank: str
    miscut: bool
    cosine: float
    largest: float | None


class OpinionFields(TypedDict):
    """What transformers' own tensor parallelism makes of the shards."""

    status: Literal["agrees", "differs", "skipped"]
    reason: str
    error: float | None


class GeneratedFields(TypedDict):
    """The next tokens of a prompt, side by side."""

    prompt: str
    source: PromptContinuation
    shards: PromptContinuation
    same: bool


class GoldenFields(TypedDict):
    """How far the output is from a golden one."""

    error: float | None
    bound: float
    positions: int
    same_tokens: int
    largest_difference: float


class PerplexityFields(TypedDict):
    """Perplexity of a text."""

    tokens: int
    window: int
    source: float | None
    shards: float | None


class DecodingFields(TypedDict):
    """Decoding with a KV cache."""

    prefill: int
    decoded: int
    error: float | None
    cache_error: float | None


class ForwardFields(TypedDict):
    """What a forward pass found; a distance that is infinite is null."""

    engine: str
    share: ShareFields | None
    dtype: str
    device: str
    architecture: str
    versions: dict[str, str]
    worst: WorstFields | None
    blocks: list[BlockFields]
    output: str
    output_error: float | None
    unrounded_error: float | None
    flips: int
    positions: int
    tolerance: dict[str, float | None] | None
    opinion: OpinionFields | None
    generated: GeneratedFields | None
    read_bytes: int
    change: ChangeKind
    distances: OutputDistances | None
    unrounded_distances: OutputDistances | None
    perplexity: PerplexityFields | None
    decoding: DecodingFields | None
    golden: GoldenFields | None


class ConvertedDocument(DocumentHead):
    """What documents of a complete conversion have."""

    verdict: str
    destination: str
    layout: str
    architecture: str
    mesh: MeshFields | None
    stages: list[int]
    tensors: int
    files: int
    file_bytes: int
    read_bytes: int
    written_bytes: int
    seconds: float
    digest: str
    source_digest: str
    notes: list[str]
    warnings: list[str]


class ReshardDocument(ConvertedDocument):
    """What `reshard --json` prints last."""

    dry_run: Literal[False]
    shared_bytes: int
    kept_bytes: int
    done_before: bool
    dropped: list[str]
    extra_tensors: list[ExtraTensorFields]
    projected_memory_bytes: int
    source_hashes: HashFields
    rules: str
    rules_proof: str
    fused_order_unknown: list[str]
    names: str
    proof: ForwardFields | None
    consumer: ConsumerFields | None


class RehearsalDocument(DocumentHead):
    """What `reshard --dry-run --json` prints; `plan` is as `shardctl schema plan` says."""

    dry_run: Literal[True]
    verdict: str
    destination: str
    plan: dict[str, Any]


class ContributionDocument(DocumentHead):
    """What `reshard --worker --json` prints last."""

    dry_run: Literal[False]
    verdict: str
    destination: str
    worker: int
    workers: int
    workers_missing: list[int]
    finished: bool
    files: int
    file_bytes: int
    read_bytes: int
    written_bytes: int
    shared_bytes: int
    kept_bytes: int
    projected_memory_bytes: int
    seconds: float
    source_hashes: HashFields
    warnings: list[str]


class OutcomeDocument(TypedDict):
    """What became of one checkpoint of `reshard --each --json`."""

    schema: str
    status: Literal["converted", "kept", "failed"]
    source: str
    destination: str
    digest: str | None
    warnings: list[str]
    error: str | None
    hint: str | None


class EachDocument(DocumentHead):
    """What `reshard --each --json` prints last."""

    converted: int
    kept: int
    failed: int
    untried: int
    each: list[OutcomeDocument]
    not_tried: list[str]


class FinishDocument(ConvertedDocument):
    """What `finish --json` prints, and `reshard --engine ray --json` last."""

    finished_before: bool
    workers: int


class LoadedRankFields(TypedDict):
    """What one rank took to load."""

    rank: int | None
    label: str
    device: str
    loaded_bytes: int
    seconds: float
    peak_bytes: int
    planned_bytes: int | None


class PlacementFields(TypedDict):
    """Where a block of a checkpoint without ranks was placed."""

    block: str
    place: str
    tensor_bytes: int


class LevelFields(TypedDict):
    """The outcome of one level of checks."""

    name: Literal["attestation", "structure", "policy", "content", "identity", "load", "forward", "engine"]
    status: Literal["passed", "failed", "skipped", "unfinished"]
    reason: str
    tensors: int
    tensor_bytes: int
    seconds: float
    findings: list[CheckFinding]
    notes: list[str]
    safetensors: NotRequired[LibraryHeaders]
    downloads: NotRequired[DownloadHashes]
    equal_files: NotRequired[list[str]]
    unrounded: NotRequired[list[UnroundedDistance]]
    ranks: NotRequired[list[LoadedRankFields]]
    placement: NotRequired[list[PlacementFields]]
    forward: NotRequired[ForwardFields]
    engine: NotRequired[dict[str, Any]]
    attestation: NotRequired[SignatureCheck]


class VerifyDocument(DocumentHead):
    """What `verify --json` prints; with `error` and `hint` where this machine could not finish a level."""

    path: str
    against: str
    ok: bool
    verdict: str
    digest: str
    unchecked: list[str]
    consumer: ConsumerFields | None
    levels: list[LevelFields]
    error: NotRequired[str]
    hint: NotRequired[str]


class ChangeFields(TypedDict):
    """One tensor, or one setting of an optimizer, that is not the same."""

    tensor: str
    kind: Literal["only_in_a", "only_in_b", "shape", "dtype", "values", "setting"]
    a: str
    b: str
    count: int
    size: int
    first: str
    distance: dict[str, float | bool | None] | None
    cast: str


class LayerChangeFields(TypedDict):
    """By how much the weights of a layer changed: `relative` is null where those of the first are all zero.

    `not_finite` counts elements that differ and are NaN or infinite in one of the two. No other number does.
    """

    layer: str
    relative: float | None
    change: float | None
    norm: float | None
    tensors: int
    changed: int
    not_finite: int


class DeltaFields(TypedDict):
    """A weight delta that `diff --write` wrote."""

    path: str
    version: int
    base_version: int
    arrays: int
    base_arrays: int
    nbytes: int
    base_digest: str
    digest: str


class DiffDocument(DocumentHead):
    """What `diff --json` prints."""

    a: str
    b: str
    equal: bool
    verdict: str
    equal_tensors: int
    compared_bytes: int
    changes: list[ChangeFields]
    config_changes: list[ConfigChange]
    file_changes: list[FileChange]
    layers: list[LayerChangeFields]
    delta: DeltaFields | None
    warnings: list[str]


class DigestFields(TypedDict):
    """The digest of one tensor, with `--tensors`."""

    digest: str
    dtype: str
    shape: list[int]


class DigestDocument(DocumentHead):
    """What `digest --json` prints."""

    path: str
    digest: str
    expected: str | None
    tensor_bytes: int
    source_hashes: HashFields
    warnings: list[str]
    tensors: NotRequired[dict[str, DigestFields]]


class AttestDocument(DocumentHead):
    """What `attest --json` prints."""

    path: str
    statement: str
    signature: str
    files: int
    signed_bytes: int
    key_hash: str
    digest: str
    source_digest: str
    unchecked: list[str]
    warnings: list[str]


class EngineSumsDocument(DocumentHead):
    """What `digest --as ENGINE --json` prints."""

    path: str
    checksums: dict[str, str]
    unknown: list[str]
    tensor_bytes: int
    warnings: list[str]


class PassedFields(TypedDict):
    """A newer checkpoint that is not whole, and why."""

    name: str
    reasons: list[str]


class NewestDocument(DocumentHead):
    """What `verify --newest-good --json` prints."""

    path: str
    newest: str | None
    order: Literal["number", "time"]
    passed_over: list[PassedFields]


class SettingsFileFields(TypedDict):
    """A file that was looked for."""

    path: str
    found: bool


class SettingsDocument(DocumentHead):
    """What `settings --json` prints."""

    verbs: dict[str, list[SettingFields]]
    overridden: list[SettingFields]
    files: list[SettingsFileFields]
    warnings: list[str]


_DOCUMENT_TYPES_BY_COMMAND: Final[dict[str, tuple[object, ...]]] = {
    "inspect": (InspectDocument,),
    "reshard": (
        *(ReshardDocument, RehearsalDocument, ContributionDocument, FinishDocument, EachDocument),
        *(OutcomeDocument, ProgressDocument),
    ),
    "finish": (FinishDocument,),
    "verify": (VerifyDocument, NewestDocument),
    "attest": (AttestDocument,),
    "diff": (DiffDocument,),
    "digest": (DigestDocument, EngineSumsDocument),
    "settings": (SettingsDocument,),
}
"""What each verb prints with `--json`, besides the record of a failure."""
_PLAN_COMMAND: Final = "plan"
"""The verb whose schema is a file: it says more than types can, such as which numbers are counts."""


def list_schema_names() -> list[str]:
    """List the verbs that have a schema."""
    return sorted([*_DOCUMENT_TYPES_BY_COMMAND, _PLAN_COMMAND])


def build_schema(verb: str) -> dict[str, Any]:
    """Build the JSON Schema of what a verb prints with `--json`; raises UsageError for one that prints no JSON.

    >>> build_schema("digest")["$id"]
    'shardctl.digest/1'
    """
    if verb == _PLAN_COMMAND:
        text = files("shardctl.report").joinpath("plan_schema.json").read_text(encoding="utf-8")
        return cast("dict[str, Any]", json.loads(text))
    if verb not in _DOCUMENT_TYPES_BY_COMMAND:
        raise UsageError(f"{verb} has no JSON schema", hint=f"use one of {', '.join(list_schema_names())}")
    name = format_schema_name(verb)
    found, types = msgspec.json.schema_components(
        [*_DOCUMENT_TYPES_BY_COMMAND[verb], FailureDocument], ref_template="#/$defs/{name}"
    )
    for each in types.values():
        each["additionalProperties"] = False
        if "schema" in each["properties"]:
            each["properties"]["schema"] = {"const": name}
    return {
        "$schema": DIALECT,
        "$id": name,
        "title": f"What `shardctl {verb} --json` prints",
        "description": "Integers that count bytes have names that end in `_bytes`.",
        "anyOf": list(found),
        "$defs": types,
    }
