"""The pages of `verify` and `reshard` say what was found and done, and what is to be done next."""

import html
from pathlib import Path

import pytest

from shardctl.cli.program import run

STORED = Path(__file__).parents[2] / "fixtures/peft/hf/llama"


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
