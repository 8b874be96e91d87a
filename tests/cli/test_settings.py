"""Options are set by files and variables, in a known order, and it is said which was set where."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder inside of a project, of which the files of project and user can be written."""
    (tmp_path / "project" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "inside")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "project" / "pyproject.toml"


@pytest.fixture
def user(tmp_path):
    path = tmp_path / "config" / "shardctl" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def ranks(said):
    return json.loads(said.out)["mesh"]["ranks"]


def test_the_command_line_then_variables_then_the_project_then_the_user(say, source, project, user, monkeypatch):
    def planned(*args):
        found = say("plan", source, "--json", *args)
        assert found.code == 0, found.err
        settings = [each for each in json.loads(found.out).get("settings", []) if each["option"] == "--fsdp"]
        return ranks(found), found.err, [each["origin"] for each in settings]

    assert planned("--fsdp", 1)[1:] == ("", [])
    user.write_text("fsdp = 2\n")
    assert planned() == (2, f"setting: --fsdp 2 from {user}\n", [str(user)])
    project.write_text("[tool.shardctl]\nfsdp = 3\n")
    where = f"{project} [tool.shardctl]"
    assert planned() == (3, f"setting: --fsdp 3 from {where}\n", [where])
    project.write_text("[tool.shardctl]\nfsdp = 3\n[tool.shardctl.plan]\nfsdp = 4\n")
    where = f"{project} [tool.shardctl.plan]"
    assert planned() == (4, f"setting: --fsdp 4 from {where}\n", [where])
    monkeypatch.setenv("SHARDCTL_FSDP", "5")
    assert planned() == (5, "setting: --fsdp 5 from SHARDCTL_FSDP\n", ["SHARDCTL_FSDP"])
    monkeypatch.setenv("SHARDCTL_PLAN_FSDP", "6")
    assert planned() == (6, "setting: --fsdp 6 from SHARDCTL_PLAN_FSDP\n", ["SHARDCTL_PLAN_FSDP"])
    assert planned("--fsdp", "7") == (7, "", [])
    assert planned("--fsdp=8") == (8, "", [])


def test_every_kind_of_option_can_be_set(say, source, project, monkeypatch):
    project.write_text(
        '[tool.shardctl]\njson = true\n[tool.shardctl.plan]\ngpu = "80GB"\nmesh = "tp=2"\nseq_len = 16\n'
        'lora-targets = "q_proj"\nlora-rank = 4\nfor = "train"\n'
    )
    document = json.loads(say("plan", source).out)
    assert ranks(say("plan", source)) == 2
    assert {each["option"] for each in document["settings"]} == {
        *("--json", "--gpu", "--mesh", "--seq-len", "--lora-targets", "--lora-rank", "--for")
    }
    monkeypatch.setenv("SHARDCTL_JSON", "0")
    assert say("plan", source).out.startswith("FITS: ")
    monkeypatch.setenv("SHARDCTL_VERIFY_MERGE", "one")
    assert "add --against SRC" in say("verify", source).err, "a list of one"


def test_a_project_does_not_say_whom_to_trust(say, source, project, user):
    for key in ("attestation", "public-key", "identity", "issuer", "key", "sigstore", "policy"):
        project.write_text(f"[tool.shardctl]\n{key} = 'x'\n")
        code, _, err = say("verify", source)
        assert (code, f"sets --{key}, which a project cannot permit" in err) == (2, True)
    project.unlink()
    user.write_text("public-key = 'x'\n")
    assert "--public-key has an effect only with --attestation" in say("verify", source).err


@pytest.mark.parametrize(
    ("written", "message", "hint"),
    [
        ("gpuu = 1", "sets 'gpuu', which is no option", "did you mean gpu?"),
        ("plan = {expect = 'x'}", "[tool.shardctl.plan] sets 'expect', which is no option", ""),
        ("tp = {a = 1}", "'tp' in", "write it as on the command line"),
        ("tp = [1, 2]", "--tp takes one value", "it takes N"),
        ("search = 'perhaps'", "--search perhaps from", "write 1 or 0"),
        ("overwrite = true", "sets --overwrite, which a project cannot permit", "on the command line"),
        ("log = 'x'", "sets --log, which a project cannot permit", "on the command line"),
        ("engine = 'http://127.0.0.1:9'", "sets --engine, which a project cannot permit", "on the command line"),
        ("verify = {engine = 'vllm'}", "sets --engine, which a project cannot permit", "on the command line"),
        ("reshard = {plan = 'plan.json'}", "sets --plan, which a project cannot permit", "on the command line"),
        ("create = true", "sets --create, which a project cannot permit", "on the command line"),
        ("quiet = true", "sets --quiet, which a project cannot permit", "on the command line"),
        ("allow-expansion = true", "sets --allow-expansion, which a project cannot permit", "on the command line"),
        ("tp = 'two'", "--tp: 'two' is not a whole number", ""),
    ],
)
def test_what_is_wrong_is_said_with_its_place(say, source, project, written, message, hint):
    project.write_text(f"[tool.shardctl]\n{written}\n")
    found = say("plan", source)
    assert found.code == 2
    assert message in found.err
    assert hint in found.err
    assert str(project) in found.err


@pytest.mark.parametrize(
    "written",
    [
        *(f"against = {value!r}" for value in ("s3://bucket/x", "hf://owner/name", "owner/name", "https://host/x")),
        *(f"config = {value!r}" for value in ("/etc/passwd", "../../secret.json", "link/secret.json", "link")),
        *("complete-from = 'owner/name'", "rules = '../../secret.json'", "merge = ['own', '../../other']"),
        *("beside = ['/tmp']", "calibrate = '/etc/hostname'", 'config = "a\\u0000b"', "config = 'none.json'"),
    ],
)
def test_a_project_names_no_place_outside_of_it(say, source, project, tmp_path, written):
    (tmp_path / "secret.json").write_text("{}")
    (project.parent / "inside" / "own").mkdir()
    (project.parent / "inside" / "link").symlink_to(tmp_path)
    project.write_text(f"[tool.shardctl]\n{written}\n")
    for verb in ("inspect", "plan", "verify"):
        found = say(verb, source)
        assert found.code == 2
        assert "which is not a file or a directory of the project" in found.err


def test_a_project_names_its_own_files(say, source, project):
    config = project.parent / "inside" / "own.json"
    config.write_text((source / "config.json").read_text())
    project.write_text(f"[tool.shardctl]\nconfig = 'own.json'\n[tool.shardctl.verify]\nagainst = {str(config)!r}\n")
    found = say("inspect", source)
    assert (found.code, f"setting: --config own.json from {project}" in found.err) == (0, True)
    assert "--against" in say("settings").out


def test_no_toml_is_an_error_that_names_the_file(say, source, project):
    project.write_text("[tool.shardctl\n")
    found = say("plan", source, "--json")
    assert found.code == 2
    assert str(project) in json.loads(found.out)["error"]


def test_a_variable_that_means_nothing_is_said(say, source, project, monkeypatch):  # noqa: ARG001 - its folder
    monkeypatch.setenv("SHARDCTL_TREADS", "3")
    monkeypatch.setenv("SHARDCTL_WORKERS", "8")
    monkeypatch.setenv("SHARDCTL_THREADS", "")
    found = say("inspect", source)
    assert found.code == 0
    assert "SHARDCTL_TREADS is no setting and no variable of shardctl; did you mean SHARDCTL_THREADS?" in found.err
    assert found.err.count("SHARDCTL_") == 2


def test_settings_shows_what_counts_and_where_was_looked(say, project, user, monkeypatch):
    user.write_text("threads = 2\n")
    project.write_text("[tool.shardctl.plan]\ngpu = 'h200'\n")
    monkeypatch.setenv("SHARDCTL_PLAN_GPU", "h100-80g")
    monkeypatch.setenv("COLUMNS", "1000")
    found = say("settings")
    assert (found.code, found.err) == (0, "")
    assert found.out.splitlines() == [
        f"--threads 2 from {user} for inspect, plan, reshard, verify, attest, diff, digest",
        "--gpu h100-80g from SHARDCTL_PLAN_GPU for plan",
        f"--gpu h200 from {project} [tool.shardctl.plan] is overridden",
        f"read: {project}",
        f"read: {user}",
    ]
    document = json.loads(say("settings", "--json").out)
    assert [each["origin"] for each in document["verbs"]["plan"]] == ["SHARDCTL_PLAN_GPU", str(user)]
    assert document["verbs"]["finish"] == []
    assert [each["value"] for each in document["overridden"]] == ["h200"]
    assert document["files"] == [{"path": str(project), "found": True}, {"path": str(user), "found": True}]


def test_a_plan_is_not_followed_beside_settings_that_would_change_it(say, source, project, tmp_path):
    assert say("plan", source, "--tp", 2, "--out", tmp_path / "plan.json").code == 0
    project.write_text("[tool.shardctl]\ntp = 4\n")
    found = say("reshard", "--plan", tmp_path / "plan.json", tmp_path / "out")
    assert found.code == 2
    assert "--plan and --tp are both given" in found.err
    assert f"setting: --tp 4 from {project}" in found.err
    project.write_text("[tool.shardctl]\nthreads = 1\n")
    assert say("reshard", "--plan", tmp_path / "plan.json", tmp_path / "out").code == 0


def test_quiet_verbose_and_the_log(say, source, project, tmp_path):
    project.write_text("[tool.shardctl]\nthreads = 1\n")
    log = tmp_path / "run.log"
    found = say("verify", source, "--level", "full", "-q")
    assert (found.code, found.err) == (0, "")
    usual = say("verify", source, "--level", "full", "--log", log)
    assert "setting: --threads 1" in usual.err
    assert "begins" not in usual.err
    assert "exit code" not in usual.err
    much = say("verify", source, "--level", "full", "-v")
    assert "content of 86.7 kB begins" in much.err
    assert much.err.splitlines()[-1].startswith("exit code 0 after ")
    first, *others = log.read_text().splitlines()
    assert first.endswith(f"shardctl verify {source} --level full --log {log}")
    said = "\n".join(line.partition(" ")[2] for line in others)
    assert said.startswith("setting: --threads 1 from ")
    assert "content of 86.7 kB begins" in said
    assert "exit code 0 after " in said
    assert say("verify", tmp_path / "nowhere", "--log", log, "-q").code == 4
    later = log.read_text().splitlines()[len(others) + 1 :]
    assert any("error: " in line and "nowhere" in line for line in later), "appended, quiet or not"
    assert "exit code 4" in later[-1]
    assert say("verify", source, "--log", tmp_path / "no" / "folder").code == 6


def test_warnings_and_errors_are_said_in_quiet_too(say, tmp_path, source):
    found = say("verify", tmp_path / "nowhere", "-q")
    assert (found.code, found.err.startswith("error: ")) == (4, True)
    assert "device '80' has no unit" in say("plan", source, "--gpu", "80", "--quiet").err
    (source / "odd.pt").write_bytes(b"")
    try:
        assert "odd.pt" in say("digest", source, "-q").err
    finally:
        (source / "odd.pt").unlink()


@pytest.mark.parametrize(
    ("word", "shown"),
    [("1", "--recompute full from "), ("TRUE", "--recompute full from "), ("0", ""), ("False", ""), ("off", "")],
)
@pytest.mark.parametrize("name", ["SHARDCTL_GRADIENT_CHECKPOINTING", "SHARDCTL_PLAN_GRADIENT_CHECKPOINTING"])
def test_an_alias_that_stands_for_a_value_is_turned_on_and_off(say, monkeypatch, name, word, shown):
    monkeypatch.setenv(name, word)
    code, out, err = say("settings")
    assert (code, err) == (0, "")
    assert ("--recompute" in out, shown in out) == (bool(shown), True)
    monkeypatch.setenv(name, "maybe")
    code, _, err = say("plan", "nowhere")
    assert (code, "--gradient-checkpointing maybe is neither true nor false" in err) == (2, True)


def test_an_alias_in_a_file_is_turned_on_and_off(say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value, found in (("true", True), ("false", False)):
        (tmp_path / "pyproject.toml").write_text(f"[tool.shardctl.plan]\ngradient_checkpointing = {value}\nusers = 4\n")
        out = say("settings").out
        assert ("--recompute full from " in out, "--batch 4 from " in out) == (found, True)


def test_an_alias_that_stands_for_a_value_takes_none(say):
    code, _, err = say("plan", "nowhere", "--gradient-checkpointing=no")
    assert (code, err.splitlines()[0]) == (2, "error: --gradient-checkpointing takes no value")
