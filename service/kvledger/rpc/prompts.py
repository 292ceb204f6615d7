"""Turning prompts into token ids, off the event loop: a long text must not stop the streams."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvledger.rpc.translation import chat_messages
from kvledger.tokenizer import Tokenizer
from kvledger.v1 import generation_pb2, models_pb2

# Prompts shorter than this, in bytes, are encoded faster than a thread could be asked to.
_SHORT = 512


class PromptEncoder:
    """Encodes prompts on a thread of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")

    async def encode(
        self, request: generation_pb2.GenerateRequest | models_pb2.TokenizeRequest
    ) -> npt.NDArray[np.int32]:
        """Token ids, int32 [tokens], of a validated request's prompt; raises InvalidRequest."""
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            assert isinstance(request, generation_pb2.GenerateRequest)
            return np.array(request.token_ids.ids, dtype=np.int32)
        if kind == "text":
            if len(request.text) < _SHORT:
                return self._tokenizer.encode_text(request.text)
            return await self._elsewhere(self._tokenizer.encode_text, request.text)
        return await self._elsewhere(self._tokenizer.encode_chat, chat_messages(request.chat))

    async def _elsewhere(self, work: object, argument: object) -> npt.NDArray[np.int32]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, argument)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the thread once it has nothing to do."""
        self._thread.shutdown(wait=False, cancel_futures=True)
