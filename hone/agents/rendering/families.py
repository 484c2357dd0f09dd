"""Families of chat formats: properties that cannot be derived from the template."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hone.agents.parsers.base import named_tokens
from hone.errors import ModelError, UnknownMethod, did_you_mean
from hone.registry import Registry


@dataclass(frozen=True)
class Family:
    """Chat format shared by a family of models."""

    name: str  # value of ``multi_turn.renderer``
    signature: tuple[str, ...] = ()  # tokens in every vocabulary of this family
    # tokens that end an assistant turn in a template's rendering, in groups of equivalent tokens
    closers: tuple[tuple[str, ...], ...] = ()
    stops: tuple[str, ...] = ()  # tokens at which generation ends
    parser: str = "hermes"  # format of tool calls if the template does not write calls
    # True if the template names a result after the last call before it, so that each result is rendered after a
    # separate call
    results_one_by_one: bool = False


FAMILIES: Registry[Family] = Registry("renderer", key="actor_rollout_ref.rollout.multi_turn.renderer")
"""Families by name."""

for _family in (
    Family(
        "harmony",
        signature=("<|start|>", "<|channel|>", "<|message|>", "<|call|>"),
        closers=(("<|end|>", "<|return|>", "<|call|>"),),
        stops=("<|return|>", "<|call|>"),
        parser="harmony",
        results_one_by_one=True,
    ),
    Family(
        "deepseek",
        signature=("<｜User｜>", "<｜Assistant｜>"),
        closers=(("<｜end▁of▁sentence｜>",),),
        stops=("<｜end▁of▁sentence｜>",),
        parser="deepseek",
    ),
    Family(
        "kimi",
        signature=("<|im_middle|>", "<|im_assistant|>"),
        closers=(("<|im_end|>",),),
        stops=("<|im_end|>",),
        parser="kimi",
    ),
    Family(
        "llama3",
        signature=("<|start_header_id|>", "<|eot_id|>"),
        closers=(("<|eot_id|>", "<|eom_id|>"),),
        stops=("<|eot_id|>", "<|eom_id|>"),
        parser="llama3_json",
    ),
    Family(
        "gemma4",
        signature=("<|turn>", "<turn|>"),
        closers=(("<turn|>",), ("<|tool_response>",)),
        stops=("<turn|>", "<|tool_response>"),
        parser="gemma",
    ),
    Family(
        "gemma",
        signature=("<start_of_turn>", "<end_of_turn>"),
        closers=(("<end_of_turn>",), ("<start_function_response>",)),
        stops=("<end_of_turn>", "<start_function_response>"),
        parser="gemma",
    ),
    Family(
        "qwen",
        signature=("<|im_start|>", "<|im_end|>"),
        closers=(("<|im_end|>",),),
        stops=("<|im_end|>", "<|endoftext|>"),
        parser="hermes",
    ),
    Family("generic"),
):
    FAMILIES.register(_family.name)(_family)

_MOST_SPECIFIC_FIRST = ("harmony", "deepseek", "kimi", "llama3", "gemma4", "gemma", "qwen")


def family_of(tokenizer: PreTrainedTokenizerBase) -> Family:
    """Return the family whose signature tokens the vocabulary has, else ``generic``."""
    token_ids = named_tokens(tokenizer)
    for name in _MOST_SPECIFIC_FIRST:
        family = FAMILIES.get(name)
        if all(token in token_ids for token in family.signature):
            return family
    return FAMILIES.get("generic")


def family_called(name: str, tokenizer: PreTrainedTokenizerBase) -> Family:
    """Return the family called ``name``, or the tokenizer's family for ``auto``.

    Raises:
        ModelError: the vocabulary lacks tokens of that family.
    """
    if name == "auto":
        return family_of(tokenizer)
    if name not in FAMILIES:
        raise UnknownMethod(
            f"unknown renderer '{name}'",
            where="actor_rollout_ref.rollout.multi_turn.renderer",
            fix=did_you_mean(name, [*FAMILIES.names(), "auto", "text_tools"]),
        )
    family = FAMILIES.get(name)
    missing = [token for token in family.signature if token not in named_tokens(tokenizer)]
    if missing:
        raise ModelError(
            f"renderer '{name}' needs the token {missing[0]}, which the tokenizer does not have",
            where=str(tokenizer.name_or_path),
            why="turns would not begin and end as the model was trained",
            fix="actor_rollout_ref.rollout.multi_turn.renderer=auto",
        )
    return family
