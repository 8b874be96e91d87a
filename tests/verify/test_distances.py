"""Distances that people use, each beside plain torch and the model that transformers loads by itself."""

from __future__ import annotations

import json

import pytest
import torch
from forward_models import config_of, cut, run, save
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shardctl.cli.program import run as command
from shardctl.options import VerifyOptions
from shardctl.running.forward.executor import ModelExecutor
from shardctl.running.forward.inputs import build_inputs
from shardctl.running.forward.verdict import measure_block, measure_outputs
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.verify import verify
from shardctl.verify.tolerance import KL_LIMITS

TEXT = " ".join(f"w{number % 37}" for number in range(300))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("distances") / "llama"
    save(path, config_of("llama"))
    words = {f"w{number}": number for number in range(37)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)  # noqa: S106
    return path


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def copy(source, target, change=lambda tensors: tensors):
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    return target


def noisy(tensors, scale=0.03):
    generator = torch.Generator().manual_seed(5)
    return {n: t + torch.randn(t.shape, generator=generator) * scale * t.std() for n, t in tensors.items()}


def test_every_measure_is_that_of_plain_torch(source, tmp_path):
    other = copy(
        source, tmp_path / "other", lambda tensors: noisy(tensors) | {"model.norm.weight": tensors["model.norm.weight"]}
    )
    found = run(source, other)
    assert found.status == "failed"
    ids = build_inputs(load(source), "cpu")["input_ids"]
    with torch.no_grad():
        right, wrong = (load(path)(input_ids=ids).logits.flatten(0, 1) for path in (source, other))
    told = found.distances
    assert told.positions == 64
    divergence = functional.kl_div(wrong.log_softmax(-1), right.log_softmax(-1), log_target=True, reduction="none")
    assert told.kl == pytest.approx(float(divergence.sum(-1).mean()), rel=1e-3)
    assert told.largest_kl == pytest.approx(float(divergence.sum(-1).max()), rel=1e-3)
    assert told.top1 == float((right.argmax(-1) == wrong.argmax(-1)).float().mean())
    tops = zip(right.topk(5).indices.tolist(), wrong.topk(5).indices.tolist(), strict=True)
    assert told.top5 == pytest.approx(sum(len({*a} & {*b}) for a, b in tops) / 320)
    cosines = functional.cosine_similarity(right, wrong)
    assert (told.cosine, told.mean_cosine) == pytest.approx((float(cosines.min()), float(cosines.mean())), rel=1e-5)
    assert told.largest == pytest.approx(float((right - wrong).abs().max()), rel=1e-4)
    assert told.log_probability == pytest.approx(
        float((right.log_softmax(-1) - wrong.log_softmax(-1)).abs().max()), rel=1e-4
    )
    assert 0 < told.kl < 1
    assert told.top1 < 1


def test_each_block_has_its_measures(source, tmp_path):
    other = copy(source, tmp_path / "other", noisy)
    found = {block.name: block for block in run(source, other).blocks}
    right, wrong = load(source), load(other)
    ids = build_inputs(right, "cpu")["input_ids"]
    seen = {}
    right.model.layers[1].register_forward_hook(
        lambda _, args, kwargs, output: seen.update(args=args, kwargs=kwargs, output=output), with_kwargs=True
    )
    with torch.no_grad():
        right(input_ids=ids, use_cache=False)
        output = wrong.model.layers[1](*seen["args"], **seen["kwargs"])
    block = found["model.layers.1"]
    assert block.cosine == pytest.approx(
        float(functional.cosine_similarity(seen["output"], output, -1).min()), rel=1e-5
    )
    assert block.largest == pytest.approx(float((seen["output"] - output).abs().max()), rel=1e-4)


def test_what_cannot_be_compared_has_no_measures():
    ones, nan = torch.ones(2, 3), torch.full((2, 3), float("nan"))
    assert measure_outputs("logits", ones, nan) is None
    assert measure_outputs("logits", ones, torch.ones(2, 4)) is None
    assert measure_outputs("logits", ones, None) is None
    zeros = measure_outputs("logits", torch.zeros(2, 3), torch.zeros(2, 3))
    assert (zeros.kl, zeros.cosine, zeros.top1, zeros.top5) == (0, 1, 1, 1)
    assert measure_block(ones, nan)[1:] == (-1, float("inf"))


def test_infinities_that_are_the_same_in_both_leave_the_other_elements_measured():
    reference = torch.ones(4, 8)
    reference[1, 2] = float("inf")
    candidate = reference.clone()
    assert measure_block(reference, candidate) == (0, 1, 0)
    candidate[0, 0] += 0.5
    found = measure_block(reference, candidate)
    assert found.cosine == pytest.approx(float(functional.cosine_similarity(reference[0], candidate[0], 0)))
    assert found.largest == 0.5


@pytest.mark.parametrize(("mesh", "processes"), [("", 0), ("tp=2", 0), ("pp=2,tp=2", 0), ("tp=2", 2)])
def test_decoding_with_a_cache_is_what_transformers_decodes(source, tmp_path, mesh, processes):
    shards = cut(source, tmp_path / "ranks", Mesh.parse(mesh)) if mesh else copy(source, tmp_path / "copy")
    found = run(source, shards, seq_len=40, decode=6, processes=processes)
    assert found.status == "passed", found.findings
    assert (found.decoding.prefill, found.decoding.decoded) == (34, 6)
    assert found.decoding.error <= (1e-4 if mesh else 0)
    model = load(source)
    ids = build_inputs(model, "cpu", 40)["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=ids).logits[:, -6:]
        cache, steps = model(input_ids=ids[:, :34], use_cache=True).cache, []
        for at in range(34, 40):
            output = model(input_ids=ids[:, at : at + 1], cache=cache, use_cache=True)
            steps.append(output.logits)
    apart = float((torch.cat(steps, 1) - whole).norm() / whole.norm())
    assert found.decoding.cache_error == pytest.approx(apart, abs=1e-6)
    assert found.decoding.cache_error < 1e-5


def test_a_fault_that_only_a_cache_shows_is_named(source, tmp_path):
    other = copy(source, tmp_path / "other", noisy)
    found = run(source, other, decode=2)
    assert any("with a KV cache" in finding.message for finding in found.findings)


def test_sequences_are_as_long_as_is_wanted_and_what_they_do_not_reach_is_noted(tmp_path):
    path, name = tmp_path / "mistral", "mistral"
    config = config_of(name, sliding_window=48, max_position_embeddings=128)
    save(path, config)
    short, long = run(path, path), run(path, path, seq_len=64)
    assert any("sliding window of 48" in note for note in short.notes)
    assert not any("sliding window" in note for note in long.notes)
    assert long.positions == 128
    refused = run(path, path, seq_len=500)
    assert refused.status == "skipped"
    assert "the model has 124 positions" in refused.reason


def test_the_perplexity_of_a_text_is_that_of_plain_torch(source, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    shards = cut(source, tmp_path / "ranks", Mesh.of(tp=2))
    options = ["--against", str(source), "--text", str(file), "--seq-len", "32", "--json"]
    assert command(["verify", str(shards), *options]) == 0
    told = json.loads(capsys.readouterr().out)["levels"][-1]["forward"]["perplexity"]
    ids = torch.tensor([int(word[1:]) for word in TEXT.split()])
    model, losses = load(source), []
    with torch.no_grad():
        for piece in ids.split(min(32, model.config.max_position_embeddings - 4)):
            logits = model(input_ids=piece[None]).logits[0]
            losses.append(functional.cross_entropy(logits[:-1].double(), piece[1:], reduction="none"))
    expected = float(torch.cat(losses).mean().exp())
    assert told["tokens"] == sum(map(len, losses))
    assert (told["source"], told["shards"]) == pytest.approx((expected, expected), rel=1e-5)


def test_a_text_that_cannot_be_measured_is_an_error(tmp_path, capsys):
    path = tmp_path / "llama"
    save(path, config_of("llama"))
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    assert command(["verify", str(path), "--text", str(file)]) == 3
    assert "the perplexity of the text was not measured" in capsys.readouterr().out
    assert command(["verify", str(path), "--text", str(tmp_path / "none.txt")]) == 2


def test_a_text_that_cannot_be_read_is_refused_before_anything_is_read(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shardctl.verbs.verify.open_checkpoint", None)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    for name in ("none.txt", "latin1.txt", "."):
        assert command(["verify", str(source), "--text", str(tmp_path / name)]) == 2
        assert "hint:  give a file of UTF-8 text" in capsys.readouterr().err


def test_a_perplexity_that_the_source_does_not_have_is_an_error(source, monkeypatch):
    usual = ModelExecutor.run

    def run_with_nan(self, inputs, *rest, **options):
        output = usual(self, inputs, *rest, **options)
        if len(inputs["input_ids"]) == 1:  # a window of the text, not the inputs that both are compared with
            output.logits = output.logits * float("nan")
        return output

    monkeypatch.setattr(ModelExecutor, "run", run_with_nan)
    found = run(source, source, text=TEXT)
    assert found.status == "failed"
    assert [each.message for each in found.findings] == [
        "the perplexity of the text was not measured: the source computes logits for the text that are not a number"
    ]


def test_a_note_says_that_a_perplexity_in_bf16_is_not_judged(source):
    found = run(source, source, text=TEXT, dtype="bf16")
    assert found.perplexity is not None
    assert any("no bound on the perplexity of the text is known for bf16" in note for note in found.notes)


def test_bounds_follow_the_kind_of_change(source, tmp_path):
    same = run(source, source)
    assert (same.change, same.tolerance.logits) == ("equal", 0)
    ranks = run(source, cut(source, tmp_path / "ranks", Mesh.of(tp=2)))
    assert (ranks.change, ranks.tolerance.logits) == ("rounding", 1e-4)
    cast = copy(source, tmp_path / "cast", lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    level = verify(cast, VerifyOptions(level="forward", against=source)).levels[-1]
    assert level.forward.change == "cast"
    assert 0 < level.forward.unrounded_distances.kl < 1.5e-2
    assert not level.findings


def test_a_cast_that_changes_too_much_is_a_warning(source, tmp_path, monkeypatch):
    monkeypatch.setitem(KL_LIMITS, "cast", 1e-9)
    cast = copy(source, tmp_path / "cast", lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    level = verify(cast, VerifyOptions(level="forward", against=source)).levels[-1]
    assert level.status == "passed", (level.reason, level.findings)
    assert [each.severity for each in level.findings] == ["warning"]
    assert "KL divergence" in level.findings[0].message
