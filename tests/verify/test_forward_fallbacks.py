"""What cannot be run is skipped with its reason, and what is done otherwise is said: nothing passes in silence."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from forward_models import REPLICATE, config_of, cut, run, save, saved_and_cut, values

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.running.forward import CandidateCheckpoint, OriginalCheckpoint, compare_forward_passes
from shardctl.tensors.mesh import Mesh


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return partial(saved_and_cut, tmp_path_factory.mktemp("fallbacks"))


def run_as(paths, **config):
    """The forward pass under another config."""
    with open_checkpoint(paths[0], REPLICATE) as whole, open_checkpoint(paths[1], REPLICATE) as parts:
        original = OriginalCheckpoint(
            whole.stored, whole.manifest, whole.source, {**whole.config, **config}, whole.model
        )
        return compare_forward_passes(
            CandidateCheckpoint(parts.manifest, parts.source, parts.model, parts.record.mesh, parts.record.stages),
            original,
        )


def test_an_unknown_class_is_skipped(made):
    result = run_as(made("llama"), architectures=["SpeciallyMadeModel"])
    assert result.status == "skipped"
    assert "has no class SpeciallyMadeModel" in result.reason


def test_a_name_that_is_no_model_is_skipped(made):
    assert run_as(made("llama"), architectures=["logging"]).status == "skipped"


def test_quantized_weights_are_skipped_and_the_method_is_named(made):
    result = run_as(made("llama"), quantization_config={"quant_method": "fp8"})
    assert result.status == "skipped"
    assert "quantized (fp8)" in result.reason


def test_without_a_config_there_is_no_model_to_run(made):
    with open_checkpoint(made("llama")[0]) as whole:
        original = OriginalCheckpoint(whole.stored, whole.manifest, whole.source, None)
        result = compare_forward_passes(CandidateCheckpoint(whole.manifest, whole.source), original)
    assert (result.status, result.blocks) == ("skipped", ())
    assert "no config.json" in result.reason


def test_another_type_is_skipped(made):
    assert "fp32, bf16 or fp16, not in fp8" in run(*made("llama"), dtype="fp8").reason


def test_without_transformers_it_is_skipped(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run(*made("llama"))
    assert result.status == "skipped"
    assert "pip install 'torch>=2.9' 'transformers>=5.17'" in result.reason


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_transformers_without_conversions_is_done_without_and_that_is_said(made, monkeypatch, name):
    monkeypatch.delattr("transformers.core_model_loading.rename_source_key")
    result = run(*made(name))
    assert result.status == "passed", result.findings
    assert any("does not rename stored tensors as expected" in note for note in result.notes)
    assert "the names of the source are read by shardctl, not by transformers" in result.notes


def test_experts_that_no_token_chose_are_said(made):
    result = run(*made("phimoe"))
    assert result.status == "passed"
    assert any("of 8 experts were chosen by no token" in note for note in result.notes), result.notes
    assert not [note for note in run(*made("mixtral")).notes if "chosen by no token" in note]


def test_a_part_that_ranks_cannot_run_is_joined_and_that_is_said(made, monkeypatch):
    """Its weights are right, so the reason lies with the code, not with the checkpoint."""
    usual = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def forward_of_whole(self, states):
        if not bool((self.up_proj(states) != 0).all()):
            raise RuntimeError("some channels are zero")
        return usual(self, states)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", forward_of_whole)
    result = run(*made("llama"))
    assert result.status == "passed", result.findings
    (joined,) = result.share.joined
    assert joined.reason == "joined: ranks cannot run it by themselves: some channels are zero"
    assert joined.share == pytest.approx(1 - result.share.own)
    assert 0.5 < joined.share < 1
    assert "model.layers.0.mlp.up_proj.weight" in joined.names


def test_a_model_that_asserts_what_it_was_not_given_is_skipped(made, monkeypatch):
    def assert_input(*_args, **_kwargs):
        raise AssertionError("Make sure that `context_input_ids` are passed")  # as RAG does

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", assert_input)
    result = run(*made("llama"))
    assert result.status == "skipped"
    assert "`context_input_ids` are passed" in result.reason


def test_a_fault_is_found_in_weights_that_code_reaches_for(made, tmp_path):
    whole, shards = made("mamba")
    sound = run(whole, shards)
    assert (sound.status, sound.share.own) == ("passed", 1.0)
    shutil.copytree(shards, tmp_path / "broken")
    values(tmp_path / "broken", "backbone.layers.1.mixer.dt_proj.weight", 1)[0] = 9
    result = run(whole, tmp_path / "broken")
    assert result.status == "failed"
    assert [(block.name, block.rank) for block in result.blocks if block.error > 1e-4] == [
        ("backbone.layers.1", "rank 1 (tp1)")
    ]


def test_a_model_that_reaches_for_weights_outside_of_blocks_runs_all_the_same(made, monkeypatch):
    """Some heads are computed by code that takes the weight of the embedding."""
    kind = transformers.LlamaForCausalLM
    usual = kind.forward

    def forward_with_embedding(self, input_ids=None, **others):
        found = usual(self, input_ids=input_ids, **others)
        found["logits"] = found.logits + (found.logits[..., :64] @ self.model.embed_tokens.weight[:64, :1]) * 1e-3
        return found

    monkeypatch.setattr(kind, "forward", forward_with_embedding)
    result = run(*made("llama"))
    assert result.status == "passed", result.findings
    assert any("outside of blocks stay in memory" in note for note in result.notes)
    assert 0 < result.output_error < 1e-5


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A tiny Llama, its shards, and a tokenizer of twenty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    base = tmp_path_factory.mktemp("speaking")
    words = ["<unk>", "the", "cat", "sat", *(f"word{n}" for n in range(16))]
    save(base / "whole", config_of("llama", eos_token_id=None, bos_token_id=None))
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(base / "whole")  # noqa: S106
    cut(base / "whole", base / "ranks", Mesh.of(tp=2))
    return base / "whole", base / "ranks"


def test_a_prompt_is_continued_by_both_as_transformers_does(speaking):
    result = run(*speaking, prompt="the cat sat", tokens=5)
    assert result.status == "passed", result.findings
    model = transformers.LlamaForCausalLM.from_pretrained(speaking[0]).eval()
    with torch.no_grad():
        expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 3:]
    assert list(result.generated.source.tokens) == expected.tolist()
    assert result.generated.same
    assert result.generated.source.text == result.generated.shards.text


def test_shards_that_speak_otherwise_are_seen_to(speaking, tmp_path):
    shutil.copytree(speaking[1], tmp_path / "broken")
    values(tmp_path / "broken", "model.embed_tokens.weight", 0)[...] *= -1
    result = run(speaking[0], tmp_path / "broken", prompt="the cat sat", tokens=3)
    assert result.status == "failed"
    assert not result.generated.same


@pytest.mark.parametrize(
    ("name", "why"),
    [("llama", "the tokenizer of .* cannot be loaded"), ("bert", "BertForMaskedLM cannot generate text")],
)
def test_a_prompt_that_cannot_be_continued_is_no_failure_and_is_said(made, name, why):
    result = run(*made(name), prompt="the cat sat", tokens=3)
    assert result.status == "passed"
    (note,) = [note for note in result.notes if "prompt was not continued" in note]
    assert re.search(why, note), note


MEASURE = """
import json, sys, threading, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from forward_models import run
import torch, transformers, transformers.conversion_mapping, transformers.models.llama.modeling_llama
from shardctl.running.forward.comparison import release_freed_memory

def anonymous():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

before = anonymous()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
result = run(Path({whole!r}), Path({shards!r}), limit=4 << 20)
print(json.dumps([result.status, peak[0] - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_memory_does_not_grow_with_the_model(tmp_path):
    """A model of 238 MB in fp32 is run in far less, because no weight of more than 4 MiB is ever whole."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 12000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    save(tmp_path / "whole", config_of("llama", **sizes, **heads, tie_word_embeddings=False))
    size = (tmp_path / "whole" / "model.safetensors").stat().st_size
    assert size > 230e6
    shards = cut(tmp_path / "whole", tmp_path / "ranks", Mesh.of(tp=2, fsdp=2))
    code = MEASURE.format(tests=str(Path(__file__).parent), whole=str(tmp_path / "whole"), shards=str(shards))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, peak = json.loads(done.stdout.splitlines()[-1])
    assert status == "passed"
    assert peak < size / 3, f"{peak / 1e6:.0f} MB"
