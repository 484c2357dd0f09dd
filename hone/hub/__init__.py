"""Models and datasets by name: a registry of known models, names of the Hugging Face hub, and downloads.

    get             bring a model into a directory; those with a short name, with licence, size and source
    download        names ORG/NAME[:SUBSET[:SPLIT]][@REVISION], and what they name brought into the local cache
    resolve         replace the names in a configuration by local paths; columns of well-known datasets, converted to Hone's

Only safetensors, JSON, tokenizer and dataset files are downloaded; code of a repository is not.
"""
