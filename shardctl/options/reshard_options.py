"""What to make of a checkpoint: the options that `plan`, `reshard` and the plan file share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardctl.mesh import Mesh
from shardctl.options.declaration import CommandOption, HelpPanel, OptionGroup
from shardctl.options.mesh_flags import MeshFlags
from shardctl.options.sizes import parse_size

Threads = Annotated[
    int | None,
    CommandOption(
        HelpPanel.EFFORT,
        "Default: cores and one more, up to eight.",
        metavar="N",
        least=1,
        shapes_result=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """What to make of a checkpoint."""

    mesh: Annotated[Mesh | None, OptionGroup(MeshFlags)] = None
    stages: Annotated[
        str | None,
        CommandOption(HelpPanel.MESH, "Layers per stage. Default: balanced by bytes.", metavar="N,N,..."),
    ] = None
    to: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "hf, ranks, dcp, universal, meta, trtllm, deepseek, megatron, torch_dist or vllm. "
            "Default: ranks for a mesh.",
            metavar="LAYOUT",
        ),
    ] = None
    """The layout; by default `ranks` for a mesh and `hf` for one device."""
    names: Annotated[
        Literal["transformers", "keep"],
        CommandOption(HelpPanel.WRITING, "Names in rank files: canonical, or the source's own."),
    ] = "transformers"
    experts: Annotated[
        Literal["keep", "fused", "split"],
        CommandOption(HelpPanel.WRITING, "Experts of a layer in one array, or each in its own."),
    ] = "keep"
    """The form of experts: `fused` as transformers 5 holds them, `split` each with names of its own, or as they are."""
    max_shard_size: Annotated[
        int | None,
        CommandOption(
            HelpPanel.WRITING, "Tensor bytes per file. Default: 5GB for hf.", metavar="SIZE", parser=parse_size
        ),
    ] = None
    vllm_profile: Annotated[
        Literal["0.25", "0.11"] | None,
        CommandOption(HelpPanel.WRITING, "Whose names --to vllm writes. Default: 0.25."),
    ] = None
    """Which version of vLLM the files are for."""
    trtllm_embedding: Annotated[
        Literal["whole", "vocabulary", "hidden"] | None,
        CommandOption(HelpPanel.WRITING, "Whether and along which dim --to trtllm cuts the embedding. Default: whole."),
    ] = None
    megatron: Annotated[
        str | None,
        CommandOption(
            HelpPanel.WRITING,
            "What --to megatron is for, such as layers=local,virtual=2,experts=grouped.",
            metavar="TEXT",
        ),
    ] = None
    """Which of Megatron-LM layers the files are for and how it runs them, as `MegatronOptions` reads it."""
    dtype: Annotated[
        Literal["keep", "bf16", "fp16", "fp32"],
        CommandOption(HelpPanel.WRITING, "Cast floating-point tensors."),
    ] = "keep"
    keep_fp32: Annotated[
        str | None, CommandOption(HelpPanel.WRITING, "Tensors that stay in fp32.", metavar="REGEX")
    ] = None
    """Tensors whose name matches this regular expression are not cast."""
    include: Annotated[
        str | None, CommandOption(HelpPanel.WRITING, "Only tensors whose name matches.", metavar="REGEX")
    ] = None
    exclude: Annotated[
        str | None, CommandOption(HelpPanel.WRITING, "No tensors whose name matches.", metavar="REGEX")
    ] = None
    allow_expansion: Annotated[
        bool,
        CommandOption(
            HelpPanel.WRITING,
            "Write tensors that take more than four times the bytes of the source.",
            shapes_result=False,
        ),
    ] = False
    """Many names of one storage, or strides that repeat elements, turn a small file into a full disk."""
    optimizer_states: Annotated[
        Literal["keep", "drop"] | None,
        CommandOption(
            HelpPanel.WRITING, "What a training checkpoint has beside weights. Default: drop for hf and ranks."
        ),
    ] = None
    """Whether the optimizer's states travel along; by default they do into layouts that trainers read."""
    host_memory: Annotated[
        int,
        CommandOption(
            HelpPanel.EFFORT,
            "Host memory to use at most. Default: 1GiB.",
            flag="--memory",
            metavar="SIZE",
            parser=parse_size,
            key="memory",
            shapes_result=False,
        ),
    ] = 1 << 30
    """Bytes of anonymous memory of this machine; what devices need is for `plan` to estimate."""
    threads: Threads = None
