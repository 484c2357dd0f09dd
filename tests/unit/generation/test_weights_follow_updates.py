"""Generation follows an optimizer that changes weights without counting its changes, even with requests under way."""

import asyncio

import torch

from hone.generation.protocol import GenerationRequest, SamplingParams


def asked(name: str, tokens: int = 6) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [GenerationRequest(f"{name}/{row}", [5, 6 + row], sampling, row) for row in range(2)]


def test_a_step_of_a_fused_optimizer_while_something_is_served(make_model, make_engine, serve):
    model = make_model("qwen3")
    engine = make_engine(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)

    async def loop() -> dict:
        async def long() -> None:
            async for _ in engine.generate(asked("long", 120)):
                pass

        background = asyncio.create_task(long())
        async for _ in engine.generate(asked("before")):
            pass
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        await engine.load_weights(model.named_parameters(), 1)
        assert not background.done()
        found = {c.request_id: c async for c in engine.generate(asked("after"))}
        await background
        return found

    followed = asyncio.run(loop())
    fresh = serve(make_engine(model), asked("after"))
    for name, completion in fresh.items():
        assert followed[name].token_ids == completion.token_ids
        torch.testing.assert_close(
            torch.tensor(followed[name].log_probs), torch.tensor(completion.log_probs), atol=1e-5, rtol=0
        )
