"""The pages of `verify` and `reshard` say what was found and done, and what is to be done next."""

import html
import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from shardctl.cli.program import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
STORED = FIXTURES / "peft" / "hf" / "llama"


@pytest.fixture
def cut(tmp_path):
    assert run(["reshard", str(STORED), str(tmp_path / "cut"), "--tp", "2"]) == 0
    return tmp_path / "cut"


def test_reshard_says_what_went_where(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert run(["reshard", str(STORED), str(tmp_path / "out"), "--tp", "2", "--report", str(page)]) == 0
    digest = capsys.readouterr().out.split()[-1]
    text = html.unescape(page.read_text())
    assert f"{digest}</code> is the source's, too" in text
    for rank in (1, 2):
        assert f"model.safetensors to shard-0000{rank}-model-00001-of-00001.safetensors: " in text
    assert f"shardctl verify {tmp_path}/out --level full --against {STORED}" in text
    assert run(["reshard", str(STORED), str(tmp_path / "out"), "--tp", "2", "--report", str(page)]) == 0
    assert "the destination holds exactly this result" in page.read_text()


def test_a_cast_has_two_digests(tmp_path):
    page = tmp_path / "page.html"
    assert run(["reshard", str(STORED), str(tmp_path / "out"), "--dtype", "fp16", "--report", str(page)]) == 0
    assert page.read_text().count("<code>shardctl1:") == 2


@pytest.mark.parametrize("option", [["--dry-run"], ["--each"], ["--worker", "0/2"], ["--engine", "ray"]])
def test_a_report_is_of_one_conversion(tmp_path, capsys, option):
    page = tmp_path / "page.html"
    assert run(["reshard", str(STORED), str(tmp_path / "out"), *option, "--report", str(page)]) == 2
    assert "--report shows one conversion" in capsys.readouterr().err
    assert not page.exists()


@pytest.mark.parametrize("verb", ["verify", "reshard"])
def test_another_suffix_is_refused(tmp_path, capsys, verb, cut):
    assert (
        run([verb, str(cut), *([str(tmp_path / "out")] * (verb == "reshard")), "--report", str(cut / "config.json")])
        == 2
    )
    assert "--report writes HTML" in capsys.readouterr().err


def test_verify_says_what_it_found_and_what_it_did_not_look_at(tmp_path, cut):
    page = tmp_path / "page.html"
    assert run(["verify", str(cut), "--report", str(page)]) == 0
    assert "What was not checked" in page.read_text()
    assert f"shardctl verify {cut} --level full" in page.read_text()
    shard = next(cut.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert run(["verify", str(cut), "--level", "full", "--report", str(page)]) == 3
    text = page.read_text()
    assert "NOT OK: " in text
    assert "content failed" in text
    assert "model.norm.weight" in text
    assert 'class="no">NOT OK' in text


def test_a_checkpoint_that_cannot_be_read_has_a_page_too(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("of yesterday")
    folder = tmp_path / "<script>alert(1)"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"no checkpoint")
    assert run(["verify", str(folder), "--report", str(page)]) == 4
    text = page.read_text()
    assert "NOT VERIFIED" in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_inspect_shows_where_the_bytes_are_without_reading_values(tmp_path):
    page, source = tmp_path / "page.html", FIXTURES / "modelopt" / "nvfp4"
    assert run(["inspect", str(source), "--report", str(page)]) == 0
    text = html.unescape(page.read_text())
    assert "lm_head.weight (BF16): 4.0 KiB, 12.9 %" in text
    assert re.search(r"<td>model.layers.\*.mlp.up_proj.weight</td><td>U8</td><td class=\"n\">1</td>", text)
    assert "<dt>quant_algo</dt><dd>NVFP4</dd>" in text
    assert "<dt>quantized weights</dt><dd>7</dd>" in text
    assert "model.safetensors: 35.0 kB" in text
    assert "no value was read" in text
    assert "Values" not in text
    for outside in ("http://", "https://", "<script", "src="):
        assert outside not in text, "a page needs no network"
    assert run(["inspect", str(source), "--stats", "--report", str(page)]) == 0
    text = page.read_text()
    assert "7 quantized weights were decoded to F32" in text
    assert re.search(r"<td>model.layers.0</td><td class=\"n\">41,088</td><td class=\"n\">12.0143</td>", text)
    tied = tmp_path / "tied"
    config = {**json.loads((STORED / "config.json").read_text()), "tie_word_embeddings": True}
    tied.mkdir()
    (tied / "config.json").write_text(json.dumps(config))
    arrays = load_file(next(STORED.glob("*.safetensors")))
    arrays.pop("lm_head.weight", None)
    save_file(arrays, tied / "model.safetensors")
    assert run(["inspect", str(tied), "--report", str(page)]) == 0
    assert "<td>lm_head.weight</td><td>model.embed_tokens.weight</td>" in page.read_text()
    assert run(["inspect", str(FIXTURES / "configs_public" / "llama-3.1-8b.json"), "--report", str(page)]) == 0
    assert "a config without weights" in page.read_text()
