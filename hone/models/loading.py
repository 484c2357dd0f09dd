"""Load a Hugging Face directory as a module ready for training: policy, reference, value model, reward model, LoRA."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from hone.config.model import ModelConfig, SFTModelConfig
from hone.data.chat import render_prompt
from hone.data.image_processor import ImageProcessor, load_image_processor, reads_images, refuse_unread
from hone.data.model_settings import check_settings, dequantised_by, read_settings, reason_of
from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer
from hone.errors import HoneError, ModelError, did_you_mean
from hone.models.activations import checkpointing_arguments, tile_mlps
from hone.models.dropout import set_dropout
from hone.models.four_bits import pack_layers, require_package
from hone.models.images import attach_processor, vision_tower
from hone.models.kernels.cpu.memory import trim_memory
from hone.models.recurrent import bypassed_linears
from hone.models.registry import family_of, is_registered
from hone.models.routing import use_hone_attention
from hone.models.streaming import WeightFiles, empty_model, fill, local_part, materialise, standing_in

VALUE_SETTINGS: dict[str, Any] = {"num_labels": 1, "classifier_dropout": 0.0}
"""Config keys that a value model sets in addition to its backbone's."""
REWARD_SETTINGS: dict[str, Any] = {"num_labels": 1, "pad_token_id": None}
"""Config keys of a reward model when it is loaded. Nothing is padded in training, so no token's embedding is left without gradient."""


def load_policy(config: ModelConfig, *, device: torch.device, seed: int, trainable: bool = True) -> nn.Module:
    """Load a causal language model in float32, with LoRA adapters when ``config.lora_rank`` > 0.

    Fresh adapters are initialised from the run's ``seed``. A model that is not ``trainable`` is frozen and gets none.

    Raises:
        ModelError: the directory is missing, holds no model, or the adapter does not fit.
    """
    model = _load(policy_factory(config), config)
    attach_processor(model, image_processor(config))
    model.to(device)  # type: ignore[arg-type]
    return as_policy(model, config, seed=seed, trainable=trainable)


def policy_factory(config: ModelConfig) -> Any:
    """Return the class of transformers that loads a policy from a directory: a model of text, or one that reads images.

    Raises ModelError: its images are not read, and transformers has no such model of text.
    """
    with _explained(_path(config)):
        settings = model_settings(config).to_dict()
    refuse_unread(settings)
    return AutoModelForImageTextToText if reads_images(settings) else AutoModelForCausalLM


def check_family(config: ModelConfig) -> None:
    """Build a policy of an unregistered family without its weights, and refuse it as loading does.

    Raises ModelError: see :func:`policy_factory` and :func:`~hone.models.routing.use_hone_attention`.
    """
    try:
        settings = model_settings(config)
        if is_registered(settings.model_type) or hasattr(settings, "auto_map"):  # the latter runs code of the directory
            return
    except Exception:  # noqa: BLE001 - whatever is met in the settings; loading explains it
        return
    refuse_unread(settings.to_dict())
    try:
        with torch.device("meta"), _quiet():
            model = policy_factory(config).from_config(settings)
    except Exception:  # noqa: BLE001 - whatever is met in the settings; loading explains it
        return
    use_hone_attention(model)


def image_processor(config: ModelConfig) -> ImageProcessor | None:
    """Return the processor of a model's images; None if they are not read."""
    if not reads_images(model_settings(config).to_dict()):
        return None
    return load_image_processor(_path(config), load_tokenizer(config.tokenizer_path or config.path))


def as_policy(model: PreTrainedModel, config: ModelConfig, *, seed: int, trainable: bool) -> nn.Module:
    """Prepare a causal model: add adapters if it trains with them, freeze it if it does not train, set attention and checkpointing."""
    ready: nn.Module = model
    if not trainable:
        model.requires_grad_(False).eval()
    elif config.lora_rank > 0 or config.lora_adapter_path:
        ready = _with_adapter(model, config, seed)
    prepare(ready, config, trainable=trainable)
    if config.freeze_vision_tower:
        _tower_of(model).requires_grad_(False)
    return ready


def _tower_of(model: nn.Module) -> nn.Module:
    tower = vision_tower(model)
    if tower is None:
        raise ModelError(
            f"{type(model).__name__} has no vision tower to freeze",
            where="model.freeze_vision_tower",
            fix="model.freeze_vision_tower=false, or a model that reads images",
        )
    return tower


def _without_adapter(model: nn.Module, config: ModelConfig) -> str | None:
    """Return the pattern of the modules that get no adapter: a frozen vision tower, and layers whose weight others read."""
    patterns = [re.escape(name) for name in bypassed_linears(model)]
    chosen = () if isinstance(config.target_modules, str) else config.target_modules
    if named := {name for name in chosen if any(pattern.endswith(name) for pattern in patterns)}:
        raise ModelError(
            f"model.target_modules has {', '.join(sorted(named))}, whose weight a recurrent layer of this model reads itself",
            why="an adapter there would be passed over in some passes, so engine and trainer would differ",
            where="model.target_modules",
            fix="model.target_modules=all-linear leaves it out",
        )
    if config.freeze_vision_tower:
        tower = _tower_of(model)
        patterns.append(re.escape(next(name for name, module in model.named_modules() if module is tower)) + r"\..*")
    return "|".join(patterns) or None


def load_value_model(config: ModelConfig, *, device: torch.device) -> nn.Module:
    """Load a value model: the same backbone with one output a token. A new output layer is zero, so all values are 0."""
    config = dataclasses.replace(config, quantization="none")  # all its weights are trained
    model = _load(AutoModelForTokenClassification, config, **VALUE_SETTINGS)
    head = value_head(model)
    if not any("Classification" in name for name in saved_settings(config).architectures or []):
        nn.init.zeros_(head.weight)
        if head.bias is not None:
            nn.init.zeros_(head.bias)
    model.to(device)  # type: ignore[arg-type]
    prepare(model, config)
    return model


def load_reward_model(config: ModelConfig, *, device: torch.device, seed: int = 0, trainable: bool = True) -> nn.Module:
    """Load a scalar reward model: a backbone with one output, read at the last token of a response.

    A causal model becomes a sequence-classification model with a new output layer of zeros. A sequence-classification or
    token-classification model with one label is loaded unchanged. With LoRA the adapter holds the output layer, too.

    Fresh adapters are initialised from the run's ``seed``. A model that is not ``trainable`` is frozen and gets none.
    """
    factory = reward_factory(config)
    model = _load(factory, config, **REWARD_SETTINGS)
    if not any("Classification" in name for name in saved_settings(config).architectures or []):
        nn.init.zeros_(value_head(model).weight)
    model.to(device)  # type: ignore[arg-type]
    return as_reward_model(model, factory, config, seed=seed, trainable=trainable)


def reward_factory(config: ModelConfig) -> Any:
    """Return the class of transformers that loads a reward model from a directory."""
    saved = saved_settings(config)
    kinds = " ".join(saved.architectures or [])
    if "Classification" in kinds and saved.num_labels != 1:
        raise ModelError(
            f"'{config.path}' is a classifier with {saved.num_labels} labels, a reward model has one output",
            where="model.path",
            fix="use a causal model or a classifier with num_labels=1",
        )
    return AutoModelForTokenClassification if "TokenClassification" in kinds else AutoModelForSequenceClassification


def as_reward_model(
    model: PreTrainedModel, factory: Any, config: ModelConfig, *, seed: int, trainable: bool
) -> nn.Module:
    """Prepare a scalar model that ``factory`` loaded, as :func:`as_policy` prepares a causal one."""
    ready: nn.Module = model
    if not trainable:
        model.requires_grad_(False).eval()
    elif config.lora_rank > 0 or config.lora_adapter_path:
        by_token = factory is AutoModelForTokenClassification
        ready = _with_adapter(model, config, seed, "TOKEN_CLS" if by_token else "SEQ_CLS")
    prepare(ready, config, trainable=trainable)
    return ready


def saved_model(config: ModelConfig, directory: Path) -> ModelConfig:
    """Point ``config`` to the weights of a checkpoint: all of them, or an adapter for the same base."""
    if (directory / "adapter_config.json").is_file():
        return dataclasses.replace(config, lora_adapter_path=str(directory))
    return dataclasses.replace(config, path=str(directory), override_config={})


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside ``model``, with any adapters in place."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"expected a Hugging Face model, got {type(inner).__name__}")
    return inner


def value_head(model: nn.Module) -> nn.Linear:
    head = getattr(model, "score", None) or getattr(model, "classifier", None)
    if isinstance(head, ModulesToSaveWrapper):  # trained besides an adapter
        head = head.modules_to_save[str(head.active_adapter)]
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear token-classification head", fix="use another critic.model.path"
        )
    return head


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Disable the LoRA adapters within the block: the reference policy."""
    if not isinstance(model, PeftModel):
        raise TypeError("the model has no adapter to switch off")
    with model.disable_adapter():
        yield


@contextlib.contextmanager
def with_adapter(model: nn.Module, saved: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute within the block with the weights of a saved adapter in place of the trained ones, which come back bit-equal.

    Parameters are plain tensors or shards; ``saved`` has the names of the adapter's file.
    """
    if not isinstance(model, PeftModel):
        raise TypeError("the model has no adapter to replace")
    name = str(model.active_adapter)
    trained: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            value = saved.get(key.replace(f".modules_to_save.{name}", "").replace(f".{name}", ""))
            if value is not None and (".lora_" in key or ".modules_to_save." in key):
                shard = local_part(value, parameter) if isinstance(parameter, DTensor) else value
                place = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                trained.append((place, place.clone()))
                place.copy_(shard)
    try:
        yield
    finally:
        with torch.no_grad():
            for place, value in trained:
                place.copy_(value)


def _path(config: ModelConfig) -> str:
    if not config.path:
        raise ModelError("no model given", where="model.path", fix="model.path=<Hugging Face model directory>")
    return config.path


def _load(factory: Any, config: ModelConfig, **overrides: Any) -> PreTrainedModel:
    path = _path(config)
    with _explained(path):
        settings = model_settings(config, **overrides)
        if hasattr(settings, "quantization_config") or config.quantization != "none":
            return load_filled(factory, config, **overrides)
        with _quiet():
            if any(Path(path).glob("model.safetensors*")):
                empty = empty_model(factory, settings, trust_remote_code=config.trust_remote_code)
                WeightFiles(Path(path), empty).check_shapes(empty)
            model, report = factory.from_pretrained(
                path,
                config=settings,
                dtype=torch.float32,
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
                attn_implementation="eager",
                output_loading_info=True,
            )
    missing = [name for name in report["missing_keys"] if not name.startswith(("score.", "classifier."))]
    if missing:
        raise ModelError(
            f"the weights in '{path}' lack {len(missing)} tensors, {missing[0]} among them",
            why="they would be random",
            where="model.path",
            fix="check that the directory holds config.json and *.safetensors of one model",
        )
    _copy_from_file(model)
    trim_memory()  # of what was read and copied
    return model


def load_filled(factory: Any, config: ModelConfig, **overrides: Any) -> PreTrainedModel:
    """Load a model one parameter at a time: from quantised files (:data:`hone.data.model_settings.DEQUANTISED`) in float32, or with
    layers that are packed while they are read (``config.quantization``).
    """
    model, files = load_empty(factory, config, **overrides)
    if config.quantization != "none":
        require_package(config.quantization)
        pack_layers(model, layers_of(model), config.quantization)
    materialise(model, torch.device("cpu"))
    fill(model, files, fresh=("score.", "classifier."))
    model.tie_weights()
    if model.can_generate() and (Path(_path(config)) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(_path(config))
    return model


def load_empty(factory: Any, config: ModelConfig, **overrides: Any) -> tuple[PreTrainedModel, WeightFiles]:
    """Build the model without storage for its parameters; returns it with the files to fill it from.

    Raises:
        ModelError: the directory is missing or holds no model in safetensors files.
    """
    path = _path(config)
    with _explained(path), _quiet():
        settings = model_settings(config, **overrides)
        model = empty_model(factory, settings, trust_remote_code=config.trust_remote_code)
        files = WeightFiles(Path(path), model)
        vars(model.config).pop("quantization_config", None)
        return model, files


def model_settings(config: ModelConfig, **overrides: Any) -> PreTrainedConfig:
    """The model's config with the user's changes and ``overrides`` applied."""
    path = _path(config)
    if not (Path(path) / "config.json").is_file():
        raise ModelError(
            f"'{path}' is not a model directory: it has no config.json",
            where="model.path",
            fix="give a Hugging Face model directory, or make one with `hone init`",
        )
    settings = saved_settings(config)
    require_known(config.override_config, settings)
    settings.update({**config.override_config, **overrides})
    dequantised_by(read_settings(path), path)
    return settings


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn errors of reading a model into a ModelError, which the user can fix."""
    try:
        yield
    except (HoneError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises any kind for what a file says
        reason = reason_of(error)
        if "ignore_mismatched_sizes" in reason:
            reason = "config.json says other sizes than its weights have"
        raise ModelError(
            f"cannot load the model in '{path}': {reason}",
            where="model.path",
            fix="check that the directory holds config.json and *.safetensors of one model",
        ) from error


def _copy_from_file(model: nn.Module) -> None:
    """Copy weights out of the memory-mapped file.

    In the file their alignment depends on the header, and matmuls differ in the last bit with alignment, so a resumed run would
    diverge. A file that changes would also change the weights.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers within the block; problems of a model are errors here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # a bar for a few files says nothing, and tears the progress line
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def saved_settings(config: ModelConfig) -> PreTrainedConfig:
    """Read the model's own configuration; ModelError where it has a size that no model has, or transformers refuses it."""
    path = _path(config)
    with _explained(path):
        check_settings({**read_settings(path), **config.override_config}, Path(path) / "config.json")
        return AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, local_files_only=True)


def require_known(overrides: dict[str, Any], settings: PreTrainedConfig) -> None:
    """Check that a model of this kind has these settings, since transformers takes any name and ignores it."""
    known = settings.to_dict()
    for name in overrides:
        if name not in known and not hasattr(settings, name):
            raise ModelError(
                f"{type(settings).__name__} has no setting '{name}'",
                why="the model would ignore it",
                fix=did_you_mean(name, known),
                where=f"model.override_config.{name}",
            )


def _with_adapter(model: PreTrainedModel, config: ModelConfig, seed: int, task: str = "CAUSAL_LM") -> nn.Module:
    """Add a fresh or a saved adapter; PEFT adds the output layer to that of a classifier (``task``)."""
    with standing_in(model):
        return _add_adapter(model, config, seed, task)


def _check_adapter(folder: Path, task: str) -> None:
    """Refuse an adapter of a model for another task, or one that is more than ``W + scale * B @ A``: engines would sample from weights
    that were not trained.
    """
    file = folder / "adapter_config.json"
    try:
        saved = json.loads(file.read_text()) if file.is_file() else {"peft_type": "LORA"}  # PEFT says what is missing
    except ValueError:
        saved = {}
    more = ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "target_parameters", "trainable_token_indices")
    unusual = [name for name in (*more, "layer_replication", "alora_invocation_tokens") if saved.get(name)]
    unusual += ["bias"] if saved.get("bias", "none") != "none" else []
    if (made_for := saved.get("task_type") or task) != task:
        raise ModelError(
            f"the adapter in '{folder}' is of a model for {made_for}, this one is for {task}",
            where="model.lora_adapter_path",
            why="the two have different heads, so its weights fit only there",
            fix=f"hone export {folder} --out DIR merges it into its base; then model.path=DIR",
        )
    kind = saved.get("peft_type")
    if kind != "LORA" or unusual:
        what = f"has {unusual[0]}" if kind == "LORA" else f"has peft_type {kind!r}, not 'LORA'"
        raise ModelError(
            f"the adapter in '{folder}' {what}",
            where="model.lora_adapter_path",
            why="engines get W + scale * B @ A, so rollouts would come from other weights than those that train",
            fix="merge it into the model (PEFT's merge_and_unload), and train a new adapter with model.lora_rank",
        )


def _add_adapter(model: PreTrainedModel, config: ModelConfig, seed: int, task: str) -> nn.Module:
    if config.lora_adapter_path:
        _check_adapter(Path(config.lora_adapter_path), task)
        try:
            return PeftModel.from_pretrained(model, config.lora_adapter_path, is_trainable=True)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ModelError(
                f"cannot load the adapter in '{config.lora_adapter_path}': {str(error).splitlines()[0]}",
                where="model.lora_adapter_path",
                fix="give a PEFT adapter directory made for this model",
            ) from error
    targets = config.target_modules
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT scales by alpha / r, any number does
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type=task,
        exclude_modules=_without_adapter(model, config),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora-init"))
        try:
            return get_peft_model(model, lora)
        except ValueError as error:
            raise ModelError(
                str(error).splitlines()[0], where="model.target_modules", fix="model.target_modules=all-linear"
            ) from error


def prepare(model: nn.Module, config: ModelConfig, *, trainable: bool = True) -> None:
    """Switch ``model`` to Hone's attention, its dropout off, and on the configured memory savings for activations if it is trained."""
    use_hone_attention(model)
    set_dropout(model, on=trainable and isinstance(config, SFTModelConfig) and config.dropout)
    inner = causal_lm(model)
    inner.config.use_cache = False
    if trainable and config.tiled_mlp.enabled:
        tile_mlps(layers_of(inner), config.tiled_mlp.num_shards)
    if trainable and config.enable_gradient_checkpointing:
        _checkpoint_layers(inner, config.gradient_checkpointing_keeps)


def narrow_frozen_matrices(model: nn.Module, device: torch.device, dtype: str) -> None:
    """Keep the frozen matrices of a model in the dtype that it computes in: half the memory of the reference, and of a LoRA base.

    A matmul would cast them to the same values every time, so no number changes. On a CPU, in float32 and for models that are not
    Llama-shaped nothing is done; embeddings, norms and heads with one output stay float32.
    """
    if device.type == "cpu" or dtype == "float32":
        return
    inner = causal_lm(model)
    if not family_of(inner.config.model_type).llama_shaped:
        return
    embedded = {id(module.weight) for module in inner.modules() if isinstance(module, nn.Embedding)}
    parts = [*layers_of(inner), inner.get_output_embeddings()]
    for module in (module for part in parts if part is not None for module in part.modules()):
        frozen = isinstance(module, nn.Linear) and not module.weight.requires_grad and module.weight.is_floating_point()
        if frozen and id(module.weight) not in embedded:
            module.weight.data = module.weight.data.to(getattr(torch, dtype))


def _checkpoint_layers(model: PreTrainedModel, keeps: str) -> None:
    """Enable gradient checkpointing: each layer keeps its input and what ``keeps`` says, and is recomputed in the backward pass.

    transformers 5.2x also hooks the embeddings, which only reentrant checkpointing needs. The hook is removed, because
    :mod:`hone.models.llama` does not support hooks between the parts of a model.
    """
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # transformers 5 renamed it
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable(checkpointing_arguments(keeps))
    if getattr(model, "_require_grads_hook", None) is not None:
        model.disable_input_require_grads()


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The model's layers, which are the modules that transformers never splits over devices."""
    names = set(model._no_split_modules or ())  # FSDP makes subclasses of their classes
    return [module for module in model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]


def set_model_padding(model: nn.Module, config: ModelConfig) -> None:
    """Write the padding token of the model's tokenizer into the model's config."""
    tokenizer = load_tokenizer(
        config.tokenizer_path or config.path,
        trust_remote_code=config.trust_remote_code,
        custom_chat_template=config.custom_chat_template,
    )
    causal_lm(model).config.pad_token_id = padding_token(tokenizer)


def set_tokenizer_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make :func:`padding_token` the tokenizer's own."""
    pad = padding_token(tokenizer)
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the tokenizer's padding token, or a special token that no conversation ends with; None if there is none.

    Transformers finds the last token of a padded row of a reward model by it. The end-of-sequence token cannot be that token, because
    transformers would find the score one token too early. Without any usable token none is set, and it scores one row at a time.
    """
    special: list[Any] = [
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.unk_token_id,
    ]
    pad, end, begin, unknown = special
    if pad is not None and pad != end:
        return pad
    used = {end, begin}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        used.update(render_prompt(tokenizer, chat))
    candidates = [unknown, *tokenizer.all_special_ids]
    return next((token for token in candidates if token is not None and token not in used), None)
