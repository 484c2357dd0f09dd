"""What functions of verl compute: `verl_numbers.py FOLDER CASES RESULTS`, with its wheel unpacked in FOLDER.

Runs with the Python of the tests, which has torch. Packages that verl imports and these functions do not use are replaced by empty ones.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


class Empty(types.ModuleType):
    """A module whose every name is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [name for name in names if importlib.util.find_spec(name) is None]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def estimator(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    given = dict(tensors)
    if "index" in given:
        given["index"] = np.array(given["index"], dtype=object)
    if "components" in given:  # GDPO: a score for each component
        components = given.pop("components")
        config = {"gdpo_reward_keys": list(components), "gdpo_reward_weights": options["weights"]}
        batch = {
            "prompts": torch.zeros(len(given["response_mask"]), 0),
            "attention_mask": given["response_mask"].long(),
        }
        return list(
            core_algos.get_adv_estimator_fn(name)(**given, config=config, non_tensor_batch=components, batch=batch)
        )
    config = AlgoConfig(
        **{key: value for key, value in options.items() if key in ("gamma", "lam", "norm_adv_by_std_in_grpo")}
    )
    own = {key: value for key, value in options.items() if key in ("norm_adv_by_std_in_grpo",)}
    if name == "gae":
        return list(core_algos.compute_gae_advantage_return(**given, gamma=options["gamma"], lam=options["lam"]))
    return list(core_algos.get_adv_estimator_fn(name)(**given, config=config, **own))


def loss(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.trainer.ppo import core_algos
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    given, options = dict(tensors), dict(options)
    mode = options.pop("loss_agg_mode", "token-mean")
    of_loss = {key: options.pop(key) for key in list(options) if key in PolicyLossConfig.__dataclass_fields__}
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, policy_loss=PolicyLossConfig(**of_loss),
                         **{key: value for key, value in options.items() if key in ActorConfig.__dataclass_fields__})  # fmt: skip
    config.global_batch_info.update(options.get("counts", {}))
    new = given.pop("log_probs").requires_grad_()
    value, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=given["old_log_probs"], log_prob=new, advantages=given["advantages"],
        response_mask=given["response_mask"], loss_agg_mode=mode, config=config,
        rollout_is_weights=given.get("rollout_is_weights"),
    )  # fmt: skip
    return [value.detach(), torch.autograd.grad(value, new)[0]]


def aggregate(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.trainer.ppo import core_algos

    return [core_algos.agg_loss(tensors["losses"], tensors["response_mask"], name, **options)]


def value(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.trainer.ppo import core_algos

    new = tensors["values"].requires_grad_()
    found, clipped = core_algos.compute_value_loss(
        new, tensors["returns"], tensors["old_values"], tensors["response_mask"], options["cliprange_value"], name
    )
    return [found.detach(), torch.autograd.grad(found, new)[0], clipped]


def kl(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.trainer.ppo import core_algos

    new = tensors["log_probs"].requires_grad_()
    found = core_algos.kl_penalty(new, tensors["ref_log_probs"], name)
    (gradient,) = torch.autograd.grad((found * tensors["response_mask"]).sum(), new)
    return [found.detach(), gradient]


def weights(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.trainer.ppo import rollout_corr_helper

    ratio = tensors["old_log_probs"] - tensors["rollout_log_probs"]
    found, _ = rollout_corr_helper.compute_rollout_correction_weights(ratio, tensors["response_mask"], name, **options)
    return [found]


def rejection(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.trainer.ppo import rollout_corr_helper

    ratio = tensors["old_log_probs"] - tensors["rollout_log_probs"]
    found, _ = rollout_corr_helper.compute_rollout_rejection_mask(ratio, tensors["response_mask"], name, **options)
    return [found]


def controller(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.trainer.ppo import core_algos

    made = core_algos.AdaptiveKLController(options["init"], options["target"], options["horizon"])
    values = []
    for kl_now in options["kls"]:
        made.update(kl_now, options["steps"])
        values.append(made.value)
    return [torch.tensor(values, dtype=torch.float64)]


def logits(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[torch.Tensor]:
    from verl.utils import torch_functional

    scores = tensors["logits"]
    return [torch_functional.logprobs_from_logits_v2(scores, tensors["labels"]), torch_functional.entropy_from_logits(scores),
            torch_functional.calculate_sum_pi_squared_from_logits(scores)]  # fmt: skip


def main(folder: str, cases: str, results: str, functions: Mapping[str, Any], unused: Sequence[str]) -> None:
    """Call the function of each case, by its kind; an error is a text in place of its values."""
    sys.path.insert(0, folder)
    sys.meta_path.append(EmptyModules(unused))
    found: list[Any] = []
    for case in torch.load(cases, weights_only=True):
        try:
            found.append(functions[case["kind"]](case["name"], case["tensors"], case["options"]))
        except Exception as error:  # noqa: BLE001  the test shows it
            found.append(f"{type(error).__name__}: {error}")
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:], functions=globals(), unused=("tensordict", "codetiming"))
