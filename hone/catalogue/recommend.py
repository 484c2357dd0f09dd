"""Which method fits: from the size of the model, the kind of reward and the memory to a preset, with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hone.algorithms import advantage_estimators
from hone.catalogue.memory import HEADROOM, Model, model_memory
from hone.catalogue.presets import preset_values
from hone.errors import ConfigError, did_you_mean

REWARDS = {
    "verifiable": "a rule says right or wrong at the end (tests, an exact answer)",
    "model": "a trained reward model scores the whole answer",
    "dense": "rewards on many tokens or turns, not only at the end",
    "preference": "no reward, but pairs: this answer is better than that one",
    "labels": "no reward and no pairs, but answers marked good or bad",
}
"""Kinds of reward, and how to recognise them."""

LONG_RESPONSE = 4096
_LORA = (
    "actor_rollout_ref.model.lora_rank=32",
    "actor_rollout_ref.model.lora_alpha=64",
    "actor_rollout_ref.actor.optim.lr=2e-5",
)
_PREFER_LORA = ("model.lora_rank=32", "model.lora_alpha=64", "optim.lr=5e-6")
_PRECOMPUTE = "ref.mode=precompute"


@dataclass(frozen=True)
class Situation:
    """What is known before a method is chosen.

    Attributes:
        parameters: of the policy.
        reward: a key of :data:`REWARDS`.
        memory_gb: of the device, in GB.
        turns: assistant turns of an episode; 1 is a single answer.
        response_length: longest response in tokens.
        grouped: whether one prompt can be answered several times (a simulator that cannot be reset says no).
        moe: whether the policy is a mixture of experts.
    """

    parameters: int
    reward: str
    memory_gb: float
    turns: int = 1
    response_length: int = 1024
    grouped: bool = True
    moe: bool = False

    def __post_init__(self) -> None:
        if self.reward not in REWARDS:
            raise ConfigError(
                f"unknown kind of reward '{self.reward}'", where="--reward", fix=did_you_mean(self.reward, REWARDS)
            )
        numbers = (("--model-size", self.parameters), ("--memory", self.memory_gb), ("--turns", self.turns))
        for where, value in (*numbers, ("--response-length", self.response_length)):
            if value <= 0:
                raise ConfigError(f"{value:g} is not above 0", where=where, fix=f"{where} with a positive number")


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what speaks for it.

    Attributes:
        name: the method.
        preset: the preset of its command.
        why: why it suits the situation.
        lora: whether adapters are trained instead of all weights.
        command: ``train`` or ``prefer``.
        overrides: keys to set on top of the preset.
    """

    name: str
    preset: str
    why: str
    lora: bool = False
    command: str = "train"
    overrides: tuple[str, ...] = ()


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
    candidates = _candidates(situation)
    usable = situation.memory_gb * HEADROOM
    needed = [sum(model.gigabytes for model in _models(candidate, situation)) for candidate in candidates]
    fitting = [number for number, gigabytes in enumerate(needed) if gigabytes <= usable]
    chosen = fitting[0] if fitting else needed.index(min(needed))
    candidate, models = candidates[chosen], _models(candidates[chosen], situation)
    reasons = [candidate.why, _memory_sentence(models, needed[chosen], usable, situation)]
    passed = candidates[:chosen] if fitting else []
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


# ---------------------------------------------------------------------------------------------------------- the choice


def _candidates(situation: Situation) -> list[Candidate]:
    """Suitable ways, the best first, the smallest last."""
    if situation.reward in ("preference", "labels"):
        return _from_preferences(situation)
    if situation.reward == "dense":
        return [
            Candidate(
                "ppo",
                "ppo",
                "Rewards stand on many tokens, and GAE with a critic credits each token with what follows it.",
            ),
            *_with_lora(
                Candidate(
                    "reinforce_plus_plus",
                    "reinforce_plus_plus",
                    "Rewards stand on many tokens; REINFORCE++ credits each token with the discounted rewards after it, without a critic.",
                )
            ),
        ]
    if situation.reward == "model":
        return _from_reward_model(situation)
    return _from_rule(situation)


def _from_rule(situation: Situation) -> list[Candidate]:
    if not situation.grouped:
        why = (
            "Each prompt is answered once, so there is no group to compare with; REINFORCE++ compares with the whole batch "
            "instead, and needs no critic."
        )
        return _with_lora(Candidate("reinforce_plus_plus", "reinforce_plus_plus", why))
    if situation.moe:
        why = (
            "A rule checks the answer, and the policy is a mixture of experts: GSPO clips the ratio of whole responses, which "
            "the changing choice of experts disturbs much less than ratios of single tokens."
        )
        return _with_lora(Candidate("gspo", "gspo", why))
    if situation.response_length >= LONG_RESPONSE:
        why = (
            f"A rule checks the answer, and responses run to {situation.response_length} tokens: DAPO weighs all tokens the "
            "same, shapes the reward of overlong ones, and replaces groups that are all right or all wrong."
        )
        return _with_lora(Candidate("dapo", "dapo", why))
    grpo = (
        "A rule checks the answer, and each prompt can be answered several times: GRPO compares an answer with the others of "
        "its group, so no critic is needed."
    )
    return [
        Candidate("grpo", "grpo", grpo),
        Candidate("dr_grpo", "dr_grpo", f"{grpo} Dr. GRPO does without the reference copy."),
        Candidate(
            "grpo_lora", "grpo_lora", f"{grpo} With LoRA the reference is the same model with its adapter off.", True
        ),
    ]


def _from_reward_model(situation: Situation) -> list[Candidate]:
    single = "reinforce_plus_plus"
    why = "A learned reward can be exploited, so the policy is held to the reference by a KL penalty"
    critic = Candidate(
        "ppo", "ppo", f"{why}, token by token in the reward; PPO's critic turns that into credit for each token."
    )
    if situation.grouped:
        rest = Candidate(
            "rloo", "rloo", f"{why}; RLOO compares an answer with the mean of the other answers, without a critic."
        )
    else:
        rest = Candidate(single, single, f"{why}; REINFORCE++ compares with the whole batch, without a critic.")
    return [critic, *_with_lora(rest)]


def _from_preferences(situation: Situation) -> list[Candidate]:
    adapter = "With LoRA the reference is the model with its adapter off."
    if situation.reward == "labels":
        name, why = (
            "kto",
            "Answers are marked good or bad one by one: KTO learns from such labels, pairs are not needed.",
        )
        lora = Candidate("kto with LoRA", "kto", f"{why} {adapter}", True, "prefer", _PREFER_LORA)
    else:
        name = "dpo"
        why = (
            "Pairs of a better and a worse answer are at hand: DPO learns from them directly, without sampling and without a "
            "reward model."
        )
        lora = Candidate("dpo with LoRA", "dpo_lora", f"{why} {adapter}", True, "prefer")
    precomputed = f"{why} The reference runs over the data once, before training, and only its log-probs are kept."
    return [
        Candidate(name, name, why, command="prefer"),
        Candidate(f"{name} with precomputed reference", name, precomputed, command="prefer", overrides=(_PRECOMPUTE,)),
        lora,
    ]


def _with_lora(candidate: Candidate) -> list[Candidate]:
    """All weights, or adapters where they do not fit."""
    adapters = Candidate(f"{candidate.name} with LoRA", candidate.preset, candidate.why, True, overrides=_LORA)
    return [candidate, adapters]


# ---------------------------------------------------------------------------------------------------------- the memory


def _models(candidate: Candidate, situation: Situation) -> list[Model]:
    """The models of a run, as the preset has them."""
    size = situation.parameters
    models = [model_memory("policy", size, "LoRA" if candidate.lora else "trained")]
    if candidate.command == "prefer":
        held = not candidate.lora and _PRECOMPUTE not in candidate.overrides
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
            "algorithm.adv_estimator=gigpo or gae."
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
