"""Stages that supply the old log-probs, one way for each source. ``trainer`` is the :class:`~hone.trainers.rl.RLTrainer`."""

from __future__ import annotations

from typing import Any, NamedTuple

from hone.config.derived import OldLogProbs
from hone.trainers.stages import Stage


class OldLogProbStages(NamedTuple):
    """The stages of one source.

    Attributes:
        before_update: stages before the advantages.
        from_update: whether the update of the policy adds the old log-probs.
        after_update: stages after that update.
    """

    before_update: list[Stage]
    from_update: bool
    after_update: list[Stage]


def old_log_prob_stages(trainer: Any, *, learn_policy: bool) -> OldLogProbStages:
    """Return the stages of the run's source; a step that updates only the critic has no pass of the update to take them from."""
    source = trainer.spec.old_log_probs.value
    if source is OldLogProbs.UPDATE_PASS and not learn_policy:
        source = OldLogProbs.OWN_PASS
    own_pass = Stage(
        "old_log_prob",
        trainer.old_log_probs,
        needs=("response_ids",),
        adds=("old_log_probs", *(("sum_pi_squared",) if trainer.spec.sum_pi_squared else ())),
        when=source is OldLogProbs.OWN_PASS,
        switch="actor_rollout_ref.actor.recompute_old_log_probs=true",
    )
    engine = Stage("old_log_prob", trainer.engine_log_probs, needs=("rollout_log_probs",), adds=("old_log_probs",))
    correct = Stage("rollout_corr", trainer.correct, needs=("old_log_probs",))
    if source is OldLogProbs.OWN_PASS:
        return OldLogProbStages([own_pass, correct], False, [])
    if source is OldLogProbs.ENGINE:
        return OldLogProbStages([engine], False, [])
    return OldLogProbStages([own_pass], True, [correct])
