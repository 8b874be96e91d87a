from xml.etree import ElementTree as ET

from rich.text import Text

from shardctl.base.errors import MachineError
from shardctl.report.annotations import format_github_annotations
from shardctl.report.junit import build_junit_report
from shardctl.report.summary import format_summary
from shardctl.report.verification import SHOWN, render_verification
from shardctl.report.visible import escape_control_characters
from shardctl.verbs.verify import LevelResult, VerifyResult
from shardctl.verify.finding import CheckFinding


def verified(*findings):
    level = LevelResult("content", tensors=3, nbytes=10**9, seconds=2.0)
    level.add(iter(findings))
    return VerifyResult("a|b", "", "", (level, LevelResult("identity", "skipped", "no source")))


def lines(result):
    return [text.plain for text in render_verification(result).renderables if isinstance(text, Text)]


ERROR = CheckFinding("error", "digest", "w has changed", "w", "f.safetensors", "[0:1]")
WARNING = CheckFinding("warning", "values", "w holds 1 NaN", "w")


def test_errors_come_before_warnings_and_say_the_place_that_the_message_leaves_out():
    assert lines(verified(WARNING, ERROR)) == [
        "NOT OK: 1 of 3 tensors changed: w in f.safetensors; 1 warning",
        "skipped: identity: no source",
        "error: [digest] w has changed",
        "    file f.safetensors, box [0:1]",
        "warning: [values] w holds 1 NaN",
    ]


def test_warnings_alone_do_not_fail():
    assert lines(verified(WARNING))[0] == "ok, but skipped: identity; 1 warning"


def test_a_thousand_findings_are_counted_and_not_all_shown():
    shown = lines(verified(*[WARNING] * 1000))
    assert len(shown) == 1 + SHOWN + 2
    assert shown[-1] == f"and {1000 - SHOWN} more findings; --json lists them all"
    assert shown[0] == "ok, but skipped: identity; 1,000 warnings"


def test_junit_is_xml_whatever_the_names_hold():
    nasty = CheckFinding("error", "digest", "\x1b[2J\x00 <w> ]]> & \ud800 \ufffe", "w")
    root = ET.fromstring(build_junit_report(verified(nasty, WARNING)))  # noqa: S314 - our own text
    failure = root.find("testsuite/testcase/failure")
    assert failure.get("message") == "\ufffd[2J\ufffd <w> ]]> & \ufffd \ufffd"
    assert root.find("testsuite/system-out").text == "warning: w holds 1 NaN; tensor w"
    assert root.find("testsuite[@name='identity']/testcase/skipped").get("message") == "no source"


def test_a_level_has_one_case_of_the_same_name_whatever_it_finds():
    cases = []
    for findings in ([], [ERROR], [ERROR, CheckFinding("error", "values", "w holds 1 NaN", "w")]):
        root = ET.fromstring(build_junit_report(verified(*findings)))  # noqa: S314 - our own text
        cases.append([(case.get("classname"), case.get("name")) for case in root.iter("testcase")])
    assert cases == [[("shardctl.content", "content"), ("shardctl.identity", "identity")]] * 3
    assert root.find("testsuite").get("failures") == "1"
    failure = root.find("testsuite/testcase/failure")
    assert failure.get("message") == "w has changed (and 1 more)"
    assert failure.text.count("\n") == 1


def test_what_could_not_be_finished_is_no_failure_in_any_report():
    level = LevelResult("load", tensors=3)
    level.give_up(MachineError("cuda:0 has too little free memory", hint="use cpu"))
    unfinished = VerifyResult("a", "", "", (LevelResult("structure"), level))
    assert lines(unfinished) == [
        "NOT VERIFIED: load could not be finished",
        "not finished: load: cuda:0 has too little free memory; use cpu",
    ]
    root = ET.fromstring(build_junit_report(unfinished))  # noqa: S314 - our own text
    assert (root.get("errors"), root.get("failures"), root.get("skipped")) == ("1", "0", "0")
    assert root.find("testsuite[@name='load']/testcase/error").get("message").startswith("cuda:0 has too little")
    assert format_summary(unfinished).startswith("### shardctl verify: NOT VERIFIED: load could not be finished\n")
    assert format_github_annotations(unfinished) == (
        "::error file=a,title=shardctl load::cuda:0 has too little free memory; use cpu\n"
    )
    assert (unfinished.exit_code, unfinished.ok) == (7, False)
    failed = LevelResult("content")
    failed.add(iter([ERROR]))
    assert VerifyResult("a", "", "", (failed, level)).exit_code == 3


def test_markdown_cells_stay_cells():
    text = format_summary(verified(CheckFinding("error", "digest", "a|b\n<script>", "w_x_")))
    assert "| error | digest | a\\|b\\\\n\\<script\\> |  | w\\_x\\_ |  |\n" in text
    assert "skipped: no source" in text


def test_text_is_left_alone_unless_it_steers():
    assert escape_control_characters("layer.0 [2, 3] é 模型") == "layer.0 [2, 3] é 模型"
    assert escape_control_characters("\u2028\u200f\ud800\x9b") == "\\u2028\\u200f\\ud800\\x9b"
