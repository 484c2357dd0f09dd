"""Facts derived from the configuration of a run of any kind; :mod:`hone.config.derived` has those of RL runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hone.config.derived import Decision, Derived, RoleNeed, RunSpec, dtype_line, micro_batch_line, pool_line
from hone.config.offline import PreferenceConfig, SFTConfig
from hone.config.pools import MAIN_POOL, Pool
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, OfflineConfig
from hone.methods import PREFERENCE_LOSS_NEEDS


@dataclass(frozen=True)
class OfflineSpec:
    """Facts derived from the configuration of a run over a fixed dataset.

    >>> spec = OfflineSpec(PreferenceConfig())
    >>> spec.reference.value, spec.reference.reason
    (True, 'loss.name=dpo compares with it')
    """

    config: OfflineConfig

    @cached_property
    def loss_needs(self) -> frozenset[str]:
        """Inputs of the preference loss; empty for other kinds of runs."""
        if not isinstance(self.config, PreferenceConfig):
            return frozenset()
        name = self.config.loss.name
        if name in PREFERENCE_LOSS_NEEDS:
            return PREFERENCE_LOSS_NEEDS[name]
        from hone.algorithms import preference_losses  # a custom loss: its module imports torch

        return frozenset(preference_losses.get(name).needs)

    @cached_property
    def reference(self) -> Decision[bool]:
        """Decision to compare log-probs with a reference policy."""
        if not isinstance(self.config, PreferenceConfig):
            return Decision(False, "no loss that compares with a reference")
        needed, name = "reference" in self.loss_needs, self.config.loss.name
        return Decision(needed, f"loss.name={name} {'compares with it' if needed else 'uses none'}")

    @property
    def adapter_is_reference(self) -> bool:
        """True when the reference is the trained model, without its adapter or with the one that it began with."""
        if not isinstance(self.config, PreferenceConfig):
            return False
        ref, model = self.config.ref, self.config.model
        if ref.mode == "adapter_off":
            return True
        continued = model.lora_adapter_path is not None  # a copy would be the base alone
        return ref.model_path is None and (continued or (ref.mode == "auto" and model.lora_rank > 0))

    @property
    def precomputes_reference(self) -> bool:
        """True when the reference runs once over all data before training, and is then released."""
        return isinstance(self.config, PreferenceConfig) and self.config.ref.mode == "precompute"

    @property
    def holds_reference(self) -> bool:
        """True when a second copy of the model stays in memory for the reference."""
        return self.reference.value and not (self.adapter_is_reference or self.precomputes_reference)

    @cached_property
    def roles(self) -> tuple[RoleNeed, ...]:
        """Roles with a model, in order of creation."""
        roles = [RoleNeed("actor", False, "every run")]
        if self.reference.value:
            roles.append(RoleNeed("reference", False, self.reference.reason))
        if (
            isinstance(self.config, SFTConfig)
            and self.config.distillation.enable
            and self.config.distillation.has_local
        ):
            roles.append(RoleNeed("teacher", False, "distillation.enable=true"))
        return tuple(roles)

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        trainer, names = self.config.trainer, tuple(role.name for role in self.roles)
        return (Pool(MAIN_POOL, "trainer", trainer.nnodes, trainer.n_gpus_per_node, names, False, self.config),)

    def lines(self) -> Iterator[Derived]:
        """Yield every derived fact with its reason."""
        config = self.config
        yield micro_batch_line(config, config.data.max_token_len_per_gpu, "data.max_token_len_per_gpu")
        yield dtype_line(config)
        if isinstance(config, PreferenceConfig):
            copied = "yes" if self.holds_reference else "none"
            yield Derived("reference copy", copied, f"loss.name={config.loss.name}, ref.mode={config.ref.mode}")
        yield from map(pool_line, self.pools)


def spec_of(config: AnyConfig) -> RunSpec | OfflineSpec:
    return RunSpec(config) if isinstance(config, RLConfig) else OfflineSpec(config)


def derived_lines(config: AnyConfig) -> list[Derived]:
    """Return the derived facts of a run of any kind.

    Raises ConfigError: a method does not exist, or the parallel sizes do not divide the processes.
    """
    return list(spec_of(config).lines())
