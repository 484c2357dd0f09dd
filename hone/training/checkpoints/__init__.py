"""Checkpoints: written in the background, complete or absent, readable with any number of ranks.

<run>/checkpoints/
    best.json              the best checkpoint by trainer.best_ckpt_metric, if that is set
    step_<N>/
        checkpoint.json    step, files with sizes and checksums; written last: a directory without it is incomplete
        config.yaml        the resolved configuration
        state.json         step, data position, KL controller, invariants
        actor/             Hugging Face directory (or PEFT adapter) with tokenizer
        actor_optimizer/   state of the optimizer in shards, with index.json
        critic/, critic_optimizer/      if there is a critic

There is one format for every layout. Weights are whole tensors with Hugging Face names: each rank all-gathers them, one
layer at a time, and writes its share as one of the safetensors files, so any program can load `actor/`. Optimizer state
stays in the ranks' shards, planned by ``torch.distributed.checkpoint``: each rank of a run with another layout reads the
chunks that it needs.
"""
