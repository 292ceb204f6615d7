"""What --model names, opened: a GGUF file, a known model, a folder, or a folder of the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvledger.errors import ModelRefused
from kvledger.memory import measured
from kvledger.models.catalogue import CATALOGUE, model_path
from kvledger.models.config import LlamaConfig
from kvledger.models.hub import hub_folder, hub_model
from kvledger.models.hub_config import llama_config
from kvledger.models.json_file import read_bytes, read_object
from kvledger.models.model_file import ModelFile, Tensors
from kvledger.models.safetensors_file import SafetensorsModel
from kvledger.tokenizer import Tokenizer, VocabularySource
from kvledger.tokenizer.json_vocabulary import TokenizerFiles, json_vocabulary

_CONFIG_BYTES_MAX = 4 << 20
_TOKENIZER_BYTES_MAX = 128 << 20
_TEMPLATE_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class OpenedModel:
    """A model whose files were checked; its tensors are not loaded yet. Hold it with `with`."""

    id: str
    where: Path
    fingerprint: str  # SHA-256 of the weight files
    config: LlamaConfig
    tokenizer: Tokenizer
    tensors: Tensors
    # Memory that making the tokenizer took, measured.
    tokenizer_bytes: int = 0

    def __enter__(self) -> OpenedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(self.tensors, SafetensorsModel):
            self.tensors.close()


def open_model(
    model: str, download: bool = False, say: Callable[[str], None] = lambda line: None
) -> OpenedModel:
    """Finds, opens and checks a model. Raises ModelRefused, in one sentence."""
    folder = model_folder(model, download, say)
    if folder is not None:
        on_hub = hub_model(model) if not _is_folder(model) else None
        return _open_folder(folder, on_hub.repository if on_hub else folder.name, say)
    path = model_path(model, say)
    file = ModelFile(path)
    fingerprint = file.fingerprint
    known = CATALOGUE.get(model)
    if known is not None and fingerprint != known.sha256:
        raise ModelRefused(
            f"{known.path} is damaged (SHA-256 {fingerprint}); delete it and start again"
        )
    config = LlamaConfig.from_gguf(file.metadata)
    tokenizer, taken = measured(lambda: Tokenizer(VocabularySource.from_gguf(file.metadata)))
    name = model if known is not None else path.stem
    return OpenedModel(name, path, fingerprint, config, tokenizer, file, taken)


def model_folder(
    model: str, download: bool = False, say: Callable[[str], None] = lambda line: None
) -> Path | None:
    """The folder that a setting names, here or on the hub; None if it names a file."""
    if model in CATALOGUE:
        return None
    if _is_folder(model):
        return Path(model).resolve()
    on_hub = None if _is_file(model) else hub_model(model)
    return None if on_hub is None else hub_folder(on_hub, download, say)


def _is_folder(model: str) -> bool:
    try:
        return model != "" and Path(model).is_dir()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_file(model: str) -> bool:
    try:
        return Path(model).is_file()
    except (OSError, ValueError):
        return False


def _open_folder(folder: Path, name: str, say: Callable[[str], None]) -> OpenedModel:
    values = _object(folder / "config.json", _CONFIG_BYTES_MAX)
    if values is None:
        raise ModelRefused(f"the folder {folder} has no config.json")
    config, embeddings = llama_config(values, name)
    tokenizer, taken = measured(
        lambda: Tokenizer(json_vocabulary(_tokenizer_files(folder, values), embeddings))
    )
    tensors = SafetensorsModel(folder)
    try:
        if config.tied_head:
            tensors.refuse_other_head()
        say(f"reading {tensors.bytes / 1e9:.2f} GB of weights for their fingerprint")
        fingerprint = tensors.fingerprint()
    except BaseException:
        tensors.close()
        raise
    return OpenedModel(name, folder, fingerprint, config, tokenizer, tensors, taken)


def _tokenizer_files(folder: Path, config: dict[str, Any]) -> TokenizerFiles:
    tokenizer = _object(folder / "tokenizer.json", _TOKENIZER_BYTES_MAX)
    if tokenizer is None:
        raise ModelRefused(f"the folder {folder} has no tokenizer.json")
    cutting = _object(folder / "tokenizer_config.json", _CONFIG_BYTES_MAX) or {}
    generation = _object(folder / "generation_config.json", _CONFIG_BYTES_MAX) or {}
    ends = generation.get("eos_token_id")
    return TokenizerFiles(
        tokenizer=tokenizer,
        config=cutting,
        end_ids=_end_ids(config.get("eos_token_id") if ends is None else ends),
        chat_template=_chat_template(folder, cutting),
    )


def _end_ids(value: object) -> list[int]:
    """One id, or a list of them, or nothing."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
    if len(ids) != len(values):
        raise ModelRefused("eos_token_id is neither a token id nor a list of them")
    return ids


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: a file of its own counts before tokenizer_config.json.

    Of several by name, it is the one called default.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bytes(path, _TEMPLATE_BYTES_MAX).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelRefused(f"{path} is not UTF-8") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ModelRefused("tokenizer_config.json: chat_template is not a text")
    return template


def _object(path: Path, most: int) -> dict[str, Any] | None:
    return read_object(path, most) if path.exists() else None
