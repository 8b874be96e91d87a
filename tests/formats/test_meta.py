"""Meta's `consolidated.NN.pth`: parts are joined by their shapes, and what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from stored_bytes import scan

from fixtures.meta import make as make_meta
from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.libraries.meta.params import MetaParams
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def place(tmp_path) -> Path:
    """A copy of the fixture with two ranks."""
    return Path(shutil.copytree(FIXTURES / "meta" / "llama2", tmp_path / "llama2"))


def change(path: Path, **tensors) -> None:
    """Replace tensors of a file; None takes one away."""
    state = torch.load(path)
    for name, value in tensors.items():
        state[name.replace("__", ".")] = value
    torch.save({name: t for name, t in state.items() if t is not None}, path)


def say(place: Path, **fields) -> None:
    params = json.loads((place / "params.json").read_text())
    (place / "params.json").write_text(json.dumps(params | fields))


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("llama2", ["the embedding is cut along the hidden dim, as Llama 2 does"]),
        (
            "llama3",
            [
                "the embedding is cut along the vocabulary, as Llama 3 does",
                "each key/value head is on 2 ranks; its copies must be equal",
            ],
        ),
        ("llama31", []),
    ],
)
def test_how_it_was_understood_is_said(name, notes):
    manifest = scan(FIXTURES / "meta" / name)
    assert (manifest.format, manifest.training.writer) == ("meta", "Meta's Llama")
    assert manifest.training.ranks == make_meta.RANKS[name]
    assert list(manifest.training.notes) == notes
    assert manifest.warnings == ()
    assert {n: t.shape for n, t in manifest.tensors.items()} == {
        n: tuple(t.shape) for n, t in make_meta.weights(name).items()
    }


def test_buffers_and_descriptions_are_left_behind(place):
    dropped = inspect(place).dropped
    assert set(dropped) == {"params.json", "checklist.chk", "rope.freqs"}


def test_a_missing_file_in_the_middle_is_named(place):
    for rank in (3, 4):
        shutil.copy(place / "consolidated.01.pth", place / f"consolidated.{rank:02d}.pth")
    with pytest.raises(SourceError, match=r"consolidated\.02\.pth is missing, but consolidated\.04\.pth is there"):
        scan(place)


def test_an_embedding_that_is_cut_in_no_known_way_is_refused(place):
    for rank in range(2):
        change(place / f"consolidated.{rank:02d}.pth", tok_embeddings__weight=torch.zeros(64, 20).half())
    with pytest.raises(
        SourceError, match=r"tok_embeddings\.weight is \[64, 20\], neither one of 2 parts of 32 columns nor"
    ):
        scan(place)


def test_parts_of_other_models_are_refused(place):
    change(place / "consolidated.01.pth", layers__0__feed_forward__w1__weight=torch.zeros(40, 32).half())
    with pytest.raises(SourceError, match=r"w1.weight is F16 \[40, 32\] in consolidated\.01\.pth, but F16 \[44, 32\]"):
        scan(place)


def test_a_tensor_that_one_rank_lacks_is_named(place):
    change(place / "consolidated.01.pth", norm__weight=None)
    with pytest.raises(SourceError, match=r"consolidated\.01\.pth has no norm\.weight, but consolidated\.00\.pth has"):
        scan(place)


def test_tensors_that_no_such_llama_has_are_refused(place):
    for rank in range(2):
        change(place / f"consolidated.{rank:02d}.pth", vision_model__conv1__weight=torch.zeros(2))
    with pytest.raises(UnsupportedError, match=r"'vision_model\.conv1\.weight', which Llama 2 and 3 do not have"):
        scan(place)


def test_quantized_weights_are_refused(place):
    (place / "fp8_scales_0.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="quantized to 8 bits"):
        scan(place)


def test_copies_of_a_head_that_differ_are_found(tmp_path):
    place = tmp_path / "llama3"
    make_meta.write("llama3", place)
    change(place / "consolidated.01.pth", layers__1__attention__wk__weight=torch.zeros(4, 32).bfloat16())
    with pytest.raises(SourceError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        reshard(place, tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "dim 0, which is not a positive number"),
        ({"n_layers": "2"}, "n_layers '2', which is not a positive number"),
        ({"n_heads": 5}, "5 heads, which do not divide dim 32"),
        ({"norm_eps": -1}, "norm_eps -1"),
        ({"n_kv_heads": True}, "n_kv_heads True"),
    ],
)
def test_params_that_make_no_sense_are_refused(place, fields, message):
    say(place, **fields)
    with pytest.raises(SourceError, match=message):
        scan(place)


def test_params_that_are_not_json_are_refused(place):
    (place / "params.json").write_text("{")
    with pytest.raises(SourceError, match=r"params\.json is not JSON"):
        scan(place)


def test_params_of_another_kind_give_no_config(place):
    say(place, moe_args={"num_experts": 16})
    manifest = scan(place)
    assert manifest.own_config is None
    assert manifest.training.notes[-1].startswith("params.json is unlike that of Llama 2 and 3: without --config")


def test_without_params_the_names_stay_metas(place):
    (place / "params.json").unlink()
    found = inspect(place)
    assert found.architecture == ""
    assert "layers.0.attention.wq.weight" in {line.name for line in found.tensors}


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps", "multiple_of", "ffn_dim_multiplier", "hidden_dim"])
def test_a_field_that_is_null_is_as_good_as_none(name):
    params = MetaParams(32, 1, 4, 4, 8, None, {"dim": 32, "n_layers": 1, "n_heads": 4, name: None})
    without = MetaParams(32, 1, 4, 4, 8, None, {"dim": 32, "n_layers": 1, "n_heads": 4})
    shapes = {"tok_embeddings.weight": (96, 32)}
    assert params.config(shapes) == without.config(shapes)


class TestNativeSafetensors:
    """`consolidated.safetensors` with `params.json` and no `config.json`."""

    def make_native(self, at: Path, name: str, params: dict[str, object]) -> Path:
        at.mkdir()
        save_file(make_meta.weights(name), at / "consolidated.safetensors")
        (at / "params.json").write_text(json.dumps(params))
        return at

    def mistral(self, **more: object) -> dict[str, object]:
        sizes = {"dim": 32, "n_layers": 2, "head_dim": 8, "hidden_dim": 112, "n_heads": 4, "n_kv_heads": 2}
        return sizes | {"norm_eps": 1e-05, "vocab_size": 64, "rope_theta": 1000000.0} | more

    def test_metas_params_make_a_llama(self, tmp_path):
        native = self.make_native(tmp_path / "native", "llama31", make_meta.PARAMS["llama31"])
        made = reshard(native, tmp_path / "hf", ReshardOptions(to="hf"))
        other = reshard(FIXTURES / "meta" / "llama31", tmp_path / "other", ReshardOptions(to="hf"))
        assert made.record.digest == other.record.digest
        ours, theirs = (json.loads((tmp_path / at / "config.json").read_text()) for at in ("hf", "other"))
        assert ours == theirs
        assert not (tmp_path / "hf" / "params.json").exists()

    @pytest.mark.parametrize("more", [{}, {"sliding_window": "4096", "model_type": "transformer", "causal": True}])
    def test_mistrals_params_make_a_mistral_that_computes_the_same(self, more, tmp_path):
        params = self.mistral(**more)
        ffn = make_meta.weights("llama31")["layers.0.feed_forward.w1.weight"].shape[0]
        native = self.make_native(tmp_path / "native", "llama31", params | {"hidden_dim": ffn})
        reshard(native, tmp_path / "hf", ReshardOptions(to="hf"))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        assert type(model).__name__ == "MistralForCausalLM"
        assert model.config.sliding_window == (4096 if more else None)
        tokens = torch.arange(12)[None]
        whole = {name: tensor.float() for name, tensor in make_meta.weights("llama31").items()}
        expected = compute_native(whole, tokens[0], heads=4, kv_heads=2, theta=1e6)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits[0], expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"moe": {"num_experts": 8}}, "has moe, which Mistral's dense models do not have"),
            ({"use_biases": True}, "has use_biases"),
            ({"rope_theta": None}, "has no rope_theta"),
        ],
    )
    def test_what_the_params_say_more_is_said(self, more, message, tmp_path):
        native = self.make_native(tmp_path / "native", "llama31", self.mistral(**more))
        assert any(message in line for line in scan(native).warnings)
        assert inspect(native).architecture == ""

    def test_a_window_for_some_layers_and_a_vocabulary_of_another_model(self, tmp_path):
        native = self.make_native(tmp_path / "a", "llama31", self.mistral(sliding_window=[4096, None]))
        with pytest.raises(SourceError, match="not one number for all layers"):
            scan(native)
        native = self.make_native(tmp_path / "b", "llama31", self.mistral(vocab_size=65))
        with pytest.raises(SourceError, match=r"vocab_size 65, but tok_embeddings\.weight has 64 rows"):
            scan(native)


def compute_native(
    weights: dict[str, torch.Tensor], tokens: torch.Tensor, *, heads: int, kv_heads: int, theta: float
) -> torch.Tensor:
    """Compute logits as the papers say, with rotations of neighbouring pairs, of weights by their native names."""

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]

    def rotate(x):
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
        turned = torch.view_as_complex(x.unflatten(-1, (half, 2))) * torch.polar(torch.ones(()), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    x = weights["tok_embeddings.weight"][tokens]
    for n in range(2):
        at = f"layers.{n}"
        h = norm(x, f"{at}.attention_norm")
        q, k, v = (
            (h @ weights[f"{at}.attention.w{part}.weight"].T).unflatten(-1, (count, -1))
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k, v = rotate(q), *(t.repeat_interleave(heads // kv_heads, dim=1) for t in (rotate(k), v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True
        )
        x = x + mixed.transpose(0, 1).flatten(1) @ weights[f"{at}.attention.wo.weight"].T
        h = norm(x, f"{at}.ffn_norm")
        gate, up = (h @ weights[f"{at}.feed_forward.{part}.weight"].T for part in ("w1", "w3"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"{at}.feed_forward.w2.weight"].T
    return norm(x, "norm") @ weights["output.weight"].T


@pytest.mark.parametrize("cut", ["vocabulary", "hidden"])
def test_the_cut_of_the_embedding_can_be_said(cut, tmp_path):
    """`rope_theta` of the fixture is Llama 2's or Llama 3's; what is asked for decides."""
    for name in ("llama2", "llama31"):
        out = tmp_path / name
        reshard(FIXTURES / "meta" / name, out, ReshardOptions(to="meta", mesh=Mesh.of(tp=2), meta_embedding=cut))
        whole = make_meta.weights(name)["tok_embeddings.weight"]
        for rank, part in enumerate(whole.chunk(2, dim=0 if cut == "vocabulary" else 1)):
            stored = torch.load(out / f"consolidated.{rank:02d}.pth")["tok_embeddings.weight"]
            assert torch.equal(stored, part)
        assert diff(out, FIXTURES / "meta" / name).equal
    with pytest.raises(UsageError, match="--to hf does not use --meta-embedding"):
        reshard(FIXTURES / "meta" / "llama2", tmp_path / "no", ReshardOptions(to="hf", meta_embedding="hidden"))
    with pytest.raises(UsageError, match="unknown --meta-embedding 'rows'"):
        reshard(FIXTURES / "meta" / "llama2", tmp_path / "no", ReshardOptions(to="meta", meta_embedding="rows"))
