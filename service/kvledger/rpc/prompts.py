"""Turning prompts into token ids, off the event loop: a long text must not stop the streams."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvledger.errors import FieldViolation, InvalidRequest, QueueFull
from kvledger.limits import check_shared_fits
from kvledger.rpc.conversations import conversation_of
from kvledger.scopes.public_prefixes import common_tokens
from kvledger.tenants.fair_queue import has_room
from kvledger.tenants.turns import Turns
from kvledger.tokenizer import Conversation, Tokenizer
from kvledger.v1 import generation_pb2, models_pb2

# Prompts shorter than this, in characters, are encoded faster than a thread could be asked to.
_SHORT = 512
# What a caller is told to wait when too many prompts wait for the thread, in seconds.
_RETRY_SECONDS = 1.0


_Prompt = TypeVar("_Prompt")
_Result = TypeVar("_Result")


class SharedPrompt(NamedTuple):
    """A prompt, and how much of it lies in the shared scope that its request names."""

    tokens: npt.NDArray[np.int32]
    # Of the first tokens; 0 where it names none.
    shared_tokens: int


class PromptEncoder:
    """Encodes prompts on a thread of its own, for tenants in turn."""

    def __init__(self, tokenizer: Tokenizer, waiting_max: int) -> None:
        """`waiting_max` is the most prompts that the thread may have before it.

        No tenant fills it for the others: see tenants.fair_queue.
        """
        self._tokenizer = tokenizer
        self._waiting_max = waiting_max
        self._waiting = 0
        self._own: Counter[int] = Counter()  # by tenant, of those that wait; none is 0
        self._turns = Turns()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")

    async def encode(
        self,
        request: generation_pb2.GenerateRequest | models_pb2.TokenizeRequest,
        tenant: int = 0,
    ) -> npt.NDArray[np.int32]:
        """Token ids, int32 [tokens], of a validated request's prompt.

        `tenant` is the number of the caller's. Raises InvalidRequest or QueueFull.
        """
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            assert isinstance(request, generation_pb2.GenerateRequest)
            return np.array(request.token_ids.ids, dtype=np.int32)
        if kind == "text":
            if len(request.text) < _SHORT:
                return self._tokenizer.encode_text(request.text)
            return await self._elsewhere(tenant, self._tokenizer.encode_text, request.text)
        return await self._elsewhere(tenant, self._encode_chat, request.chat)

    async def encode_shared(
        self, request: generation_pb2.GenerateRequest, tenant: int = 0
    ) -> SharedPrompt:
        """The same, with the border of what the request shares, in tokens.

        Where it counts messages, the border is where those end: no token before it depends on what
        follows them.
        """
        if request.cache.shared_messages:
            return await self._elsewhere(tenant, self._encode_shared_chat, request)
        tokens, shared = await self.encode(request, tenant), request.cache.shared_tokens
        check_shared_fits(shared, len(tokens))
        return SharedPrompt(tokens, shared)

    def _encode_chat(self, chat: generation_pb2.ChatPrompt) -> npt.NDArray[np.int32]:
        return self._encode_conversation(conversation_of(chat))

    def _encode_conversation(self, conversation: Conversation) -> npt.NDArray[np.int32]:
        return self._tokenizer.encode_chat(
            conversation.messages, conversation.tools, conversation.arguments
        )

    def _encode_shared_chat(self, request: generation_pb2.GenerateRequest) -> SharedPrompt:
        conversation, count = conversation_of(request.chat), request.cache.shared_messages
        tokens = self._encode_conversation(conversation)
        try:
            shared = self._tokenizer.encode_chat(
                conversation.messages[:count],
                conversation.tools,
                conversation.arguments,
                invites=False,
            )
        except InvalidRequest:
            reason = (
                f"the model's chat template cannot write the first {count} messages without those "
                f"that follow; count others, or leave cache.shared_scope out"
            )
            raise InvalidRequest(FieldViolation("cache.shared_messages", reason)) from None
        # Where the two differ, what follows has begun to tell: by another token, or by letters
        # that became one token with those before them.
        return SharedPrompt(tokens, common_tokens(tokens, shared))

    async def _elsewhere(
        self, tenant: int, work: Callable[[_Prompt], _Result], prompt: _Prompt
    ) -> _Result:
        own = self._own[tenant]  # a Counter adds no key for being asked
        tenants = len(self._own) + (own == 0)
        if not has_room(self._waiting, own, self._waiting_max, tenants):
            raise QueueFull(max(self._waiting_max, own), _RETRY_SECONDS)
        self._waiting += 1
        self._own[tenant] = own + 1
        try:
            async with self._turns.turn(tenant):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, prompt)
        finally:
            self._waiting -= 1
            self._own[tenant] -= 1
            if not self._own[tenant]:
                del self._own[tenant]

    def close(self) -> None:
        """Ends the thread once it has nothing to do."""
        self._thread.shutdown(wait=False, cancel_futures=True)
