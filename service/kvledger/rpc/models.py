"""ModelService: what this server runs, and its tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc

from kvledger.errors import ModelUnknown
from kvledger.limits import check_detokenize, check_text_fits, check_tokenize
from kvledger.rpc.calls import this_call
from kvledger.rpc.errors import abort
from kvledger.rpc.prompts import PromptEncoder
from kvledger.rpc.translation import model_message
from kvledger.served_model import ServedModel
from kvledger.v1 import models_pb2, models_pb2_grpc

_Response = TypeVar("_Response")
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ModelServicer(models_pb2_grpc.ModelServiceServicer):
    """See ModelService in the contract."""

    def __init__(self, model: ServedModel, prompts: PromptEncoder) -> None:
        self._model = model
        self._prompts = prompts

    async def ListModels(  # noqa: N802  # the contract's name
        self, request: models_pb2.ListModelsRequest, context: _Context
    ) -> models_pb2.ListModelsResponse:
        """The one model there is."""
        return models_pb2.ListModelsResponse(models=[model_message(self._model)])

    async def GetModel(  # noqa: N802  # the contract's name
        self, request: models_pb2.GetModelRequest, context: _Context
    ) -> models_pb2.GetModelResponse:
        """One model by id."""

        async def answer() -> models_pb2.GetModelResponse:
            self._require(request.model)
            return models_pb2.GetModelResponse(model=model_message(self._model))

        return await _answered(context, answer)

    async def Tokenize(  # noqa: N802  # the contract's name
        self, request: models_pb2.TokenizeRequest, context: _Context
    ) -> models_pb2.TokenizeResponse:
        """The ids that Generate would compute."""

        async def answer() -> models_pb2.TokenizeResponse:
            check_tokenize(request)
            self._require(request.model)
            ids = await self._prompts.encode(request, this_call().tenant.number)
            return models_pb2.TokenizeResponse(token_ids=ids.tolist())

        return await _answered(context, answer)

    async def Detokenize(  # noqa: N802  # the contract's name
        self, request: models_pb2.DetokenizeRequest, context: _Context
    ) -> models_pb2.DetokenizeResponse:
        """The text of some ids."""

        async def answer() -> models_pb2.DetokenizeResponse:
            check_detokenize(request, self._model.tokenizer.vocabulary_size)
            self._require(request.model)
            text = self._model.tokenizer.decode(list(request.token_ids), with_control_tokens=True)
            check_text_fits(text)
            return models_pb2.DetokenizeResponse(text=text)

        return await _answered(context, answer)

    def _require(self, name: str) -> None:
        if not self._model.answers_to(name):
            raise ModelUnknown


async def _answered(context: _Context, answer: Callable[[], Awaitable[_Response]]) -> _Response:
    """The answer, or the status of what it raised."""
    try:
        return await answer()
    except Exception as error:
        await abort(context, error)
