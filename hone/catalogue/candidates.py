"""What is known before a method is chosen, and which ways of training suit it."""

from __future__ import annotations

from dataclasses import dataclass

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
PRECOMPUTE = "ref.mode=precompute"


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


def candidates(situation: Situation) -> list[Candidate]:
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
        lengths = (f"data.max_response_length={situation.response_length}",)
        lengths += (f"reward.overlong_buffer.len={situation.response_length // 5}",)
        return _with_lora(Candidate("dapo", "dapo", why, overrides=lengths))
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
        Candidate(f"{name} with precomputed reference", name, precomputed, command="prefer", overrides=(PRECOMPUTE,)),
        lora,
    ]


def _with_lora(candidate: Candidate) -> list[Candidate]:
    """All weights, or adapters where they do not fit."""
    adapters = Candidate(
        f"{candidate.name} with LoRA", candidate.preset, candidate.why, True, overrides=candidate.overrides + _LORA
    )
    return [candidate, adapters]
