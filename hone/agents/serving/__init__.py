"""An endpoint for OpenAI's and Anthropic's clients over an engine, which records every conversation as exact tokens.

================  ==================================================================================================
``wire``          request bodies: their bounds, the threads that decode, render and tokenize, and validation
``errors``        error answers in OpenAI's and in Anthropic's form
``session``       conversations of one client as tokens, and all sessions by name and key
``gateway``       access to the engine from the endpoint's thread; counters and histograms for Prometheus
``chat``          ``/v1/chat/completions``: messages, tools and template arguments to tokens, tokens to messages
``translated``    what the two APIs share that are answered as a chat
``text``          ``/v1/completions``, ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``
``responses``     ``/v1/responses``, as a chat
``messages``      ``/v1/messages``, as a chat
``replies``       the JSON of answers, complete or streamed in chunks
``app``           routes, those of replicas too, access tokens, errors
``service``       limits, sampling parameters, seeds and streaming of the served model
``swapping``      replacement of the model while requests run
``server``        the process's HTTP server, in a thread or in the foreground; time limit of headers, check of the host
================  ==================================================================================================

The package needs the extra ``serve`` (starlette, uvicorn, pydantic and prometheus-client), imported in this package only.
"""
