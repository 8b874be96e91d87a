"""Describes a model layer by layer: what estimates of memory, traffic and work need besides its tensors."""

from __future__ import annotations

from dataclasses import field, replace
from math import prod
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import state_class, value_class
from shardctl.estimate.model.layer_weights import WeightPlace, list_weight_places
from shardctl.models.describe import find_family
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.dims import RowDims
from shardctl.models.tables.family import INDEX
from shardctl.models.tables.layer_features import read_style
from shardctl.models.tables.table import MOST_TENSORS
from shardctl.models.tables.windows import list_windows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.family import Family, FusedArray, ModelDims, Row
    from shardctl.models.tables.layer_features import LayerFeatures, LayerStyle, NormKind

_CROSS_ATTENTION_NAMES: Final = ("EncDecAttention", "encoder_attn", "crossattention")
"""What tables call a decoder's attention to the encoder."""
_WEIGHTS_ONLY: Final = "its weights are counted exactly; cache, activations and traffic cannot be estimated"
_CONTEXT_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "seq_length")


@value_class
class TokenCache:
    """What attention caches besides its keys and values: a vector for every so many tokens, whole on all tp ranks."""

    name: str
    """What it is, such as the keys of an indexer."""
    elements: int
    """Of one vector."""
    packed: int
    """Bytes of one vector as vLLM keeps it, whatever the cache's type is; 0 for elements of that type."""
    tokens: int = 1
    """Tokens for each vector."""
    waiting: int = 0
    """Of vectors of each token that wait until there are `tokens` of them to compress: how many are kept; else 0."""


@value_class
class LayerIndexer:
    """What scores the tokens before, of which attention sees the best (DeepSeek sparse attention)."""

    heads: int
    width: int
    """Elements of a head's query, and of the one key of all heads."""


@value_class
class LayerAttention:
    """The attention of one layer, whose keys and values grow with the tokens."""

    kind: Literal["full", "sliding", "latent", "cross"]
    """`cross` attends to a picture, and to no token of the text (Llama 3.2 Vision)."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Heads of keys and values; of latent attention as many as query heads, though it caches none of them."""
    head_dim: int
    """Elements of one query or key."""
    value_dim: int
    """Elements of one value."""
    window: int | None = None
    """Tokens that a query sees, where it sees not all (sliding and chunked attention)."""
    latent: int = 0
    """Elements that are cached of each token for all heads together: of latent attention `kv_lora_rank +
    qk_rope_head_dim`, of DeepSeek-V4 the one vector that is key and value; 0 for keys and values of heads."""
    query_rank: int = 0
    """Elements of its compressed queries; 0 where they are not compressed."""
    key_rank: int = 0
    """Elements of its compressed keys and values, without the rotary part."""
    cross: bool = False
    """Whether the layer attends to the encoder, too, with heads of the same numbers and a cache of its own."""
    gated: bool = False
    """Whether its result is multiplied by a gate (Qwen3-Next)."""
    sinks: bool = False
    """Whether each head has a score that belongs to no token (gpt-oss)."""
    shares_kv: bool = False
    """Whether keys and values are those of an earlier layer, and cached there: KV sharing (Gemma 4)."""
    chosen: int | None = None
    """The most tokens that a query attends to, of all that it sees, where an indexer of this or an earlier layer
    chooses them."""
    indexer: LayerIndexer | None = None
    """What chooses them, if this layer does."""
    compressed: int = 0
    """Tokens of which one vector is made, that queries attend to besides; 0 for none. The indexer scores those."""
    besides: tuple[TokenCache, ...] = ()
    """What it caches besides."""
    pictured: int = 0
    """Of `cross`, the vectors of a picture; 0 where the model by itself sees none."""


@value_class
class LayerScan:
    """How a layer computes its states over all tokens at once."""

    kind: Literal["selective", "normed selective", "chunked", "delta", "channel delta", "short", "stepwise"]
    """Selective scan (Mamba), the same with norms of time steps, B and C between its steps (Jamba), scan in chunks
    (Mamba 2), gated delta rule (Qwen3-Next), the same with a decay of each channel (Kimi Linear), a convolution between
    gates and nothing else (LFM2), one token after the other (RecurrentGemma)."""
    inner: int
    """Channels that the states are read into."""
    rank: int = 0
    """Of the projection to the time step of each channel, where there is one (Mamba)."""
    heads: int = 0
    """Heads with a decay of their own; 0 where every channel has its own."""
    key_heads: int = 0
    """Of linear attention, the heads of queries and of keys."""
    chunk: int = 0
    """Tokens that are computed at once, where the config says so."""
    bounded: bool = False
    """Whether the gate of its result is a sigmoid, of which training keeps the result and not the argument."""


@value_class
class LayerState:
    """The state of one layer that does not grow with the tokens (Mamba, gated delta net)."""

    channels: int
    """Channels of the convolution that tp divides."""
    grouped: int
    """Channels of the convolution that are shared by the heads of a group (Mamba 2's B and C): tp divides them into no
    more than `groups` parts, and ranks beyond hold copies."""
    groups: int
    """The groups of those; 1 where there are none."""
    window: int
    """Tokens that the convolution sees: transformers keeps as many, vLLM keeps one less."""
    recurrent: int
    """Elements per sequence of the recurrent state, which tp divides."""
    recurrent_fp32: bool
    """Whether transformers keeps the recurrent state in fp32 whatever the model's type."""
    scan: LayerScan | None = None
    """How it is computed in training, where that is known."""

    @property
    def convolution(self) -> int:
        """Elements per sequence of the convolution's window."""
        return (self.channels + self.grouped) * self.window


@value_class
class LayerExperts:
    """The routed experts of one layer, and the shared ones."""

    count: int
    chosen: int
    """Experts that each token goes to."""
    size: int
    """The intermediate size of one."""
    shared: int = 0
    """The intermediate size of those that see every token, all together; 0 for none."""
    shared_gate: bool = False
    """Whether what those make of a token is multiplied by a gate (Qwen2-MoE, Qwen3-Next)."""
    wide: bool = True
    """Whether results are weighted in fp32, because the router's weights stay fp32."""
    width: int = 0
    """Elements of a token's latent, which routed experts read and write (Nemotron 3); 0 for the hidden ones."""
    idle: int = 0
    """Of `count`, those that give a token back as it is (LongCat)."""
    groups: int = 1
    """Groups of consecutive experts, of which a token goes to `chosen_groups` only."""
    chosen_groups: int = 1
    """Node-limited routing (DeepSeek-AI 2024, DeepSeek-V3, sec. 2.1.2)."""


@value_class
class LayerTensor:
    """What training keeps of one layer besides what it keeps of others."""

    name: str
    size: str
    """What its elements are counted by, `dims` of each."""
    dims: str
    """The logical dims whose product `elements` is."""
    elements: int
    divided: bool
    """Whether tp divides them."""
    width: float | None
    """Bytes of an element; None for those of the type that computes."""
    given: tuple[str, ...]
    """What must hold of the computation."""


@value_class
class ModelLayer:
    """One pipeline layer."""

    hidden: int
    """Elements of one token between layers; the towers of CLIP differ in it."""
    attention: LayerAttention | None
    """None where there is no attention (Mamba)."""
    state: LayerState | None
    mlp: int
    """The intermediate size of the dense MLP; 0 where there is none."""
    gated: bool
    """Whether the MLP, or each expert, has a gate projection beside the up projection."""
    experts: LayerExperts | None
    norms: int
    """Norms of whole tokens, with that of cross attention."""
    head_norm: NormKind | None = None
    """The kind of the norms of queries and keys, where there are any."""
    head_norm_whole: bool = False
    """Whether those norms are of all heads of a token together (OLMo 2)."""
    encoder: bool = False
    """Whether it is an encoder's, which caches nothing and sees tokens both ways."""
    wide: bool = False
    """Whether what it adds to is fp32 whatever computes (Mamba's `residual_in_fp32`)."""
    readers: int = 0
    """Matrices that read whole tokens, of those that all tokens go through; each expert's are not counted."""
    streams: int = 1
    """The states of each token between layers, which it mixes (hyper-connections)."""
    halves: int = 1
    """How often it has its attention and its MLP, one after the other (LongCat)."""
    past: int = 0
    """Elements per sequence that a convolution beside its mixer sees again, whole on every tp rank (Qwen4-Exp)."""
    runs: int = 1
    """How often each token passes through it, with what each time keeps (ALBERT)."""
    further: tuple[LayerTensor, ...] = ()
    """What training keeps of it besides what it keeps of layers of other families."""
    weights: tuple[WeightPlace, ...] = ()
    """What its weights multiply; none where that is not known of all."""

    @property
    def mixes(self) -> bool:
        """Whether tokens see others in it."""
        return self.attention is not None or self.state is not None

    @property
    def feeds(self) -> bool:
        """Whether it has an MLP or experts."""
        return bool(self.mlp) or self.experts is not None


@value_class
class LayerGraph:
    """A transformer, or a model with layers of its kind."""

    hidden: int
    """Elements of one token after the last layer."""
    vocabulary: int
    """Outputs of the head and rows of the embedding, as the config says; 0 for a model without."""
    layers: tuple[ModelLayer, ...]
    """In pipeline order: of an encoder-decoder first those of the encoder. Of a model that sees only those of its
    text model: the vision model is on the first stage, and is no part of the pipeline."""
    tied: bool
    """Whether the head is the embedding."""
    generates: bool
    """Whether the class has a language-modelling head and a cache to generate with."""
    style: LayerStyle
    """What all layers compute besides their matrices."""
    positions: int | None
    """The most tokens that the model was made for, where the config says so."""
    source_positions: int | None = None
    """The same of the encoder, where the config says so and it differs (Whisper)."""
    predicting: int = 0
    """Multi-token prediction layers that are trained, on the last stage, each like the last layer and with a loss."""


def build_layer_graph(config: Mapping[str, object]) -> LayerGraph:
    """Build what the model that a decoded `config.json` describes is made of; of one that sees, its text model.

    It is read from the table and the facts of its family, with what tensors do not show from the config.
    Raises UnsupportedError if no family knows it, or a layer has neither attention nor a state that is known;
    SourceError if the config is not sound.
    """
    whole = ModelConfig(config)
    found = find_family(config)
    if found is None:
        what = whole.architecture() or whole.text("model_type", "")
        raise UnsupportedError(
            f"the layers of {what or 'this model'} are not known",
            hint=_WEIGHTS_ONLY,
        )
    family, architecture = found
    whole = family.complete_config(whole)
    parts = frozenset(part.removesuffix("?") for part in family.classes[architecture].parts.split())
    traits, texts = family.text(whole) if family.text is not None else (family.traits, whole)
    if traits is None:
        raise UnsupportedError(f"what the layers of {family.name} compute is not known", hint=_WEIGHTS_ONLY)
    facts = family.facts(whole)
    reader = _LayerGraphReader(family, traits, facts, parts, texts)
    layers = reader.layers()
    positions = next((texts.size(key) for key in _CONTEXT_LENGTH_KEYS if texts.values.get(key) is not None), None)
    learned = next((facts.size(name) for name in ("positions", "patches") if name in facts.dims), None)
    source = texts.size("max_source_positions") if texts.values.get("max_source_positions") is not None else None
    return LayerGraph(
        hidden=layers[-1].hidden if layers else 0,
        vocabulary=next((facts.size(name) for name in ("vocab", "text_vocab") if name in facts.dims), 0),
        layers=layers,
        tied=bool(facts.flags.get("tied", False)) and any(row.tie for row in family.rows),
        generates="lm" in parts,
        style=replace(
            read_style(traits, reader.norm, ModelConfig({**config, **texts.values})),
            unmodelled=traits.unmodelled if _is_unmodelled(traits, facts) else "",
        ),
        positions=positions or learned,
        source_positions=source,
    )


def _is_unmodelled(traits: LayerFeatures, facts: ModelDims) -> bool:
    """Return whether the model has what estimates of training do not know of."""
    return not traits.unmodelled_when or any(bool(facts.flags[word]) for word in traits.unmodelled_when)


@state_class
class _LayerGraphReader:
    """Reads one class of a family."""

    family: Family
    traits: LayerFeatures
    """Of the text model, where there are two."""
    facts: ModelDims
    parts: frozenset[str]
    """The conditions of the table that hold for the class."""
    config: ModelConfig
    """Of the text model, where there are two."""
    rows: Mapping[str, list[Row]] = field(init=False)
    """What the class has of each index's pipeline layers."""
    known: dict[tuple[object, ...], ModelLayer | None] = field(default_factory=dict)
    norm: NormKind = field(init=False)
    """The kind of the norms of whole tokens, when layers have been read."""

    def __post_init__(self) -> None:
        rows: dict[str, list[Row]] = {}
        classes = self.family.classes.values()
        every = {part.removesuffix("?") for one in classes for part in one.parts.split()}
        # Blocks of codes are the same matrices in other shapes.
        self.facts = self.facts.extend_dims(flags={**dict.fromkeys(every, False), **dict.fromkeys(self.parts, True)})
        if "mxfp4" in self.facts.flags:
            self.facts = self.facts.extend_dims(flags={"mxfp4": False})
        for row in (*self.family.rows, *self.family.weightless):
            first = next(iter(INDEX.findall(row.name)), "")
            if not first or row.optional or row.buffer or self.facts.indices[first].layer is None:
                continue
            rows.setdefault(first, []).append(row)
        self.rows = rows

    def layers(self) -> tuple[ModelLayer, ...]:
        """Return the layers that the class has a tensor of, in pipeline order."""
        found: dict[int, ModelLayer] = {}
        for index in self.rows:
            counted = self.facts.indices[index]
            if len(counted.values) > MOST_TENSORS:
                raise SourceError(f"config.json describes {len(counted.values)} layers")
            seen = self.windows(index, len(counted.values))
            for number, window in zip(counted.values, seen, strict=True):
                layer = self.layer(index, number, window)
                if layer is not None:
                    found[(counted.layer or 0) + number] = layer
        return tuple(found[n] for n in sorted(found))

    def windows(self, index: str, count: int) -> tuple[int | None, ...]:
        """Return the window of each layer of an index; only decoders of texts have any."""
        return list_windows(self.traits.window, self.config, count) if index == "layer" else (None,) * count

    def layer(self, index: str, number: int, window: int | None) -> ModelLayer | None:
        """Return a layer, or None if the class has none of its tensors; alike ones are made once."""
        kinds = tuple(number in flag for flag in self.facts.flags.values() if not isinstance(flag, bool))
        key = (index, window, *kinds)
        if key not in self.known:
            rows = [
                row
                for row in self.rows[index]
                if all(self.holds(word, number) for word in (*row.when.split(), *row.needed.split()))
            ]
            made = self.described(index, rows, window) if rows else None
            self.known[key] = made and replace(made, further=self.further(index, rows, number))
        return self.known[key]

    def further(self, index: str, rows: list[Row], number: int) -> tuple[LayerTensor, ...]:
        """Return what a layer that has `rows` keeps besides."""
        named = RowDims(self.facts, index, rows)
        found = []
        for one in self.traits.further:
            if not all(self.holds(word, number) for word in one.when.split()):
                continue
            words = one.dims.split()
            divided = any(named.is_divided(word) for word in words)
            elements = prod(named.size(word) for word in words)
            found.append(LayerTensor(one.name, one.size, "_".join(words), elements, divided, one.width, one.given))
        return tuple(found)

    def holds(self, word: str, number: int) -> bool:
        """Return whether a condition of the table holds for a layer."""
        flag = self.facts.flags[word.removeprefix("!")]
        return (flag if isinstance(flag, bool) else number in flag) != word.startswith("!")

    def described(self, index: str, rows: list[Row], window: int | None) -> ModelLayer:
        """Return the layer that has `rows`."""
        named = RowDims(self.facts, index, rows)
        if any(self.count_copies(row) > 1 for row in rows if row.dims.split() == ["q", "hidden"]):
            raise UnsupportedError(f"{self.family.name} has several blocks in a layer", hint=_WEIGHTS_ONLY)
        attention = self.attention(named, rows, window)
        state = _find_state(named, _find_scan(named))
        if attention is None and state is None and not self.traits.alone:
            raise UnsupportedError(f"what the layers of {self.family.name} do besides their MLP is not known")
        experts = None
        if named.has("effn"):
            config = self.config.alias_keys({"experts_per_token": "num_experts_per_tok"})
            shared = named.size("sffn") if named.has("sffn") else 0
            if self.traits.experts_per_token is None and config.values.get("num_experts_per_tok") is None:
                raise UnsupportedError("config.json does not say how many experts a token goes to", hint=_WEIGHTS_ONLY)
            chosen = _read_chosen_experts(config, self.traits.experts_per_token)
            gated = any("shared_expert_gate" in row.name for row in rows)
            wide = not self.traits.narrow_experts
            width = next((named.size("routed") for row in rows if "latent" in row.when.split()), 0)
            idle = len(self.facts.indices["idle"].values) if "idle" in self.facts.indices else 0
            groups = _read_expert_groups(config)
            counts = (named.size("experts"), chosen, named.size("effn"))
            experts = LayerExperts(*counts, shared, gated, wide, width, idle, *groups)
        widths = ("ffn", "dffn", *(() if experts else ("sffn",)), *(n for n in self.facts.dims if n.startswith("ffn_")))
        mlp = next((n for n in widths if named.has(n)), "")
        widest = mlp or ("effn" if experts else "")
        norms = [row for row in rows if _is_norm(row)]
        states = {named.known("hidden"), named.known("streams"), named.known("both")}
        whole = [row for row in norms if row.dims.split()[-1] in states]
        self.norm = self.norm_kind(whole, rows)
        # A recurrent mixer beside attention has a norm of its own; so have BitNet's attention and MLP.
        inside = {named.known("inner"), named.known("all_heads"), named.known("all_ffn")}
        heads = attention is not None and not attention.latent
        within = [row for row in norms if row not in whole and row.dims not in inside] if heads else []
        return ModelLayer(
            hidden=named.size("hidden"),
            attention=attention,
            state=state,
            past=named.size("streams") * named.size("padding") if named.has("ngram_window") else 0,
            mlp=named.size(mlp) if mlp else 0,
            gated=bool(widest) and named.count_matrices(widest) == _WITH_GATE,
            experts=experts,
            norms=sum(self.count_copies(row) for row in whole),
            head_norm=self.norm_kind(within, rows) if within else None,
            head_norm_whole=any(row.dims in {"q", "kv", "all_q", "all_kv", "q_norm", "kv_norm"} for row in within),
            # Towers and encoders by themselves have no class that generates.
            encoder=index == "encoder" or not any("lm" in one.parts.split() for one in self.family.classes.values()),
            wide=self.config.read_flag(self.traits.fp32_sums[0], default=self.traits.fp32_sums[1]),
            readers=_count_readers(named, rows, self.family.fused)
            - bool(attention) * (1 + attention.cross if attention else 0)
            - bool(mlp or named.has("sffn")),
            streams=_count_streams(named),
            runs=self.facts.size("runs") if "runs" in self.facts.dims else 1,
            halves=max(self.count_copies(row) for row in rows if ".self_attn." in row.name) if named.has("qs") else 1,
            weights=list_weight_places(named, rows, norms) if state is None and not _attends_twice(attention) else (),
        )

    def count_copies(self, row: Row) -> int:
        """Count the tensors that a row has in one layer, of those that are no experts'."""
        inner = (self.facts.indices[name] for name in INDEX.findall(row.name)[1:])
        return prod(len(index.values) for index in inner if not index.axis)

    def norm_kind(self, norms: list[Row], rows: list[Row]) -> NormKind:
        """Return the kind of some norms of a layer, which its rows say if there are biases."""
        names = {row.name for row in rows}
        if any(row.name.removesuffix("weight") + "bias" in names for row in norms):
            return "layer"
        kind = self.traits.norm
        if kind is None:
            raise UnsupportedError(f"the kind of norms of {self.family.name} is not known", hint=_WEIGHTS_ONLY)
        return "bare32" if kind != "layer" and all(row in self.family.weightless for row in norms) else kind

    def attention(self, named: RowDims, rows: list[Row], window: int | None) -> LayerAttention | None:
        """Return the attention, if any of `rows` is a projection to queries."""
        if named.has("qs"):
            head, value = named.unit("qs"), named.unit("vs")
            heads = named.size("qs") // head
            ranks = named.size("q_rank") if named.has("q_rank") else 0, named.size("kv_rank")
            width = ranks[1] + (named.size("rope") if named.has("rope") else 0)
            shares_kv = "own_kv" in self.facts.flags and not any(row.dims == named.known("kv_rank") for row in rows)
            sinks = _has_sinks(rows)
            latent = LayerAttention(
                "latent", heads, heads, head, value, None, width, *ranks, shares_kv=shares_kv, sinks=sinks
            )
            return _add_indexer(latent, named) if named.known("chosen") else latent
        wide = "full_" if named.has("full_q") else ""
        if not named.has(f"{wide}q"):
            return None
        if named.has("shared_kv"):
            return _build_compressed_attention(named, window)
        head = named.size(f"{wide}head") if named.known(f"{wide}head") else named.unit("q")
        width = named.size(f"{wide}q")
        keys = width
        shares_kv = "own_kv" in self.facts.flags and not named.has(f"{wide}kv")
        if named.has("window_kv"):
            keys, shares_kv = named.size("window_kv"), False
        elif shares_kv or named.has(f"{wide}kv"):
            keys = named.size(f"{wide}kv")
        elif named.has("qkv"):
            keys = (named.size("qkv") - width) // 2
        if any(".cross_attn." in row.name for row in rows):
            pictured = self.facts.size("picture") if "picture" in self.facts.dims else 0
            return LayerAttention("cross", width // head, keys // head, head, head, pictured=pictured)
        cross = any(name in row.name for row in rows for name in _CROSS_ATTENTION_NAMES)
        window = None if wide else window
        kind: Literal["full", "sliding"] = "full" if window is None else "sliding"
        gated = named.has("gated_q")
        value = named.unit("vs") if named.has("vs") else head
        found = LayerAttention(
            kind,
            width // head,
            keys // head,
            head,
            value,
            window,
            cross=cross,
            gated=gated,
            shares_kv=shares_kv,
            sinks=_has_sinks(rows),
        )
        return _add_indexer(found, named, packed=False) if named.has("index") else found


def _has_sinks(rows: list[Row]) -> bool:
    """Return whether heads have a score that belongs to no token."""
    return any("sink" in row.name for row in rows)


def _attends_twice(attention: LayerAttention | None) -> bool:
    """Return whether it attends to what is no part of the tokens."""
    return attention is not None and (attention.cross or attention.kind == "cross")


def _count_readers(named: RowDims, rows: list[Row], fused: tuple[FusedArray, ...]) -> int:
    """Count the matrices between whole tokens and something else for which training keeps the tokens.

    Those of single experts are not counted, nor an indexer's, of which only the choice of tokens goes on; what an array
    of `fused` joins is one.
    """
    found = {
        row.name
        for row in rows
        if len(row.dims.split()) == _MATRIX_NDIM
        and named.known("hidden") in row.dims.split()
        and "effn" not in row.dims
        and "index" not in row.dims
    }
    joined = [found.intersection(array.parts) for array in fused if not array.stored]
    return len(found) - sum(len(parts) - 1 for parts in joined if parts)


def _count_streams(named: RowDims) -> int:
    if named.has("streams"):
        return named.size("streams") // named.size("hidden")
    return named.size("copies") if named.has("copies") else 1


def _read_expert_groups(config: ModelConfig) -> tuple[int, int]:
    """Read how many groups of experts there are, and of how many a token may choose; one of one if routing is free."""
    groups, chosen = config.values.get("n_group"), config.values.get("topk_group")
    limited = isinstance(groups, int) and isinstance(chosen, int) and 0 < chosen < groups
    if not limited or config.values.get("topk_method") == "greedy":  # DeepSeek-V2's other choice
        return 1, 1
    return config.size("n_group"), config.size("topk_group")


def _read_chosen_experts(config: ModelConfig, usual: int | None) -> int:
    """Return how many experts a token goes to; a list has a number for each layer (Hunyuan), which must be the same."""
    numbers = config.values.get("num_experts_per_tok")
    if not isinstance(numbers, list):
        return config.size("num_experts_per_tok", usual)
    if any(number != numbers[0] for number in numbers):
        raise UnsupportedError("tokens go to other numbers of experts in other layers", hint=_WEIGHTS_ONLY)
    return ModelConfig({"num_experts_per_tok": next(iter(numbers), 0)}).size("num_experts_per_tok")


_INDEXER_BLOCK: Final = 128
"""Elements of an indexer's key with one fp32 scale; the elements are fp8 (vLLM, `deepseek_v2.py`, `Indexer`)."""


def _add_indexer(attention: LayerAttention, named: RowDims, *, packed: bool = True) -> LayerAttention:
    """Return `attention` to chosen tokens only, with the indexer that `named` has rows of, if any.

    `packed` says that vLLM keeps its keys in fp8.
    """
    chosen = replace(attention, chosen=named.size("chosen"))
    if not named.has("index"):
        return chosen
    width = named.size("index")
    indexer = LayerIndexer(named.size("index_heads"), width)
    cache = _build_indexer_cache(width, named.size("pool") if named.known("pool") else 1)
    return replace(chosen, indexer=indexer, besides=(cache if packed else replace(cache, packed=0),))


def _build_indexer_cache(width: int, tokens: int) -> TokenCache:
    return TokenCache("keys of the indexer", width, width + -(-width // _INDEXER_BLOCK) * 4, tokens)


def _build_compressed_attention(named: RowDims, window: int | None) -> LayerAttention:
    """DeepSeek-V4's: of each token one vector that is key and value of all heads, and one of every so many tokens.

    A compressor sums up so many tokens, and with those of the vector before where it has two sums; it keeps them and
    their weights in fp32 until then (vLLM, `compressor.py`, `CompressorStateCache`).
    """
    width = named.size("shared_kv")
    heads = named.size("q") // width
    ranks = width, named.size("q_rank")
    plain = LayerAttention("sliding", heads, heads, width, width, window, *ranks, sinks=_has_sinks(named.rows))
    two = named.has("rate")
    if not two and not named.has("dense_rate"):
        return plain
    tokens, sums = (named.size("rate"), 2) if two else (named.size("dense_rate"), 1)
    made = [("", width), *([(" of the indexer", named.size("index"))] if two else [])]
    waiting = tuple(
        TokenCache(f"{tokens} tokens that wait for the compressor{of}", 2 * n, 8 * n, tokens, sums * tokens)
        for of, n in ((of, sums * one) for of, one in made)
    )
    kept = TokenCache(f"keys and values of {tokens} tokens, compressed", width, 0, tokens)
    if not two:
        return replace(plain, compressed=tokens, besides=(kept, *waiting))
    indexer, keys = named.size("index"), _build_indexer_cache(named.size("index"), tokens)
    return replace(
        plain,
        chosen=named.size("chosen"),
        indexer=LayerIndexer(named.size("index_heads"), indexer),
        compressed=tokens,
        besides=(kept, keys, *waiting),
    )


_MATRIX_NDIM: Final = 2
"""Dims of a matrix."""
_WITH_GATE: Final = 3
"""Matrices of an MLP with a gate: the gate's, the one up and the one down."""


def _is_norm(row: Row) -> bool:
    """Return whether a row of a layer is the weight of a norm: of one dim, or called so where each head has its own."""
    words = len(row.dims.split())
    return row.name.endswith(".weight") and (words == 1 or "norm" in row.name.rpartition(".")[0].rpartition(".")[2])


def _find_scan(named: RowDims) -> LayerScan | None:
    """Find how a recurrent layer computes its states: what its rows have besides decides."""
    if named.known("state") and not named.size("state"):
        return LayerScan("short", named.size("inner"))
    if named.has("blocks"):
        return LayerScan("stepwise", named.size("inner"))
    if named.has("rank"):
        normed = any(_is_norm(row) and row.dims == named.known("rank") for row in named.rows)
        return LayerScan("normed selective" if normed else "selective", named.size("inner"), rank=named.size("rank"))
    if named.has("groups"):
        return LayerScan("chunked", named.size("inner"), heads=named.size("heads"), chunk=named.size("chunk"))
    if named.has("keys"):
        keys = named.size("keys") // named.unit("keys")
        kind: Literal["channel delta", "delta"] = (
            "channel delta" if named.has("decay_rank") or named.has("decays") else "delta"
        )
        bounded = bool(named.facts.flags.get("sigmoid_gate", False))
        heads = named.size("value_heads")
        return LayerScan(kind, named.size("values"), heads=heads, key_heads=keys, bounded=bounded)
    return None


def _find_state(named: RowDims, scan: LayerScan | None) -> LayerState | None:
    """Find the state of Mamba, Mamba 2 or a gated delta net, if the rows are those of one.

    Each has a convolution over the last tokens, and of each channel as many elements as the state is wide: in a gated
    delta net, those of a key head for each channel of the values.
    """
    if named.has("groups"):
        inner, grouped, wide = named.size("inner"), named.size("groups"), named.unit("groups")
        channels, groups, recurrent = inner, grouped // wide, inner * wide
    elif named.has("inner"):
        channels, grouped, groups = named.size("inner"), 0, 1
        recurrent = channels * named.size("state")
    elif named.has("keys"):
        channels, grouped, groups = 2 * named.size("keys") + named.size("values"), 0, 1
        recurrent = named.size("values") * named.unit("keys")
    else:
        return None
    return LayerState(channels, 2 * grouped, groups, named.size("window"), recurrent, recurrent_fp32=True, scan=scan)
