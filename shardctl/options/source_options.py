"""How a source is to be understood: the options that all verbs share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shardctl.options.declaration import CommandOption, HelpPanel


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How a source is to be understood."""

    config: Annotated[
        Path | None,
        CommandOption(HelpPanel.SOURCE, "The model's config.json, or its directory.", metavar="PATH"),
    ] = None
    """Needed where the checkpoint has none."""
    rules: Annotated[
        Path | None,
        CommandOption(HelpPanel.SOURCE, "A rule file: how tensors are named and cut.", metavar="FILE"),
    ] = None
    rules_from: Annotated[
        Literal["transformers"] | None,
        CommandOption(
            HelpPanel.SOURCE, "Borrow rules for a model that shardctl does not know.", metavar="transformers"
        ),
    ] = None
    container: Annotated[
        str | None,
        CommandOption(HelpPanel.SOURCE, "The format, instead of detecting it.", flag="--from", metavar="FORMAT"),
    ] = None
    weights: Annotated[
        Literal["module", "master"] | None,
        CommandOption(
            HelpPanel.SOURCE,
            "Of a training checkpoint: the module's own copy, or the optimizer's in fp32. Default: master.",
        ),
    ] = None
    true_vocab: Annotated[
        int | None,
        CommandOption(
            HelpPanel.SOURCE,
            "Tokens of a vocabulary that the files only tell to be padded, as Megatron-LM's do.",
            metavar="N",
            least=1,
        ),
    ] = None
    kv_heads: Annotated[
        Literal["error", "replicate"],
        CommandOption(HelpPanel.SOURCE, "What to do when tp exceeds the key/value heads."),
    ] = "error"
    """`replicate` keeps each key/value head on several ranks."""
    prefer_index: Annotated[
        bool,
        CommandOption(
            HelpPanel.SOURCE,
            "Where two files hold a tensor with different values, take the one that the index names.",
        ),
    ] = False
    strict: Annotated[bool, CommandOption(HelpPanel.SOURCE, "Every warning is an error.", shapes_result=False)] = False
    allow_unverified: Annotated[
        bool,
        CommandOption(
            HelpPanel.SOURCE,
            "Take bytes that cannot be compared with the Hub's hashes, and say of which files.",
            shapes_result=False,
        ),
    ] = False
    unbound: bool = False
    """Whether arrays of another library's making will do as they are; no option, the verb says so."""
    described: bool = False
    """Whether a config without weights will do, for verbs that need no bytes; no option, the verb says so."""
