"""What runs inside vLLM's own worker processes: takes weights, and reports a second log-prob.

vLLM makes a class of this and its worker; every worker of a tensor-parallel engine runs each method.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from hone.errors import GenerationError
from hone.generation.remote.transports import Mappings, opened
from hone.generation.server.processes import die_with_parent
from hone.generation.server.vllm_log_probs import report_both
from hone.generation.server.vllm_reload import Reload
from hone.generation.server.vllm_streams import draw_only_what_counts
from hone.generation.server.vllm_weights import UnknownWay, WeightWays, ways_of

die_with_parent()


class HoneWorker:
    """Methods that the server calls by name on every worker; ``model_runner`` is the worker's."""

    model_runner: Any

    def hone_prepare(self) -> None:
        """Once, before anything is served."""
        report_both(self.model_runner)
        if current_platform.is_cpu():
            draw_only_what_counts(self.model_runner)
        model = self.model_runner.get_model()
        self._hone_tied = {name for name, _ in _tied_heads(model)}
        self._hone_expected = {name for name, _ in model.named_parameters()} - self._hone_tied
        self._hone_ways = ways_of(model, self._hone_tied)
        self._hone_reload: Reload | None = None
        self._hone_mappings = Mappings()

    def hone_begin_weights(self) -> None:
        """New weights follow."""
        if self._hone_reload is not None:  # the update before broke off: no layer may go on from its parts
            self._hone_reload.finish(self.model_runner.model_config)
            self._hone_reload = None
        self._hone_begun = False
        if self._hone_ways is not None:
            self._hone_ways.begin()

    def hone_load_weights(self, parcel: dict[str, Any]) -> None:
        """Take a parcel.

        Raises:
            GenerationError: weights were taken one way, and these cannot be.
        """
        with opened(parcel, self._hone_mappings) as tensors:
            ways = self._ways_for(tensors)
            if ways is not None:
                ways.take(tensors)
            else:
                assert self._hone_reload is not None
                self._hone_arrived |= self._hone_reload.load((name, tensor.clone()) for name, tensor in tensors)
        self._hone_begun = True

    def _ways_for(self, tensors: list[tuple[str, Tensor]]) -> WeightWays | None:
        """The ways of these weights; None when vLLM's own reload takes them, layer by layer, which then has begun."""
        if self._hone_ways is not None:
            try:
                self._hone_ways.learn(tensors)
                return self._hone_ways
            except UnknownWay as error:
                self._hone_ways = None
                if self._hone_begun:
                    raise GenerationError(
                        f"vLLM does not simply copy one of these weights ({error})",
                        why="the weights before them were copied straight to their places, and vLLM's reload needs all of them",
                        fix="send all weights of the version again",
                    ) from error
        if self._hone_reload is None:
            self._hone_arrived: set[str] = set()
            self._hone_reload = Reload(self.model_runner.get_model())
        return None

    def hone_finish_weights(self) -> None:
        """Make what is derived from the weights anew.

        Raises:
            GenerationError: some have not arrived; vLLM itself would go on with the old ones.
        """
        model = self.model_runner.get_model()
        if self._hone_reload is not None:
            untouched = self._hone_reload.untouched(but=self._hone_tied)
            incomplete = self._hone_reload.finish(self.model_runner.model_config)
            missing = sorted({*incomplete, *(self._hone_expected - self._hone_arrived)})
            self._hone_reload = None
        else:
            missing = sorted(self._hone_ways.missing() if self._hone_ways is not None else self._hone_expected)
            untouched = []
        _renew_packed_heads(model)
        if missing:
            raise GenerationError(
                f"{len(missing)} of {len(self._hone_expected)} weights have not arrived, such as '{missing[0]}'",
                why="the engine would sample from a mixture of two policies",
                fix="publish every parameter of the policy",
            )
        if untouched:
            raise GenerationError(
                f"vLLM does not let new weights into {len(untouched)} layers of this model, such as '{untouched[0]}'",
                why="its loader writes them past its own reload, which puts the old ones back: it would sample from a mixture",
                fix="actor_rollout_ref.rollout.name=native",
            )


def _tied_heads(model: nn.Module) -> list[tuple[str, Any]]:
    """Output heads whose weight is the embedding's, by the names of those weights."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return []
    return [(f"{name}.weight", module) for name, module in model.named_modules() if isinstance(module, ParallelLMHead)]


def _renew_packed_heads(model: nn.Module) -> None:
    """On a CPU embeddings and output heads have a packed copy beside their weight. A reload leaves that of a tied head as it was;
    that of an embedding beside a head is never computed with, and goes.
    """
    embedding = next((module for name, module in model.named_modules() if name.endswith("embed_tokens")), None)
    for _, head in _tied_heads(model):
        if embedding is not None:
            head.weight = embedding.weight
    packed: list[Any] = [
        m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and hasattr(m, "cpu_linear")
    ]
    heads = [module for module in packed if isinstance(module, ParallelLMHead)]
    for module in packed:
        if heads and module not in heads:
            del module.cpu_linear
            continue
        module.cpu_linear = None  # its memory serves again
        module.quant_method.process_weights_after_loading(module)
