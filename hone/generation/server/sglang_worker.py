"""What runs inside SGLang's own scheduler processes: takes weights, draws tokens, and reports both log-probs.

SGLang puts these classes in the place of its own through its registry of hooks; every process of a tensor-parallel engine has them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor, nn

from hone.errors import GenerationError
from hone.generation.native.sampler import RowSampling, sample
from hone.generation.remote.transports import Mappings, opened
from hone.generation.server.sglang_processes import SAMPLED_FROM

_EXPERTS_APART = ("Qwen3MoeForCausalLM",)
"""SGLang's models that take each expert by itself, where transformers has a layer's in one tensor of the layout known here."""
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch"


def install() -> None:
    """Have SGLang take Hone's classes when it starts its scheduler."""
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", HoneScheduler, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler", HoneSampler, HookType.REPLACE)
    HookRegistry.register(_SAMPLING, _keep_seeds, HookType.AFTER)


class HoneScheduler(Scheduler):
    """Methods that the server calls by name (``hone_...``), and two habits that differ from SGLang's."""

    _hone_continues = False
    _hone_expects = False
    _hone_mappings = Mappings()

    def init_tokenizer(self) -> None:
        """Stopping tokens are named by each request alone, not by the model's files."""
        super().init_tokenizer()
        self.model_config.hf_eos_token_id = None
        if self.tokenizer is not None:
            self.tokenizer.eos_token = None
            self.tokenizer.additional_stop_token_ids = None

    def abort_request(self, recv_req: AbortReq) -> None:
        """End requests. One that waits to be computed again keeps its tokens, which SGLang would drop with it."""
        begun = [
            one
            for one in self.waiting_queue
            if one.output_ids and (recv_req.abort_all or one.rid.startswith(recv_req.rid))
        ]
        self.waiting_queue = [one for one in self.waiting_queue if one not in begun]
        super().abort_request(recv_req)
        for one in begun:
            one.to_finish = FINISH_ABORT()
        self.waiting_queue = begun + self.waiting_queue

    def hone_pause(self) -> None:
        """Stop decoding; requests stay where they are."""
        self.pause_generation(PauseGenerationReqInput(mode="in_place"))
        self._hone_continues = False

    def hone_resume(self) -> None:
        """Go on, or once new weights have arrived if they are on their way."""
        self._hone_continues = self._hone_expects
        if not self._hone_expects:
            self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def hone_begin_weights(self) -> None:
        """Empty every parameter, so that one that does not arrive shows. What requests had computed is computed again afterwards."""
        if not self._hone_expects:
            self._hone_continues = not self._engine_paused
            self._hone_expects = True
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        runner = self.tp_worker.model_runner
        runner.weight_updater.begin_weight_update()
        with torch.no_grad():
            for _, parameter in _floating(runner.model):
                parameter.fill_(torch.nan)

    def hone_load_weights(self, parcel: str) -> None:
        """Take a parcel, in JSON."""
        with opened(json.loads(parcel), self._hone_mappings) as tensors:
            model = self.tp_worker.model_runner.model
            apart = type(model).__name__ in _EXPERTS_APART
            model.load_weights(_experts_apart(tensors) if apart else tensors)

    def hone_finish_weights(self) -> None:
        """Make what is derived from the weights anew, and forget what was cached of the old ones.

        Raises:
            GenerationError: some have not arrived; SGLang itself would go on with the old ones.
        """
        runner = self.tp_worker.model_runner
        parameters = _floating(runner.model)
        missing = [name for name, parameter in parameters if bool(parameter.isnan().any())]
        if missing:
            raise GenerationError(
                f"{len(missing)} of {len(parameters)} weights have not arrived, such as '{missing[0]}'"
            )
        runner.weight_updater.end_weight_update(run_post_load=False)
        self.hone_forget()
        self._hone_expects = False
        if self._hone_continues:
            self.hone_resume()

    def hone_forget(self) -> None:
        """Forget cached prefixes.

        Raises:
            GenerationError: a request is being computed.
        """
        if not self.flush_cache():
            raise GenerationError("the cache is in use")


def _experts_apart(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each expert's matrices under the names that they have in a model's files; transformers holds those of a layer in one tensor."""
    for name, tensor in weights:
        layer, found, kind = name.rpartition(".experts.")
        if not found or kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, matrix in zip(names, expert.chunk(len(names)), strict=True):
                yield f"{layer}.experts.{number}.{part}.weight", matrix


def _floating(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.is_floating_point()]


class HoneSampler(Sampler):
    """Draws as the native engine does: each request from its own random stream, with both log-probs of what was drawn.

    SGLang itself has seeds only in its deterministic mode, which needs kernels for GPUs, and reports one log-prob.
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
        """Draw a token a row; log-probs are left in ``logits_output``."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        tokens, policy, drawn = sample(logits, _rows(sampling_info), positions.long(), None)
        logits_output.next_token_logprobs = policy
        logits_output.customized_info = {SAMPLED_FROM: drawn.tolist()}
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def _rows(info: Any) -> RowSampling:
    """The rows' sampling. SGLang writes greedy as top-k 1 at temperature 1."""
    temperature = info.temperatures[:, 0]
    return RowSampling(
        seeds=info.sampling_seed,
        temperature=torch.where((info.top_ks == 1) & (temperature == 1), 0.0, temperature),
        top_k=info.top_ks.long(),
        top_p=info.top_ps,
        min_p=info.min_ps,
        repetition_penalty=torch.ones_like(temperature),
        penalises=False,
        truncates=not info.is_all_greedy
        and (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling),
        greedy=info.is_any_greedy,
    )


def _keep_seeds(_result: None, info: Any, batch: Any, _vocabulary: int) -> None:
    """Note the requests' seeds, which SGLang then carries along as requests come and go."""
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
