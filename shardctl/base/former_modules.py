"""Finds modules under their former names, with a warning; the former names go with the next release.

>>> find_present_name("shardctl.errors"), find_present_name("shardctl.execute.engine")
('shardctl.base.errors', 'shardctl.conversion.engine.engine')
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

_PACKAGE_PREFIX: Final = "shardctl."
_MOVED_MODULES_BY_FOLDERS: Final = {
    ("", "base"): ("amounts dtype errors extras garbage_collection huge_pages settings value version workers"),
    ("", "tensors"): (
        "affine bands box cast copyplan digest manifest mesh pieces placement record shares small_tensors "
        "tensor_groups tiles training turns views"
    ),
    ("checkpoint", "checkpoint.adapters"): (
        "adapted_base adapter_checkpoint adapter_splitting bridge_adapter expert_adapters listed_modules "
        "merge_comparison merge_targets merging"
    ),
    ("checkpoint", "checkpoint.quantization"): ("decoding_stored exact_experts spared_modules unexplained_codes"),
    ("estimate", "estimate.model"): ("allowed_degrees heaviest inventory narrower_types operations sizes"),
    ("estimate", "estimate.search"): ("advice cost forecast"),
    ("estimate", "estimate.serving"): ("engine_budget kv_cache paged_groups"),
    ("estimate", "estimate.training"): (
        "activations calibrate communication comparison compiled_layers fused_gradients layer_flags offload "
        "optimizers preconditioner_blocks profiles recomputed_modules recurrent schedule scheme selective "
        "states timeline trained_weights transients unit_transients"
    ),
    ("estimate", "hardware"): ("device_spec devices"),
    ("models", "estimate.model"): ("layer_weights"),
    ("models", "models.names"): (
        "autoep_names automodel_names binding extra_names flat_parameters hub maxtext_names meta_names naming "
        "torchtitan_names torchtitan_tables trained trainer_arrays trainer_names trainer_tables wrapping"
    ),
    ("models", "models.rules"): (
        "fused_orders renaming rule_cuts rule_file rule_table transformers_plan transformers_rules untabled"
    ),
    ("models", "models.submodels"): ("inner_adapters inner_kinds multimodal nesting towers"),
    ("models", "models.tables"): (
        "config decoder dims experts family fusion hyper_connections latent_attention layer_names model "
        "name_pattern predicting rope stacked_experts table text_config windows"
    ),
    ("verify", "running"): ("device engines forward load loaded process_traces processes worker_process"),
    ("verify.forward", "verify"): ("tolerance"),
}
"""By the former and the present folder, the modules and packages that kept their names."""
_RENAMED_MODULES: Final = {
    "base.notebook": "base.result_view",
    "checkpoint.dequantising": "checkpoint.quantization.dequantizing",
    "checkpoint.quantised_modules": "checkpoint.quantization.quantized_modules",
    "checkpoint.quantising": "checkpoint.quantization.quantizing",
    "conversion.bucket_crew": "conversion.bucket_worker_group",
    "conversion.carried_files": "conversion.written_auxiliary_files",
    "dialect": "tensors.naming_scheme",
    "estimate.holding": "estimate.model.rank_shards",
    "estimate.kept_tensors": "estimate.training.saved_activations",
    "estimate.step_place": "estimate.training.step_phase",
    "execute": "conversion.engine",
    "execute.crew": "conversion.engine.worker_group",
    "execute.crew_files": "conversion.engine.worker_group_files",
    "libraries.megatron.family_traits": "libraries.megatron.family_features",
    "loading": "running",
    "models.anatomy": "estimate.model.layer_graph",
    "models.dequantisation": "models.dequantization",
    "models.derived.circuits": "models.derived.module_groups",
    "models.drafters": "models.submodels.draft_models",
    "models.halves": "models.submodels.part_models",
    "models.layer_traits": "models.tables.layer_features",
    "models.quantisation": "models.quantization",
    "models.quantisation.quantiser": "models.quantization.quantizer",
    "notebook": "base.result_view",
    "options.talk_options": "options.logging_options",
    "report.notebook_views": "report.result_views",
    "verify.engines.asking": "running.engines.engine_client",
    "verify.engines.judging": "running.engines.score_check",
    "verify.engines.result": "verify.engine_result",
    "verify.forward.leaves": "running.forward.streamed_modules",
    "verify.forward.lens": "running.forward.lazy_state_dict",
    "verify.forward.meeting": "running.forward.rendezvous",
    "verify.forward.result": "verify.forward_result",
    "verify.forward.sides": "running.forward.compared_checkpoints",
    "verify.machine_trouble": "running.machine_failure",
    "verify.side_files": "verify.auxiliary_files",
}
_MERGED_MODULES: Final = {
    "checkpoint.other_weights": "checkpoint.content_level",
    "conversion.engine.publication": "conversion.engine.staging",
    "conversion.source_sample": "conversion.worker_part",
    "libraries.deepspeed.affine_maps": "libraries.deepspeed.tensor_parallel",
    "libraries.deepspeed.experts": "libraries.deepspeed.partitions",
    "libraries.deepspeed.gpt_neox_arrays": "libraries.deepspeed.gpt_neox_ranks",
    "libraries.deepspeed.layers": "libraries.deepspeed.checkpoint",
    "libraries.gguf.block_type": "libraries.gguf.header",
    "libraries.megatron.dist_config": "libraries.megatron.dist_checkpoint",
    "libraries.megatron.dist_flattened": "libraries.megatron.dist_checkpoint",
    "libraries.megatron.expert_degree": "libraries.megatron.legacy_checkpoint",
    "libraries.megatron.replicated_states": "libraries.megatron.rank_states",
    "libraries.meta.parts": "libraries.meta.checkpoint",
    "libraries.rank_pickles.placements": "libraries.rank_pickles.parts",
    "libraries.trtllm.engine_models": "libraries.trtllm.arrays",
    "libraries.vllm.fused_qkv": "libraries.vllm.arrays",
    "libraries.vllm.linear_attention": "libraries.vllm.decoders",
    "libraries.vllm.routers": "libraries.vllm.feed_forward",
    "libraries.vllm.seeing": "libraries.vllm.arrays",
    "models.dequantization.affine_codes": "models.dequantization.weight",
    "models.dequantization.floats": "models.dequantization.weight",
    "models.derived.library_embeddings": "models.derived.deriving",
    "models.derived.stored_codes": "models.derived.deriving",
    "models.names.autoep_names": "models.names.naming",
    "models.names.trained": "models.names.naming",
    "models.quantization.bitnet": "models.quantization.methods",
    "models.quantization.metal": "models.quantization.methods",
    "models.quantization.undecoded": "models.quantization.stored_formats",
    "models.rules.renaming": "models.rules.rule_file",
    "models.submodels.inner_adapters": "models.submodels.multimodal",
    "running.forward.lockstep": "running.forward.rank_runner",
    "running.forward.second_opinion": "running.forward.check",
    "running.forward.share": "running.forward.comparison",
    "running.process_traces": "running.processes",
    "storage.descriptors": "storage.local",
    "storage.hub.headers": "storage.hub.source",
    "tensors.affine": "tensors.bands",
    "tensors.tensor_groups": "tensors.pieces",
    "verify.expert_owners": "verify.alignment",
}
"""Modules that are part of their only importer now."""
_MOVED_NAMES: Final = _RENAMED_MODULES | {
    f"{former}.{name}".removeprefix("."): f"{present}.{name}"
    for (former, present), names in _MOVED_MODULES_BY_FOLDERS.items()
    for name in names.split()
}
_CURRENT_MODULE_NAMES: Final = _MERGED_MODULES | {
    former: _MERGED_MODULES.get(present, present) for former, present in _MOVED_NAMES.items()
}


def find_present_name(name: str) -> str | None:
    """Find the name that a module has now, by the one that it had before; None if it had no other."""
    words = name.removeprefix(_PACKAGE_PREFIX).split(".")
    for count in range(len(words), 0, -1):
        found = _CURRENT_MODULE_NAMES.get(".".join(words[:count]))
        if found is not None:
            return _PACKAGE_PREFIX + ".".join((found, *words[count:]))
    return None


class FormerModuleFinder:
    """Imports a module by its present name where its former one is asked for; also loads it."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Return what imports the module under its present name; None for every other module."""
        if not fullname.startswith(_PACKAGE_PREFIX) or find_present_name(fullname) is None:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make a module, which is not used."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the present name in the place of this one."""
        former = module.__name__
        present = find_present_name(former) or former
        warnings.warn(f"{former} is called {present} now", DeprecationWarning, stacklevel=2)
        sys.modules[former] = import_module(present)
