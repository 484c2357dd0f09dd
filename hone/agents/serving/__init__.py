"""An OpenAI-compatible endpoint over an engine, which records every conversation as exact tokens.

==============  ====================================================================================================
``wire``        request bodies and their validation
``errors``      error answers in OpenAI's form
``session``     conversations of one client as tokens
``gateway``     access to the engine from the endpoint's thread
``chat``        ``/v1/chat/completions``: messages to tokens, tokens to messages
``text``        ``/v1/completions``
``replies``     the JSON of answers, complete or streamed in chunks
``app``         routes, access tokens, errors
``server``      the process's HTTP server, in a thread or in the foreground
==============  ====================================================================================================

The package needs the extra ``serve`` (starlette, uvicorn and pydantic), imported in this package only.
"""
