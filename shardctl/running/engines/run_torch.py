"""Runs transformers' tensor parallelism, or FSDP2, on a directory: ``python run_torch.py QUESTION.json ANSWER.json``.

Question and answer are those of `run_vllm.py`; it needs torch and transformers, and nothing of shardctl. Every rank is
a process of its own over gloo. With `transformers`, `from_pretrained` cuts the weights by the plan of the model's
class; with `fsdp2`, `torch.distributed.checkpoint` loads them into a model that `fully_shard` has divided.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, cast

_TOP_TOKEN_COUNT = 5
_TRAINER_NAME_PREFIXES = ("", "model.", "module.", "state.model.", "app.model.")
"""What trainers put before the names of a model's tensors."""


def build_parallel(question: dict[str, Any], world: int) -> Any:  # noqa: ANN401 - a module
    """Build the model as transformers' own tensor parallelism loads it."""
    import torch
    from transformers import AutoConfig, distributed

    config, native = AutoConfig.from_pretrained(question["path"]), cast("Any", distributed)
    auto = _get_classes(config)
    shared: dict[str, Any] = {"dtype": _get_type(question), "attn_implementation": "eager"}
    if world > 1:
        if not getattr(config, "base_model_tp_plan", None):
            raise NotImplementedError(f"{type(config).__name__} has no base_model_tp_plan")
        shared["distributed_config"] = native.DistributedConfig(tp_size=world)
    if question["empty"]:
        torch.manual_seed(0)
        return auto.from_config(config, attn_implementation="eager")
    model, told = auto.from_pretrained(question["path"], output_loading_info=True, **shared)
    wrong = {kind: sorted(map(str, names)) for kind, names in told.items() if names and kind != "error_msgs"}
    if wrong:
        raise ValueError(f"from_pretrained reports {wrong}")
    return model


def build_divided(question: dict[str, Any], world: int) -> Any:  # noqa: ANN401 - a module
    """Build the model with FSDP2, and load what `torch.distributed.checkpoint` finds for each of its tensors."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig

    config, dcp = AutoConfig.from_pretrained(question["path"]), cast("Any", checkpoint)
    torch.manual_seed(0)
    model = _get_classes(config).from_config(config, dtype=_get_type(question), attn_implementation="eager")
    mesh = init_device_mesh("cpu", (world,))
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):  # noqa: SLF001 - as its trainers do
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if question["empty"]:
        return model
    reader = dcp.FileSystemReader(question["path"])
    stored, state = reader.read_metadata().state_dict_metadata, model.state_dict()
    prefix = max(_TRAINER_NAME_PREFIXES, key=lambda each: sum(f"{each}{name}" in stored for name in state))
    wanted = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    dcp.load(wanted, storage_reader=reader)
    return model


def run_rank(rank: int, question: dict[str, Any], world: int, port: int, out: str) -> None:
    """Score the prompts on one of the ranks; the first one writes the answer."""
    import torch
    import torch.distributed as dist
    import transformers

    said: dict[str, Any] = {
        "stage": "load",
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(max((os.cpu_count() or 1) // world, 1))
        dist.init_process_group("gloo", rank=rank, world_size=world)
        build = build_parallel if question["engine"] == "transformers" else build_divided
        model = build(question, world).eval()
        said["stage"] = "run"
        said["answers"] = score_prompts(model, question)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        import traceback

        traceback.print_exc()
        said["error"] = f"{type(error).__name__}: {error}"
    if rank == 0 or "error" in said:
        partial = Path(f"{out}.{rank}")
        partial.write_text(json.dumps(said))
        if rank == 0 or not Path(out).exists():
            partial.rename(out)
    sys.stderr.flush()
    os._exit("error" in said)


def score_prompts(model: Any, question: dict[str, Any]) -> list[dict[str, Any]]:  # noqa: ANN401 - a module
    """Score the prompts and what follows them, without a cache."""
    import torch

    ids, start = torch.tensor(question["prompts"]), len(question["prompts"][0])
    with torch.no_grad():
        for _ in range(question["tokens"]):
            ids = torch.cat([ids, _compute_logits(model, ids)[:, -1:].argmax(-1)], 1)
        scores = _compute_logits(model, ids).double().log_softmax(-1)
    answers = []
    for row, every in zip(ids.tolist(), scores, strict=True):
        places = [_get_scores(one, token) for one, token in zip(every[:-1], row[1:], strict=True)]
        answers.append({"prompt": places[: start - 1], "tokens": row[start:], "following": places[start - 1 :]})
    return answers


def _compute_logits(model: Any, ids: Any) -> Any:  # noqa: ANN401 - a module and tensors
    logits = model(input_ids=ids, use_cache=False).logits
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def _get_scores(every: Any, token: int) -> dict[int, float]:  # noqa: ANN401 - a tensor
    return {
        each: float(every[each]) for each in {token, *every.topk(min(_TOP_TOKEN_COUNT, len(every))).indices.tolist()}
    }


def _get_classes(config: Any) -> Any:  # noqa: ANN401 - of transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal = AutoModelForCausalLM._model_mapping  # noqa: SLF001 - no public function says which configs it takes
    return AutoModelForCausalLM if type(config) in causal else AutoModelForImageTextToText


def _get_type(question: dict[str, Any]) -> Any:  # noqa: ANN401 - a torch.dtype
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[question["dtype"]]


def main(question: dict[str, Any], out: str) -> int:
    """Start the ranks, and end them all as soon as one fails."""
    from torch import multiprocessing

    start: Any = cast("Any", multiprocessing).start_processes
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = int(listening.getsockname()[1])
    try:
        start(run_rank, (question, question["tp"], port, out), nprocs=question["tp"], start_method="spawn")
    except Exception:  # noqa: BLE001 - it is in the answer
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a loader's threads must not enter collectives
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]))
