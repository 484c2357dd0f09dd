"""The block ``distillation``: one or several teachers give log-probs of what the policy sampled, and the policy follows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import block, choice, model_path, number
from hone.config.run import OwnPoolConfig

SAMPLED_MODES = ("k1", "abs", "k2", "k3")
"""Distances that are estimated from the sampled token."""
TOP_K_MODES = ("forward_kl_topk", "reverse_kl_topk", "jsd_topk")
"""Divergences over the teacher's most likely tokens and the rest."""
WHOLE_MODES = ("forward_kl", "reverse_kl", "jsd")
"""Divergences over the whole vocabulary."""


def is_address(path: str | None) -> bool:
    return path is not None and path.startswith(("http://", "https://"))


@dataclass
class TeacherServerConfig:
    """Requests to teachers behind a server."""

    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; without it no key is sent."""
    max_concurrent: int = number(64, low=1)
    """Most concurrent requests, one for each answer, at each server."""
    timeout: float = number(300.0, above=0)
    """Seconds that a request may take."""
    retries: int = number(4, low=0)
    """Retries when the server is busy or unreachable; after these the run ends."""


@dataclass(kw_only=True)
class TeacherConfig:
    """A teacher, and the distance from it at each token of an answer."""

    enable: bool = False
    """Load the teachers, and learn from them."""
    path: str | None = model_path()
    """Teacher: a model directory, a name of the hub, or the address of a server that gives log-probs of prompts, such as
    http://HOST:8000/v1, with #NAME after it if it has several models."""
    topk: int = number(32, low=1)
    """Tokens of the teacher at each position (..._topk)."""
    beta: float = number(0.5, above=0, high=1)
    """Weight of the teacher in the mixture of jsd, below 1."""
    tail_bucket: bool = True
    """Count all tokens outside of topk as one more token; false leaves them out, for forward_kl_topk only."""
    coef: float = number(1.0, above=0)
    """Weight of the distance."""
    log_prob_min_clamp: float | None = number(None, high=0)
    """Lowest log-prob that is compared, such as -10; null means no limit."""
    loss_max_clamp: float | None = number(None, above=0)
    """Largest distance of a token; null means no limit."""
    log_prob_max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a teacher's micro-batch; null means that of the trained model."""
    server: TeacherServerConfig = block(TeacherServerConfig)
    """Teachers behind a server."""

    loss_mode: str = choice("forward_kl_topk", *SAMPLED_MODES, *TOP_K_MODES, *WHOLE_MODES)
    """Distance from the teacher at each token."""

    @property
    def models(self) -> list[str | None]:
        """Directories and addresses of the teachers without repeats; None is the policy itself."""
        return [self.path]

    @property
    def addresses(self) -> dict[int, str]:
        """Addresses of the teachers behind a server, by their index in :attr:`models`."""
        return {number: str(path) for number, path in enumerate(self.models) if is_address(path)}

    @property
    def has_local(self) -> bool:
        """True when the run holds the weights of a teacher."""
        return len(self.addresses) < len(self.models)


@dataclass(kw_only=True)
class AnswersDistillationConfig(TeacherConfig):
    """Off-policy distillation: a teacher scores the stored answers, and the model follows it on them."""

    loss_mode: str = choice("forward_kl_topk", "abs", "k2", "k3", *TOP_K_MODES, *WHOLE_MODES)
    """Distance from the teacher at each token of a stored answer. forward_kl, reverse_kl and jsd are exact, over the whole vocabulary;
    with _topk over the teacher's topk tokens and the rest. abs, k2 and k3 compare log-probs of the answer's tokens alone, and there
    they are no estimate of a KL: the model did not sample these tokens."""
    task_weight: float = number(0.0, low=0)
    """Weight of the cross entropy of the answers next to the distance; 0 learns from the teacher's distributions alone."""


@dataclass(kw_only=True)
class DistillationConfig(TeacherConfig, OwnPoolConfig):
    """On-policy distillation: teachers score what the policy samples. A teacher has the policy's tokenizer."""

    path: str | None = model_path()
    """Teacher: a model directory, a name of the hub, or the address of a server that gives log-probs of prompts, such as
    http://HOST:8000/v1, with #NAME after it if it has several models. null means the policy itself (self_teacher), under
    teacher_prompt."""
    teachers: dict[str, Any] = field(default_factory=dict)
    """Further teachers by data source, {gsm8k: /models/math, mbpp: "http://HOST:8000/v1"}. Rows of other data sources have the teacher
    path."""
    self_teacher: str = choice("initial", "initial", "current")
    """Weights of the policy as its own teacher (path=null): initial are those before training; current are those that are trained,
    without a gradient."""
    teacher_prompt: str | None = None
    """Text of the last user message that the teacher sees instead of the policy's, with fields in braces: {prompt} is the policy's
    text, {ground_truth} the solution, and every key of extra_info has its name. null means the same prompt."""
    loss_mode: str = choice("k1", *SAMPLED_MODES, *TOP_K_MODES, *WHOLE_MODES)
    """Distance from the teacher at each token. k1, abs, k2, k3 estimate the reverse KL from the sampled token. forward_kl, reverse_kl
    and jsd are exact, over the whole vocabulary; with _topk over the teacher's topk tokens and the rest."""
    use_policy_gradient: bool | None = None
    """Make the distance of each sampled token an advantage of the policy loss (k1, abs, k2, k3); false makes it a loss of its own.
    null means true for k1, false for all others."""
    task_weight: float = number(0.0, low=0)
    """Weight of the reward's advantages next to the distance; 0 learns from the teacher alone, and needs no reward function."""

    @property
    def by_advantage(self) -> bool:
        """True when the distance is an advantage of the sampled tokens."""
        return self.loss_mode == "k1" if self.use_policy_gradient is None else self.use_policy_gradient

    @property
    def models(self) -> list[str | None]:
        """Directories of the teachers without repeats; None is the policy itself."""
        default = [] if self.teachers and self.path is None else [self.path]
        return list(dict.fromkeys([*default, *(str(path) for path in self.teachers.values())]))

    def teacher_of(self, data_source: str) -> int:
        """Return the index in :attr:`models` of the teacher of a data source."""
        return self.models.index(str(self.teachers[data_source]) if data_source in self.teachers else self.path)
