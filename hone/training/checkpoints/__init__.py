"""Checkpoints: written beside, published whole, read back on any number of ranks.

<run>/checkpoints/
    best.json              the best of them by trainer.best_ckpt_metric, when one is named
    step_<N>/
        checkpoint.json    step, files with their sizes; written last, and without it a directory is no checkpoint
        config.yaml        the resolved configuration
        state.json         step, data position, KL controller, invariants
        actor/             Hugging Face directory (or PEFT adapter) with tokenizer
        actor_optimizer/   state of the optimizer in shards, with index.json
        critic/, critic_optimizer/      when there is a critic

There is one format for every layout. Weights are whole tensors under the names of Hugging Face: each rank gathers all of
them, one layer at a time, and writes its share as one of the safetensors files, so `actor/` loads anywhere as it is.
Optimizer state stays in the shards that the ranks hold, planned by ``torch.distributed.checkpoint``: whatever the layout of
the run that reads them, each of its ranks takes the pieces that it needs.

=====================  ======================================================================
:mod:`.storage`        a directory on a disk or in an object store
:mod:`.tensor_files`   safetensors files, written and read as streams
:mod:`.shards`         optimizer state of any layout
:mod:`.weights`        a Hugging Face or PEFT directory, of a model of any layout
:mod:`.checkpoint`     one checkpoint, and where it lies
:mod:`.store`          the checkpoints of a run: save in the background, publish, keep, retire
=====================  ======================================================================
"""
