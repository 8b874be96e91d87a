"""Lists what other tools call our verbs, options and element types, for the hints of wrong command lines."""

from __future__ import annotations

from typing import Final

TYPES: Final = {
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("float32", "float", "f32"), "fp32"),
}
"""Other spellings of element types, and those that options take."""

CHOICES: Final = {
    **TYPES,
    **dict.fromkeys(("inference", "infer", "serving", "generate", "decode"), "serve"),
    **dict.fromkeys(("training", "pretrain", "pretraining", "finetune", "finetuning", "sft"), "train"),
    **dict.fromkeys(("q4_0", "q4_k_m", "q4_k_s", "nf4", "awq", "gptq", "w4a16", "4bit"), "int4"),
    **dict.fromkeys(("q8_0", "8bit"), "int8"),
    **dict.fromkeys(("yes", "true", "all", "block"), "full"),
}
"""What other tools call a choice of an option, where that option has the choice on the right."""

QUANTIZED: Final = {
    **dict.fromkeys(("fp8", "float8", "float8_e4m3fn", "f8_e4m3"), "--quantize fp8-channel"),
    **{each: f"--quantize {each}" for each in ("int8", "int4", "mxfp8", "mxfp4", "nvfp4")},
}
"""Types that weights are quantized to, and not cast."""

VERBS: Final = {
    **dict.fromkeys(("convert", "split", "shard", "consolidate", "export", "unshard"), "reshard"),
    **dict.fromkeys(("push", "upload", "push-to-hub"), "reshard SRC hf://owner/name --create"),
    "merge": "reshard --to hf, or reshard --merge for an adapter",
    **dict.fromkeys(("quantize", "quantize"), "reshard --quantize"),
    **dict.fromkeys(("dequantize", "dequantize", "cast"), "reshard --dtype"),
    **dict.fromkeys(("info", "show", "list", "ls", "cat", "describe"), "inspect"),
    **dict.fromkeys(("estimate", "estimate-memory", "fit", "memory", "search"), "plan"),
    **dict.fromkeys(("check", "validate", "test"), "verify"),
    **dict.fromkeys(("compare", "cmp"), "diff"),
    **dict.fromkeys(("hash", "checksum", "sha256"), "digest"),
}
"""What other tools call what a verb does, and that verb."""

OPTIONS: Final = {
    **dict.fromkeys(("train", "training"), "--for train"),
    **dict.fromkeys(("serve", "serving", "inference"), "--for serve"),
    **dict.fromkeys(("tensor-parallel", "tensor-model-parallel-size", "tp-size"), "--tp"),
    **dict.fromkeys(("pipeline-parallel", "pipeline-parallel-size", "pipeline-model-parallel-size", "pp-size"), "--pp"),
    **dict.fromkeys(("expert-parallel", "expert-parallel-size", "expert-model-parallel-size", "ep-size"), "--ep"),
    **dict.fromkeys(("context-parallel-size", "cp-size"), "--cp"),
    **dict.fromkeys(("data-parallel", "data-parallel-size", "dp-size"), "--dp"),
    **dict.fromkeys(("world-size", "num-gpus", "n-gpus", "nproc", "nproc-per-node", "devices"), "--gpus"),
    **dict.fromkeys(("gpu-memory", "device-memory", "vram"), "--gpu 80GB"),
    "mem-fraction-static": "--utilization",
    **dict.fromkeys(("context-length", "context-len", "max-seq-len", "seq-length"), "--seq-len"),
    **dict.fromkeys(("batch-size", "micro-batch-size", "per-device-train-batch-size"), "--batch"),
    **dict.fromkeys(("gradient-accumulation-steps", "num-microbatches"), "--microbatches"),
    "activation-checkpointing": "--recompute",
    **dict.fromkeys(("zero-stage", "use-distributed-optimizer", "distributed-optimizer"), "--zero"),
    **dict.fromkeys(("recompute-granularity", "recompute-activations"), "--recompute"),
    **dict.fromkeys(("cpu-offload", "offload-optimizer", "optimizer-cpu-offload"), "--offload cpu"),
    **dict.fromkeys(("enable-expert-parallel", "num-experts-parallel"), "--ep"),
    **dict.fromkeys(("lora", "lora-r", "r"), "--lora-rank"),
    **dict.fromkeys(("load-in-4bit", "qlora"), "--base-dtype nf4"),
    **dict.fromkeys(("attn-implementation", "use-flash-attn", "attention-backend"), "--attention"),
    **dict.fromkeys(("ram", "max-memory", "max-ram", "memory-limit"), "--memory"),
    **dict.fromkeys(("jobs", "num-threads"), "--threads"),
    **dict.fromkeys(("torch-dtype", "outtype", "precision"), "--dtype"),
    **dict.fromkeys(("quantization", "quant"), "--quantize"),
    **dict.fromkeys(("force", "replace", "yes"), "--overwrite"),
    **dict.fromkeys(("format", "layout", "target"), "--to"),
    **dict.fromkeys(("shard-size", "max-file-size"), "--max-shard-size"),
    **dict.fromkeys(("base", "reference", "compare"), "--against"),
}
"""What other tools call an option, without its dashes, and ours, with a value where that is what they mean."""
