"""Models: attention, KV caches, CPU kernels, executors, heads, loading and random initialisation.

Generation and training are built on this package; it imports neither.

:mod:`.registry`          what Hone knows about each model family
:mod:`.attention`         packed attention and KV caches
:mod:`.routing`           a model's attention goes there
:mod:`.kernels`           CPU kernels and memory
:mod:`.llama`             Llama-shaped layers computed in few operations
:mod:`.module_forward`    every other model, by its own module
:mod:`.heads`             log-probs, entropy and values of a packed micro-batch
:mod:`.loading`           from a Hugging Face directory to a module
:mod:`.init`              random-initialised model directories
"""

import warnings

# PEFT and torch read a property that transformers renamed
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
