"""Rules about files: datasets, model directories, checkpoints, the run directory."""

from __future__ import annotations

from pathlib import Path

from hone.config.derived import RunSpec, longest_sequence
from hone.config.engines import SERVED
from hone.config.offline import RewardModelConfig, SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.data.chat_formats import read_template
from hone.data.files import Row, file_list
from hone.data.model_settings import DEQUANTISED, decoder_settings, dequantised_by, read_settings
from hone.errors import HoneError, ModelError, near_path
from hone.hub.get import KNOWN_MODELS
from hone.preflight.evidence import Evidence
from hone.preflight.machine import write_problem
from hone.preflight.reading import answer_key, read_json, read_model
from hone.preflight.rules import Finding, Findings, Stage, error, error_of, rule

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@rule("R42", Stage.FILES)
def datasets(config: AnyConfig, evidence: Evidence) -> Findings:
    """Training files are given, and the first row of every file can be read and has the needed columns."""
    data = config.data
    if isinstance(config, RLConfig):
        columns = (config.data.prompt_key,)
    elif isinstance(config, SFTConfig):
        columns = (config.data.messages_key,)
    else:
        columns = ()  # pairs or labels; the rules about preferences check them
    if not file_list(data.train_files) and data.custom_cls.path is None:
        yield error(
            "data.train_files is not set",
            fix="data.train_files=PATH.parquet; `hone data make arithmetic --out DIR` makes an example",
        )
    for _, row in evidence.first_rows(required=columns, answer_key=answer_key(config)):
        if isinstance(row, HoneError):
            yield Finding(row, stops=True)


@rule("R08", Stage.FILES)
def model_directory(config: AnyConfig) -> Findings:
    """The model directory holds config, weights and tokenizer; the adapter directory holds an adapter."""
    block, model = model_block(config)
    if model.path is None:
        yield error(
            f"{block}.path is not set",
            fix=f"{block}.path=DIR, a Hugging Face model directory; `hone init` makes a small one",
        )
        return
    yield from weights(f"{block}.path", model.path)
    tokenizer = model.tokenizer_path or model.path
    if Path(tokenizer).is_dir() and not _holds_any(tokenizer, TOKENIZER_FILES):
        yield error(
            f"'{tokenizer}' has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}, ...)",
            why="text cannot be tokenized",
            fix=f"{block}.tokenizer_path=DIR with a tokenizer of the same vocabulary",
            where=f"{block}.tokenizer_path" if model.tokenizer_path else f"{block}.path",
        )
    elif model.tokenizer_path and not Path(tokenizer).is_dir():
        yield _no_directory(f"{block}.tokenizer_path", tokenizer)
    if model.lora_adapter_path and not _holds_any(model.lora_adapter_path, ("adapter_config.json",)):
        yield error(
            f"'{model.lora_adapter_path}' is not a PEFT adapter: it has no adapter_config.json",
            fix=f"{block}.lora_adapter_path=DIR of an adapter, or null for a new one",
        )
    method = (read_json(Path(model.path) / "config.json").get("quantization_config") or {}).get("quant_method")
    if method in DEQUANTISED and isinstance(config, RLConfig) and config.actor_rollout_ref.rollout.name in SERVED:
        yield error(
            f"'{model.path}' is quantised ({method}), and rollout.name={config.actor_rollout_ref.rollout.name}",
            why="the engine would keep the layout of the quantised weights, and the trainer sends it unquantised ones",
            fix=f"`hone export {model.path} --out DIR --dtype bfloat16` and {block}.path=DIR, or actor_rollout_ref.rollout.name=native",
            where=f"{block}.path",
        )


@rule("R08", Stage.FILES)
def overridden_settings(config: AnyConfig) -> Findings:
    """Every name in ``override_config`` is a setting of the model."""
    from hone.models.loading import require_known, saved_settings  # slow to import

    block, model = model_block(config)
    if not model.override_config or model.path is None or not (Path(model.path) / "config.json").is_file():
        return
    try:
        settings = saved_settings(model)
    except ModelError:
        return  # the rule about the model's directory reports it
    try:
        require_known(model.override_config, settings)
    except ModelError as unknown:
        where = unknown.where.replace("model", block, 1)
        yield Finding(ModelError(unknown.what, why=unknown.why, fix=unknown.fix, where=where), stops=True)


@rule("R08", Stage.FILES)
def critic_directory(config: RLConfig) -> Findings:
    """The critic's model directory holds config and weights."""
    if RunSpec(config).critic.value and config.critic.model.path is not None:
        yield from weights("critic.model.path", config.critic.model.path)


@rule("R39", Stage.FILES)
def chat_template(config: AnyConfig, evidence: Evidence) -> Findings:
    """Rows of messages have a chat template."""
    block, model = model_block(config)
    tokenizer = model.tokenizer_path or model.path
    custom = model.custom_chat_template
    if custom is not None:
        try:
            read_template(custom)
        except HoneError as problem:
            key = f"{block}.custom_chat_template"
            yield error(problem.what, fix=problem.fix.replace("model.custom_chat_template", key), where=key)
    elif (
        tokenizer
        and _holds_any(tokenizer, TOKENIZER_FILES)
        and not _has_template(Path(tokenizer))
        and _rows_hold_messages(config, evidence)
    ):
        yield error(
            f"the tokenizer in '{tokenizer}' has no chat template, but the training rows are chat messages",
            why="messages cannot be rendered as text",
            fix=f"the model's instruct version has one: train that, or {block}.custom_chat_template=PATH of its chat_template.jinja, or "
            f"{block}.custom_chat_template=chatml for a vocabulary that has its tokens"
            + ("; prompts of plain text need none" if isinstance(config, RLConfig) else ""),
            where=f"{block}.path",
        )


@rule("R95", Stage.FILES)
def family_can_be_trained(config: AnyConfig, evidence: Evidence) -> Findings:
    """Engine and trainer compute the same probabilities with a model of this family."""
    from hone.models.loading import check_family

    if evidence.model_settings and not isinstance(config, RewardModelConfig):
        yield from error_of(check_family, model_block(config)[1])


@rule("R30", Stage.FILES)
def model_length(config: AnyConfig) -> Findings:
    """The longest sequence is within the model's maximum number of positions."""
    block, model = model_block(config)
    file = Path(model.path or "") / "config.json"
    if model.path is None or not file.is_file():
        return
    settings = decoder_settings({**read_model(model.path), **model.override_config})
    positions = settings.get("max_position_embeddings") or settings.get("n_positions")
    if isinstance(config, RLConfig):
        needed, keys = longest_sequence(config), "data.max_prompt_length + data.max_response_length"
        if config.actor_rollout_ref.rollout.multi_turn.compaction.strategy is not None:
            keys = "multi_turn.compaction.context_tokens"
    else:
        needed, keys = config.data.max_length, "data.max_length"
    if isinstance(positions, int) and positions < needed:
        yield error(
            f"{keys} = {needed} tokens, but the model has max_position_embeddings={positions}",
            why="a model fails or generates nonsense beyond its positions",
            fix=f"shorter sequences, at most {positions} tokens in total",
            where=f"{block}.path",
        )


@rule("R55", Stage.FILES)
def run_directory(config: AnyConfig) -> Findings:
    """The run directory can be written, and resume_mode=resume_path has a checkpoint."""
    trainer = config.trainer
    directory = Path(trainer.default_local_dir).expanduser().absolute()
    if problem := write_problem(directory):
        yield error(f"the run directory {directory} cannot be written: {problem}", fix="trainer.default_local_dir=DIR")
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield error(
            "trainer.resume_mode=resume_path, but trainer.resume_from_path is not set",
            fix="trainer.resume_from_path=RUN/checkpoints/step_N, or trainer.resume_mode=auto",
        )


def _adapter_fix(key: str, path: str) -> str:
    if key.startswith("reward."):  # frozen: its adapter is merged
        return f"hone export {path} --out DIR, which merges base and adapter, and {key}=DIR"
    return f"{key}=BASE and {key.removesuffix('path')}lora_adapter_path={path}"


def weights(key: str, path: str) -> Findings:
    """Yield a finding when a model directory lacks config.json or weights; nothing is loaded."""
    directory = Path(path)
    if not directory.is_dir():
        yield _no_directory(key, path)
        return
    if not (directory / "config.json").is_file():
        adapter = (directory / "adapter_config.json").is_file()
        yield error(
            f"'{path}' is " + ("a PEFT adapter, not a model" if adapter else "not a model: it has no config.json"),
            fix=_adapter_fix(key, path) if adapter else f"{key}=DIR of a Hugging Face model",
            where=key,
        )
        return
    try:
        settings = read_settings(directory)
        if not settings:
            yield error(f"'{directory / 'config.json'}' is empty", fix="restore the file", where=key)
        dequantised_by(settings, directory)
    except ModelError as problem:
        yield error(problem.what, why=problem.why, fix=problem.fix, where=key)
    index = directory / "model.safetensors.index.json"
    needed = sorted(set(read_json(index).get("weight_map", {}).values())) if index.is_file() else []
    missing = [name for name in needed if not (directory / name).is_file()]
    if missing:
        yield error(
            f"'{path}' lacks {len(missing)} of {len(needed)} weight files: {', '.join(missing[:3])}",
            fix="copy the missing files into the directory",
            where=key,
        )
    elif not needed and not _holds_any(
        path, ("model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json")
    ):
        yield error(
            f"'{path}' has no weights (model.safetensors)", fix="copy the weights into the directory", where=key
        )


def _no_directory(key: str, path: str) -> Finding:
    return error(
        f"directory '{path}' does not exist",
        why="a path with a folder that exists, or with more than one /, is not looked up on the hub",
        fix=f"`hone models get {path} --out {path}` brings it"
        if path.lower() in KNOWN_MODELS
        else near_path(path) or f"{key}=DIR that exists (current directory: {Path.cwd()}), or ORG/NAME of the hub",
        where=key,
    )


def _rows_hold_messages(config: AnyConfig, evidence: Evidence) -> bool:
    """Return whether the first training row is a list of messages; False when it cannot be read (R42)."""
    if isinstance(config, SFTConfig):
        return True
    if not isinstance(config, RLConfig):
        return False  # rows may hold text or token ids; loading the dataset reports a missing template
    _, row = next(evidence.first_rows(required=(config.data.prompt_key,)), ("", None))
    prompt = row.values[config.data.prompt_key] if isinstance(row, Row) else None
    return isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], dict)


def _has_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    return bool(read_json(directory / "tokenizer_config.json").get("chat_template"))


def _holds_any(directory: str, names: tuple[str, ...]) -> bool:
    return any((Path(directory) / name).is_file() for name in names)
