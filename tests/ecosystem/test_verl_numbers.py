"""Estimators, losses, aggregations, KL, corrections and controllers against the functions in verl's wheel.

Random batches in float64, with and without holes in the mask (answers of tools), groups of 4, 4, 3 and 1. :data:`DIFFERENT` has what is
meant to differ, with the reason; those must differ, or their line is out of date.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.peer_numbers import GROUPS, ROWS, WIDTH, Case, batch, gaps_of, loss_and_gradient, numbers_of
from torch import Tensor

from hone.algorithms import (
    AGGREGATION_MODES,
    AdaptiveKLController,
    advantage_estimators,
    aggregate_loss,
    entropy_from_logits,
    kl_penalty,
    rollout_correction,
    sum_pi_squared_from_logits,
    token_log_probs,
    value_loss,
)

pytestmark = pytest.mark.long("hone/algorithms")
VERL = "verl==0.9.1"
SEEDS = range(4)


def estimates(seed: int, *, holes: bool) -> list[Case]:
    made = batch(seed, holes=holes)
    columns = {name: made[name] for name in ("token_level_rewards", "response_mask")}
    path = {name: made[name] for name in ("old_log_probs", "sum_pi_squared")}
    groups, scores = {"index": GROUPS}, made["token_level_rewards"].sum(-1)
    baselines = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = {"right": (scores > 0).double(), "short": baselines.round(decimals=1)}
    wanted: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ("gae", {"values": made["values"]}, {"gamma": 0.97, "lam": 0.9}, {"values": made["values"]}),
        ("gae", {"values": made["values"]}, {"gamma": 1.0, "lam": 1.0}, {"values": made["values"]}),
        *((name, groups, {"norm_adv_by_std_in_grpo": by}, {}) for name in ("grpo", "grpo_vectorized") for by in (True, False)),
        *((name, groups, {}, {}) for name in ("opo", "gpg", "rloo", "reinforce_plus_plus_baseline")),
        ("reinforce_plus_plus", {}, {"gamma": 0.9}, {}),
        ("remax", {"reward_baselines": baselines}, {}, {"reward_baselines": baselines}),
        *((name, {**groups, **path, **more}, {}, {**path, **more})
          for name in ("optimal_token_baseline", "tir_optimal_token_baseline")
          for more in ({}, {"rollout_is_weights": made["rollout_is_weights"]})),
        ("gdpo", {**groups, "components": {name: part.tolist() for name, part in parts.items()}}, {"weights": [1.0, 0.5]},
         {"reward_components": parts, "gdpo_reward_weights": [1.0, 0.5]}),
    ]  # fmt: skip
    cases = []
    for name, tensors, options, ours in wanted:
        arguments = {**ours, **({} if "weights" in options else options)} | (
            {"group_ids": GROUPS} if "index" in tensors else {}
        )
        call = advantage_estimators.get(name)
        cases.append(
            Case(
                "estimator",
                name,
                {**columns, **tensors},
                options,
                lambda c=call, a=arguments: c(*columns.values(), **a),
            )
        )
    # pass@k compares two of a group, of different reward; of a group of one rloo_vectorized makes 0, rloo (and both of Hone) the reward
    large = [row for row, group in enumerate(GROUPS) if GROUPS.count(group) > 1]
    rewards, mask = (columns[name][large] for name in columns)
    rewards, index = rewards * (1 + 0.01 * torch.arange(len(large))[:, None]), [GROUPS[row] for row in large]
    tensors = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
    for name in ("grpo_passk", "rloo_vectorized"):
        call = functools.partial(advantage_estimators.get(name), rewards, mask, group_ids=index)
        cases.append(Case("estimator", name, tensors, {}, call))
    return cases


OPTIONS: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5},
    "dppo_tv": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 2.0},
    "dppo_kl": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 2.0},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.4},
    "gpg": {},
    "clip_cov": {
        "clip_cov_ratio": 1.0,
        "clip_cov_lb": 0.5,
        "clip_cov_ub": 5.0,
    },  # all candidates: none is drawn by chance
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    "geo_mean": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    "dro": {"dro_beta": 0.3},
    "cispo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3},
}


def losses(seed: int, *, holes: bool) -> list[Case]:
    made, cases = batch(seed, holes=holes), []
    columns = {name: made[name] for name in ("old_log_probs", "log_probs", "advantages", "response_mask")}
    per_row = made["advantages"].sum(-1, keepdim=True) * made["response_mask"]  # as an outcome has them
    for name, options in OPTIONS.items():
        tensors = columns | ({"advantages": per_row} if name == "geo_mean" else {})
        for mode in ("seq-mean-token-mean",) if name in ("sapo", "geo_mean") else AGGREGATION_MODES:
            for weights in ({}, {"rollout_is_weights": made["rollout_is_weights"]}):
                if weights and name == "geo_mean":
                    continue  # a geometric mean of the weights there, their product with the loss here
                scale = {"loss_scale_factor": 7.0} if mode == "seq-mean-token-sum-norm" else {}
                arguments = {"loss_agg_mode": mode, **options}
                call = functools.partial(loss_and_gradient, name, {**tensors, **weights}, {**arguments, **scale})
                cases.append(Case("loss", name, {**tensors, **weights}, {**arguments, "counts": scale}, call))
    return cases


def others(seed: int, *, holes: bool) -> list[Case]:
    made = batch(seed, holes=holes)
    mask, loss, cases = made["response_mask"], made["advantages"], []
    counts = {"dp_size": 2, "batch_num_tokens": 70, "global_batch_size": 20, "loss_scale_factor": 11}
    for mode in AGGREGATION_MODES:
        for given in ({"loss_scale_factor": 11}, counts):
            tensors = {"losses": loss, "response_mask": mask}
            cases.append(
                Case("aggregate", mode, tensors, given, lambda m=mode, g=given: [aggregate_loss(loss, mask, m, **g)])
            )

    def of_values() -> list[Tensor]:
        new = made["values"].clone().requires_grad_()
        value, metrics = value_loss(new, made["returns"], made["advantages"], mask, cliprange_value=0.4)
        return [value.detach(), torch.autograd.grad(value, new)[0], metrics["critic/vf_clipfrac"]]

    tensors = {
        "values": made["values"],
        "returns": made["returns"],
        "old_values": made["advantages"],
        "response_mask": mask,
    }
    cases.append(Case("value", "token-mean", tensors, {"cliprange_value": 0.4}, of_values))
    for kind in ("k1", "abs", "k2", "k3", "kl", "mse", "low_var_kl", "k1+", "k3+", "abs+"):

        def of_kl(kind: str = kind) -> list[Tensor]:
            new = made["log_probs"].clone().requires_grad_()
            found = kl_penalty(new, made["old_log_probs"], kind)
            return [found.detach(), torch.autograd.grad((found * mask).sum(), new)[0]]

        tensors = {"log_probs": made["log_probs"], "ref_log_probs": made["old_log_probs"], "response_mask": mask}
        cases.append(Case("kl", kind, tensors, {}, of_kl))
    tensors = {"old_log_probs": made["log_probs"], "rollout_log_probs": made["old_log_probs"], "response_mask": mask}

    def corrected(**options: Any) -> Any:
        return rollout_correction(*tensors.values(), **options)

    for level in ("token", "sequence"):
        for threshold in (1.5, "0.6_1.6"):
            for by_mean in (False, True):
                options = {"rollout_is_threshold": threshold, "rollout_is_batch_normalize": by_mean}
                cases.append(Case("weights", level, tensors, options,
                                  lambda o=options, n=level: [corrected(rollout_is=n, **o).weights * mask]))  # fmt: skip
    for reduction in ("token", "seq_sum", "seq_mean", "seq_max"):
        for statistic, threshold in (("k1", "0.6_1.5"), ("k2", "0.05"), ("k3", "0.04")):
            if (name := f"{reduction}_{statistic}") != "seq_max_k1":
                cases.append(Case("rejection", name, tensors, {"rollout_rs_threshold": threshold},
                                  lambda n=name, t=threshold: [corrected(rollout_rs=n, rollout_rs_threshold=t).response_mask]))  # fmt: skip

    def controlled() -> list[Tensor]:
        controller, values = AdaptiveKLController(0.2, 6.0, 1000), []
        for kl in (0.1, 5.0, 6.5, 60.0, 6.0):
            controller.update(kl, 64)
            values.append(controller.value)
        return [torch.tensor(values, dtype=torch.float64)]

    kls = {"init": 0.2, "target": 6.0, "horizon": 1000, "kls": [0.1, 5.0, 6.5, 60.0, 6.0], "steps": 64}
    scores = torch.randn(ROWS, WIDTH, 17, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels = scores.argsort(-1)[..., seed]
    return [
        *cases,
        Case("controller", "adaptive", {}, kls, controlled),
        Case("logits", "logits", {"logits": scores, "labels": labels}, {},
             lambda: [token_log_probs(scores, labels), entropy_from_logits(scores), sum_pi_squared_from_logits(scores)]),
    ]  # fmt: skip


CASES = [
    (case, holes)
    for seed in SEEDS
    for holes in (False, True)
    for make in (estimates, losses, others)
    for case in make(seed, holes=holes)
]
DIFFERENT = {
    **{
        (
            "rejection",
            f"{reduction}_k1",
        ): "the bounds hold for the ratio there for its inverse, here for the ratio itself"
        for reduction in ("token", "seq_sum", "seq_mean")
    },
    (
        "estimator",
        "optimal_token_baseline",
    ): "time is a column of the batch there, so that the output of a tool shifts it; here a sampled token",
}
"""Reason why a method is meant to differ; the second only where the mask has holes."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What verl computes for every case."""
    return numbers_of("verl_numbers.py", VERL, [case for case, _ in CASES], tmp_path_factory.mktemp("verl"))


@pytest.mark.parametrize(("kind", "name"), sorted({(case.kind, case.name) for case, _ in CASES}))
def test_the_numbers_are_those_of_verl(theirs: list[Any], kind: str, name: str) -> None:
    gaps = [
        (holes, gap)
        for (case, holes), found in zip(CASES, theirs, strict=True)
        if (case.kind, case.name) == (kind, name)
        for gap in gaps_of(case, found, case.tensors["response_mask"] if kind == "estimator" else torch.tensor(1.0))
    ]
    assert bool(gaps) == ((kind, name) in DIFFERENT), gaps[:4]
    if kind == "estimator":
        assert all(holes for holes, _ in gaps), gaps[:4]
