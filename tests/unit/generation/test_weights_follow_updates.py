"""Generation follows an optimizer that changes weights without counting its changes, with never an idle moment between."""

import asyncio

import torch

from hone.generation.protocol import GenerationRequest, SamplingParams


def asked(number: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"{number}/{row}", [5, 6 + row], SamplingParams(max_tokens=6), row) for row in range(3)]


def test_a_step_of_a_fused_optimizer_between_two_requests(make_model, make_engine, serve):
    model = make_model("qwen3")
    engine = make_engine(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    async def loop() -> dict:
        found = {}
        for step in range(3):
            found = {c.request_id: c async for c in engine.generate(asked(step))}
            for parameter in model.parameters():  # training does not wait for the event loop
                parameter.grad = torch.ones_like(parameter)
            if step < 2:
                optimizer.step()
                await engine.load_weights(model.named_parameters(), step + 1)
        return found

    followed = asyncio.run(loop())
    fresh = serve(make_engine(model), asked(2))
    for name, completion in fresh.items():
        assert followed[name].token_ids == completion.token_ids
        assert followed[name].log_probs == completion.log_probs
