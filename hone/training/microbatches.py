"""A micro-batch of a run on disk, with the weights and what the run computed from both; `hone oracle` recomputes it.

    <run>/microbatches/step_<N>/
      about.json             dtype, device, totals of the loss, loss, gradient norm of every parameter
      config.yaml            the resolved config, credentials hidden
      batch/                 the columns that the loss reads, see :meth:`hone.data.batch.Batch.save`
      model/                 the weights before the update, or the adapter
      computed.safetensors   packed tokens and positions; outputs and their gradients; layers; gradients of small parameters

Nothing is pickled. The training pass itself is recorded, so the saved numbers are those of the run.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hone.config import RLConfig, to_yaml
from hone.config.trust import remember, run_config
from hone.data.batch import Batch
from hone.errors import HoneError
from hone.insight.redaction import redact_tree
from hone.insight.run_files import disk_errors
from hone.models.inputs import PackedSequences
from hone.models.llama import cuda as llama_cuda
from hone.models.llama import train as llama_train
from hone.models.llama.train import LAYER_OBSERVER
from hone.models.loading import causal_lm
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import stage_weights
from hone.training.objectives import Totals

FOLDER = "microbatches"
MAX_TOKENS = 2048
"""Tokens whose hidden states are saved; from a longer row the ends of its segments, and others evenly spaced."""
MAX_ELEMENTS = 65536  # parameters up to this size have their whole gradient saved, larger ones its norm
_ABOUT, _COMPUTED, _CONFIG = "about.json", "computed.safetensors", "config.yaml"


@dataclass(frozen=True)
class MicroBatchTarget:
    """Destination of a saved micro-batch."""

    config: RLConfig
    step: int  # of training, from 1 on

    @property
    def directory(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / FOLDER / f"step_{self.step}"


class MicroBatchRecorder:
    """Records one micro-batch while it is trained on: :meth:`forward`, :meth:`keep_gradients`, :meth:`write`.
    ``model``: the trained module, its parameters without gradients.
    """

    def __init__(self, model: nn.Module, dtype: str, target: MicroBatchTarget) -> None:
        self._model, self._dtype, self._target = model, dtype, target
        self._computed: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def forward(self, packed: PackedSequences) -> Iterator[None]:
        """Record the layers of the forward pass in the block."""
        index = _recorded_tokens(packed.context.position_ids[0].cpu())
        on_device = index.to(packed.input_ids.device)
        self._computed |= {
            "token_index": index,
            "input_ids": packed.input_ids[0],
            "position_ids": packed.context.position_ids[0],
            "output_index": packed.output_index,
        }

        def record(kind: str, layer: int, values: Tensor) -> None:
            self._computed[f"{kind}.{layer}"] = values.detach().reshape(-1, values.shape[-1])[on_device]

        with observing(causal_lm(self._model), record):
            yield

    def keep_gradients(self, outputs: dict[str, Tensor]) -> None:
        for values in outputs.values():
            if values.requires_grad and not values.is_leaf:
                values.retain_grad()

    def write(
        self, micro: Batch, outputs: dict[str, Tensor], loss: Tensor, totals: Totals, factor: float = 1.0
    ) -> None:
        """Write the directory after the backward pass; it replaces an older one of this step.

        ``factor``: scale of the loss. The gradients that are written do not have it.

        Raises HoneError: the disk is full or not writable.
        """
        for name, values in outputs.items():
            self._computed[f"output.{name}"] = values
            if values.grad is not None:
                self._computed[f"output_gradient.{name}"] = values.grad / factor
        norms = {}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                norms[name] = float(parameter.grad.double().norm()) / factor
                if parameter.numel() <= MAX_ELEMENTS:
                    self._computed[f"gradient.{name}"] = parameter.grad / factor
        final = self._target.directory
        temporary = final.with_name(f".{final.name}.new")
        with disk_errors(final):
            shutil.rmtree(temporary, ignore_errors=True)
            columns = [name for name in micro.names() if name == "uid" or not isinstance(micro[name], list)]
            micro.select(*columns).save(temporary / "batch")
            stage_weights(self._model, Storage(temporary / "model"))()
            save_file(
                {name: x.detach().cpu().clone().contiguous() for name, x in self._computed.items()},
                temporary / _COMPUTED,
            )
            config = redact_tree(yaml.safe_load(to_yaml(self._target.config)))
            (temporary / _CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
            remember(temporary / _CONFIG, self._target.config)
            about = self._about(loss, totals, norms)
            (temporary / _ABOUT).write_text(json.dumps(about, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)

    def _about(self, loss: Tensor, totals: Totals, norms: dict[str, float]) -> dict[str, Any]:
        device = loss.device
        return {
            "step": self._target.step,
            "dtype": self._dtype,
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else platform.processor() or device.type,
            "torch": torch.__version__,
            "totals": {"tokens": totals.tokens, "sequences": totals.sequences},
            "loss": float(loss.detach()),
            "base_model": str(Path(self._target.config.actor_rollout_ref.model.path or "").absolute()),
            "gradient_norms": norms,
        }


@dataclass(frozen=True)
class SavedMicroBatch:
    """A micro-batch that :class:`MicroBatchRecorder` wrote."""

    directory: Path
    about: dict[str, Any]  # content of ``about.json``
    config: RLConfig
    batch: Batch
    computed: dict[str, Tensor]

    @property
    def totals(self) -> Totals:
        return Totals(**self.about["totals"])

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())


def load_micro_batch(run: Path, step: int) -> SavedMicroBatch:
    """Read the micro-batch of a step of a run. Raises HoneError: it was not saved, or is damaged."""
    directory = run / FOLDER / f"step_{step}"
    if not (directory / _ABOUT).is_file():
        saved = sorted(int(path.name[5:]) for path in (run / FOLDER).glob("step_*"))
        raise HoneError(
            f"no micro-batch of step {step} is saved; saved steps: {saved or 'none'}",
            where=str(run),
            fix=f"--step {saved[0]}" if saved else f"train with trainer.save_microbatch_steps=[{step}]",
            code="E-microbatch",
        )
    try:
        about = json.loads((directory / _ABOUT).read_text())
        computed = load_file(directory / _COMPUTED)
    except (OSError, ValueError, SafetensorError) as error:
        raise HoneError(
            f"the saved micro-batch is damaged: {error}", where=str(directory), code="E-microbatch"
        ) from error
    config = run_config(directory)
    return SavedMicroBatch(directory, about, config, Batch.load(directory / "batch"), computed)


def _recorded_tokens(positions: Tensor) -> Tensor:
    """Return the indices of the tokens whose hidden states are saved, in order."""
    count = len(positions)
    if count <= MAX_TOKENS:
        return torch.arange(count)
    jumps = (positions.diff() != 1).nonzero()[:, 0]
    ends = torch.cat([torch.tensor([0]), jumps, jumps + 1, torch.tensor([count - 1])]).unique()[: MAX_TOKENS // 2]
    even = torch.linspace(0, count - 1, MAX_TOKENS - len(ends)).long()
    return torch.cat([ends, even]).unique()


Observer = Callable[[str, int, Tensor], None]
"""("hidden" or "router", index of the layer, output ``[..., N, H]`` of the layer or ``[..., N, experts]`` of its router)."""


@contextlib.contextmanager
def observing(causal: nn.Module, observer: Observer) -> Iterator[None]:
    """Within the block, pass the outputs of layers and routers of a training forward pass to ``observer``.

    A hook would move a Llama-shaped model off its CPU executor, so that executor reports its layers itself.
    """
    if not (llama_train.supports_training(causal) or llama_cuda.supports_training(causal)):
        with layer_hooks(causal, observer):
            yield
        return
    token = LAYER_OBSERVER.set(lambda layer, hidden: observer("hidden", layer, hidden))
    try:
        yield
    finally:
        LAYER_OBSERVER.reset(token)


@contextlib.contextmanager
def layer_hooks(causal: nn.Module, observer: Observer) -> Iterator[None]:
    """Within the block, pass the outputs of layers and routers to ``observer`` by hooks on the modules."""
    handles = []
    for index, layer in enumerate(causal.get_decoder().layers):  # type: ignore[operator]
        handles.append(layer.register_forward_hook(_hook("hidden", index, observer)))
        routers = [module for module in layer.modules() if "Router" in type(module).__name__]
        handles += [module.register_forward_hook(_hook("router", index, observer)) for module in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(kind: str, index: int, observer: Observer) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        observer(kind, index, output[0] if isinstance(output, tuple) else output)

    return hook
