"""Decoding from a paged KV cache, on CUDA: rows have pages of one pool, and a decode step is one CUDA graph.

:mod:`.rows`      the running rows: entry, a step, removal, preemption
:mod:`.pool`      which pages are in use, and how often; the keys and values of all pages
:mod:`.prompts`   where the tokens of an entering row come from: another row, an earlier turn, or the model
:mod:`.context`   attention of new tokens over the pages of their rows
:mod:`.table`     state, sampling parameters and pages of the rows, at fixed addresses
:mod:`.decoding`  the step itself, eager or as a CUDA graph, and the way of its tokens to the host
:mod:`.support`   whether a model and a device can do this
"""
