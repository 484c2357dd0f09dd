"""Distillation on two ranks, whichever way they share the models, is that of one."""

import pytest
import torch
from support.ranks import Ranks
from support.teacher_updates import distilled

pytestmark = pytest.mark.long("hone/trainers/teacher_inputs.py", "hone/training/learners.py", "hone/cluster/teacher.py")

ACTOR = "actor_rollout_ref.actor"
OVERRIDES = [
    "data.train_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=16",
    "actor_rollout_ref.rollout.n=2",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.ppo_max_token_len_per_gpu=60",
    f"{ACTOR}.optim.lr=1e-2",
    f"{ACTOR}.optim.eps=1e-4",
    "distillation.topk=5",
    "trainer.device=cpu",
]
LAYOUTS = {
    "data": [],
    "tensor": [f"{ACTOR}.tensor_model_parallel_size=2"],
    "sequence": [f"{ACTOR}.ulysses_sequence_parallel_size=2"],
    "ring": [f"{ACTOR}.context_parallel_size=2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["k2", "k2 of spans", "reverse_kl_topk", "jsd"])
def test_two_ranks_learn_what_one_learns(layout: str, mode: str, two_ranks: Ranks, tiny_models) -> None:
    name, _, spans = mode.partition(" of ")
    overrides, by_span = [*OVERRIDES, f"distillation.loss_mode={name}"], {"spans": bool(spans)}
    models = tiny_models["tied"], tiny_models["untied"]
    expected, weights = distilled(*models, overrides, **by_span)
    for numbers, other in two_ranks.run(distilled, *models, [*overrides, *LAYOUTS[layout]], **by_span):
        assert numbers == pytest.approx(expected, rel=2e-4, abs=1e-6)
        for key, value in weights.items():
            torch.testing.assert_close(other[key], value, atol=2e-5, rtol=0)
