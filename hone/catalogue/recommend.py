"""Which method fits: from the size of the model, the kind of reward and the memory to a preset, with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hone.algorithms import advantage_estimators
from hone.catalogue.candidates import PRECOMPUTE, Candidate, Situation, candidates
from hone.catalogue.memory import HEADROOM, Model, model_memory
from hone.catalogue.presets import preset_values


@dataclass(frozen=True)
class Recommendation:
    """The choice and how it came about.

    Attributes:
        method: what to use.
        command: to start from; paths of model and data are left to the user.
        fits: whether its models fit into the memory.
        models: what is held in memory.
        needed_gb: their sum.
        usable_gb: what models may take of the memory.
        reasons: the explanation, a sentence each.
    """

    method: str
    command: str
    fits: bool
    models: tuple[Model, ...]
    needed_gb: float
    usable_gb: float
    reasons: list[str] = field(default_factory=list)


def recommend(situation: Situation) -> Recommendation:
    """Choose the first of the suitable ways whose models fit, and explain the choice.

    When none fits, the smallest is returned with ``fits=False`` and the size of a policy that would fit.
    """
    ways = candidates(situation)
    usable = situation.memory_gb * HEADROOM
    needed = [sum(model.gigabytes for model in _models(candidate, situation)) for candidate in ways]
    fitting = [number for number, gigabytes in enumerate(needed) if gigabytes <= usable]
    chosen = fitting[0] if fitting else needed.index(min(needed))
    candidate, models = ways[chosen], _models(ways[chosen], situation)
    reasons = [candidate.why, _memory_sentence(models, needed[chosen], usable, situation)]
    passed = ways[:chosen] if fitting else []
    reasons += [_passed_sentence(other, needed[i], usable) for i, other in enumerate(passed)]
    if not fitting:
        largest = situation.parameters * usable / needed[chosen]
        reasons.append(
            f"Nothing fits: even this one, the smallest, needs {needed[chosen]:.3g} GB. With {situation.memory_gb:g} GB a "
            f"policy of up to {size_text(largest)} parameters could be trained this way."
        )
    reasons += _advice(situation, candidate)
    return Recommendation(
        candidate.name, _command(candidate, situation), bool(fitting), tuple(models), needed[chosen], usable, reasons
    )


def size_text(parameters: float) -> str:
    """A number of parameters as people write it: 1.5B, 7M."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return f"{parameters:.0f}"


# ---------------------------------------------------------------------------------------------------------- the memory


def _models(candidate: Candidate, situation: Situation) -> list[Model]:
    """The models of a run, as the preset has them."""
    size = situation.parameters
    models = [model_memory("policy", size, "LoRA" if candidate.lora else "trained")]
    if candidate.command == "prefer":
        held = not candidate.lora and PRECOMPUTE not in candidate.overrides
        return models + ([model_memory("reference", size, "frozen")] if held else [])
    values = preset_values(candidate.preset)
    if "values" in advantage_estimators.get(values.get("algorithm.adv_estimator", "grpo")).needs:
        models.append(model_memory("critic", size, "trained"))
    kl = values.get("algorithm.use_kl_in_reward") or values.get("actor_rollout_ref.actor.use_kl_loss")
    if kl and not candidate.lora:
        models.append(model_memory("reference", size, "frozen"))
    if situation.reward == "model":
        models.append(model_memory("reward model of the same size", size, "frozen"))
    return models


def _memory_sentence(models: Sequence[Model], needed: float, usable: float, situation: Situation) -> str:
    listed = ", ".join(f"{model.role} ({model.how}) {model.gigabytes:.3g} GB" for model in models)
    return (
        f"For {size_text(situation.parameters)} parameters it holds {listed}: {needed:.3g} GB of the {usable:.3g} GB that "
        f"models may take of {situation.memory_gb:g} GB (the rest is for activations and the key-value cache). A trained "
        "parameter takes 16 bytes (weight, gradient, AdamW), a frozen one 4."
    )


def _passed_sentence(candidate: Candidate, needed: float, usable: float) -> str:
    return f"{candidate.name} would come before it but needs {needed:.3g} GB, more than {usable:.3g} GB."


# ---------------------------------------------------------------------------------------------------------- the advice


def _advice(situation: Situation, candidate: Candidate) -> list[str]:
    if candidate.command == "prefer":
        return [
            "The pairs should come from the policy itself; `hone data pairs` mines them from the rollouts of a run."
        ]
    advice = []
    if situation.turns > 1:
        advice.append(
            f"With {situation.turns} turns, tokens that tools wrote carry no loss, and one reward at the end credits all turns "
            "alike; when the environment scores turns, put each score on the last token of its turn and use "
            "algorithm.adv_estimator=gigpo or gae. `hone train` itself plays single turns so far."
        )
    if situation.reward == "verifiable" and situation.grouped:
        advice.append(
            "Watch reward/zero_std_group_ratio: groups whose answers are all right or all wrong teach nothing; above 0.5 "
            "change the difficulty of the prompts or raise rollout.n."
        )
    if situation.reward == "model":
        advice.append(
            "Watch the KL together with the reward: KL up while a held-out score falls is a reward being exploited."
        )
    return advice


def _command(candidate: Candidate, situation: Situation) -> str:
    target = "actor_rollout_ref.model.path" if candidate.command == "train" else "model.path"
    words = [f"hone {candidate.command} --preset {candidate.preset}", *candidate.overrides]
    if situation.reward == "model":
        words += ["reward.reward_model.enable=true", "reward.reward_model.path=REWARD_MODEL"]
    return " ".join([*words, f"{target}=MODEL", "data.train_files=DATA"])
