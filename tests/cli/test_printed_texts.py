"""What is printed and logged is no command to a CI job, whatever tensors are called, and shows no password."""

from __future__ import annotations

import json
import re
import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardctl.report.visible import escape_ci_commands, hide_passwords

COMMAND = re.compile(r"##\w*\[|^\s*::(?!(?:error|warning) file=)", re.MULTILINE)
"""What runners of GitHub, Azure Pipelines and TeamCity would carry out, but for shardctl's own annotations."""
NAMES = (
    *("##[set-output name=a]b", "##[add-path]/evil", "###[command]x", "##vso[task.setvariable variable=x]y"),
    *("::set-output name=a::b", "::add-mask::c", "::stop-commands::d", "##teamcity[buildNumber '1']"),
    *("lm_head.::error::e", "::warning file=x::f"),
)


@pytest.fixture
def named(tmp_path):
    """Two checkpoints of tensors with such names, one value of which differs, and the second lacks one."""
    for place, count in (("one", len(NAMES)), ("two", len(NAMES) - 1)):
        folder = tmp_path / place
        folder.mkdir()
        tensors = {name: np.full((2, 2), float(number), np.float32) for number, name in enumerate(NAMES[:count])}
        tensors[NAMES[0]][0, 0] = count
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tmp_path


class TestCiCommands:
    @pytest.mark.parametrize("github", [False, True])
    def test_no_name_of_a_tensor_is_a_command(self, say, named, monkeypatch, github):
        one, two, log = named / "one", named / "two", named / "run.log"
        if github:
            monkeypatch.setenv("GITHUB_ACTIONS", "true")
        found = ""
        for args in (
            *(["inspect", one, "--tensors"], ["inspect", one, "--show-rules"], ["diff", one, two]),
            *(["digest", one, "--tensors"], ["plan", one, "--fsdp", 2, "--detail", "tensor"]),
            *(["verify", one, "--level", "full", "--against", two], ["reshard", one, named / "out", "--fsdp", 2]),
        ):
            shown = say(*args, "-v", "--log", log)
            assert COMMAND.search(shown.out + shown.err) is None, args
            found += shown.out + shown.err
        assert COMMAND.search(log.read_text()) is None
        assert r"\u0023\u0023vso[task" in found, "the names are shown all the same"
        assert github == ("::error file=" in found)

    def test_no_name_of_a_directory_is_a_command(self, say, source, tmp_path):
        shutil.copytree(source, tmp_path / "::set-output name=a::b")
        found = say("verify", tmp_path, "--newest-good")
        assert (found.code, found.out) == (0, r"\u003a\u003aset-output name=a::b" + "\n")

    def test_json_has_the_names_as_they_are(self, say, named):
        shown = say("inspect", named / "one", "--tensors", "--json").out
        assert COMMAND.search(shown) is None
        assert {tensor["name"] for tensor in json.loads(shown)["tensors"]} == {*NAMES}
        shown = say("verify", named / "one", "--level", "full", "--against", named / "two", "--json").out
        assert COMMAND.search(shown) is None
        assert NAMES[0] in json.dumps(json.loads(shown))

    def test_an_annotation_is_a_command_and_its_message_is_none(self, say, named, monkeypatch):
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        lines = say("verify", named / "one", "--level", "full", "--against", named / "two").err.splitlines()
        commands = [line for line in lines if line.startswith("::")]
        assert len(commands) > 1
        assert all(line.startswith(("::error file=", "::warning file=")) for line in commands)


ADDRESSES = (
    *("s3://user:HUSHED@host/x", "https://user:HUSHED@host/x", "https://HUSHED@host/x", "s3://user:HUS/HED@host/x"),
    *("az://user:HUS@HED@host/x", "s3://us'er:HUS HED@host/x", "hf://user:HUSHED@huggingface.co/owner/name"),
)


class TestPasswords:
    @pytest.mark.parametrize("address", ADDRESSES)
    def test_no_output_shows_the_password_of_an_address(self, say, source, tmp_path, monkeypatch, address):
        monkeypatch.chdir(tmp_path)
        reports = ("--junit", "r.xml", "--summary", "r.md", "--report", "r.html")
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        shown = ""
        for args in (
            *(["inspect", address, "--json"], ["verify", address, *reports], ["verify", source, "--against", address]),
            *(["reshard", source, address], ["reshard", f"{address}*", "out", "--each"], ["finish", address]),
            *(["verify", source, "--engine", address], ["plan", source, "--complete-from", address]),
            *(["plan", source, "--out", address], ["digest", address], ["diff", source, address, "--json"]),
        ):
            found = say(*args, "-v", "--log", "run.log")
            assert found.code in {2, 4}, found.err
            shown += found.out + found.err
        monkeypatch.setenv("SHARDCTL_AGAINST", address)
        shown += "".join(map(str, (say("settings"), say("settings", "--json"), say("verify", source, "--json"))))
        shown += "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
        assert "://***@" in shown
        assert "HUS" not in shown
        assert "HED" not in shown

    def test_signatures_of_signed_addresses_are_hidden_and_other_texts_stay(self):
        signed = "GET https://store/x?X-Amz-Credential=a&partNumber=1&X-Amz-Signature=b, az://c/m?sv=1&SIG=c"
        assert hide_passwords(signed) == (
            "GET https://store/x?X-Amz-Credential=***&partNumber=1&X-Amz-Signature=*** az://c/m?sv=1&SIG=***"
        )
        for text in ("hf://owner/name@main", "http://127.0.0.1:8000/a@b", "s3://bucket: failed for a@b", "a@b ://"):
            assert hide_passwords(text) == text

    def test_long_hostile_texts_take_little_time(self):
        began = time.process_time()
        for text in (
            "a" * 10**5 + "://",
            "://a:" * 10**4,
            "://" + "@" * 10**5,
            "a://x:" + "y" * 10**5,
            "?sig=" * 10**4,
        ):
            hide_passwords(text + "://")
        for text in ("##" * 10**5, "\n" * 10**5, " \n" * 10**5, " " * 10**5):
            escape_ci_commands(f"{text}::##")
        assert time.process_time() - began < 5
