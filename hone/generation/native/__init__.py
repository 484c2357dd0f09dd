"""Continuous batching over the trainer's own module.

    request -> Scheduler: waits for capacity -> Runner: prefills the cache -> a row of the batch -> one token a step
            -> completion, streamed by NativeEngine to the caller

Rows 0 .. A - 1 are in use. The last row moves into the place of a row that ends, so finished sequences cost nothing.
"""
