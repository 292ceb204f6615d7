"""What a chat template keeps of earlier turns, and the first token that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reuse_harness import BLOCK, ReuseServer, namespace
from server_harness import Log, running
from stepping import settings
from test_shared_border import TEMPLATES, tokenizer_of
from tiny_model import CHAT_TEMPLATE, write_gguf

from kvledger import self_test
from kvledger.kept_history import KeptTurn, first_losses, kept_turns, told_history
from kvledger.self_test import tell_history
from kvledger.served_model import load
from kvledger.tokenizer import Tokenizer
from kvledger.v1 import models_pb2

# Reasoning of earlier turns goes, whether it was sent back or not.
DROPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The prompt itself opens the reasoning, as for some distilled models.
OPENING = DROPPING.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
# What else changes from one turn to the next.
DATED = "{{ '2026-11-' ~ (messages | length) }}" + DROPPING
TEMPLATES.update(dropping=DROPPING, opening=OPENING, dated=DATED)


def by_kind(turns: Sequence[KeptTurn]) -> dict[str, list[KeptTurn]]:
    kinds: dict[str, list[KeptTurn]] = {}
    for turn in turns:
        kinds.setdefault(turn.conversation, []).append(turn)
    return kinds


def tried(name: str) -> dict[str, list[KeptTurn]]:
    kinds = by_kind(kept_turns(tokenizer_of(name)))
    for turns in kinds.values():
        assert [turn.turn for turn in turns] == [1, 2]
        for turn in turns:
            assert turn.tokens == turn.kept + turn.lost
            same = list(turn.computed[: turn.kept]) == list(turn.followed[: turn.kept])
            assert same, "what is said to be kept is the same"
            differ = turn.computed_ids[:1] != turn.written_ids[:1]
            assert differ == (turn.lost > 0), "and the next token is not"
    return kinds


def lossy(name: str) -> set[str]:
    return {kind for kind, turns in tried(name).items() if any(turn.lost for turn in turns)}


def parted(name: str, kind: str) -> list[tuple[str, str, str]]:
    """Of each turn: the text that is kept, and what follows on both sides, control tokens too."""
    tokenizer = tokenizer_of(name)

    def text(ids: Any) -> str:
        return tokenizer.decode(ids, with_control_tokens=True)

    return [
        (text(t.computed[: t.kept]), text(t.computed[t.kept :]), text(t.followed[t.kept :]))
        for t in tried(name)[kind]
    ]


def test_the_model_that_is_shipped_keeps_all(tokenizer: Tokenizer) -> None:
    """Its conversations would be said to be computed anew, or be so."""
    turns = kept_turns(tokenizer)
    assert set(by_kind(turns)) == {"text", "system", "blanks"}
    assert [turn.lost for turn in turns] == [0] * 6
    assert all(turn.tokens > 20 for turn in turns)
    told = "text, system, blanks: the next turn begins with all that was computed"
    assert told_history(turns, tokenizer) == (told,)


def test_reasoning_that_is_dropped_is_named() -> None:
    """Of every turn of a model that reasons the answer is computed again, and nobody is told."""
    for name in ("qwen", "dropping"):
        for kept, computed, written in parted(name, "reasoning"):
            assert kept.endswith("<|im_start|>assistant\n")
            assert computed.startswith("<think>\nA pair") or computed.startswith("<think>\nThree")
            assert computed.endswith(("</think>\n\nFour", "</think>\n\nSix"))
            assert written.startswith(("Four<|im_end|>", "Six<|im_end|>"))
    assert lossy("qwen") == {"reasoning", "thinking_off"}, "that comes back keeps it"
    assert lossy("dropping") == {"reasoning", "reasoning_returned"}
    assert lossy("smollm3") == {"reasoning", "reasoning_returned"}


def test_an_empty_reasoning_in_the_prompt_is_no_part_of_history() -> None:
    """With thinking turned off too, the prompt has a mark that the next one has not."""
    for _, computed, written in parted("qwen", "thinking_off"):
        assert computed.startswith("<think>\n\n</think>\n\n")
        assert written.startswith(("Four", "Six"))


def test_reasoning_that_the_prompt_opens() -> None:
    """Every answer begins within reasoning: as text, it would be tried as no model writes it."""
    for kind in ("text", "system", "reasoning"):
        for kept, computed, written in parted("opening", kind):
            assert kept.endswith("assistant\n")
            assert computed.startswith("<think>\n")
            assert computed.count("<think>") == computed.count("</think>") == 1
            assert written.startswith(("Four", "Six"))


@pytest.mark.parametrize("name", ["strict", "mistral", "llama"])
def test_blanks_that_are_trimmed_are_named(name: str) -> None:
    """An answer with a line end behind it would end reuse in every turn, for no visible reason."""
    assert "blanks" in lossy(name)
    kept, computed, written = parted(name, "blanks")[0]
    assert (kept + computed).endswith(" Four\n")
    assert computed.strip() != computed
    assert not written.startswith(computed)


def test_what_moves_to_the_last_turn_is_named() -> None:
    """A system message and tools that move leave nothing to reuse but the first token or two."""
    kinds = tried("mistral")
    assert lossy("mistral") == {"system", "blanks", "tools"}
    assert [turn.kept for turn in kinds["system"]] == [2, 2 + kinds["text"][0].tokens]
    assert [turn.lost for turn in kinds["text"]] == [0, 0]
    assert kinds["tools"][0].kept == 1


def test_what_changes_at_the_front_is_named() -> None:
    """A date that moves on leaves nothing to reuse."""
    for turns in tried("dated").values():
        assert [turn.kept for turn in turns] == [len("2026-11-")] * 2
    assert tried("backwards")["text"][0].kept == 0


def test_templates_that_keep_all_are_called_so() -> None:
    """Every template would be said to rewrite history."""
    for name in ("plain", "joined", "mistral_names"):
        assert lossy(name) == set(), name
    assert lossy("strict") == {"blanks"}


def test_what_the_template_refuses_is_left_out() -> None:
    """A start would fail at it, or a conversation that cannot be be called kept."""
    assert set(tried("only_whole")) == {"system"}
    TEMPLATES["refusing"] = "{{ raise_exception('no') }}"
    tokenizer = tokenizer_of("refusing")
    assert kept_turns(tokenizer) == ()
    assert "takes none" in told_history((), tokenizer)[0]


def test_the_sentence_names_place_ids_and_texts() -> None:
    """A person could not find it in the template."""
    tokenizer = tokenizer_of("qwen")
    (turn,) = [t for t in first_losses(kept_turns(tokenizer)) if t.conversation == "reasoning"]
    mark = int(turn.computed[turn.kept])
    sentence = turn.sentence(tokenizer)
    assert sentence.startswith(f"of the {turn.tokens} tokens of turn 1 the next one begins with ")
    assert f"begins with {turn.kept}; then it has {tokenizer.encode_text('F')[0]} 'F'" in sentence
    assert f"where {mark} '<think>'" in sentence


def trimming_model(folder: Path) -> Path:
    changes = {"tokenizer.chat_template": CHAT_TEMPLATE.replace("m.content", "m.content | trim")}
    return write_gguf(folder / "trims.gguf", changes=changes)


def test_the_start_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a server that computes conversations anew would not say so."""
    log = Log()
    monkeypatch.setattr(self_test, "_log", log)
    path = trimming_model(tmp_path)
    asked = settings("--model", str(path), "--kv-blocks", "4")
    model = load(asked)
    tell_history(asked, model)
    (line,) = log.of("chat_history_rewritten")
    assert line == {
        "conversation": "blanks",
        "turn": 1,
        "turn_tokens": 29,
        "kept_tokens": 23,
        "computed": " Fou",
        "written": "Four",
    }
    off = settings("--model", str(path), "--kv-blocks", "4", "--prefix-reuse", "off")
    tell_history(off, model)
    keeps = write_gguf(tmp_path / "keeps.gguf")
    tell_history(asked, replace(load(settings("--model", str(keeps), "--kv-blocks", "4"))))
    assert len(log.lines) == 1, "nothing is said where nothing is lost, or nothing reused"


async def test_a_server_reuses_what_it_says(tmp_path: Path) -> None:
    """GetModel would promise tokens that are computed again, or hide some that are found."""
    server = ReuseServer("--model", str(trimming_model(tmp_path)))
    server.model = replace(server.model, tokenizer=load(server.settings).tokenizer)
    async with running(server):
        answer = await server.models.GetModel(models_pb2.GetModelRequest())
        told = {(turn.conversation, turn.turn): turn for turn in answer.model.chat.history}
        assert len(told) == 6
        for turn in server.model.kept_turns:
            entry = told[turn.conversation, turn.turn]
            assert (entry.turn_tokens, entry.kept_tokens) == (turn.tokens, turn.kept)
            assert list(entry.computed_ids) == turn.computed_ids
            assert list(entry.written_ids) == turn.written_ids
            # The turn once more, by its ids and in a namespace of its own; a request's last token
            # is not kept, so one more.
            cache = {"cache": namespace(f"{turn.conversation} {turn.turn}")}
            await server.ids([*turn.computed.tolist(), 7], max_tokens=1, **cache)
            found = await server.ids(turn.followed.tolist(), max_tokens=1, **cache)
            reused = found.finished.usage.cached_prompt_tokens
            assert turn.kept - BLOCK < reused <= turn.kept
        assert entry.kept_tokens < entry.turn_tokens
        await server.require_nothing_held()
