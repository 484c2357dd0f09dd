"""What runs inside vLLM's own worker processes: takes weights, and reports a second log-prob.

vLLM makes a class of this and its worker; every worker of a tensor-parallel engine runs each method.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.sampler import Sampler

from hone.errors import GenerationError
from hone.generation.remote.transports import opened
from hone.generation.server.processes import die_with_parent

die_with_parent()

_GREEDY = 1e-5
"""vLLM takes temperatures below this as 0."""


class HoneWorker:
    """Methods that the server calls by name on every worker; ``model_runner`` is the worker's."""

    model_runner: Any

    def hone_prepare(self) -> None:
        """Once, before anything is served."""
        sampler = self.model_runner.sampler
        if not isinstance(sampler, Sampler):
            raise GenerationError(f"this vLLM samples with {type(sampler).__name__}, which Hone does not know")
        sampler.forward = _reporting_both(sampler.forward)
        self._hone_expected = {name for name, _ in self.model_runner.get_model().named_parameters()}

    def hone_begin_weights(self) -> None:
        """Put every layer into the state in which it takes weights as they are saved."""
        self._hone_arrived: set[str] = set()
        initialize_layerwise_reload(self.model_runner.get_model())

    def hone_load_weights(self, parcel: dict[str, Any], whole: bool) -> None:
        """Take a parcel. Layers may keep what they get until they are complete, so it is copied unless it stays."""
        model = self.model_runner.get_model()
        with opened(parcel) as tensors:
            self._hone_arrived |= model.load_weights((n, t if whole else t.clone()) for n, t in tensors)
            if whole:
                self.hone_finish_weights()

    def hone_finish_weights(self) -> None:
        """Make what is derived from the weights anew.

        Raises:
            GenerationError: some have not arrived; vLLM itself would go on with the old ones.
        """
        model = self.model_runner.get_model()
        finalize_layerwise_reload(model, self.model_runner.model_config)
        missing = sorted(self._hone_expected - self._hone_arrived)
        tied = _renew_packed_heads(model)
        missing = [name for name in missing if name not in tied]
        if missing:
            raise GenerationError(
                f"{len(missing)} of {len(self._hone_expected)} weights have not arrived, such as '{missing[0]}'",
                why="the engine would sample from a mixture of two policies",
                fix="publish every parameter of the policy",
            )


def _renew_packed_heads(model: nn.Module) -> set[str]:
    """On a CPU an output head that is tied to the embedding has a packed copy of its own, which a reload leaves as it was.

    Returns:
        Names of the weights that are the embedding's.
    """
    tied = getattr(model.config, "tie_word_embeddings", False)
    embedding = next((module for name, module in model.named_modules() if name.endswith("embed_tokens")), None)
    names = set()
    module: Any
    for name, module in model.named_modules():
        if not isinstance(module, ParallelLMHead) or not tied or embedding is None:
            continue
        names.add(f"{name}.weight")
        if hasattr(module, "cpu_linear"):
            module.weight = embedding.weight
            module.quant_method.process_weights_after_loading(module)
    return names


def _reporting_both(forward: Any) -> Any:
    """The sampler with one more result: each token's log-prob under the raw policy, before top-k and the like.

    vLLM reports one log-prob a token, here that of the distribution sampled from. The other one travels as the bits of a float32
    in the place of the token's rank, which nobody asks for.
    """

    def sample(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        policy = _policy_log_probs(logits, sampling_metadata.temperature)
        output = forward(logits, sampling_metadata, *args, **kwargs)
        if output.logprobs_tensors is not None:
            drawn = policy.gather(1, output.sampled_token_ids[:, :1].long())[:, 0].float()
            ranks = drawn.view(torch.int32).to(output.logprobs_tensors.selected_token_ranks.dtype)
            output.logprobs_tensors = output.logprobs_tensors._replace(selected_token_ranks=ranks)
        return output

    return sample


def _policy_log_probs(logits: Tensor, temperature: Tensor | None) -> Tensor:
    scores = logits.float()
    if temperature is not None:
        scores = scores / torch.where(temperature < _GREEDY, 1.0, temperature)[:, None]
    return scores.log_softmax(-1)
