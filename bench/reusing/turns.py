"""A conversation through the chat template: how much of each turn the next one reuses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.duress import Bar
from bench.reusing.figures import common_beginning, reusable, share
from bench.reusing.servers import MeasuredServer, require_ok
from kvledger.v1 import generation_pb2, models_pb2

QUESTIONS = (
    "What is a ledger, and who keeps one? Answer in a few sentences.",
    "And why are there two entries for everything?",
    "Give me an example with a bakery that buys flour on credit.",
    "How would the baker see at the end of the month whether the books agree?",
    "What if one entry was forgotten? How is it found?",
    "Sum up what you have told me in three lines.",
)


async def rendered(server: MeasuredServer, messages: Sequence[tuple[int, str]]) -> list[int]:
    """The token ids of a conversation, as the server's template puts it."""
    chat = generation_pb2.ChatPrompt(
        messages=[generation_pb2.ChatMessage(role=role, content=text) for role, text in messages]
    )
    answer = await server.client._models.Tokenize(models_pb2.TokenizeRequest(chat=chat), timeout=30)
    return list(answer.token_ids)


async def measure(server: MeasuredServer, options: argparse.Namespace) -> list[Bar]:
    """Turn after turn; each must reuse all whole blocks that the last one left."""
    model = await server.client.model()
    block = next(
        cost.tokens_per_block for cost in model.kv_formats if cost.format == model.kv_pool.format
    )
    asker = server.asker()
    messages: list[tuple[int, str]] = []
    before: list[int] = []
    short, differing = 0, 0
    print("turn  prompt  reused  of the prompt  to be had  of the last turn   differs at")
    try:
        for turn, question in enumerate(QUESTIONS):
            messages.append((generation_pb2.ROLE_USER, question))
            prompt = await rendered(server, messages)
            answer = await asker.chat(messages, options.output)
            require_ok([answer])
            there = reusable(before, prompt, block)
            agree = common_beginning(before, prompt)
            differs = agree < min(len(before), len(prompt))
            short += answer.cached_tokens < there
            differing += differs
            print(
                f"{turn + 1:4}  {len(prompt):6}  {answer.cached_tokens:6}  "
                f"{share(answer.cached_tokens, len(prompt)):13.1%}  {there:9}  {len(before):16}   "
                f"{agree if differs else '-'}",
                flush=True,
            )
            if differs:
                sides = (before[agree : agree + 4], prompt[agree : agree + 4])
                computed, written = [await server.client.text(ids) for ids in sides]
                print(f"      computed {computed!r}, now written {written!r}")
            messages.append((generation_pb2.ROLE_ASSISTANT, answer.text))
            before = prompt + answer.tokens
    finally:
        await asker.close()
    return [
        Bar("whole blocks of the last turn", short == 0, f"{short} turns reused less", "none"),
        Bar(
            "the template writes answers as the model did",
            differing == 0,
            f"{differing} turns differ",
            "none",
        ),
    ]
