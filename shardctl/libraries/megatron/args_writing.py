"""Makes the `args` of a run of Megatron-LM, which both of its formats contain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError
from shardctl.libraries.megatron.arguments import LISTS
from shardctl.libraries.megatron.family_features import TRAITS
from shardctl.libraries.megatron.layers import get_embedding_name
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.torch_save.pickle_writer import PickleName, PickleObject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.dtype import DType
    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.mesh import Mesh

TRACKER: Final = "latest_checkpointed_iteration.txt"
"""What says in which folder the files are; `FOLDER` without its slash."""
FOLDER: Final = "release/"
VERSION: Final = 3.0
"""`checkpoint_version`: of the order of rows of queries, keys and values."""
DIVISIBLE: Final = 128
"""Megatron-LM's own `--make-vocab-size-divisible-by`; times tp, what vocabularies are padded to a multiple of
(`_vocab_size_with_padding`)."""


def build_arguments(order: PackRequest, mesh: Mesh, dtype: DType, more: Mapping[str, Value]) -> PickleObject:
    """Build the namespace for a model on a mesh whose weights are of `dtype`; `more` is what one format has beside.

    Raises UnsupportedError for a model that Megatron-LM's arguments cannot say, and PartitionError for another's mesh.
    """
    from shardctl.libraries.megatron.model_arguments import convert_config_to_arguments  # only who writes needs it

    if TRAITS[order.model.family].turning and mesh.etp > 1:
        raise PartitionError(f"{TITLE} divides no experts that have biases, but etp is {mesh.etp}", hint="give --etp 1")
    said: dict[str, Value] = {
        name: list(value) if isinstance(value, tuple) and name in LISTS else value
        for name, value in convert_config_to_arguments(order.config, order.model).items()
    }
    said |= {
        "vocab_size": order.model.tensors[get_embedding_name(order.model)].shape[0],
        "seq_length": said["max_position_embeddings"],
        "tensor_model_parallel_size": mesh.degree("tp"),
        "pipeline_model_parallel_size": mesh.degree("pp"),
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": mesh.degree("cp"),
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "data_parallel_size": mesh.degree("dp") * mesh.degree("fsdp"),
        "world_size": mesh.world,
        "params_dtype": PickleName("torch", dtype.torch),
        "bf16": dtype.name == "BF16",
        "fp16": dtype.name == "F16",
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        **more,
    }
    return PickleObject(PickleName("argparse", "Namespace"), said)
