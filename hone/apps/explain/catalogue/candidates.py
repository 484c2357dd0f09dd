"""Situation of a user, and the ways of training that suit it."""

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
