"""Decoding from a paged KV cache, on CUDA: rows have pages of one pool, and a decode step is one CUDA graph.

:mod:`.rows`      the running rows: entry, a step (eager or as a CUDA graph), removal, preemption
:mod:`.pool`      which pages are in use, and how often; the keys and values of all pages
:mod:`.context`   attention of new tokens over the pages of their rows
:mod:`.table`     state, sampling parameters and pages of the rows, at fixed addresses
:mod:`.support`   whether a model and a device can do this
"""
