"""Attention over packed sequences and KV caches, shared by training and generation.

:mod:`.context`     what a model's attention calls: it knows which tokens see which
:mod:`.packed`      whole sequences end to end, for training and prefill
:mod:`.cache`       what a layer keeps of earlier tokens
:mod:`.varlen`      one variable-length call for all sequences, on CUDA
:mod:`.paged`       the same over keys and values in pages
:mod:`.partial`     some queries and some of their keys, with log-sum-exps that add the parts up
:mod:`.tiles`       sequences of similar length grouped into padded tiles
:mod:`.softmax`     causal softmax attention over padded tiles, with torch's kernels
:mod:`.cpu`         the same on the CPU, in blocks that fit the processor's cache, and the tiles for that
"""
