"""What a place to write to may be: an address of a kind that is not written never becomes a directory of that name."""

import pytest

KINDS = {
    "file:///data/new": "DST is hf://, s3://, gs://, az:// or a directory, such as /data/new",
    "hdfs://host/new": "DST is hf://, s3://, gs://, az:// or a directory, such as ./hdfs://host/new",
    "S3://bucket/new": "DST is hf://, s3://, gs://, az:// or a directory, such as ./S3://bucket/new",
}


@pytest.fixture(autouse=True)
def nothing_written(tmp_path, monkeypatch):
    """Every test runs in a directory of its own, and leaves it empty."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--worker", "0/2"], ["--json"]], ids=" ".join)
@pytest.mark.parametrize("place", KINDS)
def test_reshard_refuses_an_address_of_another_kind(say, source, place, more):
    code, _, err = say("reshard", source, place, *more)
    assert code == 2
    assert (
        err == f"error: {place.partition(':')[0]}:// is not an address that shardctl writes to\nhint:  {KINDS[place]}\n"
    )


@pytest.mark.parametrize("place", KINDS)
def test_it_is_refused_before_the_source_is_looked_for(say, place):
    assert say("reshard", "no-such-source", place).code == 2


@pytest.mark.parametrize("place", KINDS)
def test_finish_refuses_an_address_of_another_kind(say, place):
    code, _, err = say("finish", place)
    assert code == 2
    assert KINDS[place] in err


@pytest.mark.parametrize("place", ["hf://me/new.html", "s3://bucket/plan.html", "file:///plan.html"])
@pytest.mark.parametrize(
    ("verb", "option"), [("plan", "--out"), ("plan", "--report"), ("verify", "--junit"), ("verify", "--summary")]
)
def test_plans_and_reports_are_files_of_this_machine(say, source, verb, option, place):
    code, out, err = say(verb, source, option, place)
    assert (code, out) == (2, "")
    assert err == (
        f"error: {place} is an address, but only checkpoints can be written to addresses\n"
        "hint:  name a file on this machine\n"
    )


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_a_file_to_write_without_a_name_is_a_usage_error(say, source, option):
    assert say("plan", source, option, "").code == 2


def test_a_place_below_a_file_names_the_file(say, source, tmp_path):
    (tmp_path / "notes").write_text("mine")
    code, _, err = say("reshard", source, "notes/out")
    assert (code, err.splitlines()[0]) == (6, f"error: {tmp_path}/notes exists and is not a directory")
    (tmp_path / "notes").unlink()


def test_a_missing_file_is_no_model_of_the_hub(say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = say("plan", "x/config.json")
    assert (found.code, found.err.splitlines()[0]) == (4, "error: x/config.json does not exist")
