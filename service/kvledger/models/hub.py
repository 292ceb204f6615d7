"""Model folders of the Hugging Face hub, named by repository and commit.

A name without a commit would mean another model tomorrow, so there is none. Only weights in
safetensors, JSON and chat templates are fetched: nothing that anybody would run. Without the
setting --download nothing is asked of the network: what the cache holds is served, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvledger.errors import ModelRefused

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(f"({_PART}/{_PART})@([0-9a-f]{{40}})")
_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
# Folders hold other formats of the same weights, and so do files of this name.
_IGNORED = ["*/*", "consolidated*.safetensors"]


@dataclass(frozen=True)
class HubModel:
    """A repository at a commit."""

    repository: str
    commit: str


def hub_model(model: str) -> HubModel | None:
    """What a setting names on the hub, None if it is no such name.

    Raises ModelRefused for a name that lacks the commit, or has something else in its place.
    """
    repository, at, _ = model.partition("@")
    if not at or re.fullmatch(f"{_PART}/{_PART}", repository) is None:
        return None
    match = _ID.fullmatch(model)
    if match is None:
        raise ModelRefused(
            f"--model: {model[:200]!r} does not end in a commit, @ and 40 digits from 0 to f; "
            f"a branch or a tag may be another model tomorrow"
        )
    return HubModel(match[1], match[2])


def hub_folder(
    model: HubModel, download: bool, say: Callable[[str], None] = lambda line: None
) -> Path:
    """The folder of a repository at a commit, fetched if `download` says so. ModelRefused."""
    try:
        import huggingface_hub
    except ImportError:
        raise ModelRefused(
            f"{model.repository} is on the hub, which needs huggingface_hub: "
            f"pip install 'kvledger[hub]'"
        ) from None
    if download:
        say(f"fetching {model.repository} at {model.commit} from the hub, if it is not there yet")
    try:
        folder = huggingface_hub.snapshot_download(
            model.repository,
            revision=model.commit,
            allow_patterns=_PATTERNS,
            ignore_patterns=_IGNORED,
            local_files_only=not download,
        )
    except huggingface_hub.errors.LocalEntryNotFoundError:
        hint = "the hub cannot be reached" if download else "--download fetches it"
        raise ModelRefused(
            f"{model.repository} at {model.commit} is not in the hub's cache; {hint}"
        ) from None
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        # Their texts have many lines, with addresses and ids of requests.
        kind = type(error).__name__
        raise ModelRefused(
            f"{model.repository} at {model.commit} cannot be fetched from the hub ({kind})"
        ) from None
    return Path(str(folder))
