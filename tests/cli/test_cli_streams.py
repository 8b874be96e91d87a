import os
import pty
import subprocess
import sys

import pytest
from cli_checkpoints import environment, shardctl, start


def test_colour_follows_the_environment(source):
    assert "\x1b[" not in shardctl("inspect", source).stdout
    assert "\x1b[" in shardctl("inspect", source, FORCE_COLOR="1", TERM="xterm-256color").stdout
    coloured = shardctl("diff", source, source, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color").stdout
    assert "\x1b[3" not in coloured


def test_what_colour_says_the_words_say_too(source):
    plain = shardctl("inspect", source).stdout
    coloured = shardctl("inspect", source, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert coloured.replace("\x1b[1m", "").replace("\x1b[0m", "") == plain


def test_long_paths_are_neither_wrapped_nor_cut(source, tmp_path):
    place = tmp_path / ("long-" * 40)
    place.mkdir()
    os.link(source / "model.safetensors", place / "model.safetensors")
    for columns in ("20", "80"):
        assert shardctl("inspect", place, COLUMNS=columns).stdout.splitlines()[1] == str(place)
        assert shardctl("digest", place, COLUMNS=columns).stdout.endswith(f"  {place}\n")


def test_a_reader_who_leaves_changes_neither_the_work_nor_its_exit_code(source, tmp_path):
    assert shardctl("reshard", source, tmp_path / "out", "--dtype", "bf16").returncode == 0
    read, write = os.pipe()
    os.close(read)
    try:
        with start("diff", source, tmp_path / "out", stdout=write) as process:
            _, err = process.communicate(timeout=300)
    finally:
        os.close(write)
    assert (process.returncode, err) == (3, "")


def test_a_reader_who_has_enough_of_the_help_leaves_in_peace():
    read, write = os.pipe()
    os.close(read)
    try:
        with start("verify", "--help", stdout=write) as process:
            _, err = process.communicate(timeout=300)
    finally:
        os.close(write)
    assert (process.returncode, err) == (0, "")


def test_without_a_stdout_the_exit_code_still_answers(source):
    command = f'"{sys.executable}" -m shardctl inspect "{source}" >&-'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment(), check=False)  # noqa: S602
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")  # noqa: PTH110
def test_output_that_is_lost_is_an_error(source):
    with open("/dev/full", "w") as full, start("inspect", source, stdout=full) as process:  # noqa: PTH123
        _, err = process.communicate(timeout=300)
    assert process.returncode == 6
    assert err.startswith("error: No space left on device\n")


def test_a_locale_without_blocks_gets_other_characters(source):
    done = shardctl("plan", source, "--tp", "2", "--detail", "rank", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "########################" in done.stdout


def test_names_that_are_not_text_are_escaped(tmp_path, source):
    place = os.fsencode(tmp_path) + b"/not-utf8-\xff"
    os.mkdir(place)  # noqa: PTH102
    os.link(source / "model.safetensors", place + b"/model.safetensors")
    done = shardctl("inspect", os.fsdecode(place))
    assert done.returncode == 0, done.stderr
    assert "not-utf8-\\udcff" in done.stdout


def test_a_person_at_a_terminal_sees_a_bar_that_goes_away(source, tmp_path):
    controller, terminal = pty.openpty()
    args = [sys.executable, "-m", "shardctl", "reshard", str(source), str(tmp_path / "out")]
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=terminal, text=True, env=environment(TERM="xterm-256color")
    ) as process:
        os.close(terminal)
        out, _ = process.communicate(timeout=300)
    seen = b""
    try:
        while part := os.read(controller, 65536):
            seen += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(controller)
    assert process.returncode == 0
    assert b"\x1b[?25l" in seen, "the cursor is hidden while the bar moves"
    assert b"\x1b[?25h" in seen, "and shown again"
    assert "\x1b" not in out


def left_terminal(*args, both):
    """A run whose terminal goes away while it begins; without SIGHUP, as where it is no controlling terminal."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "shardctl", *map(str, args)]
    out = terminal if both else subprocess.PIPE
    with subprocess.Popen(command, stdout=out, stderr=terminal, env=environment(TERM="xterm-256color")) as process:
        os.close(terminal)
        os.close(controller)
        said, _ = process.communicate(timeout=300)
    return process.returncode, said


@pytest.mark.parametrize("both", [True, False], ids=["all", "stderr"])
def test_a_terminal_that_goes_away_changes_neither_the_work_nor_its_exit_code(source, tmp_path, both):
    assert left_terminal("reshard", source, tmp_path / "out", both=both)[0] == 0
    assert (tmp_path / "out" / "shardctl.json").exists()
    (tmp_path / "out" / "tokenizer.json").write_text("[]")
    assert left_terminal("verify", tmp_path / "out", both=both)[0] == 3


def test_help_for_a_terminal_that_goes_away_ends_in_peace():
    assert left_terminal("verify", "--help", both=True)[0] == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")  # noqa: PTH110
def test_talk_that_is_lost_does_not_fail_the_work(source, tmp_path):
    with open("/dev/full", "w") as full, start("reshard", source, tmp_path / "out", stderr=full) as process:  # noqa: PTH123
        process.communicate(timeout=300)
    assert process.returncode == 0


def test_without_a_terminal_nothing_moves_the_cursor(source, tmp_path):
    done = shardctl("reshard", source, tmp_path / "out", FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0
    *progress, suggestion = done.stderr.splitlines()
    assert all(line.startswith("reshard: ") for line in progress), "a slow machine says how far it is"
    assert suggestion.startswith("next: shardctl verify ")
    assert "\x1b" not in done.stderr
