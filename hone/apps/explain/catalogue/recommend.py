"""Recommend a preset, with reasons, for a model size, a kind of reward and the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hone.algorithms import advantage_estimators
from hone.apps.explain.catalogue.methods import preset_values
from hone.config.limits import TRAINED_BYTES
from hone.errors import ConfigError, did_you_mean

REWARDS = {
    "verifiable": "a rule says right or wrong at the end (tests, an exact answer)",
    "model": "a trained reward model scores the whole answer",
    "dense": "rewards on many tokens or turns, not only at the end",
    "preference": "no reward, but pairs: this answer is better than that one",
    "labels": "no reward and no pairs, but answers marked good or bad",
}
"""Kinds of reward, with a description."""

LONG_RESPONSE = 4096
_LORA = (
    "actor_rollout_ref.model.lora_rank=32",
    "actor_rollout_ref.model.lora_alpha=64",
    "actor_rollout_ref.actor.optim.lr=2e-5",
)
_PREFER_LORA = ("model.lora_rank=32", "model.lora_alpha=64", "optim.lr=5e-6")
PRECOMPUTE = "ref.mode=precompute"


@dataclass(frozen=True)
class Situation:
    """Facts that are known before a method is chosen."""

    parameters: int  # number of parameters of the policy
    reward: str  # a key of :data:`REWARDS`
    memory_gb: float  # memory of the device, in GB
    turns: int = 1  # assistant turns of an episode; 1 is a single answer
    response_length: int = 1024  # longest response in tokens
    grouped: bool = True  # whether one prompt can be answered several times (not with a simulator that cannot be reset)
    moe: bool = False  # whether the policy is a mixture of experts

    def __post_init__(self) -> None:
        if self.reward not in REWARDS:
            raise ConfigError(
                f"unknown kind of reward '{self.reward}'", where="--reward", fix=did_you_mean(self.reward, REWARDS)
            )
        numbers = (("--model-size", self.parameters), ("--memory", self.memory_gb), ("--turns", self.turns))
        for where, value in (*numbers, ("--response-length", self.response_length)):
            if value <= 0:
                raise ConfigError(f"{value:g} is not positive", where=where, fix=f"{where} 1 or more")


@dataclass(frozen=True)
class Candidate:
    """A way to train, with its reason."""

    name: str
    preset: str
    why: str  # reason why it suits the situation
    lora: bool = False  # whether adapters are trained instead of all weights
    command: str = "train"  # ``train`` or ``prefer``
    overrides: tuple[str, ...] = ()  # keys to set in addition to the preset


def candidates(situation: Situation) -> list[Candidate]:
    """Return suitable ways to train, the best first, the smallest last."""
    if situation.reward in ("preference", "labels"):
        return _from_preferences(situation)
    if situation.reward == "dense":
        return [
            Candidate(
                "ppo",
                "ppo",
                "Many tokens have rewards, and GAE with a critic credits each token with the rewards after it.",
            ),
            *_with_lora(
                Candidate(
                    "reinforce_plus_plus",
                    "reinforce_plus_plus",
                    "Many tokens have rewards; REINFORCE++ credits each token with the discounted rewards after it, without a critic.",
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
            "changes of the chosen experts affect much less than ratios of single tokens."
        )
        return _with_lora(Candidate("gspo", "gspo", why))
    if situation.response_length >= LONG_RESPONSE:
        why = (
            f"A rule checks the answer, and responses have up to {situation.response_length} tokens: DAPO weights all tokens the "
            "same, penalises overlong ones, and replaces groups that are all right or all wrong."
        )
        lengths = (f"data.max_response_length={situation.response_length}",)
        lengths += (f"reward.overlong_buffer.len={situation.response_length // 5}",)
        return _with_lora(Candidate("dapo", "dapo", why, overrides=lengths))
    grpo = (
        "A rule checks the answer, and each prompt can be answered several times: GRPO compares an answer with the others of "
        "its group, so no critic is needed."
    )
    return [
        Candidate("grpo", "grpo", grpo),
        Candidate("dr_grpo", "dr_grpo", f"{grpo} Dr. GRPO needs no reference copy."),
        Candidate(
            "grpo_lora", "grpo_lora", f"{grpo} With LoRA the reference is the same model with its adapter off.", True
        ),
    ]


def _from_reward_model(situation: Situation) -> list[Candidate]:
    single = "reinforce_plus_plus"
    why = "A learned reward can be exploited, so a KL penalty keeps the policy near the reference"
    critic = Candidate("ppo", "ppo", f"{why}, token by token in the reward; PPO's critic assigns credit to each token.")
    if situation.grouped:
        critic_free = Candidate(
            "rloo", "rloo", f"{why}; RLOO compares an answer with the mean of the other answers, without a critic."
        )
    else:
        critic_free = Candidate(single, single, f"{why}; REINFORCE++ compares with the whole batch, without a critic.")
    return [critic, *_with_lora(critic_free)]


def _from_preferences(situation: Situation) -> list[Candidate]:
    adapter = "With LoRA the reference is the model with its adapter off."
    if situation.reward == "labels":
        name, why = (
            "kto",
            "Single answers are labelled good or bad: KTO learns from such labels without pairs.",
        )
        lora = Candidate("kto with LoRA", "kto", f"{why} {adapter}", True, "prefer", _PREFER_LORA)
    else:
        name = "dpo"
        why = (
            "Pairs of a better and a worse answer are available: DPO learns from them directly, without sampling and without a "
            "reward model."
        )
        lora = Candidate("dpo with LoRA", "dpo_lora", f"{why} {adapter}", True, "prefer")
    precomputed = f"{why} The reference runs over the data once, before training, and only its log-probs are stored."
    return [
        Candidate(name, name, why, command="prefer"),
        Candidate(f"{name} with precomputed reference", name, precomputed, command="prefer", overrides=(PRECOMPUTE,)),
        lora,
    ]


def _with_lora(candidate: Candidate) -> list[Candidate]:
    """Return training of all weights, and of adapters as the smaller alternative."""
    adapters = Candidate(
        f"{candidate.name} with LoRA", candidate.preset, candidate.why, True, overrides=candidate.overrides + _LORA
    )
    return [candidate, adapters]


ADAPTER_SHARE = 0.015
"""Parameters of rank-32 adapters on all linear layers, as a share of the model; 1 to 2 percent for 0.5B to 70B."""
FROZEN_BYTES = 2
"""Bytes of a frozen parameter in bfloat16, as on a GPU; a CPU holds float32."""
HEADROOM = 0.8
"""Share of the memory that models may use; the rest is for activations, the KV cache and fragmentation."""


@dataclass(frozen=True)
class Model:
    """One model of a run and its memory in GB (10^9 bytes)."""

    role: str
    how: str
    gigabytes: float


def model_memory(role: str, parameters: int, how: str) -> Model:
    """Return the memory of a model of ``parameters`` that is ``trained``, ``frozen`` or trained by ``LoRA``."""
    weight = {
        "trained": TRAINED_BYTES,
        "frozen": FROZEN_BYTES,
        "LoRA": FROZEN_BYTES + ADAPTER_SHARE * TRAINED_BYTES,
    }[how]
    return Model(role, how, parameters * weight / 1e9)


@dataclass(frozen=True)
class Recommendation:
    """A method with the reasons for it."""

    method: str
    command: str  # command to start from; the user adds the paths of model and data
    fits: bool  # whether its models fit into the memory
    models: tuple[Model, ...]  # models in memory
    needed_gb: float  # their sum
    usable_gb: float  # memory that models may use
    reasons: list[str] = field(default_factory=list)  # explanation, one sentence each


def recommend(situation: Situation) -> Recommendation:
    """Recommend the first suitable way whose models fit, with an explanation.

    If none fits, the smallest is returned with ``fits=False`` and the size of a policy that would fit.
    """
    ways = candidates(situation)
    usable = situation.memory_gb * HEADROOM
    needed = [sum(model.gigabytes for model in _models(candidate, situation)) for candidate in ways]
    fitting = [number for number, gigabytes in enumerate(needed) if gigabytes <= usable]
    chosen = fitting[0] if fitting else needed.index(min(needed))
    candidate, models = ways[chosen], _models(ways[chosen], situation)
    reasons = [candidate.why, _memory_sentence(models, needed[chosen], usable, situation)]
    skipped = ways[:chosen] if fitting else []
    reasons += [_skipped_sentence(candidate_before, needed[i], usable) for i, candidate_before in enumerate(skipped)]
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
    """Format a number of parameters: 1.5B, 7M."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return f"{parameters:.0f}"


# ---------------------------------------------------------------------------------------------------------- the memory


def _models(candidate: Candidate, situation: Situation) -> list[Model]:
    """Return the models of a run with the candidate's preset."""
    size = situation.parameters
    models = [model_memory("policy", size, "LoRA" if candidate.lora else "trained")]
    if candidate.command == "prefer":
        has_reference = not candidate.lora and PRECOMPUTE not in candidate.overrides
        return models + ([model_memory("reference", size, "frozen")] if has_reference else [])
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
        f"For {size_text(situation.parameters)} parameters the run holds {listed}: {needed:.3g} GB of the {usable:.3g} GB that "
        f"models may use of {situation.memory_gb:g} GB (the rest is for activations and the KV cache). A trained "
        "parameter needs 16 bytes (weight, gradient, AdamW), a frozen one 2, as below an adapter (4 on a CPU)."
    )


def _skipped_sentence(candidate: Candidate, needed: float, usable: float) -> str:
    return f"{candidate.name} is preferred but needs {needed:.3g} GB, more than {usable:.3g} GB."


# ---------------------------------------------------------------------------------------------------------- the advice


def _advice(situation: Situation, candidate: Candidate) -> list[str]:
    if candidate.command == "prefer":
        return [
            "The pairs should come from the policy itself; `hone data pairs` builds them from the rollouts of a run."
        ]
    advice = []
    if situation.turns > 1:
        advice.append(
            f"With {situation.turns} turns, tokens of tools carry no loss, and one reward at the end credits all turns "
            "equally; if the environment scores turns, put each score on the last token of its turn and use "
            "algorithm.adv_estimator=gigpo or gae. actor_rollout_ref.rollout.agent.default_agent_loop selects the loop that plays them."
        )
    if situation.reward == "verifiable" and situation.grouped:
        advice.append(
            "Watch reward/zero_std_group_ratio: groups whose answers are all right or all wrong have no gradient; above 0.5 "
            "change the difficulty of the prompts or raise rollout.n."
        )
    if situation.reward == "model":
        advice.append(
            "Watch the KL together with the reward: a rising KL with a falling held-out score means that the reward is exploited."
        )
    return advice


def _command(candidate: Candidate, situation: Situation) -> str:
    target = "actor_rollout_ref.model.path" if candidate.command == "train" else "model.path"
    preset = (
        f"agent_{candidate.preset}" if situation.turns > 1 and candidate.preset in ("grpo", "ppo") else candidate.preset
    )
    words = [f"hone {candidate.command} --preset {preset}", *candidate.overrides]
    if situation.reward == "model":
        words += ["reward.reward_model.enable=true", "reward.reward_model.path=REWARD_MODEL"]
    return " ".join([*words, f"{target}=MODEL", "data.train_files=DATA"])
