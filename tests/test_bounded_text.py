"""Small text files are bounded before they are parsed: size, nesting, and the memory that their values would take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardctl.base.errors import SourceError, UsageError
from shardctl.cli.program import run
from shardctl.storage.bounded_text import CONFIG_TEXT, RULE_TEXT, TextLimits, parse_json, parse_toml, read_file

SMALL = TextLimits(size=1000, memory=20_000, depth=4)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (b"[" * 5 + b"]" * 5, "deeper than 4 levels"),
        (b'{"a":' * 5 + b"1" + b"}" * 5, "deeper than 4 levels"),
        (b"[" + b"[]," * 300 + b"0]", "KiB of memory"),
        (b'"' + b"a" * 1000 + b'"', "at most 1,000 are read"),
        (b'["]]]]", [[[["\\"', "deeper than 4 levels"),
        (b"\xff", "not JSON"),
        (b'{"a": ', "not JSON"),
        (b"9" * 5000, "at most 1,000"),
    ],
)
def test_json_beyond_a_limit_is_refused_before_it_is_parsed(text, fragment):
    with pytest.raises(SourceError, match=fragment) as caught:
        parse_json(text, "c.json", SMALL)
    assert caught.value.message.startswith("c.json ")


def test_brackets_and_commas_in_strings_are_no_nesting():
    said = {"template": "[{" * 50 + '"\\', "deep": [[[1]]]}
    assert parse_json(json.dumps(said).encode(), "c.json", SMALL) == said


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("a." * 100_000 + "b = 1", "more than 32 parts"),
        ("[" + "a . " * 40 + "b]", "more than 32 parts"),
        ('"a" . ' * 40 + "b = 1", "more than 32 parts"),
        ("a = " + "[" * 900 + "]" * 900, "deeper than 16 levels"),
        ("a = [" + "[]," * 1_300_000 + "]", "GiB of memory"),
        ("".join(f"a{i}.b.c.d = 1\n" for i in range(250_000)), "at most 4,194,304|GiB of memory"),
        ("a = " + "9" * 5000, "4,300 digits"),
        ("a = 1\na = 2", "not TOML"),
    ],
)
def test_toml_beyond_a_limit_is_refused_before_it_is_parsed(text, fragment):
    with pytest.raises(UsageError, match=fragment):
        parse_toml(text.encode(), "r.toml", RULE_TEXT, UsageError)


def test_dots_in_strings_and_comments_are_no_keys():
    name = "model." * 40 + "weight"
    text = f"# it's {name}\n[rules]\n\"{name}\" = ['''{name}''']  # {name}\n'{name}x' = [\"\"\"{name}\"\"\"]\n"
    assert parse_toml(text.encode(), "r.toml", RULE_TEXT, UsageError) == {"rules": {name: [name], name + "x": [name]}}


@pytest.mark.parametrize("piece", ['"', '"\\"', '"""', "'''", "a", "a.", '"""\\"', '"""a', "a .", "1"])
def test_looking_for_keys_takes_time_linear_in_the_text(piece):
    text = (piece * RULE_TEXT.size)[: RULE_TEXT.size]
    with pytest.raises(UsageError):
        parse_toml(text.encode(), "r.toml", RULE_TEXT, UsageError)


def test_a_file_is_not_read_beyond_its_limit():
    with pytest.raises(SourceError, match="at most 1,000"):
        read_file(Path("/dev/zero"), SMALL)


# As a user meets it


def checkpoint(root: Path) -> Path:
    import torch

    root.mkdir()
    torch.save({"w": torch.zeros(4)}, root / "pytorch_model.bin")
    return root


HUGE = b"[" + b"[]," * ((CONFIG_TEXT.size >> 1) // 3) + b"0]"


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("config.json", HUGE, "GiB of memory"),
        ("config.json", b" " * (CONFIG_TEXT.size + 1), "at most 16,777,216"),
        ("config.json", b'{"a":' * 900 + b"1" + b"}" * 900, "deeper than 64"),
        ("shardctl.json", b"[" + b"[]," * 6_000_000 + b"0]", "GiB of memory"),
    ],
)
def test_a_source_with_such_a_file_ends_with_exit_4(tmp_path, capsys, name, content, fragment):
    source = checkpoint(tmp_path / "m")
    (source / name).write_bytes(content)
    assert run(["inspect", str(source)]) == 4
    assert fragment in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "name", "content", "fragment"),
    [
        ("--rules", "r.toml", b"a." * 100_000 + b"b = 1", "more than 32 parts"),
        ("--rules", "r.toml", b" " * (RULE_TEXT.size + 1), "at most 4,194,304"),
        ("--plan", "p.json", HUGE, "GiB of memory"),
        ("--plan", "p.json", b"[" * 900 + b"]" * 900, "deeper than 32"),
    ],
)
def test_such_a_file_that_a_person_gave_ends_with_exit_2(tmp_path, capsys, option, name, content, fragment):
    source = checkpoint(tmp_path / "m")
    (tmp_path / name).write_bytes(content)
    arguments = [] if option == "--plan" else [str(source)]
    assert run(["reshard", *arguments, str(tmp_path / "out"), option, str(tmp_path / name)]) == 2
    assert fragment in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_what_is_refused_took_little_memory(tmp_path):
    """15 MB of brackets took 400 MB, and 90 MB 2.3 GB."""
    (tmp_path / "config.json").write_bytes(b'{"model_type": ' + b"[]," * 5_000_000)
    program = (
        "import sys\nfrom shardctl.cli.program import run\ncode = run(sys.argv[1:])\n"
        "print(code, *(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", str(tmp_path)], capture_output=True, text=True, check=True
    )
    code, kilobytes = map(int, done.stdout.split()[-2:])
    assert code == 4
    assert kilobytes < 300 << 10


@pytest.mark.parametrize(
    "text",
    [
        rb'{"a": "\ud800"}',
        rb'{"\udfff": 1}',
        b'["\xed\xa0\x80"]',
        rb'["\udc00\ud800"]',
        '["\ud800"]'.encode("utf-16", "surrogatepass"),
    ],
)
def test_half_of_a_surrogate_pair_is_not_text(text):
    with pytest.raises(SourceError, match="half of a surrogate pair"):
        parse_json(text, "x.json", SMALL)


@pytest.mark.parametrize("text", [rb'["\ud83d\ude00"]', '["😀"]'.encode(), '["😀 \\u00e9"]'.encode("utf-16")])
def test_whole_characters_are(text):
    assert parse_json(text, "x.json", SMALL)[0].startswith("😀")
