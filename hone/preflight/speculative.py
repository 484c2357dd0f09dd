"""Rules about speculative decoding."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone.config.tree import RLConfig
from hone.errors import ConfigError, HoneError
from hone.preflight.evidence import Evidence
from hone.preflight.reading import read_model
from hone.preflight.rules import Finding, Stage, error, rule

BLOCK = "actor_rollout_ref.rollout.speculative"


@rule("R90", RLConfig)
def engine_drafts_as_configured(config: RLConfig) -> Iterator[Finding]:
    """The engine has the configured speculative decoding, and its keys fit each other."""
    from hone.generation.options import check_speculation

    rollout, settings = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.speculative
    try:
        check_speculation(rollout)
    except ConfigError as problem:
        yield error(problem.what, why=problem.why, fix=problem.fix, where=problem.where)
        return
    if settings.method == "ngram" and settings.prompt_lookup_min > settings.prompt_lookup_max:
        yield error(
            f"speculative.prompt_lookup_min={settings.prompt_lookup_min} exceeds prompt_lookup_max={settings.prompt_lookup_max}",
            why="no n-gram has such a length, so nothing would be drafted",
            fix=f"{BLOCK}.prompt_lookup_min={settings.prompt_lookup_max}",
            where=f"{BLOCK}.prompt_lookup_min",
        )
    if settings.method == "draft_model" and settings.model is None:
        yield error(
            "speculative.method=draft_model, but speculative.model=null names no draft model",
            fix=f"{BLOCK}.model=<directory of a small model with the tokenizer of the policy>, or {BLOCK}.method=ngram",
            where=f"{BLOCK}.model",
        )
    if rollout.name == "vllm" and settings.method is not None and rollout.min_p > 0:
        yield error(
            f"vLLM cannot sample with min_p={rollout.min_p:g} and speculative decoding",
            why="it verifies drafts without min_p",
            fix=f"actor_rollout_ref.rollout.min_p=0, or {BLOCK}.method=null",
            where="actor_rollout_ref.rollout.min_p",
        )


@rule("R90", RLConfig, stage=Stage.FILES)
def draft_model_shares_the_tokenizer(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
    """The draft model has the tokenizer of the policy, and rejected drafts can be taken back from the caches of both models."""
    settings = config.actor_rollout_ref.rollout.speculative
    native = config.actor_rollout_ref.rollout.name == "native" and settings.method is not None
    if native and not _has_entries_per_token(evidence.model_settings):
        yield error(
            f"speculative.method={settings.method}, but a {evidence.model_settings['model_type']} model keeps one state a sequence",
            why="rejected drafts could not be taken back from it",
            fix=f"{BLOCK}.method=null",
            where=f"{BLOCK}.method",
        )
    if not native or settings.method != "draft_model" or settings.model is None or evidence.tokenizer is None:
        return
    from hone.data.tokenizer import load_tokenizer

    fix = f"{BLOCK}.model=<directory of a model with the tokenizer of the policy>, or {BLOCK}.method=ngram"
    try:
        trusted = config.actor_rollout_ref.model.trust_remote_code
        drafted = load_tokenizer(settings.model, trust_remote_code=trusted).get_vocab()
    except HoneError as problem:
        yield error(
            f"the draft model '{settings.model}' cannot be used: {problem.what}",
            why=problem.why,
            fix=fix,
            where=f"{BLOCK}.model",
        )
        return
    policy = evidence.tokenizer.get_vocab()
    others = sum(drafted.get(token) != number for token, number in policy.items())
    if others or len(drafted) != len(policy):
        yield error(
            f"the draft model '{Path(settings.model).name}' has another tokenizer: {others} of the policy's {len(policy)} tokens have "
            f"another id or none, and {len(drafted.keys() - policy.keys())} tokens of the draft model are not the policy's",
            why="its drafts are token ids that the policy verifies",
            fix=fix,
            where=f"{BLOCK}.model",
        )
    elif not _has_entries_per_token(read_model(settings.model)):
        yield error(
            f"the draft model '{Path(settings.model).name}' keeps one state a sequence",
            why="rejected drafts could not be taken back from it",
            fix=fix,
            where=f"{BLOCK}.model",
        )


def _has_entries_per_token(settings: dict[str, Any]) -> bool:
    """Return whether the KV cache of every layer of a model has an entry for each token; True for unreadable settings."""
    from types import SimpleNamespace

    from hone.models.registry import family_of

    if not {"model_type", "num_hidden_layers"} <= settings.keys():
        return True
    new_layer = functools.partial(family_of(settings["model_type"]).layer_cache, SimpleNamespace(**settings))
    return all(new_layer(layer).per_token for layer in range(settings["num_hidden_layers"]))
