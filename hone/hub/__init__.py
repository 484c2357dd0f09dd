"""Models and datasets by name: a registry of known models, names of the Hugging Face hub, and downloads.

    known_models    the models that `hone models get NAME` knows, with licence, size and source
    get             bring one of them into a directory
    download        names ORG/NAME[:SUBSET[:SPLIT]][@REVISION], and what they name brought into the local cache
    resolve         replace the names in a configuration by local paths; columns of well-known datasets, converted to Hone's

Only safetensors, JSON, tokenizer and dataset files are downloaded; code of a repository is not.
"""
