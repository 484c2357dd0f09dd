"""Rules about the life of a run: it saves checkpoints, profiles steps that exist, its configuration holds no secrets, and its webhook is an address."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.environment import written_leaves
from hone.config.trees import TREES, AnyConfig
from hone.insight.redaction import is_secret_name, redact_entry
from hone.insight.webhook import is_address
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Finding, Stage, error, rule, warning

_LONG = 500


@rule("R56", *TREES.values(), stage=Stage.FILES)
def long_runs_are_saved(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """A long run saves checkpoints before its end."""
    trainer = config.trainer
    steps = trainer.total_training_steps or trainer.total_epochs * (
        len(evidence.train_rows) // config.data.train_batch_size
    )
    if trainer.save_freq == -1 and steps >= _LONG:
        yield warning(
            f"{steps} steps, but trainer.save_freq=-1 saves only at the end",
            why="a run that is killed starts again from step 0",
            fix=f"trainer.save_freq={max(1, steps // 20)}",
            where="trainer.save_freq",
        )


@rule("R61", *TREES.values())
def no_secrets_in_the_configuration(config: AnyConfig) -> Iterator[Finding]:
    """Credentials are in the environment, not in the configuration."""
    for path, value in written_leaves(config):
        if redact_entry(path, value) != value:
            inner = [name for name in value if is_secret_name(str(name))] if isinstance(value, dict) else []
            key = f"++{path}.{inner[0]}" if inner else path
            yield warning(
                f"{path} seems to hold a credential{f' ({inner[0]})' if inner else ''}",
                why="Hone redacts it in its files, but shell histories and scripts keep it",
                fix=f"read it from the environment: '{key}=${{oc.env:NAME}}', or os.environ['...'] where it is used",
                where=path,
            )


@rule("R92", *TREES.values())
def the_webhook_is_an_address(config: AnyConfig) -> Iterator[Finding]:
    """insight.webhook is an http or https address, and insight.notify_end has one."""
    key, url = "insight.webhook", config.insight.webhook
    if url is None and config.insight.notify_end:
        yield error(
            f"insight.notify_end=true, and {key} is null",
            why="there is no address to send the end of the run to",
            fix="insight.notify_end=false, or insight.webhook='${oc.env:NAME}'",
            where=key,
        )
    if url is not None and not is_address(url):
        yield error(
            f"{key} is a text of {len(url)} characters that is not an http or https address",
            why="no alert and no failure of the run would reach anybody",
            fix="insight.webhook='${oc.env:NAME}', with NAME=https://... in the environment, or insight.webhook=null",
            where=key,
        )


@rule("R83", *TREES.values())
def profiled_steps_exist(config: AnyConfig) -> Iterator[Finding]:
    """The steps of trainer.profile_steps belong to the run."""
    trainer, key = config.trainer, "trainer.profile_steps"
    last = trainer.total_training_steps
    outside = [step for step in trainer.profile_steps if step < 1 or (last is not None and step > last)]
    if outside:
        inside = [str(step) for step in trainer.profile_steps if step not in outside]
        yield warning(
            f"{key} has {outside}, but the steps are 1 to {last or 'the end'}",
            why="nothing is profiled for them",
            fix=f"{key}=[{', '.join(inside)}]",
            where=key,
        )
