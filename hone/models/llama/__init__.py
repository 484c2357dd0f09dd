"""Llama-shaped decoders (Llama, Mistral, Qwen 2 and 3) computed from their parameters in few operations.

:mod:`.spec`     one description of such a layer, and which models have it
:mod:`.decode`   executor for generation on the CPU: fused projections, no gradients
:mod:`.train`    executor for training on the CPU: gradients written out
:mod:`.cuda`     executor for both on CUDA: fused operators
:mod:`.choice`   which of them generates

    hidden -> RMS norm -> [q k v] -> (QK norm) -> RoPE -> attention -> o -> + hidden
           -> RMS norm -> [gate up] -> act(gate) * up -> down -> + hidden

The model's own module is the reference implementation; tests compare both executors with it.
"""
