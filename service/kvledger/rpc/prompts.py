"""Turning prompts into token ids, off the event loop: a long text must not stop the streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvledger.errors import QueueFull
from kvledger.rpc.conversations import conversation_of
from kvledger.tokenizer import Tokenizer
from kvledger.v1 import generation_pb2, models_pb2

# Prompts shorter than this, in characters, are encoded faster than a thread could be asked to.
_SHORT = 512
# What a caller is told to wait when too many prompts wait for the thread, in seconds.
_RETRY_SECONDS = 1.0


_Prompt = TypeVar("_Prompt")


class PromptEncoder:
    """Encodes prompts on a thread of its own."""

    def __init__(self, tokenizer: Tokenizer, waiting_max: int) -> None:
        """`waiting_max` is the most prompts that the thread may have before it."""
        self._tokenizer = tokenizer
        self._waiting_max = waiting_max
        self._waiting = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")

    async def encode(
        self, request: generation_pb2.GenerateRequest | models_pb2.TokenizeRequest
    ) -> npt.NDArray[np.int32]:
        """Token ids, int32 [tokens], of a validated request's prompt.

        Raises InvalidRequest or QueueFull.
        """
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            assert isinstance(request, generation_pb2.GenerateRequest)
            return np.array(request.token_ids.ids, dtype=np.int32)
        if kind == "text":
            if len(request.text) < _SHORT:
                return self._tokenizer.encode_text(request.text)
            return await self._elsewhere(self._tokenizer.encode_text, request.text)
        return await self._elsewhere(self._encode_chat, request.chat)

    def _encode_chat(self, chat: generation_pb2.ChatPrompt) -> npt.NDArray[np.int32]:
        conversation = conversation_of(chat)
        return self._tokenizer.encode_chat(
            conversation.messages, conversation.tools, conversation.arguments
        )

    async def _elsewhere(
        self, work: Callable[[_Prompt], npt.NDArray[np.int32]], prompt: _Prompt
    ) -> npt.NDArray[np.int32]:
        if self._waiting >= self._waiting_max:
            raise QueueFull(self._waiting, _RETRY_SECONDS)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, prompt)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Ends the thread once it has nothing to do."""
        self._thread.shutdown(wait=False, cancel_futures=True)
