"""Describes a model by its config: every tensor's name, shape and placement, and what stored names mean."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.models.derived.derivation import RuleDerivation
    from shardctl.models.quantization.encoding import WeightEncoding
    from shardctl.models.tables.family import Row
    from shardctl.models.tables.fusion import TensorFusion
    from shardctl.tensors.placement import PartitionSpec


@value_class
class ModelTensor:
    """A tensor that the model has or may have."""

    name: str
    """The canonical name: that of the class's state dict, the first name of a tie."""
    shape: tuple[int, ...]
    """The global shape in elements."""
    dtype: DType
    """The declared element type; a checkpoint may store another."""
    spec: PartitionSpec
    """How it is cut, and on which stages it lives."""
    row: Row
    """Where this comes from: the row of the family's table, or the rule of a file."""
    ties: tuple[str, ...] = ()
    """The other names of a tied weight."""
    optional: bool = False
    """Not in the class's state dict, but known: a buffer, or the head of another class."""
    spare: bool = False
    """In the class's state dict, but a checkpoint may lack it (a pooler)."""
    free: tuple[int, ...] = ()
    """Dims whose extent the config does not determine; the stored extent is taken."""


@value_class
class Model:
    """What a checkpoint of this class contains: every tensor's name, shape and placement, and its other names.

    Made by `describe_model`, which raises UnsupportedError for a config that no table, rule file or library knows.

    >>> from shardctl.models.describe import describe_model
    >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 32, "num_attention_heads": 2}
    >>> model = describe_model({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, **sizes})
    >>> model.layers, model.tensors["model.layers.1.mlp.up_proj.weight"].shape
    (2, (16, 8))
    """

    family: str
    """The family's name, or empty for a model that only a rule file describes."""
    architecture: str
    """The transformers class, such as `LlamaForCausalLM`, or empty."""
    layers: int
    """Pipeline layers; for an encoder-decoder first those of the encoder, then those of the decoder."""
    tensors: Mapping[str, ModelTensor]
    """By canonical name, in model order; optional ones included."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied weights, and the canonical name of each."""
    prefix: str = ""
    """The base model's prefix in this class."""
    prefixes: tuple[str, ...] = ()
    """Base-model prefixes that stored names may have, or lack."""
    legacy: Mapping[str, str] = field(default_factory=dict)
    """Older spellings of runs of whole name parts; see `Family.legacy`."""
    fusions: Mapping[str, TensorFusion] = field(default_factory=dict)
    """The arrays, by name, that transformers' state dict has in place of some tensors."""
    warnings: tuple[str, ...] = ()
    """What is odd in the description, such as a rule that matches nothing."""
    counted: str = ""
    """The layers that were counted by names alone, where rules say nothing of them."""
    text: Mapping[str, object] | None = None
    """The config of the text model inside, of a model that is known by the table of that."""
    transposed: bool = False
    """Whether linear weights are stored as `[in, out]`."""
    plain: Model | None = None
    """The model as it would be without quantization; None if that makes no difference."""
    encodings: Mapping[str, WeightEncoding] = field(default_factory=dict)
    """How each quantized weight is stored, by its name."""
    derivation: RuleDerivation | None = None
    """How the cuts were derived, where no table says them."""

    @property
    def tabled(self) -> bool:
        """Whether a family's table knows it, or at least its text half; else only names, or rules that a user gave."""
        return bool(self.family or self.text)

    def own(self) -> Iterator[ModelTensor]:
        """Yield the tensors of the class's state dict: all but the optional ones."""
        return (t for t in self.tensors.values() if not t.optional)

    def state(self) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes of the state dict of transformers' class, in its order; ties by every name."""
        inside = {name: fusion for fusion in self.fusions.values() if not fusion.stored for name in fusion.tensors}
        found: dict[str, tuple[int, ...]] = {}
        for tensor in self.own():
            fusion = inside.get(tensor.name)
            if fusion is not None:
                found[fusion.name] = fusion.shape
            else:
                found |= dict.fromkeys((tensor.name, *tensor.ties), tensor.shape)
        return found

    @property
    def parameters(self) -> int:
        """Elements of the class's own tensors, ties counted once."""
        return sum(_count_elements(t.shape) for t in self.own())


def _count_elements(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
