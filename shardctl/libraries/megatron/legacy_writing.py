"""Plans directories that Megatron-LM loads (`--ckpt-format torch`): a folder per rank, and the tracker.

The dictionary is that of `generate_state_dict` in `megatron/training/checkpointing.py`: the args, from which
`--use-checkpoint-args` builds the model, the version of the order of rows, and the arrays. Local layers look for an
extra state of every projection, which is None; Transformer Engine makes its own anew.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, UnsupportedError, UsageError
from shardctl.libraries.arrays.composing import build_manifest, compose_arrays
from shardctl.libraries.arrays.composite import round_up_to_multiple
from shardctl.libraries.megatron import arrays as megatron
from shardctl.libraries.megatron import layers
from shardctl.libraries.megatron.args_writing import FOLDER, TRACKER, VERSION, build_arguments
from shardctl.libraries.megatron.arguments import LAST_ROW
from shardctl.libraries.megatron.arrays import SCHEMA
from shardctl.libraries.megatron.dist_parameters import BUFFERS
from shardctl.libraries.megatron.dist_states import (
    SCHEDULE,
    add_progress,
    build_schedule,
    collect_states,
    find_iteration,
    list_trained,
    note_unknown_progress,
)
from shardctl.libraries.megatron.family_features import TRAITS
from shardctl.libraries.megatron.further_layers import COUNT, count_complete_layers
from shardctl.libraries.megatron.hybrid_layers import format_patterns
from shardctl.libraries.megatron.layer_options import OPTION, MegatronOptions
from shardctl.libraries.megatron.names import (
    EXTRA_STATE,
    find_engine_name,
    find_layer,
    find_newer_name,
    find_newest_name,
    find_projection,
)
from shardctl.libraries.megatron.ranks import FILE, TITLE, build_least_mesh, list_mesh_folders
from shardctl.libraries.torch_save.item_writer import build_tensor_value
from shardctl.libraries.writer import Layout
from shardctl.models.tables.config import ModelConfig
from shardctl.tensors.manifest import CheckpointFile
from shardctl.tensors.naming_scheme import NamingScheme

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.libraries.arrays.composing import ComposedArray
    from shardctl.libraries.megatron.rank_archive import RankArchive
    from shardctl.libraries.megatron.rank_state_writing import NamedArray, RankStateWriter
    from shardctl.libraries.torch_save.pickle_writer import PickleObject, Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Chunk, Manifest
    from shardctl.tensors.mesh import Mesh

NAME: Final = "megatron"
_RANKS_FOLDER_KEY: Final = "folder"
"""The fact that says in which folder the ranks' folders are."""
_NO_RANDOM_STATES: Final = f"start {TITLE} with --no-load-rng: no random states are written"
_LINEAR_PARAMETER_PATTERN: Final = re.compile(
    r"(.*\.)?(linear_[a-z0-9_]+|(?:in|out)_proj|eh_proj|output_layer)\.(weight|bias)"
)


def pack_megatron(order: PackRequest) -> Manifest:
    """Return the file of every rank that has one of its own, and the tracker.

    Raises as `Layout.pack` says.
    """
    from shardctl.libraries.megatron.embedding_copies import note_copies  # which needs NumPy
    from shardctl.libraries.megatron.rank_archive import RankArchive  # as all below, of these files alone
    from shardctl.libraries.megatron.rank_order import sort_parameters
    from shardctl.libraries.megatron.rank_state_writing import RankStateWriter
    from shardctl.libraries.megatron.rank_states import STATES_FILE

    SCHEMA.check(order.model)
    wanted = MegatronOptions.parse(order.options.get(OPTION, ""))
    if layers.is_hybrid(order.model):
        _check_hybrid_options(wanted, count_complete_layers(order))
    if wanted.grouped and wanted.local and TRAITS[order.model.family].turning:
        raise UsageError(
            "megatron-core's local layers have no grouped experts with biases", hint="leave experts=grouped out"
        )
    training, trained = order.have.training, list_trained(order)
    mesh = _build_mesh(order)
    counts = _count_chunk_layers(order, wanted)
    names = dict(enumerate(list_mesh_folders(mesh)))
    tp, pp = mesh.degree("tp"), mesh.degree("pp")
    embedding = layers.get_embedding_name(order.model)
    padded = _compute_padded_rows(order.model.tensors[embedding].shape[0], tp, wanted)
    further = count_complete_layers(order)
    folder = f"iter_{find_iteration(training):07d}/" if trained else FOLDER
    dialect = NamingScheme(
        megatron.NAME,
        mesh,
        {rank: f"{name}/" for rank, name in names.items()},
        tuple(sum(counts[stage::pp]) for stage in range(pp)),
        {
            megatron.LAYERS: counts,
            megatron.VOCABULARY: padded,
            megatron.LAST_ROW: wanted.last_row,
            megatron.LATENTS_CUT: wanted.local,
            megatron.GROUPED: wanted.grouped and wanted.local,
            megatron.DTYPE: order.dtypes[embedding].name,
            COUNT: further,
            _RANKS_FOLDER_KEY: folder,
        },
    )
    arguments = _build_arguments(order, wanted, dialect)
    namer = _ArrayNamer(order, wanted)
    named = {rank: list(namer(arrays)) for rank, arrays in compose_arrays(order, SCHEMA, dialect).items()}
    files: dict[str, CheckpointFile] = {}
    stored: list[tuple[str, Chunk]] = []
    common: dict[str, Value] = {"args": arguments, "checkpoint_version": VERSION, "iteration": find_iteration(training)}
    writer: RankStateWriter | None = None
    warnings: tuple[str, ...] = ()
    if trained and training is not None:
        _check_states(wanted, further)
        add_progress(arguments, training, distributed=not wanted.replicated)
        common[SCHEDULE] = build_schedule(training)
        named = {rank: sort_parameters(arrays, engine=not wanted.local) for rank, arrays in named.items()}
        writer = RankStateWriter(order, mesh, named, trained, replicated=wanted.replicated)
        warnings = (*note_unknown_progress(training), _NO_RANDOM_STATES)
    for rank, arrays in named.items():
        path = f"{folder}{names[rank]}/"
        files[path + FILE] = _build_file(RankArchive(path + FILE), rank, arrays, common, wanted, writer, stored)
        beside = writer.build_file(rank, path + STATES_FILE, stored) if writer and not wanted.replicated else None
        if beside is not None:
            files[beside.path] = beside
    tracked = (str(find_iteration(training)) if trained else FOLDER.rstrip("/")).encode()
    files[TRACKER] = CheckpointFile(TRACKER, len(tracked), ((0, tracked),))
    held = training.states if training is not None else {}
    weights = replace(order.have, tensors={n: t for n, t in order.have.tensors.items() if n not in held})
    own = [each for each in stored if each[0] not in held]
    built = build_manifest(NAME, replace(order, have=weights), SCHEMA, dialect, files, own, note_copies(order, further))
    return replace(
        built,
        tensors={**built.tensors, **collect_states(training, stored)},
        warnings=(*built.warnings, *warnings),
    )


def _check_states(wanted: MegatronOptions, further: int) -> None:
    """Raise UnsupportedError for what optimizer states cannot be written beside."""
    if further:
        raise UnsupportedError(
            f"where layers that predict further tokens stand among the parameters of {TITLE}'s optimizers is not known",
            hint="write --to torch_dist, whose states have names, or add --optimizer-states drop",
        )
    if wanted.last_row:
        raise UsageError(
            "padding=last-row is for weights alone: no token trains the rows that pad the vocabulary",
            hint="leave it out, or add --optimizer-states drop",
        )


def _check_hybrid_options(wanted: MegatronOptions, further: int) -> None:
    """Raise UsageError for what `--megatron` says that megatron-core has not in models of several kinds of layers."""
    if wanted.local:
        raise UsageError(
            "megatron-core has Mamba between Transformer Engine's layers only", hint="leave layers=local out"
        )
    if wanted.older and (further or wanted.chunks > 1):
        lacking = "layers that predict further tokens" if further else "virtual pipelines"
        raise UsageError(
            f"megatron-core 0.16 has no {lacking} in models with Mamba",
            hint="use core=0.17" + (", or --exclude 'mtp.*'" if further else ""),
        )


def _build_mesh(order: PackRequest) -> Mesh:
    """Build the mesh without replicas."""
    mesh = order.mesh
    if mesh.degree("fsdp") > 1:
        raise PartitionError(
            f"{TITLE}'s directories are those of tp, pp and ep ranks, not of fsdp", hint="use --dp instead"
        )
    tp = mesh.degree("tp")
    heads = ModelConfig(order.config).size("n_head" if order.model.family == "gpt2" else "num_attention_heads")
    if heads % tp:
        raise PartitionError(
            f"{TITLE} gives every tp rank the same number of heads, but {heads} cannot be divided over tp={tp}",
            hint=f"use --tp {', '.join(str(degree) for degree in range(1, heads + 1) if heads % degree == 0)}",
        )
    ep, etp = (mesh.ep, mesh.etp) if layers.count_experts(order.model) else (1, tp)
    return build_least_mesh(tp=tp, pp=mesh.degree("pp"), ep=ep, etp=etp)


def _compute_padded_rows(tokens: int, tp: int, wanted: MegatronOptions) -> int:
    """Compute rows of the vocabulary with its padding.

    Raises PartitionError where some rank would have copies of the last row alone: nobody could tell them from remains.
    """
    padded = round_up_to_multiple(tokens, wanted.multiple * tp)
    if wanted.last_row and padded // tp * (tp - 1) >= tokens:
        raise PartitionError(
            f"padding {tokens} tokens to {padded} rows would leave ranks with only copies of the last row",
            hint="use a smaller multiple=N, or padding=zeros",
        )
    return padded


def _count_chunk_layers(order: PackRequest, wanted: MegatronOptions) -> tuple[int, ...]:
    """Count layers of each chunk of each stage, as data flows."""
    stages = order.mesh.degree("pp")
    turns = stages * wanted.chunks
    if wanted.chunks > 1 and (stages == 1 or order.stages is not None):
        raise UsageError(
            f"virtual={wanted.chunks} needs --pp and excludes --stages, because all chunks have the "
            "same number of layers"
        )
    if order.stages is not None:
        if wanted.older or not layers.is_hybrid(order.model):  # patterns of newer cores say any stages
            _find_end_stages(order.stages)
        return order.stages
    each, rest = divmod(order.model.layers, turns)
    if rest:
        raise PartitionError(
            f"{order.model.layers} layers cannot be divided evenly over {turns} stages, as {TITLE} does",
            hint="use --stages, with as many layers on all stages but the first and the last",
        )
    return (each,) * turns


def _find_end_stages(stages: Sequence[int]) -> tuple[int | None, int | None]:
    """Find what `--decoder-first-pipeline-num-layers` and its sibling are, if anything.

    Raises PartitionError for other cuts.
    """
    middle = stages[1:-1]
    if len(set(middle)) > 1:
        raise PartitionError(
            f"{TITLE} gives all stages the same number of layers, except the first and the last: --stages "
            f"{','.join(map(str, stages))} differ in the middle"
        )
    if len(set(stages)) == 1:
        return None, None
    if len(stages) == 2:  # noqa: PLR2004 - one number says both
        return stages[0], None
    return (
        stages[0] if stages[0] != middle[0] else None,
        stages[-1] if stages[-1] != middle[0] else None,
    )


def _build_arguments(order: PackRequest, wanted: MegatronOptions, dialect: NamingScheme) -> PickleObject:
    """Build the `args` of the run that might have written this."""
    counts = dialect.numbers(megatron.LAYERS)
    several = dialect.mesh.degree("pp") > 1
    hybrid = layers.is_hybrid(order.model)
    ends = wanted.chunks == 1 and several and (wanted.older or not hybrid)
    first, last = _find_end_stages(counts) if ends else (None, None)
    more: dict[str, Value] = {
        "encoder_num_layers": order.model.layers,
        "padded_vocab_size": dialect.number(megatron.VOCABULARY),
        "make_vocab_size_divisible_by": wanted.multiple,
        LAST_ROW: wanted.last_row,
        "tokenizer_type": "HuggingFaceTokenizer",
        "virtual_pipeline_model_parallel_size": wanted.chunks if wanted.chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": counts[0] if wanted.chunks > 1 else None,
        "decoder_first_pipeline_num_layers": first,
        "decoder_last_pipeline_num_layers": last,
        "pipeline_model_parallel_layout": None,
        "mtp_num_layers": dialect.number(COUNT) or None,
        "transformer_impl": "local" if wanted.local else "transformer_engine",
        "moe_grouped_gemm": wanted.grouped,
        "moe_use_legacy_grouped_gemm": wanted.grouped and wanted.local,
        "use_legacy_models": False,
        "ckpt_format": "torch",
    }
    if hybrid:
        more |= format_patterns(order.model, counts, dialect.number(COUNT))
        more |= {"moe_grouped_gemm": True, "num_layers_per_virtual_pipeline_stage": None}
    return build_arguments(order, dialect.mesh, order.dtypes[layers.get_embedding_name(order.model)], more)


class _ArrayNamer:
    """The name that a layer which loads the files has for each array."""

    def __init__(self, order: PackRequest, wanted: MegatronOptions) -> None:
        self._wanted = wanted
        self._latent = any(name.endswith("kv_b_proj.weight") for name in order.model.tensors)
        self._hybrid = layers.is_hybrid(order.model)

    def __call__(self, arrays: Sequence[ComposedArray]) -> Iterator[tuple[str, str, ComposedArray]]:
        """Yield the chunk's key, the name and the array of each."""
        layers: dict[str, list[str]] = {}
        for array in arrays:
            layers.setdefault(find_layer(array.name), []).append(array.name)
        projections = {layer: find_projection(names) for layer, names in layers.items()}
        routed = {find_layer(array.name) for array in arrays if ".mlp.router.weight" in array.name}
        for array in arrays:
            chunk, _, name = array.name.rpartition("/")
            layer = find_layer(array.name)
            if not self._wanted.local:
                name = find_engine_name(
                    name,
                    experts=layer in routed,
                    latent=self._latent,
                    grouped=self._wanted.grouped or self._hybrid,
                    projection=projections[layer],
                )
            if not self._wanted.older:
                name = find_newer_name(name)
            if self._hybrid and self._wanted.newest:
                name = find_newest_name(name)
            yield chunk or "model", name, array


def _build_file(
    archive: RankArchive,
    rank: int,
    arrays: Sequence[NamedArray],
    common: Mapping[str, Value],
    wanted: MegatronOptions,
    writer: RankStateWriter | None,
    stored: list[tuple[str, Chunk]],
) -> CheckpointFile:
    """Build the file of a rank's weights; what it holds of each tensor is added to `stored`."""
    from shardctl.libraries.megatron.rank_archive import StoragePart  # of these files alone

    models: dict[str, dict[str, Value]] = {}
    for chunk, name, array in arrays:
        model = models.setdefault(chunk, {})
        is_copy = writer is not None and not name.endswith(BUFFERS) and writer.has_masters(array)
        number = archive.add(array.nbytes, [StoragePart(array, name=name, aside=is_copy)])
        model[name] = build_tensor_value(array.dtype, array.box.shape, number)
        linear = _LINEAR_PARAMETER_PATTERN.fullmatch(name) if wanted.local else None
        if linear is not None:
            extra = f"{linear[1] or ''}{linear[2]}.{EXTRA_STATE}"
            model.pop(extra, None)  # it stands behind a bias
            model[extra] = None
    if wanted.local:
        for model in models.values():
            if "decoder.final_layernorm.weight" in model:
                model.setdefault(f"output_layer.{EXTRA_STATE}", None)
    value: dict[str, Value] = {**common, **models}
    if writer is not None:
        value["optimizer"] = writer.add_replicated(archive, rank) if wanted.replicated else writer.build_settings()
    return archive.finish({**value, "num_floating_point_operations_so_far": 0}, stored)


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
    return f"{dialect.text(_RANKS_FOLDER_KEY, FOLDER)}{dialect.ranks.get(rank, '?/')}"


LAYOUT: Final = Layout(
    NAME,
    pack_megatron,
    ranks="library",
    options=frozenset({OPTION}),
    states="on request",
    own_settings=True,
    trainer="Megatron-LM",
    prefix=_format_file_prefix,
)
