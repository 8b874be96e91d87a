"""Describes a workload, serving or training, with every choice that changes memory or traffic."""

from __future__ import annotations

from typing import Final, Literal

from shardctl.base.value import value_class

Profile = Literal["megatron", "hf", "fsdp2", "deepspeed", "torchtune", "ddp"]
"""Whose runtime trains; runtimes differ in what they keep for the backward pass and in what they allocate."""
PROFILES: Final[tuple[Profile, ...]] = ("megatron", "hf", "fsdp2", "deepspeed", "torchtune", "ddp")
ChunkedLoss = Literal["torchtune", "litgpt", "torchtitan", "liger", "unsloth"]
Recompute = Literal["none", "selective", "full"]
RecomputedModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
Precision = Literal["mixed", "bf16", "fp32"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
AttentionKernel = Literal["flash", "sdpa", "eager"]
Offload = Literal["none", "cpu", "nvme"]
CompiledPart = Literal["none", "layers", "all"]
Float8Recipe = Literal["none", "tensorwise", "rowwise"]
OptimizerKernel = Literal["fused", "foreach"]
Allocator = Literal["native", "expandable"]


Engine = Literal["vllm", "sglang"]


@value_class
class EngineBudget:
    """How much of a device an engine uses."""

    engine: Engine
    utilization: float
    """vLLM's `gpu_memory_utilization`, SGLang's `mem_fraction_static`."""
    usable: int
    """Bytes of the device."""
    version: tuple[int, int] | None = None
    """vLLM's, which decides how it counts and which kernels it has; None if nobody said it."""
    compute_capability: float = 0.0
    """NVIDIA's of the device, by which vLLM chooses kernels; 0 if it is not known."""


@value_class
class ServingWorkload:
    """Generation with a key/value cache."""

    context: int
    """Tokens per sequence that the cache must hold, prompt and answer together."""
    batch: int = 1
    """Sequences held at once by one replica of the mesh (not per rank)."""
    kv_dtype: str | None = None
    """The safetensors dtype of the cache, such as ``BF16`` or ``F8_E4M3``; by default that of the activations."""
    batched_tokens: int = 8192
    """The most tokens of one forward pass, over all sequences (vLLM's `max_num_batched_tokens`)."""
    page: int = 16
    """Tokens per page of the cache (vLLM's `block_size`)."""
    source: int | None = None
    """Tokens of each sequence that the encoder of an encoder-decoder reads; by default `context`."""
    decode_cp: int = 1
    """Ranks of tp that share the cache of full and latent attention by tokens (vLLM's
    `decode_context_parallel_size`); weights and states are not divided further."""
    rows: int | None = None
    """Sequences for which the sampler makes room, which are the most at once (vLLM's `max_num_seqs`); by default
    `batch`."""
    budget: EngineBudget | None = None
    """The engine, and how much of a device it uses; None where all of it may be used, by an engine that frees pages as
    soon as it may."""


@value_class
class TrainingWorkload:
    """Optimisation of all parameters."""

    sequence: int
    """Tokens per sequence, over all cp ranks."""
    micro_batch: int = 1
    """Sequences per forward pass of one data-parallel rank."""
    microbatches: int | None = None
    """Forward passes per optimizer step of one data-parallel rank; by default as many as there are stages."""
    profile: Profile = "fsdp2"
    optimizer: str = "adamw"
    """A name of the table in `optimizers`."""
    zero: int = 0
    """Which states dp ranks share besides: 0 none, 1 optimizer states, 2 and gradients, 3 and parameters
    (Rajbhandari et al. 2020). With Megatron, 1 is the distributed optimizer. fsdp ranks always share all three."""
    dtype: str = "BF16"
    """Of the parameters that compute; safetensors' name."""
    gradient_dtype: str | None = None
    """Of gradients that are kept; by default the profile's."""
    moment_dtypes: tuple[str, str] | None = None
    """Of the first and the second moment of Megatron-LM's precision-aware optimizer, safetensors' names; None for
    optimizers that keep both in fp32, with whole fp32 copies of the parameters."""
    precision: Precision = "mixed"
    """Whether fp32 copies of the parameters are updated, or all is kept in `dtype`."""
    recompute: Recompute = "none"
    """What is computed again: all of a layer (`full`), or what the profile's runtime means by `selective`: attention
    between its projections (Megatron-LM's `core_attn`), with `fsdp2` all but what torchtitan's list saves."""
    recompute_modules: tuple[RecomputedModule, ...] = ("core_attn",)
    """What `selective` means with Megatron-LM (`--recompute-modules`)."""
    recompute_every: int = 1
    """Of this many layers that follow each other, the last is computed again, the others keep everything
    (torchtitan's `selective_ac_option`)."""
    sequence_parallel: bool = True
    """Whether norms and dropouts are divided over tp too (Korthikanti et al. 2022); without tp it changes nothing."""
    attention: AttentionKernel = "flash"
    """FlashAttention; torch's `scaled_dot_product_attention`, whose fused kernels differ from it for windows and for
    values of another width than keys; or attention that holds its scores."""
    dropout: bool = True
    """Whether there is dropout where the config, or Megatron-LM's default of 0.1, has it."""
    fused_gradients: bool = True
    """Whether Megatron-LM's kernels add weight gradients to their sums (gradient accumulation fusion)."""
    fused_loss: bool = False
    """Whether Megatron-LM's loss is computed in place of the logits (`--cross-entropy-fusion-impl te`)."""
    chunked_loss: ChunkedLoss | None = None
    """Whose cross entropy computes the logits or their fp32 copies in chunks; None for all at once."""
    exchanged_heads: bool = False
    """Whether Megatron-LM's cp ranks exchange heads (`--cp-comm-type a2a`) instead of keys and values in a ring."""
    overlapped_all_to_all: bool = False
    """Whether Megatron's all-to-all of experts runs behind the computation of another microbatch
    (`--overlap-moe-expert-parallel-comm`), of which one more is then in flight."""
    adapter_dropout: bool = False
    """Whether adapters drop some of what they read (PEFT's `lora_dropout`)."""
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    """Model chunks per stage, for `interleaved`."""
    offload: Offload = "none"
    """Where the optimizer states go; with ZeRO-3 also the parameters, if `offload_parameters`."""
    offload_parameters: bool = False
    offload_checkpoints: bool = False
    """Whether the inputs of layers that are computed again are kept on the host (Unsloth's gradient checkpointing,
    torchtune's activation offloading)."""
    step_in_backward: bool = False
    """Whether the optimizer updates each parameter as soon as its gradient is there, which is freed then."""
    compiled: CompiledPart = "none"
    """What `torch.compile` compiles: each layer by itself, or (`all`) the loss too."""
    float8: Float8Recipe = "none"
    """How torchao scales what enters the products of layers, if they are in float8; the head's stay as they are."""
    float8_gathered: bool = False
    """Whether FSDP2 gathers the matrices of layers in float8."""
    optimizer_kernel: OptimizerKernel | None = None
    """How torch's optimizers compute; None for what the profile's users have by default."""
    allocator: Allocator | None = None
    """Whether torch's caching allocator has expandable segments; None for what the profile's users have by default."""

    @property
    def expandable(self) -> bool:
        """Whether the allocator's segments grow, so that blocks are not lost between them."""
        return self.allocator == "expandable" if self.allocator is not None else self.profile == "fsdp2"

    def count_passes(self, stages: int) -> int:
        """Count forward passes per optimizer step of one data-parallel rank.

        >>> TrainingWorkload(4096).count_passes(4), TrainingWorkload(4096, microbatches=16).count_passes(4)
        (4, 16)
        """
        return self.microbatches or stages

    @property
    def flash(self) -> bool:
        """Whether attention never holds its scores."""
        return self.attention != "eager"
