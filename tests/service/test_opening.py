"""What --model names: folders and hub ids, and everything about them that is refused."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hub_models import END, VOCABULARY, HubShape, change_json, hub_model, save_folder
from stepping import settings
from tiny_model import CHAT_TEMPLATE, CONTROL_TOKENS

from kvledger.cli import doctor
from kvledger.errors import ModelRefused
from kvledger.models import hub
from kvledger.models.hub import HubModel, hub_folder
from kvledger.models.opening import model_folder, open_model
from kvledger.served_model import ServedModel, load
from kvledger.tokenizer import ChatMessage

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_ID = f"some-org/Tiny_1.5@{COMMIT}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("saved") / "tiny", hub_model(HubShape("llama")))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A folder of its own, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def loaded(model: Path | str, *arguments: str, said: list[str] | None = None) -> ServedModel:
    told = [] if said is None else said
    return load(settings("--model", str(model), "--kv-blocks", "8", *arguments), told.append)


def refusal(model: Path | str, *arguments: str) -> str:
    """The sentence that refuses a model."""
    with pytest.raises(ModelRefused) as refused:
        loaded(model, *arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- Folders --------------------------------------------------------------------------------


def test_a_folder_is_served_under_its_name(saved: Path) -> None:
    """Clients could not ask for the model by a name, nor find out which weights it has."""
    said: list[str] = []
    model = loaded(saved, said=said)
    assert model.id == "tiny"
    assert model.answers_to("tiny")
    weights = (saved / "model.safetensors").read_bytes()
    assert model.fingerprint == hashlib.sha256(weights).hexdigest()
    assert model.tokenizer.eos_ids == {END}
    assert any("tiny" in line and "3 layers" in line for line in said)
    assert "loaded 3 of 3 layers" in said
    # A folder that is given by its place alone has a name as well.
    assert loaded(f"{saved}/.").id == loaded(f"{saved}/").id == "tiny"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "neither model.safetensors nor"),
    ],
)
def test_a_folder_without_one_of_its_files_is_refused(folder: Path, name: str, reason: str) -> None:
    """A person who copied half a folder would not learn which half."""
    (folder / name).unlink()
    sentence = refusal(folder)
    assert reason in sentence
    assert str(folder) in sentence


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 99_999, b'{"a":1,"a":2}'])
def test_files_that_are_no_json_are_refused(folder: Path, name: str, content: bytes) -> None:
    """A download that broke off would end the start with a traceback."""
    (folder / name).write_bytes(content)
    assert f"{folder / name} is not JSON to trust" in refusal(folder)


def test_a_tensor_too_many_or_too_few_is_refused(folder: Path) -> None:
    """A bias that is ignored, or a layer that is missing, changes the model."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    bias = {"model.layers.0.self_attn.q_proj.bias": tensors["model.norm.weight"].clone()}
    save_file({**tensors, **bias}, path)
    assert "q_proj.bias' is not part of a model" in refusal(folder)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, path)
    assert "model.layers.2.mlp.up_proj.weight is missing" in refusal(folder)


def test_a_head_that_config_calls_tied_has_to_be(folder: Path) -> None:
    """A model with a head of its own would be served with its embedding instead."""
    change_json(folder / "config.json", {"tie_word_embeddings": True})
    assert "another lm_head.weight" in refusal(folder)


def test_an_untied_head_has_to_be_there(tmp_path: Path) -> None:
    """A model whose file lost its head would be served with its embedding instead."""
    tied = save_folder(tmp_path / "tied", hub_model(HubShape("llama", tied=True)))
    loaded(tied)
    change_json(tied / "config.json", {"tie_word_embeddings": False})
    assert "lm_head.weight is missing" in refusal(tied)


def test_open_files_are_let_go(folder: Path) -> None:
    """A server would keep its model's disk from being unmounted."""
    loaded(folder)
    change_json(folder / "config.json", {"num_hidden_layers": 2})
    refusal(folder)
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [link for link in links if str(folder) in str(link)]


# --- What begins and ends a text, and the chat template ---------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ([END, END + 1], END, {END, END + 1}),
        (END + 1, END, {END + 1}),
        (None, [END + 2], {END + 2}),
        (None, None, {END}),
    ],
)
def test_ends_of_an_answer(folder: Path, generation: Any, config: Any, ends: set[int]) -> None:
    """An answer would go on after its end until it is cut."""
    change_json(folder / "generation_config.json", {"eos_token_id": generation})
    change_json(folder / "config.json", {"eos_token_id": config})
    assert loaded(folder).tokenizer.eos_ids == ends


@pytest.mark.parametrize("value", ["2", -1, 1.5, True, [2, "3"], {}])
def test_ends_that_are_no_ids_are_refused(folder: Path, value: Any) -> None:
    """Answers would never end."""
    change_json(folder / "generation_config.json", {"eos_token_id": value})
    assert "eos_token_id is neither" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "config", "first"),
    [
        ("{{ 'a' }}", "{{ 'b' }}", "a"),
        (None, "{{ 'b' }}", "b"),
        (None, [{"name": "x", "template": "x"}, {"name": "default", "template": "d"}], "d"),
    ],
)
def test_the_chat_template_that_counts(
    folder: Path, file: str | None, config: Any, first: str
) -> None:
    """The model would read a conversation that its publisher has replaced."""
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    change_json(folder / "tokenizer_config.json", {"chat_template": config})
    ids = loaded(folder).tokenizer.encode_chat([ChatMessage("user", "hello")])
    assert ids.tolist() == [ord(first)]


@pytest.mark.parametrize("config", [None, [], [{"name": "tools", "template": "x"}]])
def test_without_a_chat_template_text_still_works(folder: Path, config: Any) -> None:
    """A base model could not be served, or a chat would get a template that nobody chose."""
    change_json(folder / "tokenizer_config.json", {"chat_template": config})
    tokenizer = loaded(folder).tokenizer
    assert not tokenizer.has_chat_template
    assert tokenizer.encode_text("the").size == 2


def test_chat_templates_that_cannot_be_used_are_refused(folder: Path) -> None:
    """A template from a stranger would run whatever it likes, or fail at every request."""
    path = folder / "chat_template.jinja"
    for content, reason in (
        (b"\xff\xfe", "is not UTF-8"),
        (b"{% bad", "does not compile"),
        (b"a" * (2 << 20), "larger than"),
        (b"{{ ''.__class__ }}", "chat_template"),
    ):
        path.write_bytes(content)
        assert reason in refusal(folder)
    path.unlink()
    change_json(folder / "tokenizer_config.json", {"chat_template": 5})
    assert "chat_template is not a text" in refusal(folder)


def test_control_tokens_in_a_message_stay_text(saved: Path) -> None:
    """A user could end a turn, or speak for the system, by typing."""
    tokenizer = loaded(saved).tokenizer
    typed = "".join(CONTROL_TOKENS)
    ids = tokenizer.encode_chat([ChatMessage("user", typed)]).tolist()
    assert [i for i in ids if i in tokenizer.control_ids] == [END + 1, END, END + 2]
    assert tokenizer.decode(ids) == typed
    assert CHAT_TEMPLATE.startswith("{% for")
    assert tokenizer.vocabulary_size > VOCABULARY


# --- The hub --------------------------------------------------------------------------------


class FakeHub:
    """Stands for the download, and remembers how it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repository: str, **arguments: Any) -> str:
        self.calls.append({"repository": repository, **arguments})
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_a_hub_id_is_served_from_the_cache_alone(fake: FakeHub) -> None:
    """A server that starts again would ask the network, and maybe serve something else."""
    model = loaded(HUB_ID)
    assert model.id == "some-org/Tiny_1.5"
    assert [call["local_files_only"] for call in fake.calls] == [True]
    assert [call["revision"] for call in fake.calls] == [COMMIT]
    assert [call["repository"] for call in fake.calls] == ["some-org/Tiny_1.5"]


def test_the_setting_fetches_it(fake: FakeHub) -> None:
    """A person with a network could not fetch a model at all."""
    said: list[str] = []
    loaded(HUB_ID, "--download", said=said)
    assert [call["local_files_only"] for call in fake.calls] == [False]
    assert any("some-org/Tiny_1.5" in line and COMMIT in line for line in said)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *[(name, True) for name in ("config.json", "model-00001-of-00002.safetensors")],
        *[(name, True) for name in ("tokenizer.json", "chat_template.jinja")],
        *[(name, False) for name in ("modeling_x.py", "pytorch_model.bin", "run.sh", "x.pickle")],
        *[(name, False) for name in ("original/params.json", "consolidated.safetensors")],
        *[(name, False) for name in ("README.md", "onnx/model.onnx", "tokenizer.model")],
    ],
)
def test_only_weights_and_descriptions_are_fetched(fake: FakeHub, name: str, wanted: bool) -> None:
    """Somebody's program would come along with a model, or each weight twice."""
    from huggingface_hub.utils import filter_repo_objects

    loaded(HUB_ID, "--download")
    patterns = {key: fake.calls[0][key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([name], **patterns)) == ([name] if wanted else [])


def test_a_model_that_is_not_in_the_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person would see a traceback of the network's library."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    real = huggingface_hub.snapshot_download

    def in_folder(repository: str, **arguments: Any) -> str:
        return str(real(repository, cache_dir=tmp_path, **arguments))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", in_folder)
    assert "is not in the hub's cache; --download fetches it" in refusal(HUB_ID)


def test_a_real_cache_is_read(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another program has fetched already would have to be fetched again."""
    place = tmp_path / "models--some-org--Tiny_1.5" / "snapshots" / COMMIT
    shutil.copytree(saved, place)
    real = huggingface_hub.snapshot_download

    def in_folder(repository: str, **arguments: Any) -> str:
        return str(real(repository, cache_dir=tmp_path, **arguments))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", in_folder)
    assert loaded(HUB_ID).fingerprint == loaded(saved).fingerprint


@pytest.mark.parametrize(
    "error",
    [OSError("a\nb"), ConnectionError("x"), ValueError("y"), PermissionError(13, "no")],
)
def test_a_failure_of_the_network_is_one_sentence(fake: FakeHub, error: Exception) -> None:
    """A person would see pages of a library's troubles."""
    fake.error = error
    sentence = refusal(HUB_ID, "--download")
    assert "cannot be fetched from the hub" in sentence
    assert type(error).__name__ in sentence


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person would not learn what to install."""
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ModelRefused, match=r"pip install 'kvledger\[hub\]'"):
        hub_folder(HubModel("a/b", COMMIT), download=False)


@pytest.mark.parametrize(
    "name",
    [
        *("a/b@main", "a/b@v1.0", f"a/b@{COMMIT[:-1]}", f"a/b@{COMMIT}0", f"a/b@{COMMIT.upper()}"),
        *(f"a/b@{COMMIT}\n", "a/b@", f"a/b@{COMMIT}@{COMMIT}"),
    ],
)
def test_a_hub_id_without_a_commit_is_refused(fake: FakeHub, name: str) -> None:
    """A branch would be another model tomorrow, under the same name."""
    assert "does not end in a commit" in refusal(name)
    assert fake.calls == []


@pytest.mark.parametrize(
    "name",
    [
        *(f"b@{COMMIT}", f"../b@{COMMIT}", f"a/../b@{COMMIT}", f"/a/b@{COMMIT}", f"a//b@{COMMIT}"),
        *(f"a/b/c@{COMMIT}", f"a b/c@{COMMIT}", f"_a/b@{COMMIT}", f"a/b.@{COMMIT}", "a/b", "@"),
    ],
)
def test_what_is_no_hub_id_is_not_asked_for(fake: FakeHub, name: str) -> None:
    """A misspelt path would be looked for on the network."""
    assert "neither a file nor a known model" in refusal(name)
    assert fake.calls == []


def test_a_folder_that_is_named_like_a_hub_id_is_a_folder(
    saved: Path, fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in a folder would be replaced by one from the network."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, tmp_path / HUB_ID)
    with open_model(HUB_ID) as opened:
        assert opened.where == tmp_path / HUB_ID
        assert opened.id == f"Tiny_1.5@{COMMIT}"
    assert fake.calls == []


def test_known_models_and_files_are_no_folders(fake: FakeHub, tmp_path: Path) -> None:
    """A known model would be hidden by a folder of its name, or asked of the hub."""
    assert model_folder("smollm2-135m-instruct") is None
    assert model_folder("") is None
    assert model_folder("x" * 5000) is None
    assert model_folder("a\0b") is None
    assert fake.calls == []
    assert hub._PATTERNS == ["*.safetensors", "*.json", "*.jinja"]


def test_doctor_looks_at_folders(saved: Path, folder: Path) -> None:
    """A person whose folder is damaged would be told that it is no file."""
    good = doctor._model(settings("--model", str(saved)))
    assert good.good
    assert hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()[:16] in good.text
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelRefused, match="not a safetensors file to trust"):
        doctor._model(settings("--model", str(folder)))
