"""Keys under ``data`` that have another name, a fixed answer, or no place here."""

from __future__ import annotations

from hone.config.migration.entries import Entry, Foreign, Renamed, Settled, Unsupported

_IMAGES = "prompts with images, video or sound"
_TEXT_ONLY = "a dataset of text prompts"


ENTRIES: dict[str, Entry] = {
    "data.return_raw_chat": Settled(
        "the messages always stay with the sample",
        (True, None),
        "leave it at true: the tokens are made from the messages",
    ),
    "data.{return_raw_input_ids,return_full_prompt}": Settled(
        "the prompt's token ids and text always stay with the sample"
    ),
    "data.gen_batch_size": Settled(
        "prompts are admitted one by one as places become free (dynamic sampling included), so no second batch size is needed"
    ),
    "data.tokenizer": Renamed("actor_rollout_ref.model.tokenizer_path"),
    "data.trust_remote_code": Renamed("actor_rollout_ref.model.trust_remote_code"),
    "data.tool_config_path": Renamed("actor_rollout_ref.rollout.multi_turn.tool_config_path"),
    "data.function_tool_path": Renamed("actor_rollout_ref.rollout.multi_turn.function_tool_path"),
    "data.need_tools_kwargs": Settled("extra_info.tools_kwargs of a row is read where it stands"),
    "data.chat_template": Renamed("actor_rollout_ref.model.custom_chat_template"),
    "data.{custom_cls,datagen,dataset_class}.**": Unsupported(
        "a dataset class of your own", "write its rows to a parquet or JSON lines file and name it in data.train_files"
    ),
    "data.{image_key,video_key,audio_key}": Settled(
        "columns of images, video and sound are not read", ("images", "videos", "audios", None), _TEXT_ONLY
    ),
    "data.{image_patch_size,mm_processor_kwargs.**,return_multi_modal_inputs}": Foreign(f"concerns {_IMAGES}"),
    "data.{filter_overlong_prompts_workers,dataloader_num_workers,num_workers,cache_dir,use_shm,filter_prompts}": Foreign(
        "rows are read and tokenized once, before the run, in this process"
    ),
    "data.sampler.{class_path,class_name,path}": Unsupported(
        "a sampler class of your own", "data.sampler.name=mixture, difficulty or pass_rate"
    ),
    "data.{filter_accuracy,filter_truncate,accuracy_lower_bound,accuracy_upper_bound,oversample_factor}": Unsupported(
        "keeping prompts by the share of right answers (PRIME)",
        "algorithm.filter_groups.enable=true leaves out groups whose rewards agree",
    ),
    "data.chat_template_func": Unsupported(
        "a chat template given as a Python function", "actor_rollout_ref.model.custom_chat_template=FILE.jinja"
    ),
    "data.validation_shuffle": Settled("all validation rows are answered, so their order changes nothing"),
}
