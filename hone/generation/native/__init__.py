"""Continuous batching over the trainer's own module.

    request -> waiting -> [prefill: prompt into the cache] -> a row of the batch -> one token a step -> completion

Rows 0 .. A - 1 are in use; a row that ends is filled by the last one, so that finished sequences cost nothing.
"""
