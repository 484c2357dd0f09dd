"""Rules about what lies on disk: datasets, model directories, checkpoints, the run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig
from hone.errors import HoneError
from hone.preflight.evidence import file_list, model_block, read_json
from hone.preflight.needs import needs_critic
from hone.preflight.rules import Finding, Stage, error, rule

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@rule("R42", *TREES.values(), stage=Stage.FILES)
def datasets(config: AnyConfig) -> Iterator[Finding]:
    """Training files are named, and the first row of every file can be read and has its columns."""
    from hone.data.files import read_rows

    data = config.data
    if isinstance(config, RLConfig):
        columns = (config.data.prompt_key, config.data.reward_fn_key)
    elif isinstance(config, SFTConfig):
        columns = (config.data.messages_key,)
    else:
        columns = ()  # either of two sets; see the rules of preferences
    if not file_list(data.train_files):
        yield error(
            "no training data is given",
            fix="data.train_files=PATH.parquet; `hone data make arithmetic --out DIR` makes some",
            where="data.train_files",
        )
    for file in [*file_list(data.train_files), *file_list(data.val_files)]:
        try:
            read_rows(file, required=columns, max_rows=1)
        except HoneError as found:
            yield Finding(found, stops=True)


@rule("R08", *TREES.values(), stage=Stage.FILES)
def model_directory(config: AnyConfig) -> Iterator[Finding]:
    """The model directory holds config, weights and tokenizer; the adapter directory holds an adapter."""
    block, model = model_block(config)
    if model.path is None:
        yield error(
            "no model is given",
            fix=f"{block}.path=DIR, a Hugging Face model directory; `hone init` makes a small one",
            where=f"{block}.path",
        )
        return
    yield from weights(f"{block}.path", model.path)
    tokenizer = model.tokenizer_path or model.path
    if Path(tokenizer).is_dir() and not _holds_any(tokenizer, TOKENIZER_FILES):
        yield error(
            f"'{tokenizer}' has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}, ...)",
            why="text cannot be turned into tokens",
            fix=f"{block}.tokenizer_path=DIR with a tokenizer of the same vocabulary",
            where=f"{block}.tokenizer_path" if model.tokenizer_path else f"{block}.path",
        )
    elif model.tokenizer_path and not Path(tokenizer).is_dir():
        yield _no_directory(f"{block}.tokenizer_path", tokenizer)
    if model.lora_adapter_path and not _holds_any(model.lora_adapter_path, ("adapter_config.json",)):
        yield error(
            f"'{model.lora_adapter_path}' is not a PEFT adapter: it has no adapter_config.json",
            fix=f"{block}.lora_adapter_path=DIR of an adapter, or null for a fresh one",
            where=f"{block}.lora_adapter_path",
        )


@rule("R08", RLConfig, stage=Stage.FILES)
def critic_directory(config: RLConfig) -> Iterator[Finding]:
    """The critic's own model directory holds config and weights."""
    if needs_critic(config) and config.critic.model.path is not None:
        yield from weights("critic.model.path", config.critic.model.path)


@rule("R39", *TREES.values(), stage=Stage.FILES)
def chat_template(config: AnyConfig) -> Iterator[Finding]:
    """Where rows hold messages there is a template that turns them into text."""
    block, model = model_block(config)
    tokenizer = model.tokenizer_path or model.path
    custom = model.custom_chat_template
    if custom is not None:
        if "{{" not in custom and "{%" not in custom and not Path(custom).is_file():
            yield error(
                f"'{custom}' is neither an existing file nor a Jinja template",
                fix=f"{block}.custom_chat_template=PATH.jinja",
                where=f"{block}.custom_chat_template",
            )
    elif (
        tokenizer
        and _holds_any(tokenizer, TOKENIZER_FILES)
        and not _has_template(Path(tokenizer))
        and _rows_hold_messages(config)
    ):
        yield error(
            f"the tokenizer in '{tokenizer}' has no chat template, and the training rows are chat messages",
            why="messages cannot be turned into tokens",
            fix=f"{block}.custom_chat_template=PATH.jinja, or chat_template.jinja in the tokenizer directory",
            where=f"{block}.path",
        )


@rule("R30", *TREES.values(), stage=Stage.FILES)
def model_length(config: AnyConfig) -> Iterator[Finding]:
    """The model has a position for every token of the longest sequence."""
    block, model = model_block(config)
    file = Path(model.path or "") / "config.json"
    if model.path is None or not file.is_file():
        return
    settings = {**read_json(file), **model.override_config}
    settings = {**settings.get("text_config", {}), **settings}
    positions = settings.get("max_position_embeddings") or settings.get("n_positions")
    if isinstance(config, RLConfig):
        needed = config.data.max_prompt_length + config.data.max_response_length
        keys = "data.max_prompt_length + data.max_response_length"
    else:
        needed, keys = config.data.max_length, "data.max_length"
    if isinstance(positions, int) and positions < needed:
        yield error(
            f"{keys} = {needed} tokens, the model was made for {positions}",
            why="beyond its positions a model fails or writes nonsense",
            fix=f"shorter sequences, at most {positions} tokens in all",
            where=f"{block}.path",
        )


@rule("R55", *TREES.values(), stage=Stage.FILES)
def run_directory(config: AnyConfig) -> Iterator[Finding]:
    """The run directory can be written, and a checkpoint to resume from is named."""
    trainer = config.trainer
    directory = Path(trainer.default_local_dir).expanduser().absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield error(
            f"the run directory {directory} cannot be written: {existing} is "
            + ("not a directory" if not existing.is_dir() else "write-protected"),
            fix="trainer.default_local_dir=DIR",
            where="trainer.default_local_dir",
        )
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield error(
            "trainer.resume_mode=resume_path, and no checkpoint is named",
            fix="trainer.resume_from_path=RUN/checkpoints/step_N, or trainer.resume_mode=auto",
            where="trainer.resume_from_path",
        )


def weights(key: str, path: str) -> Iterator[Finding]:
    """Yield what a model directory lacks of config.json and weights; nothing is loaded."""
    directory = Path(path)
    if not directory.is_dir():
        yield _no_directory(key, path)
        return
    if not (directory / "config.json").is_file():
        adapter = (directory / "adapter_config.json").is_file()
        yield error(
            f"'{path}' is " + ("a PEFT adapter, not a model" if adapter else "not a model: it has no config.json"),
            fix=f"{key}=BASE and {key.removesuffix('path')}lora_adapter_path={path}"
            if adapter
            else f"{key}=DIR of a Hugging Face model",
            where=key,
        )
        return
    if not read_json(directory / "config.json"):
        yield error(f"'{directory / 'config.json'}' is not valid JSON", fix="restore the file", where=key)
    index = directory / "model.safetensors.index.json"
    needed = sorted(set(read_json(index).get("weight_map", {}).values())) if index.is_file() else []
    missing = [name for name in needed if not (directory / name).is_file()]
    if missing:
        yield error(
            f"'{path}' lacks {len(missing)} of {len(needed)} weight files: {', '.join(missing[:3])}",
            fix="copy the missing files into it",
            where=key,
        )
    elif not needed and not _holds_any(
        path, ("model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json")
    ):
        yield error(f"'{path}' has no weights (model.safetensors)", fix="copy the weights into it", where=key)


def _no_directory(key: str, path: str) -> Finding:
    return error(
        f"directory '{path}' does not exist",
        why="nothing is downloaded: models and checkpoints are local directories",
        fix=f"{key}=DIR that exists (current folder: {Path.cwd()})",
        where=key,
    )


def _rows_hold_messages(config: AnyConfig) -> bool:
    """Tell whether the first training row is a list of messages; an unreadable one is another rule's finding."""
    from hone.data.files import read_rows

    if isinstance(config, SFTConfig):
        return True
    if not isinstance(config, RLConfig):
        return False  # rows may hold text or token ids; the dataset says so when a template is missing
    try:
        (row,) = read_rows(config.data.train_files, required=(config.data.prompt_key,), max_rows=1)
    except (HoneError, TypeError):
        return False
    prompt = row.values[config.data.prompt_key]
    return isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], dict)


def _has_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    return bool(read_json(directory / "tokenizer_config.json").get("chat_template"))


def _holds_any(directory: str, names: tuple[str, ...]) -> bool:
    return any((Path(directory) / name).is_file() for name in names)
