"""vLLM as the engine of a scoring model, such as a reward model: prompts in, scores out. Runs in vLLM's environment."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError, RequestError
from hone.generation.protocol import Completion, GenerationRequest
from hone.generation.server.arguments import one_line
from hone.generation.server.backend import BackendSettings
from hone.generation.server.processes import give_up
from hone.generation.server.vllm_backend import VllmBackend

_OF_SAMPLING = ("generation_config", "structured_outputs_config", "logprobs_mode", "worker_extension_cls")


class VllmScorer(VllmBackend):
    """vLLM with ``runner=pooling``. A completion has no tokens; its score is the raw output, without an activation function."""

    def _options(self, settings: BackendSettings) -> dict[str, Any]:
        return {name: value for name, value in super()._options(settings).items() if name not in _OF_SAMPLING}

    async def generate(self, request: GenerationRequest) -> Completion:
        from vllm import PoolingParams
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        final = None
        try:
            prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
            parameters = PoolingParams(task="classify", use_activation=False)
            async for output in self._engine.encode(prompt, parameters, request.request_id):
                final = output
        except EngineDeadError:
            give_up()
        except ValueError as error:
            raise RequestError(f"vLLM refuses to score a text: {one_line(error)}") from error
        if final is None:
            raise GenerationError("vLLM returned no score")
        if final.outputs.data.numel() != 1:
            raise ConfigError(
                f"the model has {final.outputs.data.numel()} outputs, but a score is one",
                fix="reward.reward_model.path=<a model with one label>",
                where="reward.reward_model.path",
            )
        self._count(request, [])
        return Completion(request.request_id, [], [], [], StopReason.STOP, score=float(final.outputs.data))
