"""Runs vLLM on a directory: ``python run_vllm.py QUESTION.json ANSWER.json``; needs vLLM, and nothing of shardctl.

QUESTION has the fields of `EngineQuestion`. ANSWER has `versions`, and `answers` with a `TokenScores` for each prompt,
or `error` with vLLM's own words and `stage`: `import`, `load` or `run`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_ENVIRONMENT_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Unless the environment says otherwise: a small cache, no compiling, nothing from the network."""
_TOP_TOKEN_COUNT = 5


def main(question: dict[str, Any], answer: dict[str, Any]) -> None:
    """Fill the answer; raises whatever vLLM raises."""
    import torch
    import transformers
    import vllm  # type: ignore[import-not-found]

    answer["versions"] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    answer["stage"] = "load"
    room = len(question["prompts"][0]) + question["tokens"] + 1
    engine = vllm.LLM(
        question["path"],
        load_format="dummy" if question["empty"] else "sharded_state" if question["sharded"] else "safetensors",
        tensor_parallel_size=question["tp"],
        pipeline_parallel_size=question["pp"],
        enable_expert_parallel=question["ep"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[question["dtype"]],
        skip_tokenizer_init=not any(Path(question["path"]).glob("*processor_config.json")),  # which needs a tokenizer
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=room,
        max_num_seqs=len(question["prompts"]),
        max_num_batched_tokens=max(room * len(question["prompts"]), 64),
        seed=0,
    )
    answer["stage"] = "run"
    asked = vllm.SamplingParams(
        temperature=0,
        max_tokens=question["tokens"],
        logprobs=_TOP_TOKEN_COUNT,
        prompt_logprobs=_TOP_TOKEN_COUNT,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in question["prompts"]]
    said = engine.generate(prompts, asked, use_tqdm=False)
    answer["answers"] = [
        {
            "prompt": [_get_scores(each) for each in one.prompt_logprobs[1:]],
            "tokens": list(one.outputs[0].token_ids),
            "following": [_get_scores(each) for each in one.outputs[0].logprobs],
        }
        for one in said
    ]


def _get_scores(position: Any) -> dict[int, float]:  # noqa: ANN401 - vLLM's, or a dict
    return {int(token): float(found.logprob) for token, found in position.items()}


if __name__ == "__main__":
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    said: dict[str, Any] = {"stage": "import"}
    try:
        main(json.loads(Path(sys.argv[1]).read_text()), said)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        import traceback

        traceback.print_exc()
        words = str(error) or (traceback.extract_tb(error.__traceback__)[-1].line or "")
        said["error"] = f"{type(error).__name__}: {words}"
    Path(sys.argv[2]).write_text(json.dumps(said))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit("error" in said)  # not to wait for the engine's threads
