"""Use of a trained or pretrained model from Python: evaluate, generate, serve, push."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.api.objects import Episodes, GivenObjects, Reward, Tools, dataset_files, reward_keys
from hone.api.runs import Run, model_directory
from hone.api.settings import api_call, override_words

if TYPE_CHECKING:
    from hone.agents.base import AgentLoop
    from hone.agents.environments import Environment
    from hone.agents.interactions import Interaction


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """Answer of a model.

    Attributes:
        prompt: the prompt.
        text: decoded response.
        token_ids: response tokens.
        log_probs: log-probability of each token.
        stop_reason: stop, length, or another reason of the engine.
    """

    prompt: str
    text: str
    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str


@api_call
def generate(
    model: str | Path | Run,
    prompts: str | Sequence[str],
    *,
    n: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = -1,
    max_tokens: int = 256,
    constraint: str | None = None,
    raw: bool = False,
    seed: int = 1,
    dtype: str = "auto",
) -> list[Answer]:
    """Answer prompts, ``n`` times each, like `hone generate`.

    Args:
        model: model directory, run, checkpoint, or name of the hub.
        prompts: one or several texts.
        n: answers per prompt, next to each other in the result.
        temperature: 0 is greedy.
        top_p: nucleus sampling.
        top_k: sample from the k most likely tokens; -1 means all.
        max_tokens: most tokens of an answer.
        constraint: what every answer follows: ``KIND=TEXT``, ``KIND=@FILE`` or ``json_object``.
        raw: use the prompts unchanged, without the chat template.
        seed: seed of the draws.
        dtype: compute dtype: float32, bfloat16, float16, or auto: bfloat16 on a GPU that computes in it, else float32.

    Raises:
        HoneError: the model cannot be loaded, or an argument is wrong.
    """
    from hone.generation.constraints import constraint_option
    from hone.generation.protocol import SamplingParams
    from hone.trainers.evaluation import ask

    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        constraint=constraint_option(constraint),
    )
    played = ask(str(model_directory(model)), texts, sampling, n=n, raw=raw, seed=seed, dtype=dtype)
    return [
        Answer(
            texts[int(answer.sample.uid)],
            answer.text,
            list(answer.response_ids),
            list(answer.rollout_log_probs or []),
            answer.stop_reason.value,
        )
        for answer in played
    ]


@api_call
def evaluate(
    model: str | Path | Run,
    dataset: Any,
    *,
    reward: Reward | None = None,
    tools: Tools = None,
    environment: type[Environment] | str | None = None,
    agent_loop: type[AgentLoop] | str | None = None,
    interaction: type[Interaction] | str | None = None,
    n: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    constraint: str | None = None,
    max_prompt_length: int = 512,
    max_response_length: int = 512,
    max_samples: int = -1,
    seed: int = 1,
    dtype: str = "auto",
    episodes: Mapping[str, Any] | None = None,
    prompt_key: str = "prompt",
    answer_key: str | None = None,
    reward_fn_key: str = "data_source",
) -> dict[str, float]:
    """Answer every prompt of a dataset, score the answers, and return the metrics, like `hone eval`.

    Args:
        model: as in :func:`generate`.
        dataset: as in :func:`hone.api.training.train`.
        reward: see :data:`hone.api.objects.Reward`.
        tools, environment, agent_loop, interaction: as in :func:`hone.api.training.train`; None means those of the model's run.
        n: answers per prompt; more than one needs a positive temperature.
        temperature: 0 is greedy.
        top_p: nucleus sampling.
        constraint: as in :func:`generate`.
        max_prompt_length: longest prompt in tokens.
        max_response_length: most tokens of an answer.
        max_samples: use the first rows only; -1 uses all.
        seed: seed of the draws.
        dtype: as in :func:`generate`.
        episodes: keys of ``multi_turn`` and ``agent``.
        prompt_key, answer_key, reward_fn_key: columns, as in the block ``data``.

    Raises:
        HoneError: the model, the data or the reward is wrong.
    """
    from hone.config import RLConfig, load_config
    from hone.generation.constraints import constraint_option
    from hone.trainers.episode_keys import episode_keys
    from hone.trainers.evaluation import EvaluationRequest, run_evaluation
    from hone.training.export import find_actor

    directory = str(model_directory(model))
    objects, given = GivenObjects(), Episodes(tools, environment, agent_loop, interaction)
    settings = load_config(RLConfig, override_words(reward_keys(reward, objects)))
    keys = given.implied | given.keys(objects)
    words = [*override_words(keys), *(f"{key}={value}" for key, value in (episodes or {}).items())]
    with tempfile.TemporaryDirectory(prefix="hone-evaluate-") as folder:
        files = dataset_files(given.rows(dataset, objects), Path(folder), "val") or []
        request = EvaluationRequest(
            model=directory,
            files=[files] if isinstance(files, str) else files,
            n=n,
            temperature=temperature,
            top_p=top_p,
            constraint=constraint_option(constraint),
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            max_samples=max_samples,
            reward=settings.reward,
            seed=seed,
            dtype=dtype,
            episodes=episode_keys(find_actor(directory), words),
            prompt_key=prompt_key,
            answer_key=answer_key,
            reward_fn_key=reward_fn_key,
        )
        return run_evaluation(request).metrics


@api_call
def serve(model: str | Path | Run, **options: Any) -> None:
    """Serve a model with an OpenAI-compatible API until a signal, like `hone serve`.

    Args:
        model: as in :func:`generate`.
        options: attributes of :class:`hone.trainers.served_model.ServeRequest`, such as ``port`` and ``token``.

    Raises:
        HoneError: the model cannot be loaded, or the address is not available.
    """
    from hone.trainers.served_model import ServeRequest
    from hone.trainers.serving import serve as program

    program(ServeRequest(model=str(model_directory(model)), **options))


@api_call
def push(model: str | Path | Run, repository: str, **options: Any) -> str:
    """Upload a model to the hub with a card, like `hone export --push`, and return the address of the repository.

    Args:
        model: as in :func:`generate`.
        repository: USER/NAME; it is made, private, if it does not exist.
        options: ``merge``, ``dtype``, ``gguf`` and ``private`` of :func:`hone.apps.ops.push.push_model`.

    Raises:
        HoneError: there is no model, or the hub refuses it.
    """
    from hone.apps.ops.push import push_model

    return push_model(str(model_directory(model)), repository, **{"report": log.info, **options})
