"""Families of chat formats: the few facts about each that its template does not tell by itself."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hone.agents.parsers.base import named_tokens
from hone.errors import ModelError
from hone.registry import Registry


@dataclass(frozen=True)
class Family:
    """What a family of models agrees on.

    Attributes:
        name: as in ``multi_turn.renderer``.
        signature: tokens that a vocabulary of this family has.
        closers: tokens that end an assistant turn in a template's rendering, in groups that mean the same.
        stops: tokens at which generation ends.
        parser: format of its tool calls, where the template does not write it.
        results_one_by_one: the template names a result after the last call before it, so each is rendered behind a call of its
            own.
    """

    name: str
    signature: tuple[str, ...] = ()
    closers: tuple[tuple[str, ...], ...] = ()
    stops: tuple[str, ...] = ()
    parser: str = "hermes"
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

_TELLING_FIRST = ("harmony", "deepseek", "kimi", "llama3", "gemma4", "gemma", "qwen")


def family_of(tokenizer: PreTrainedTokenizerBase) -> Family:
    """Return the family whose tokens the vocabulary has, ``generic`` when it has those of none."""
    known = named_tokens(tokenizer)
    for name in _TELLING_FIRST:
        family = FAMILIES.get(name)
        if all(token in known for token in family.signature):
            return family
    return FAMILIES.get("generic")


def family_called(name: str, tokenizer: PreTrainedTokenizerBase) -> Family:
    """Return the family called ``name``, or the tokenizer's own for ``auto``.

    Raises:
        ConfigError: no family has that name.
        ModelError: the vocabulary lacks tokens of that family.
    """
    if name == "auto":
        return family_of(tokenizer)
    family = FAMILIES.get(name)
    missing = [token for token in family.signature if token not in named_tokens(tokenizer)]
    if missing:
        raise ModelError(
            f"renderer '{name}' needs the token {missing[0]}, which the tokenizer does not have",
            where=str(tokenizer.name_or_path),
            why="turns could not be ended and begun as the model has learnt it",
            fix="actor_rollout_ref.rollout.multi_turn.renderer=auto",
        )
    return family
