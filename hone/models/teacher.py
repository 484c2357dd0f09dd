"""Head of a teacher: what it says about each response token, as columns for the student."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hone.algorithms.logits import chunked_log_probs, token_log_probs
from hone.algorithms.teacher import OutputLayer, chunked_top_k, top_k
from hone.config.model import ModelConfig
from hone.errors import ConfigError
from hone.models.heads import (
    causal_logits,
    hidden_states,
    output_weights,
    projects_plainly,
    transformers_or_backbone,
    whole_vocabulary,
)
from hone.models.inputs import PackedSequences
from hone.models.loading import load_empty, policy_factory

TEACHER = "teacher"
"""Column ``[B]`` of the index of each row's teacher; missing if there is one teacher."""
TEACHER_PROMPTS = "teacher_prompt_ids"
"""Column of the prompts that teachers see; missing if they are the policy's."""
TEACHER_LOG_PROBS = "teacher_log_probs"
"""Column ``[R]`` of a teacher's log-probs of the sampled tokens."""
SPANS = "teacher_spans"
"""Column ``[R]`` of the span of each token of the policy (:mod:`hone.data.spans`); missing if every token is one."""
IDS, LOG_PROBS, HIDDEN = "teacher_ids", "teacher_top_log_probs", "teacher_hidden"
"""Columns of a teacher: its likeliest tokens ``[R, K]`` and their log-probs ``[R, K]``, or last hidden states ``[R, H]``."""


class TopKHead:
    """The teacher's ``k`` likeliest tokens and their log-probs at each response token.

    Args:
        k: number of tokens.
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        vocabulary: size of the student's output layer; later tokens do not exist for it.
    """

    def __init__(self, k: int, temperature: float, vocabulary: int) -> None:
        self.k, self.vocabulary = k, vocabulary
        self.temperature = temperature if temperature > 0 else 1.0

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        del with_entropy
        causal = transformers_or_backbone(model)
        if not projects_plainly(causal):
            ids, log_probs = top_k(causal_logits(causal, packed), self.k, self.temperature, self.vocabulary)
        else:
            ids, log_probs = chunked_top_k(
                hidden_states(causal, packed),
                k=self.k,
                temperature=self.temperature,
                vocabulary=self.vocabulary,
                **whole_vocabulary(output_weights(causal)),
            )
        return {IDS: ids.int(), LOG_PROBS: log_probs}


class PromptHead:
    """``log_probs`` of the target tokens, and the ``k`` likeliest tokens at each, of the same forward pass.

    Args:
        k: number of likeliest tokens; 0 leaves them out.
    """

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        del with_entropy
        causal = transformers_or_backbone(model)
        if not projects_plainly(causal):
            logits = causal_logits(causal, packed)
            outputs, likeliest = {"log_probs": token_log_probs(logits, packed.targets)}, top_k(logits, self.k or 1)
        else:
            hidden, layer = hidden_states(causal, packed), whole_vocabulary(output_weights(causal))
            log_probs, _ = chunked_log_probs(hidden, targets=packed.targets, **layer)
            outputs, likeliest = {"log_probs": log_probs}, chunked_top_k(hidden, k=self.k or 1, **layer)
        return outputs if self.k == 0 else {**outputs, IDS: likeliest[0], LOG_PROBS: likeliest[1]}


class HiddenHead:
    """The teacher's last hidden state at each response token, which :func:`output_layer` of the same model projects."""

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        del with_entropy
        causal = transformers_or_backbone(model)
        if not projects_plainly(causal):
            raise _other_logits(str(causal.config.name_or_path))
        return {HIDDEN: hidden_states(causal, packed)}


def output_layer(model: ModelConfig, device: torch.device) -> OutputLayer:
    """Read the output layer of a model directory, and nothing else of it.

    Raises:
        ModelError: the directory is missing or holds no model.
    """
    empty, files = load_empty(policy_factory(model), model)
    if not projects_plainly(empty):
        raise _other_logits(str(model.path))
    output = empty.get_output_embeddings()
    assert isinstance(output, nn.Linear)
    weight = files.read(*names_of(empty, output.weight)).float().to(device)
    bias = None if output.bias is None else files.read(*names_of(empty, output.bias)).float().to(device)
    return OutputLayer(
        weight, bias, getattr(empty.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    )


def names_of(model: nn.Module, parameter: Tensor) -> list[str]:
    """Return all names of a parameter: several if it is tied."""
    return [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]


def _other_logits(path: str) -> ConfigError:
    return ConfigError(
        f"the teacher '{Path(path).name}' transforms its logits after the output layer",
        why="a divergence over the whole vocabulary computes the teacher's logits from its hidden states",
        fix="distillation.loss_mode=reverse_kl_topk, or another _topk",
        where="distillation.loss_mode",
    )
