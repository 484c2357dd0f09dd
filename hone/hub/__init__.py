"""Models and datasets by name: a registry of known models, names of the Hugging Face hub, and downloads.

    known_models    the models that `hone models get NAME` knows, with licence, size and source
    get             bring one of them into a directory
    names           parse ORG/NAME[:SUBSET[:SPLIT]][@REVISION]
    download        bring a model, tokenizer, adapter or dataset of the hub into the local cache
    columns         the columns of well-known datasets, converted to Hone's
    resolve         replace the names in a configuration by local paths, once, before anything starts

Only safetensors, JSON, tokenizer and dataset files are downloaded; code of a repository is not.
"""
