"""Checks, from headers and configs alone, whether a consumer such as vLLM will load a directory.

Each check reports a reason why the directory will not load, or what cannot be known from headers. `reshard --for` runs
the checks on what it is going to write, and `verify --for` on what is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.amounts import format_plural
from shardctl.base.errors import UsageError, format_first_few
from shardctl.base.value import value_class
from shardctl.libraries.files.extra_tensors import EXTRA_FILE
from shardctl.libraries.files.file_names import INDEX_SUFFIX, SAFETENSORS
from shardctl.models import find_quantization_config
from shardctl.models.names.hub.older_config import lacks_older_settings
from shardctl.models.quantization.settings import name_method
from shardctl.models.tables.predicting import list_predicting_names
from shardctl.models.tables.text_config import merge_text_config

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.libraries.consumers.profile import ConsumerProfile
    from shardctl.tensors.mesh import Mesh

CONFIG: Final = "config.json"
TOKENIZER_FILES: Final = frozenset(
    {"tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model"}
)
"""Files with the vocabulary of a tokenizer; a model has one of them at least."""
CHECK: Final = "consumer"
"""What findings call this check."""
_OUTPUT_HEAD_PREFIXES: Final = ("lm_head.", "embed_out.", "output.")
"""What the names of an output head begin with."""
MAX_NAMES: Final = 3
"""Tensors that one reason names."""
_PLAIN_PARAMETER_NAMES: Final = frozenset({"weight", "bias"})
_PACKED_TYPES: Final = ("F8_", "I8", "U8", "I32", "F4", "F6")
"""Types in which weights are stored only if they are quantized."""
_WEIGHT_FILES: Final = (SAFETENSORS, ".bin", ".pt", ".pth")
_IGNORED_EVERYWHERE: Final = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
"""Buffers of old checkpoints, which every consumer skips."""


@value_class
class StoredModel:
    """What a directory holds, or will hold once a conversion is done."""

    config: Mapping[str, Any] | None
    arrays: Mapping[str, DType]
    """The types of the stored arrays, by the names that a consumer sees."""
    files: Collection[str]
    known: bool = True
    """Whether the names of the class in the config are known."""
    misfit: str = ""
    """Why the stored names are not those of the class, if the class is known and they are not."""
    missing: tuple[str, ...] = ()
    """Tensors of the class that are not there."""
    unsaved: tuple[str, ...] = ()
    """Arrays with a name that transformers 5 gives them and the Hub does not, such as stacked experts."""
    extra: tuple[str, ...] = ()
    """Tensors that the class does not have, but for those that transformers ignores."""


@value_class
class ConsumerVerdict:
    """Whether a consumer will load a directory."""

    profile: ConsumerProfile
    reasons: tuple[str, ...]
    """Why it will not load; empty if nothing speaks against it."""
    unknown: tuple[str, ...]
    """What headers and the profile cannot tell; empty if nothing is open."""
    unlisted: str
    """Why the profile cannot tell whether it has the class, which is among `unknown`; empty if it can."""
    notes: tuple[str, ...]
    """What the user must know to start the consumer."""
    command: str
    """The command that loads the directory."""

    @property
    def loads(self) -> bool:
        """Whether it should load, as far as headers tell."""
        return not self.reasons and not self.unknown

    def describe(self) -> str:
        """Describe the verdict in one line.

        It is ``should load in vllm 0.33 (headers only)``, ``will not load: REASON ...`` or ``not known: ...``.
        """
        if self.reasons:
            more = f" (and {len(self.reasons) - 1} more)" if len(self.reasons) > 1 else ""
            return f"will not load: {self.reasons[0]}{more} ({self.profile.label})"
        if self.unknown:
            return f"not known: {'; '.join(self.unknown)} ({self.profile.label})"
        return f"should load in {self.profile.label} (headers only)"


def require_axes(profile: ConsumerProfile, mesh: Mesh) -> None:
    """Raise UsageError for a mesh axis that no option of the consumer stands for."""
    known = {*profile.degrees, *(["ep"] if profile.expert_parallel else [])}
    for axis, degree in (*mesh.axes, ("ep", mesh.ep)):
        if degree > 1 and axis not in known:
            only = f"it takes {', '.join(sorted(known))}" if known else "leave the mesh out"
            raise UsageError(f"{profile.label} is not started for {axis}={degree}", hint=only)


def check_consumer(
    profile: ConsumerProfile, stored: StoredModel, mesh: Mesh, path: str, *, per_rank: bool
) -> ConsumerVerdict:
    """Check a directory for a consumer; reads nothing.

    `mesh` is the one that the consumer will run on, and `per_rank` says that the files are those of its ranks.
    """
    reasons: list[str] = []
    unknown: list[str] = []
    unlisted = ""
    if stored.config is None:
        reasons.append(f"there is no {CONFIG}")
    else:
        for known, text in _check_class(profile, stored.config):
            (reasons if known else unknown).append(text)
        unlisted = "; ".join(unknown)
        if not profile.rope_parameters and lacks_older_settings(stored.config):
            some = f"{CONFIG} lacks settings of transformers 4, such as rope_theta or num_experts"
            reasons.append(f"{some}; reshard --for {profile.option} adds them")
        reasons += _check_quantization(profile, stored)
        reasons += _check_degrees(stored.config, mesh)
    if not per_rank:
        for known, text in _check_names(profile, stored):
            (reasons if known else unknown).append(text)
        reasons += _check_files(stored)
    notes = tuple(_list_notes(profile, stored))
    if per_rank and profile.read_ranks:
        compared = f"{profile.consumer} {profile.read_ranks}"
        notes = (f"{profile.label} was read and not run: its arrays per rank are those of {compared}", *notes)
    command = format_command(profile, stored, mesh, path, per_rank=per_rank)
    return ConsumerVerdict(profile, tuple(reasons), tuple(unknown), unlisted, notes, command)


def _check_class(profile: ConsumerProfile, config: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield why the class is not loaded, each with whether that is known."""
    classes = config.get("architectures")
    named = [each for each in classes if isinstance(each, str)] if isinstance(classes, list) else []
    kind = config.get("model_type")
    if profile.model_types:
        if kind not in profile.model_types:
            yield False, f"it has no model of type {kind!r} and may run it with transformers' code"
        return
    if not named:
        yield True, f"{CONFIG} names no class in `architectures`"
        return
    name = named[0]
    if name in profile.architectures or (profile.transformers_backend and name in profile.transformers_backend):
        return
    if name in profile.removed:
        yield True, f"it no longer has {name}, which {profile.removed[name]} was the last version to have"
    elif config.get("auto_map"):
        yield False, f"{name} is code of the checkpoint (auto_map), which nobody ran"
    elif profile.transformers_backend is None:
        yield False, f"it has no class {name} and may run it with transformers' code"
    else:
        yield True, f"it has no class {name}"


def _check_quantization(profile: ConsumerProfile, stored: StoredModel) -> Iterator[str]:
    """Yield what of the quantization is not supported."""
    settings = find_quantization_config(stored.config or {})
    packed = [name for name, dtype in stored.arrays.items() if dtype.name.startswith(_PACKED_TYPES)]
    if settings is None:
        if packed:
            some, kind = format_plural(len(packed), "tensor"), stored.arrays[packed[0]].name
            yield f"{some} of type {kind} are stored and {CONFIG} declares no quantization, such as {packed[0]}"
        return
    method = name_method(settings)
    if method not in profile.quantization:
        yield f"it does not load weights quantized with {method or 'an unnamed method'}"
    if "*" in profile.quantized_head or method in profile.quantized_head:
        return
    head = [
        name
        for name, dtype in stored.arrays.items()
        if name.startswith(_OUTPUT_HEAD_PREFIXES)
        and (name.rpartition(".")[2] not in _PLAIN_PARAMETER_NAMES or dtype.name.startswith(_PACKED_TYPES))
    ]
    if head:
        module = head[0].partition(".")[0]
        yield f"it does not load a head quantized with {method} ({head[0]}): add --dtype bf16 --dequantize {module}"


def _check_degrees(config: Mapping[str, Any], mesh: Mesh) -> Iterator[str]:
    """Yield which degree of the mesh the model cannot be divided by."""
    text = merge_text_config(config)
    tp, heads, shared = mesh.degree("tp"), text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(heads, int) and heads % tp:
        yield f"{heads} attention heads are not divisible by tp={tp}"
    elif isinstance(shared, int) and shared > 0 and shared % tp and tp % shared:
        yield f"{shared} key/value heads neither divide nor are divided by tp={tp}"
    layers, stages = text.get("num_hidden_layers"), mesh.degree("pp")
    if isinstance(layers, int) and layers < stages:
        yield f"{layers} layers are fewer than pp={stages}"


def _check_names(profile: ConsumerProfile, stored: StoredModel) -> Iterator[tuple[bool, str]]:
    """Yield which tensors it will miss or not know, each with whether that is known."""
    if stored.misfit:
        yield True, f"the names are not those of the class: {stored.misfit}"
        return
    if not stored.known:
        yield False, "the tensor names of this class are not known"
        return
    if stored.missing:
        yield (
            True,
            f"{_count(stored.missing)} of the class are not there: {format_first_few(stored.missing, MAX_NAMES)}",
        )
    if stored.unsaved and not profile.state_names:
        some = f"{_count(stored.unsaved)} as transformers 5 has them in memory, and not as on the Hub"
        yield (
            True,
            f"{some}: {format_first_few(stored.unsaved, MAX_NAMES)}; reshard --for {profile.option} renames them",
        )
    extra = [name for name in stored.extra if not name.endswith(_IGNORED_EVERYWHERE)]
    if not extra or profile.extra_tensors == "ignore":
        return
    some = f"{_count(extra)} that the class does not have: {format_first_few(extra, MAX_NAMES)}"
    if profile.extra_tensors == "reject":
        yield True, f"it rejects {some}; reshard moves them to a file of their own"
    else:
        yield False, f"some of its classes reject {some}"


def _count(names: Sequence[str]) -> str:
    return format_plural(len(names), "tensor")


def _check_files(stored: StoredModel) -> Iterator[str]:
    """Yield which file is missing or in the way."""
    top = [path for path in stored.files if "/" not in path]
    weights = [path for path in top if path.endswith(_WEIGHT_FILES)]
    shards = [path for path in weights if path.endswith(SAFETENSORS)]
    if len(shards) > 1 and not any(path.endswith(INDEX_SUFFIX) for path in top):
        yield f"{format_plural(len(shards), 'shard')} have no model.safetensors{INDEX_SUFFIX}"
    if "adapter_config.json" in top and weights:
        yield "an adapter lies next to the model, and is applied on top of it"


def _list_notes(profile: ConsumerProfile, stored: StoredModel) -> Iterator[str]:
    """Yield what a user must add to start the consumer, and what it does not load."""
    predicting = list_predicting_names(stored.config or {}, stored.arrays)
    if predicting:
        some = f"{_count(predicting)} of multi-token prediction layers: {format_first_few(predicting, MAX_NAMES)}"
        yield f"{profile.label} loads {some} for speculative decoding at most, and ignores them otherwise"
    if EXTRA_FILE in stored.files:
        yield f"{profile.label} does not load the tensors in {EXTRA_FILE}, which the class does not have"
    if TOKENIZER_FILES.isdisjoint(stored.files):
        way = f"start {profile.consumer} with {profile.tokenizer}, or " if profile.tokenizer else ""
        yield f"there is no tokenizer: {way}add one with --complete-from BASE"


def format_command(profile: ConsumerProfile, stored: StoredModel, mesh: Mesh, path: str, *, per_rank: bool) -> str:
    """Format the command that loads a directory, with the options of the mesh."""
    words = [profile.command.format(path=path, auto_class=_choose_auto_class(stored.config or {}))]
    for axis, option in profile.degrees.items():
        if mesh.degree(axis) > 1:
            words.append(option.format(degree=mesh.degree(axis)))
    if mesh.ep > 1 and profile.expert_parallel:
        words.append(profile.expert_parallel.format(degree=mesh.ep))
    if per_rank and profile.sharded:
        words.append(profile.sharded)
    if TOKENIZER_FILES.isdisjoint(stored.files) and profile.tokenizer:
        words.append(profile.tokenizer)
    return " ".join(words)


def _choose_auto_class(config: Mapping[str, Any]) -> str:
    """Choose the class of transformers that loads a model of these `architectures`."""
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "AutoModelForCausalLM"
    if name.endswith("ForConditionalGeneration"):
        return "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForSeq2SeqLM"
    return "AutoModel"
