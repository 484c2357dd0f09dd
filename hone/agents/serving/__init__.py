"""An OpenAI-compatible endpoint over an engine, which records every conversation as exact tokens.

==============  ====================================================================================================
``wire``        what clients send: request bodies, checked
``errors``      what they get when something is wrong, in OpenAI's form
``session``     the conversations of one client as tokens: which call continues which
``gateway``     the engine, asked from the endpoint's own thread
``chat``        ``/v1/chat/completions``: messages to tokens, tokens to messages
``text``        ``/v1/completions``
``replies``     the JSON of answers, whole or in pieces
``app``         routes, tokens of access, errors
``server``      the process's HTTP server, in a thread or in the foreground
==============  ====================================================================================================

It needs the extra ``serve`` (starlette, uvicorn and pydantic), imported in this package only.
"""
