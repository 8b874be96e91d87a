import io
import json
import time
from pathlib import Path

from rich.console import Console

from shardctl.cli import progress
from shardctl.report.meter import TransferMeter


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def metered(total=1000):
    clock = Clock()
    meter = TransferMeter(clock=clock)
    meter.begin(total, 4)
    return meter, clock


def test_bytes_of_an_earlier_run_count_as_done_but_not_for_the_rate():
    meter, clock = metered()
    meter.advance(500, kept=True)
    clock.now += 3600  # reading them again takes time, too
    meter.sample()
    meter.advance(1)
    meter.sample()
    meter.advance(99)
    clock.now += 2
    meter.sample()
    assert (meter.done_bytes, meter.kept_bytes, meter.rate) == (600, 500, 49.5)
    assert round(meter.seconds_left, 3) == round(400 / 49.5, 3)


def test_the_rate_falls_while_nothing_moves():
    meter, clock = metered()
    for nbytes in (1, 100, 0, 0):
        meter.advance(nbytes)
        meter.sample()
        clock.now += 5
    assert round(meter.rate, 3) == round(100 / 15, 3)


def test_the_rate_is_that_of_the_last_half_minute():
    meter, clock = metered()
    for _ in range(120):  # a minute of finding old bytes in place, half a second at a time
        meter.advance(5, kept=True)
        clock.now += 0.5
        meter.sample()
    for _ in range(60):
        meter.advance(2)
        clock.now += 0.5
        meter.sample()
    assert round(meter.rate, 6) == 4.0


def test_nothing_is_promised_before_anything_is_known():
    meter, _ = metered()
    assert (meter.rate, meter.seconds_left) == (0.0, None)
    meter.sample()
    assert meter.seconds_left is None


def test_a_line_is_due_every_5_percent_or_30_seconds():
    meter, clock = metered()
    assert not meter.is_line_due()
    meter.advance(50)
    assert not meter.is_line_due(), "lines do not flood: at least a second lies between two"
    clock.now += 1
    assert meter.is_line_due()
    assert not meter.is_line_due()
    meter.advance(49)
    clock.now += 29
    assert not meter.is_line_due()
    clock.now += 1
    assert meter.is_line_due()
    clock.now += 30
    assert meter.is_line_due(), "a job that stands still says so too"


def test_a_line_says_bytes_rate_time_files_and_memory():
    meter, clock = metered(91_000_000)
    meter.advance(500_000)
    meter.sample()
    meter.advance(45_000_000)
    meter.finish_file()
    clock.now += 10
    meter.sample()
    assert meter.format_line("reshard", 118_111_600) == (
        "reshard: 45.5 MB of 91.0 MB (50 %), 4.5 MB/s, 10.1 s left, 1 of 4 files, 0.11 GiB held\n"
    )


def test_a_task_of_unknown_size_says_what_is_known():
    clock = Clock()
    meter = TransferMeter(clock=clock)
    meter.advance(1_000_000)
    meter.sample()
    assert meter.format_line("verify", 0) == "verify: 1.0 MB\n", "one sample is no rate"
    meter.advance(3_000_000)
    clock.now += 30
    meter.sample()
    assert meter.is_line_due()
    assert meter.format_line("verify", 0) == "verify: 4.0 MB, 100.0 kB/s\n"


def test_no_time_is_promised_from_the_first_moments():
    meter, clock = metered(1000)
    for _ in range(3):
        meter.advance(10)
        meter.sample()
        assert meter.seconds_left is None
        clock.now += 0.8
    meter.advance(10)
    meter.sample()
    assert round(meter.seconds_left, 3) == round(960 / (30 / 2.4), 3)


def test_a_phase_begins_anew_and_says_its_name_and_where_it_is():
    meter, clock = metered(1000)
    meter.advance(1000)
    meter.begin(4_000_000, phase="content")
    assert (meter.done_bytes, meter.rate, meter.seconds_left) == (0, 0.0, None)
    meter.place = "model-00002-of-00004.safetensors"
    meter.advance(1_000_000)
    meter.sample()
    clock.now += 2
    meter.advance(1_000_000)
    meter.sample()
    assert meter.format_line("verify", 0) == (
        "verify: content, 2.0 MB of 4.0 MB (50 %), 500.0 kB/s, 4.00 s left, model-00002-of-00004.safetensors\n"
    )


def test_a_phase_of_unknown_size_says_where_it_is_and_no_rate():
    meter, clock = metered()
    meter.begin(0, phase="forward")
    meter.place = "model.layers.3"
    assert not meter.is_line_due()
    clock.now += 5
    assert meter.is_line_due()
    assert meter.format_line("verify", 0) == "verify: forward, model.layers.3\n"
    clock.now += 5
    assert not meter.is_line_due(), "the place is the same"


def test_a_resumed_run_says_once_what_was_there():
    meter, _ = metered(4_000_000)
    meter.advance(100_000)  # a band that no journal has, before those that one has
    meter.advance(2_000_000, kept=True)
    meter.sample()
    assert not meter.is_resumed(), "more may be found"
    meter.advance(1_000_000, kept=True)
    meter.sample()
    assert not meter.is_resumed()
    meter.advance(1)
    meter.sample()
    assert (meter.is_resumed(), meter.is_resumed()) == (True, False)
    assert meter.format_resumption("reshard") == "reshard: resuming, 3.0 MB of 4.0 MB are there\n"


def test_time_in_which_bytes_of_an_earlier_run_are_found_is_none_of_the_rest():
    """A few bands are new before the others are found; 5 seconds of finding had made 8 minutes of half a minute."""
    meter, clock = metered(1000)
    meter.advance(10)
    meter.sample()
    for _ in range(10):
        meter.advance(40, kept=True)
        clock.now += 0.5
        meter.sample()
        assert meter.seconds_left is None
    for _ in range(10):
        meter.advance(20)
        clock.now += 0.5
        meter.sample()
    assert meter.rate == 40
    assert meter.seconds_left == (1000 - 610) / 40


def test_the_bar_fits_one_line_and_keeps_the_time_left():
    """At 80 columns it took two lines, and the time left was cut to `0:0...`."""
    clock = Clock()
    meter = TransferMeter(clock=clock)
    assert meter.render_bar(60, 1 << 30).plain == "reading headers  1.00 GiB"
    meter.begin(2_900_000_000_000, 1_204, phase="re-checking")
    meter.advance(700_000_000_000, kept=True)
    meter.place = "some/folder/model-00002-of-01204.safetensors"
    for _ in range(7):
        meter.advance(123_456_789)
        meter.sample()
        clock.now += 0.5
    meter.finish_file()
    phase, left, rate = "re-checking", "2:28:27 left", "246.9 MB/s"
    meter._sampled_since -= 2
    for columns in range(1, 240):
        line = meter.render_bar(columns, 3 << 30)
        assert line.cell_len <= columns
        assert "0:0..." not in line.plain
        if columns >= 48:
            assert all(each in line.plain for each in (phase, "24 %", left, rate)), (columns, line.plain)
    lines = {columns: meter.render_bar(columns, 3 << 30).plain for columns in (60, 80, 120)}
    bar, place = "━" * 16, "some/folder/model-000…"
    assert lines[60] == f"{phase}  {'━' * 15}  24 %  {left}  {rate}"
    assert lines[80] == f"{phase}  {bar}  24 %  {left}  {rate}  1/1,204 files"
    assert lines[120] == f"{phase}  {bar}  24 %  {left}  {rate}  700.9 GB of 2.9 TB  1/1,204 files  {place}"
    page = (Path(__file__).parents[2] / "docs/benchmarks/progress.md").read_text(encoding="utf-8")
    assert all(f"\n{line}\n" in page for line in lines.values())
    shown = Console(width=60, file=io.StringIO(), color_system=None)
    shown.print(meter.render_bar(60, 0))
    assert shown.file.getvalue().count("\n") == 1


def test_a_terminal_shows_one_line_at_any_width(monkeypatch):
    monkeypatch.setattr(progress, "measure_held_memory", lambda: 3 << 30)
    for columns in (60, 80, 120):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, width=columns, color_system=None)
        view = progress._TerminalBar("reshard", console)
        view.meter.begin(9_000_000_000, 12)
        view.meter.place = "model-00001-of-00012.safetensors"
        view.meter.advance(4_000_000_000)
        view._live.refresh()
        view.close()
        assert "44 %" in screen.getvalue()
        assert screen.getvalue().count("\x1b[1A") == 1, "the one line that was drawn is cleared"


def test_what_an_interrupted_run_wrote_is_checked_in_a_phase_of_its_own(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    import shardctl
    from shardctl.base.errors import Interrupted

    (tmp_path / "source").mkdir()
    save_file({f"w{i}": np.full((300_000,), i, np.float32) for i in range(40)}, tmp_path / "source/model.safetensors")
    seen = []

    def stop_midway(update):
        seen.append(update)
        if update.done_bytes > update.total_bytes // 2 and not update.phase:
            raise Interrupted("stopped by the test", signal=2)

    def convert(callback):
        return shardctl.reshard(tmp_path / "source", tmp_path / "out", dtype="bf16", threads=1, progress=callback)

    try:
        convert(stop_midway)
    except Interrupted:
        pass
    else:
        raise AssertionError("the first run was to stop")
    assert {update.phase for update in seen} == {""}
    seen.clear()
    convert(seen.append)
    phases = list(dict.fromkeys(update.phase for update in seen))
    assert phases == ["re-checking", ""]
    checked = [update for update in seen if update.phase]
    moved = [update for update in seen if not update.phase]
    assert checked[-1].total_bytes > 0
    assert checked[-1].kept_bytes == checked[-1].files == 0
    assert moved[-1].kept_bytes == checked[-1].total_bytes, "all of it was intact"
    assert moved[-1].done_bytes == moved[-1].total_bytes > moved[-1].kept_bytes
    assert moved[-1].files_done == moved[-1].files == 1


def test_verify_and_digest_say_phase_share_and_file(monkeypatch, say, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    from shardctl.report import meter

    monkeypatch.setattr(progress, "_SAMPLING_INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(meter, "_MIN_LINE_INTERVAL_SECONDS", 0.0)
    save_file({f"w{i}": np.full((200_000,), i, np.float32) for i in range(40)}, tmp_path / "model.safetensors")
    for arguments, begin in ((["verify", "--level", "full"], "verify: content, "), (["digest"], "digest: ")):
        said = say(*arguments, tmp_path, "--threads", "1")
        assert said.code == 0
        lines = [line for line in said.err.splitlines() if line.startswith(begin) and "%" in line]
        assert lines, arguments
        assert all(" of 32.0 MB (" in line and "model.safetensors" in line for line in lines)


def test_lines_and_records_come_while_the_work_goes_on(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_SAMPLING_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr("shardctl.report.meter._MIN_LINE_INTERVAL_SECONDS", 0.0)
    said = {"out": "", "err": ""}

    def wait_for(stream, text):
        deadline = time.monotonic() + 60
        while text not in said[stream]:
            assert time.monotonic() < deadline, said
            time.sleep(0.01)
            found = capfd.readouterr()
            said["out"], said["err"] = said["out"] + found.out, said["err"] + found.err

    lines = ("reshard: 50 bytes of 100 bytes (50 %)", "reshard: 100 bytes of 100 bytes (100 %)")
    for stream, expected in (("err", lines), ("out", ('"done_bytes": 50,', '"done_bytes": 100,'))):
        with progress.watch_progress("reshard", json=stream == "out") as watch:
            watch.begin(100, 1)
            for text in expected:
                watch.advance(50)
                wait_for(stream, text)
    records = [json.loads(line) for line in said["out"].splitlines()]
    assert set(records[0]) == {
        *("schema", "status", "phase", "done_bytes", "total_bytes", "kept_bytes", "files_done", "files", "rate_bytes"),
        *("seconds_left", "held_bytes"),
    }
    assert (records[0]["status"], records[-1]["done_bytes"]) == ("running", 100)


def test_memory_held_is_known_on_linux():
    assert progress.measure_held_memory() > 1 << 20 or progress.measure_held_memory() == 0
