"""The options that several verbs share, each defined once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardctl.cli.sizes import parse_size
from shardctl.errors import UsageError
from shardctl.mesh import Mesh

if TYPE_CHECKING:
    from shardctl.verbs.drafting import Wish
    from shardctl.verbs.opening import Reading


def place(text: str) -> str:
    """An empty path is what an unset shell variable gives, and must not become the working directory."""
    if not text:
        raise UsageError("a path is empty", hint="is a shell variable not set?")
    return text


def written_file(text: str) -> Path:
    """The file that a plan or a report is written to; an address must not become a directory of that name."""
    from shardctl.storage.places import check_written_file

    check_written_file(place(text))
    return Path(text)


_MESH = "Mesh"
_READING = "How the source is understood"
_WRITING = "What is written"
_EFFORT = "Effort"

_PLACES = "A path; owner/name or owner/name@revision on the Hub; or s3://, gs://, az://."
_WHERE = "A directory that is new, empty or ours; or s3://, gs://, az://."
Source = Annotated[str, typer.Argument(metavar="SRC", parser=place, show_default=False, help=_PLACES)]
Destination = Annotated[str | None, typer.Argument(metavar="DST", parser=place, show_default=False, help=_WHERE)]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON document instead of text.")]

Config = Annotated[
    Path | None,
    typer.Option(metavar="PATH", rich_help_panel=_READING, help="The model's config.json, or its directory."),
]
Rules = Annotated[
    Path | None,
    typer.Option(metavar="FILE", rich_help_panel=_READING, help="A rule file: how tensors are named and cut."),
]
RulesFrom = Annotated[
    Literal["transformers"] | None,
    typer.Option(
        metavar="transformers", rich_help_panel=_READING, help="Borrow rules for a model that shardctl does not know."
    ),
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="FORMAT", rich_help_panel=_READING, help="The format, instead of detecting it."),
]
Weights = Annotated[
    Literal["module", "master"] | None,
    typer.Option(
        show_default=False,
        rich_help_panel=_READING,
        help="Of a training checkpoint: the module's own copy, or the optimizer's in fp32. Default: master.",
    ),
]
TrueVocab = Annotated[
    int | None,
    typer.Option(
        "--true-vocab",
        metavar="N",
        min=1,
        show_default=False,
        rich_help_panel=_READING,
        help="Tokens of a vocabulary that the files only tell to be padded, as Megatron-LM's do.",
    ),
]
PreferIndex = Annotated[
    bool,
    typer.Option(
        "--prefer-index",
        metavar="",
        rich_help_panel=_READING,
        help="Where two files hold a tensor with different values, take the one that the index names.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", metavar="", rich_help_panel=_READING, help="Every warning is an error.")
]
KvHeads = Annotated[
    Literal["error", "replicate"],
    typer.Option(rich_help_panel=_READING, help="What to do when tp exceeds the key/value heads."),
]


def _degree(axis: str, text: str) -> Any:  # noqa: ANN401 - typer's own type
    return typer.Option(f"--{axis}", metavar="N", min=1, show_default=False, rich_help_panel=_MESH, help=text)


Tp = Annotated[int | None, _degree("tp", "Tensor parallel ranks.")]
Pp = Annotated[int | None, _degree("pp", "Pipeline stages.")]
Dp = Annotated[int | None, _degree("dp", "Data parallel replicas.")]
Fsdp = Annotated[int | None, _degree("fsdp", "Ranks that share each tensor's first dim.")]
Cp = Annotated[int | None, _degree("cp", "Context parallel ranks.")]
Ep = Annotated[int | None, _degree("ep", "Expert parallel ranks, of those of a stage.")]
Etp = Annotated[int | None, _degree("etp", "Tensor parallel ranks within an expert.")]
MeshText = Annotated[
    str | None,
    typer.Option("--mesh", metavar="AXES", rich_help_panel=_MESH, help="All of it: pp=2,fsdp=2,tp=4, outermost first."),
]
Stages = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", rich_help_panel=_MESH, help="Layers per stage. Default: balanced by bytes."),
]

To = Annotated[
    str | None,
    typer.Option(
        metavar="LAYOUT",
        rich_help_panel=_WRITING,
        help="hf, ranks, dcp, universal, meta, trtllm, deepseek, megatron, torch_dist or vllm. "
        "Default: ranks for a mesh.",
    ),
]
Names = Annotated[
    Literal["transformers", "keep"],
    typer.Option(rich_help_panel=_WRITING, help="Names in rank files: canonical, or the source's own."),
]
Experts = Annotated[
    Literal["keep", "fused", "split"],
    typer.Option(rich_help_panel=_WRITING, help="Experts of a layer in one array, or each in its own."),
]
MaxShardSize = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE", parser=parse_size, rich_help_panel=_WRITING, help="Tensor bytes per file. Default: 5GB for hf."
    ),
]
VllmProfile = Annotated[
    Literal["0.25", "0.11"] | None,
    typer.Option(show_default=False, rich_help_panel=_WRITING, help="Whose names --to vllm writes. Default: 0.25."),
]
TrtllmEmbedding = Annotated[
    Literal["whole", "vocabulary", "hidden"] | None,
    typer.Option(
        show_default=False,
        rich_help_panel=_WRITING,
        help="Whether and along which dim --to trtllm cuts the embedding. Default: whole.",
    ),
]
Megatron = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        rich_help_panel=_WRITING,
        help="What --to megatron is for, such as layers=local,virtual=2,experts=grouped.",
    ),
]
Dtype = Annotated[
    Literal["keep", "bf16", "fp16", "fp32"],
    typer.Option(rich_help_panel=_WRITING, help="Cast floating-point tensors."),
]
KeepFp32 = Annotated[
    str | None,
    typer.Option("--keep-fp32", metavar="REGEX", rich_help_panel=_WRITING, help="Tensors that stay in fp32."),
]
Include = Annotated[
    str | None, typer.Option(metavar="REGEX", rich_help_panel=_WRITING, help="Only tensors whose name matches.")
]
Exclude = Annotated[
    str | None, typer.Option(metavar="REGEX", rich_help_panel=_WRITING, help="No tensors whose name matches.")
]
OptimizerStates = Annotated[
    Literal["keep", "drop"] | None,
    typer.Option(
        show_default=False,
        rich_help_panel=_WRITING,
        help="What a training checkpoint has beside weights. Default: drop for hf and ranks.",
    ),
]

Memory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE", parser=parse_size, rich_help_panel=_EFFORT, help="Host memory to use at most. Default: 1GiB."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, rich_help_panel=_EFFORT, help="Default: cores and one more, up to eight."),
]


def reading(
    config: Path | None,
    rules: Path | None,
    container: str | None = None,
    *,
    strict: bool = False,
    kv_heads: Literal["error", "replicate"] = "error",
    rules_from: Literal["transformers"] | None = None,
    weights: Literal["module", "master"] | None = None,
    true_vocab: int | None = None,
    prefer_index: bool = False,
) -> "Reading":
    """How a source is to be understood."""
    from shardctl.verbs.opening import Reading

    return Reading(
        config=config,
        rules=rules,
        rules_from=rules_from,
        container=container,
        kv_heads=kv_heads,
        weights=weights,
        true_vocab=true_vocab,
        prefer_index=prefer_index,
        strict=strict,
    )


def mesh(text: str | None, **degrees: int | None) -> Mesh | None:
    """The mesh that was asked for, if one was."""
    given = {axis: degree for axis, degree in degrees.items() if degree is not None}
    if text is None:
        return Mesh.of(**given) if given else None
    if given:
        raise UsageError(
            f"--mesh and --{next(iter(given))} are both given", hint="write every axis in --mesh, or leave it out"
        )
    return Mesh.parse(text)


def wish(**fields: Any) -> "Wish":  # noqa: ANN401 - the fields of Wish, checked by it
    """What to make of a checkpoint; options that were not given keep the defaults of `Wish`."""
    from shardctl.verbs.drafting import Wish

    return Wish(**{name: value for name, value in fields.items() if value is not None})
