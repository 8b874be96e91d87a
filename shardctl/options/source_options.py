"""Declares how a source is understood: the options that all verbs share."""

from pathlib import Path
from typing import Annotated, Literal

from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess
from shardctl.options.known_words import list_format_names


@settings_class
class SourceOptions:
    """How a source is understood."""

    config: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.SOURCE,
            "The model's config.json, its directory, or owner/name on the Hub.",
            brief="config.json, its directory, or owner/name",
            metavar="PATH",
            access=PathAccess.READ,
        ),
    ] = None
    """Needed where the checkpoint has none."""
    rules: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.SOURCE,
            "A rule file, which says how tensors are named and cut.",
            brief="Rule file: how tensors are named and cut",
            metavar="FILE",
            access=PathAccess.READ,
        ),
    ] = None
    rules_from: Annotated[
        Literal["transformers", "names", "none"] | None,
        CommandOption(
            HelpPanel.SOURCE,
            "Where the rules for a model without a table come from. Default: derived from transformers' plan, "
            "names and shapes.",
        ),
    ] = None
    """`transformers` takes its plan alone, `names` asks no library, and `none` derives nothing."""
    container: Annotated[
        str | None,
        CommandOption(
            HelpPanel.SOURCE,
            "{formats}. Default: detected.",
            brief="Format of the source",
            flag="--from",
            metavar="FORMAT",
            words=list_format_names,
        ),
    ] = None
    weights: Annotated[
        Literal["module", "master"] | None,
        CommandOption(
            HelpPanel.SOURCE,
            "Which weights of a training checkpoint: the module's, or the optimizer's fp32 master copy. "
            "Default: master.",
        ),
    ] = None
    true_vocab: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SOURCE,
            "Vocabulary size without padding, for files that do not say it, such as Megatron-LM's, or have more rows.",
            metavar="N",
            least=1,
        ),
    ] = None
    keep_padding: Annotated[
        bool,
        CommandOption(
            HelpPanel.SOURCE,
            "Keep the rows that Megatron-LM padded the vocabulary with, and raise vocab_size, instead of leaving them "
            "out.",
        ),
    ] = False
    source_etp: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SOURCE,
            "Number of tensor-parallel ranks within each expert of the source, for Megatron-LM's directories that do "
            "not say it.",
            metavar="N",
            least=1,
        ),
    ] = None
    kv_heads: Annotated[
        Literal["error", "replicate"] | None,
        CommandOption(
            HelpPanel.SOURCE,
            "What to do if there are more tp ranks than key/value heads. Default: replicate for serving, else error.",
        ),
    ] = None
    """`replicate` keeps each key/value head on several ranks; None leaves it to the verb and the layout."""
    prefer_index: Annotated[
        bool,
        CommandOption(
            HelpPanel.SOURCE,
            "If two files hold different values for a tensor, take those in the file that the index names.",
        ),
    ] = False
    subtree: Annotated[
        str | None,
        CommandOption(
            HelpPanel.SOURCE,
            "Read only the tensors below this prefix, for files with more than one model, such as an EMA or a teacher.",
            metavar="PREFIX",
        ),
    ] = None
    """`inspect` lists the prefixes below which there is a whole model."""
    complete_from: Annotated[
        str | None,
        CommandOption(
            HelpPanel.SOURCE,
            "Another checkpoint, which has what the source lacks: layers that predict, a vision model, a head, files.",
            metavar="BASE",
            access=PathAccess.READ,
        ),
    ] = None
    """A path or an address; what contradicts the source is refused."""
    apply: Annotated[
        tuple[str, ...],
        CommandOption(
            HelpPanel.SOURCE,
            "Apply this weight delta, such as weight_v000001 of SGLang, to the source; may be repeated, in order.",
            brief="Apply this weight delta to the source",
            metavar="DELTA",
            accepts=list[str],
            access=PathAccess.READ,
        ),
    ] = ()
    """The source has safetensors files. `verify --against` applies it to the base, and `diff` to the first."""
    strict: Annotated[
        bool,
        CommandOption(
            HelpPanel.SOURCE,
            "Treat every warning as an error.",
            brief="Treat every warning as an error",
            shapes_result=False,
        ),
    ] = False
    allow_unverified: Annotated[
        bool,
        CommandOption(
            HelpPanel.SOURCE,
            "Accept files that cannot be compared with the Hub's hashes, and name them.",
            shapes_result=False,
        ),
    ] = False
    unbound: bool = False
    """Whether arrays in another library's form are accepted as they are; the verb sets this, not an option."""
    unpadded: bool = False
    """Whether a padded vocabulary is fitted to the config; the verb sets this, not an option."""
    untied: bool = False
    """Whether the head is a weight of its own, whatever config.json says; the verb sets this, not an option."""
    described: bool = False
    """Whether a config without weights is enough, for verbs that read no bytes; the verb sets this, not an option."""
