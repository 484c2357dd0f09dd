"""The handles that the driver calls are the ``@dispatch`` methods of the classes behind them."""

import inspect
from typing import Any

import pytest

from hone.cluster import handles
from hone.cluster.dispatch import Split, dispatch, dispatched
from hone.cluster.local import LocalGroup
from hone.cluster.offline_roles import FrozenPolicyWorker, LearnerWorker
from hone.cluster.reward_model import GenerativeRewardModelWorker, RewardModelWorker
from hone.cluster.roles import CriticWorker, PolicyWorker, ReferenceWorker
from hone.cluster.rollout import RolloutWorker
from hone.cluster.teacher import TeacherWorker
from hone.trainers.batch_ops import BatchOps

BEHIND = [
    (handles.Actor, PolicyWorker),
    (handles.Reference, ReferenceWorker),
    (handles.Critic, CriticWorker),
    (handles.Teacher, TeacherWorker),
    (handles.RewardModel, RewardModelWorker),
    (handles.RewardModel, GenerativeRewardModelWorker),
    (handles.Learner, LearnerWorker),
    (handles.FrozenPolicy, FrozenPolicyWorker),
    (handles.Rollout, RolloutWorker),
    (handles.Work, BatchOps),
]


def methods(handle: type) -> dict[str, Any]:
    found = {}
    for cls in reversed(handle.__mro__):
        found |= {name: method for name, method in vars(cls).items() if inspect.isfunction(method)}
    return {name: method for name, method in found.items() if not name.startswith("_")}


def parameters(method: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values() if p.name != "self"]


@pytest.mark.parametrize(("handle", "cls"), BEHIND, ids=lambda each: each.__name__)
def test_a_handle_has_what_the_class_behind_it_offers(handle: type, cls: type) -> None:
    offered = dispatched(cls)
    assert offered.keys() - methods(handle).keys() <= {
        "write",
        "take_busy_seconds",
    }  # a model that nobody trains or times
    for name, method in methods(handle).items():
        first = 1 if offered[name].split is Split.ONE else 0  # the number of the worker
        assert parameters(method)[first:] == parameters(getattr(cls, name)), name


class Novelty:
    @dispatch(Split.ALL)
    def known(self) -> int:
        return 3

    def forgotten(self) -> int:
        return 4


def test_a_method_that_is_not_marked_is_named_with_those_that_are() -> None:
    group: Any = LocalGroup(Novelty())
    assert group.known().result() == 3
    with pytest.raises(AttributeError) as refused:
        group.forgotten()
    assert all(word in str(refused.value) for word in ("Novelty.forgotten", "@dispatch", "known"))
