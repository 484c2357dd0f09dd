"""Continuous batching over the trainer's own module.

    request -> Scheduler: waits for room -> Runner: prompt into the cache -> a row of the batch -> one token a step
            -> completion, streamed by NativeEngine to the caller

Rows 0 .. A - 1 are in use; a row that ends is filled by the last one, so that finished sequences cost nothing.
"""
