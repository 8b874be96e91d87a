"""`verify --policy` lists everything in a directory that somebody does not allow."""

from __future__ import annotations

import json
import pickle
import zipfile

import numpy as np
import pytest
from cli_checkpoints import llama
from safetensors.numpy import save_file

CARD = "---\nlanguage: en\nlicense: Apache-2.0\n---\n# A model\n"
STRICT = """
code_files = "forbid"
auto_map = "forbid"
pickles = "forbid"
dtypes = ["F32"]
licenses = ["apache-2.0"]
"""


@pytest.fixture
def model(tmp_path):
    place = llama(tmp_path / "llama")
    (place / "README.md").write_text(CARD)
    return place


@pytest.fixture
def judge(model, tmp_path, say):
    """Gives the exit code and the findings of a policy, each as its check and its message."""

    def call(policy=STRICT, *options):
        (tmp_path / "policy.toml").write_text(policy)
        done = say("verify", model, "--policy", tmp_path / "policy.toml", "--json", *options)
        if done.code not in {0, 3}:
            return done.code, done.err
        level = next(each for each in json.loads(done.out)["levels"] if each["name"] == "policy")
        return done.code, [(each["check"], each["message"]) for each in level["findings"]]

    return call


def test_what_is_allowed_passes_and_the_verdict_says_so(model, judge, tmp_path, say):
    assert judge() == (0, [])
    done = say("verify", model, "--policy", tmp_path / "policy.toml", "--level", "full")
    assert "within the policy, every byte read" in done.out


def write_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02.")


def write_objects(path):
    with path.open("wb") as file:
        np.save(file, np.array([{}], object), allow_pickle=True)


def edit_config(path, **changes):
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(said | changes))


FILES = {
    "code_files modeling_x.py": lambda path: path.write_text("x = 1\n"),
    "code_files setup": lambda path: path.write_text("#!/bin/sh\n"),
    "code_files kernel.SO": lambda path: path.write_bytes(b"x"),
    "code_files weights.dat": lambda path: path.write_bytes(b"\x7fELF\x02"),
    "auto_map config.json names modeling_x.X": lambda path: edit_config(path, auto_map={"AutoModel": "modeling_x.X"}),
    "auto_map part/config.json names o/r--m.X": lambda path: edit_config(
        path, a={"auto_map": {"AutoModel": "o/r--m.X"}}
    ),
    "auto_map tokenizer_config.json names t.Fast": lambda path: edit_config(path, auto_map={"A": [None, "t.Fast"]}),
    "auto_map processor_config.json cannot be read": lambda path: path.write_text("{"),
    "pickles training_args.bin": lambda path: path.write_bytes(b""),
    "pickles notes": lambda path: path.write_bytes(pickle.dumps({})),
    "pickles old": lambda path: path.write_bytes(pickle.dumps({}, protocol=2)),
    "pickles state": write_zip,
    "pickles rows.npy": write_objects,
    "dtypes part/model.safetensors has tensors of the type F16": lambda path: save_file(
        {"w": np.zeros(2, np.float16)}, path
    ),
}
"""Each finding, and what makes its file."""
CARDS = {
    "---\nlicense: mit\n---\n": "the licence is mit",
    "---\r\nlicense: other\r\nlicense_name: llama3.1\r\n---\r\n": "the licence is llama3.1",
    "---\nlicense: [apache-2.0, gpl-3.0]\n---\n": "the licence is gpl-3.0",
    "---\nlicense: !!bool x\n---\n": "the licence is x",
    "---\na: &a [x, x]\nb: &b [*a, *a]\nlicense: [[*b, *b], {c: d}]\n---\n": "the licence is not a text",
    "---\nlicense: [apache-2.0, {c: d}]\n---\n": "the licence is not a text",
    "license: apache-2.0\n": "no licence is stated",
    "---\n[}: x\n---\n": "no licence is stated",
    "": "no licence is stated",
}


def test_each_breach_is_a_finding(model, judge):
    (model / "part").mkdir()
    for finding, make in FILES.items():
        make(model / finding.split()[1])
    code, findings = judge()
    assert code == 3
    for finding in FILES:
        check, _, message = finding.partition(" ")
        assert sum(found == check and said.startswith(message) for found, said in findings) == 1, finding
    assert len(findings) == len(FILES) + 1, "training_args.bin has types, too, which nobody knows"


def test_a_licence_that_is_not_listed_or_not_stated_is_a_finding(model, judge):
    for card, message in CARDS.items():
        (model / "README.md").write_bytes(card.encode())
        ((check, said),) = judge('licenses = ["Apache-2.0"]')[1]
        assert (check, said[: len(message)]) == ("licenses", message)


def test_types_of_tensors_count_as_they_are_stored(model, judge):
    code, findings = judge('dtypes = ["bf16"]')
    assert (code, {check for check, _ in findings}) == (3, {"dtypes"})
    assert "lm_head.weight has the type F32, which the policy does not allow" in [said for _, said in findings]
    assert judge('dtypes = ["bf16", "f32"]') == (0, [])
    (model / "optimizer.bin").write_bytes(b"x")
    assert judge('dtypes = ["F32"]')[1] == [
        (
            "dtypes",
            "optimizer.bin is not part of the checkpoint, so its types are not known, which the policy does not allow",
        )
    ]


def test_what_is_listed_is_allowed(model, judge):
    (model / "modeling_x.py").write_text("x = 1\n")
    edit_config(model / "config.json", auto_map={"AutoModel": "modeling_x.X", "AutoConfig": "modeling_x.C"})
    (model / "rng.pkl").write_bytes(pickle.dumps(1))
    lists = 'code_files = ["modeling_x.py"]\npickles = ["rng.pkl"]\nauto_map = ["modeling_x.X", "modeling_x.C"]\n'
    assert judge(lists) == (0, [])
    assert judge('code_files = "allow"\npickles = "allow"\nauto_map = "allow"\n') == (0, [])
    code, findings = judge('code_files = []\npickles = ["rng"]\nauto_map = ["modeling_x.X"]\n')
    assert (code, sorted(check for check, _ in findings)) == (3, ["auto_map", "code_files", "pickles"])


def test_a_policy_that_means_nothing_is_refused(model, judge, tmp_path, say):
    for policy, message in (
        ("", "says nothing"),
        ('codefiles = "forbid"', "has the key 'codefiles'"),
        ("code_files = true", "code_files is not a list of names"),
        ('pickles = "deny"', "pickles is not a list of names"),
        ('dtypes = "forbid"', "dtypes is not a list of names"),
        ('dtypes = ["float32"]', "dtypes has 'float32'"),
        ("licenses = [1]", "licenses is not a list of names"),
        ("signers = []", "signers is not a list of signers"),
        ('signers = ["key.pub"]', "signers has 'key.pub'"),
        ('signers = [{identity = "me"}]', "signers has"),
        ('signers = [{public_key = "a", issuer = "b"}]', "signers has"),
        ("= 1", "is not TOML"),
    ):
        code, said = judge(policy)
        assert code == 2, policy
        assert message in said
    assert say("verify", model, "--policy", tmp_path / "nothing.toml").code == 2
    assert say("verify", model / "model.safetensors", "--policy", tmp_path / "policy.toml").code == 2
    (tmp_path / "policy.toml").write_text('code_files = "forbid"')
    done = say("verify", model / "model.safetensors", "--policy", tmp_path / "policy.toml")
    assert (done.code, "--policy is for a directory" in done.err) == (2, True)
    done = say("verify", model, "--policy", tmp_path / "policy.toml", "--attestation")
    assert (done.code, "names no signers" in done.err) == (2, True)


def test_one_of_the_signers_must_have_signed(source, tmp_path, say):
    pytest.importorskip("model_signing")
    from test_attestation import make_keys

    for name in ("own", "other"):
        make_keys(tmp_path, name)
    out = tmp_path / "llama-hf"
    assert say("reshard", source, out, "--to", "hf").code == 0

    def verify(*signers, options=()):
        tables = ", ".join(f'{{public_key = "{name}.pub"}}' for name in signers)
        (tmp_path / "policy.toml").write_text(f'code_files = "forbid"\nsigners = [{tables}]\n')
        return say("verify", out, "--policy", tmp_path / "policy.toml", *options)

    assert verify("own").code == 4
    assert say("attest", out, "--key", tmp_path / "own.pem").code == 0
    assert verify("own").out.startswith(f"ok: signed by the key {tmp_path / 'own.pub'}, within the policy")
    assert verify("other", "own", options=["--attestation"]).code == 0
    assert verify("other").code == 3
    assert verify("own", options=["--attestation", "--public-key", tmp_path / "other.pub"]).code == 2
    (out / "x.py").write_text("")
    assert "x.py was added" in verify("own").out


def test_a_policy_that_cannot_be_read_is_no_verdict_on_a_run(model, tmp_path, say):
    (tmp_path / "run").mkdir()
    model.rename(tmp_path / "run" / "step-1")
    (tmp_path / "policy.toml").write_text(STRICT)
    newest = ("verify", tmp_path / "run", "--newest-good", "--policy", tmp_path / "policy.toml")
    assert say(*newest).out == "step-1\n"
    for policy in ("licences = []", 'signers = [{public_key = "absent.pub"}]'):
        (tmp_path / "policy.toml").write_text(policy)
        assert say(*newest).code == 2
    assert say(*newest[:3], "--attestation", "--public-key", tmp_path / "policy.toml").code == 2


def test_a_policy_that_was_not_applied_is_said_to_be_skipped(model, tmp_path, say):
    (tmp_path / "policy.toml").write_text(STRICT)
    assert say("reshard", model, tmp_path / "cut", "--tp", "2").code == 0
    (tmp_path / "cut" / "extra.safetensors").write_bytes(b"x")
    done = say("verify", tmp_path / "cut", "--policy", tmp_path / "policy.toml", "--json")
    levels = [(each["name"], each["status"]) for each in json.loads(done.out)["levels"]]
    assert (done.code, levels) == (3, [("structure", "failed"), ("policy", "skipped")])
