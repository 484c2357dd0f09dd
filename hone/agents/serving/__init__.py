"""An endpoint for OpenAI's and Anthropic's clients over an engine, which records every conversation as exact tokens.

================  ==================================================================================================
``intake``        bounds on a body: bytes, time, values; threads that decode, render and tokenize, so that the event loop does not
``wire``          request bodies and their validation
``errors``        error answers in OpenAI's and in Anthropic's form
``session``       conversations of one client as tokens, and all sessions by name and key
``chat_prompt``   validation of messages, tools and template arguments; messages as the prompt of a chat
``gateway``       access to the engine from the endpoint's thread
``metrics``       counters and histograms for Prometheus
``chat``          ``/v1/chat/completions``: messages to tokens, tokens to messages
``text``          ``/v1/completions``, ``/tokenize`` and ``/detokenize``
``responses``     ``/v1/responses``, as a chat
``messages``      ``/v1/messages``, as a chat
``replies``       the JSON of answers, complete or streamed in chunks
``delivery``      answers as one object or as events, and errors on the way
``app``           routes, those of replicas too, access tokens, errors
``service``       limits, sampling parameters, seeds and streaming of the served model
``swapping``      replacement of the model while requests run
``connections``   time limit of headers, check of the host
``server``        the process's HTTP server, in a thread or in the foreground
================  ==================================================================================================

The package needs the extra ``serve`` (starlette, uvicorn, pydantic and prometheus-client), imported in this package only.
"""
