"""What a SRC means."""

import pytest
from hub_models import model, write

from shardctl.base.errors import SourceError, UsageError
from shardctl.storage.addresses import open_source
from shardctl.storage.hub.address import HubAddress
from shardctl.storage.local import LocalSource
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", HubAddress("owner/name")),
        ("owner/name@v1.0", HubAddress("owner/name", "v1.0")),
        ("owner/name@refs/pr/7", HubAddress("owner/name", "refs/pr/7")),
        ("owner/name@feature/new", HubAddress("owner/name", "feature/new")),
        ("hf://owner/name", HubAddress("owner/name")),
        ("hf://owner/name/", HubAddress("owner/name")),
        ("hf://models/owner/name", HubAddress("owner/name")),
        ("hf://owner/name/sub/folder", HubAddress("owner/name", "main", "sub/folder")),
        (f"hf://owner/name@{COMMIT}/sub/", HubAddress("owner/name", COMMIT, "sub")),
        ("hf://owner/name@refs/pr/7/sub", HubAddress("owner/name", "refs/pr/7", "sub")),
        ("hf://owner/name@feature%2Fnew/a%20b", HubAddress("owner/name", "feature/new", "a b")),
        ("hf://o.w-n_er/N.a-m_e9/model.safetensors", HubAddress("o.w-n_er/N.a-m_e9", "main", "model.safetensors")),
    ],
)
def test_addresses(text, expected):
    assert HubAddress.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "hf://", "hf://owner", "hf://owner/", "hf:///name", "hf://owner/name@", "hf://owner/name/../other",
        "hf://owner/na me", "hf://datasets/owner/name", "hf://spaces/owner/name",
        "hf://owner/name@main/a/./b",
    ],
)  # fmt: skip
def test_addresses_that_are_none(text):
    with pytest.raises(UsageError, match=r"is (not the address of a|not a|no) model"):
        open_source(text)


def test_a_commit_is_known_for_one():
    assert HubAddress("a/b", COMMIT).commit == COMMIT
    assert HubAddress("a/b", COMMIT[:12]).commit is None
    assert HubAddress("a/b", "main", "sub").at(COMMIT) == f"hf://a/b@{COMMIT}/sub"


def test_a_path_that_exists_is_a_path(hub, tmp_path, monkeypatch):
    write(model(), tmp_path / "someone" / "llama")
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_source("someone/llama"), LocalSource)
    assert not hub.requests


@pytest.mark.parametrize("text", ["./someone/llama", "/someone/llama", "someone", "some/one/llama", "~/llama", "a/b/"])
def test_what_does_not_look_like_a_model_of_the_hub_is_a_path(hub, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="does not exist"):
        open_source(text)
    assert not hub.requests


def test_places_that_nobody_knows():
    with pytest.raises(UsageError, match="ftp:// is not an address that shardctl reads"):
        open_source("ftp://server/model")


class TestRevisions:
    def test_branches_tags_and_commits(self, hub, tmp_path):
        repository = hub.add("a/b", model(seed=1))
        second = repository.push(model(seed=2), "feature/two")
        repository.push(model(seed=3), "refs/pr/3")
        right = [digest(write(model(seed=seed), tmp_path / str(seed))).digest for seed in (1, 2, 3)]
        assert digest("a/b").digest == right[0]
        assert digest("a/b@feature/two").digest == right[1]
        assert digest("hf://a/b@feature%2Ftwo").digest == right[1]
        assert digest(f"a/b@{second}").digest == right[1]
        assert digest("hf://a/b@refs/pr/3").digest == right[2]

    def test_a_commit_needs_no_resolving(self, hub):
        commit = hub.add("a/b").push(model())
        inspect(f"a/b@{commit}")
        assert not hub.asked("info")


class TestFolders:
    @pytest.fixture
    def source(self, hub):
        hub.add("a/b", {**{f"text/{path}": content for path, content in model().items()}, "README.md": b"x"})
        return "hf://a/b/text"

    def test_a_folder_is_a_checkpoint(self, source, tmp_path):
        assert digest(source).digest == digest(write(model(), tmp_path / "here")).digest
        assert "README.md" in inspect(source).carried

    def test_a_file_is_one_and_has_the_config_beside_it(self, hub):
        files = model(shards=1)
        hub.add("a/b", {f"text/{path}": content for path, content in files.items()})
        found = inspect("hf://a/b/text/model-00001-of-00001.safetensors")
        assert found.files == ("model-00001-of-00001.safetensors",)
        assert found.architecture == "LlamaForCausalLM"
        assert found.carried == ()

    def test_files_of_other_folders_are_none_of_it(self, source):
        assert set(open_source(source).files()) == set(model())
