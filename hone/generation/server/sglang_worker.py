"""Hone's classes in SGLang's scheduler processes: they load weights, sample tokens, and report both log-probs.

They replace SGLang's classes through its hook registry, in every process of a tensor-parallel engine.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor, nn

from hone.errors import GenerationError
from hone.generation.native.sampler import RowSampling, sample
from hone.generation.protocol import require_weights
from hone.generation.remote.transports import Mappings, open_chunk
from hone.generation.server.processes import SAMPLED_FROM

_SPLIT_EXPERTS = ("Qwen3MoeForCausalLM",)
"""SGLang models that load experts one by one, while transformers has those of a layer in one tensor."""
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch"


def install() -> None:
    """Register Hone's classes, before SGLang starts its scheduler."""
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", HoneScheduler, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler", HoneSampler, HookType.REPLACE)
    HookRegistry.register(_SAMPLING, _keep_seeds, HookType.AFTER)


class HoneScheduler(Scheduler):
    """Scheduler with the methods that the server calls by name (``hone_...``), and two changes of behaviour."""

    _hone_continues = False
    _hone_expects = False
    _hone_mappings = Mappings()

    def init_tokenizer(self) -> None:
        """Ignore stop tokens in the model's files: each request has its own."""
        super().init_tokenizer()
        self.model_config.hf_eos_token_id = None
        if self.tokenizer is not None:
            self.tokenizer.eos_token = None
            self.tokenizer.additional_stop_token_ids = None

    def abort_request(self, recv_req: AbortReq) -> None:
        """End requests. A retracted request keeps its tokens, which SGLang would drop."""
        retracted = [
            request
            for request in self.waiting_queue
            if request.output_ids and (recv_req.abort_all or request.rid.startswith(recv_req.rid))
        ]
        self.waiting_queue = [request for request in self.waiting_queue if request not in retracted]
        super().abort_request(recv_req)
        for request in retracted:
            request.to_finish = FINISH_ABORT()
        self.waiting_queue = retracted + self.waiting_queue

    def hone_pause(self) -> None:
        """Stop decoding; requests keep their state."""
        self.pause_generation(PauseGenerationReqInput(mode="in_place"))
        self._hone_continues = False

    def hone_resume(self) -> None:
        """Resume decoding now, or after the weight sync if one is running."""
        self._hone_continues = self._hone_expects
        if not self._hone_expects:
            self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def hone_begin_weights(self) -> None:
        """Set every parameter to NaN, which shows missing ones later. Running requests are computed again afterwards."""
        if not self._hone_expects:
            self._hone_continues = not self._engine_paused
            self._hone_expects = True
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        runner = self.tp_worker.model_runner
        runner.weight_updater.begin_weight_update()
        with torch.no_grad():
            for _, parameter in _floating(runner.model):
                parameter.fill_(torch.nan)

    def hone_load_weights(self, chunk: str) -> None:
        with open_chunk(json.loads(chunk), self._hone_mappings) as tensors:
            model = self.tp_worker.model_runner.model
            split = type(model).__name__ in _SPLIT_EXPERTS
            model.load_weights(_split_experts(tensors) if split else tensors)

    def hone_finish_weights(self) -> None:
        """Complete the weight sync, and drop the cache of the old weights.

        Raises:
            GenerationError: some weights have not arrived; SGLang would keep the old ones.
        """
        runner = self.tp_worker.model_runner
        parameters = _floating(runner.model)
        missing = [name for name, parameter in parameters if bool(parameter.isnan().any())]
        require_weights(dict(parameters), missing)
        runner.weight_updater.end_weight_update(run_post_load=False)
        self.hone_forget()
        self._hone_expects = False
        if self._hone_continues:
            self.hone_resume()

    def hone_release(self, tags: str) -> None:
        """Free memory, named by SGLang's tags with commas between them; no request runs."""
        self.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags.split(",")))

    def hone_reclaim(self, tags: str) -> None:
        """Take memory back, named as for :meth:`hone_release`."""
        self.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags.split(",")))

    def hone_forget(self) -> None:
        """Drop cached prefixes."""
        if not self.flush_cache():
            raise GenerationError("the cache is in use")


def _split_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each expert's matrices with their names in a model's files; transformers has those of a layer in one tensor."""
    for name, tensor in weights:
        layer, separator, kind = name.rpartition(".experts.")
        if not separator or kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for matrix_name, matrix in zip(names, expert.chunk(len(names)), strict=True):
                yield f"{layer}.experts.{number}.{matrix_name}.weight", matrix


def _floating(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.is_floating_point()]


class HoneSampler(Sampler):
    """Samples like the native engine: with one random stream per request, and both log-probs of the sampled token.

    SGLang has seeds only in its deterministic mode, which needs GPU kernels, and reports one log-prob.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
        **_: Any,
    ) -> Tensor:
        """Sample one token per row and store the log-probs in ``logits_output``."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        draws = sample(logits, _rows(sampling_info), positions.long(), None)
        logits_output.next_token_logprobs = draws.log_probs
        logits_output.customized_info = {SAMPLED_FROM: draws.sampling_log_probs.tolist()}
        self._sync_token_ids_across_tp(draws.tokens, sampling_info)
        return draws.tokens


def _rows(info: Any) -> RowSampling:
    """Return the sampling parameters of the rows. SGLang represents greedy as top-k 1 at temperature 1."""
    temperature = info.temperatures[:, 0]
    return RowSampling(
        seeds=info.sampling_seed,
        temperature=torch.where((info.top_ks == 1) & (temperature == 1), 0.0, temperature),
        top_k=info.top_ks.long(),
        top_p=info.top_ps,
        min_p=info.min_ps,
        repetition_penalty=torch.ones_like(temperature),
        presence_penalty=torch.zeros_like(temperature),
        frequency_penalty=torch.zeros_like(temperature),
        biased=torch.zeros(len(temperature), 0, dtype=torch.int64, device=temperature.device),
        bias=torch.zeros(len(temperature), 0, device=temperature.device),
        penalises=False,
        counts=False,
        truncates=not info.is_all_greedy
        and (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling),
        greedy=info.is_any_greedy,
        reports_support=False,
    )


def _keep_seeds(_result: None, info: Any, batch: Any, _vocabulary: int) -> None:
    """Store the requests' seeds in SGLang's batch, which keeps them when requests enter and leave."""
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
