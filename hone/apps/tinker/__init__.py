"""Training as a service (`hone serve --train`): several LoRA adapters on one model, trained and sampled over HTTP.

The protocol is that of the client ``tinker`` (PyPI, Apache 2.0): loops written for it run unchanged. An *operation* of a training model
is answered with the name of a future, which the client asks for until the result is there.

    client --HTTP--> app.py (a thread)          token, JSON and protobuf (wire.py), futures (futures.py)
                       |
                       v  operations, on the engine's event loop
                     service.py                 order of each model's operations, sampling sessions
                       |                |
                  adapters.py        sampling.py (turns of the native engine)
                  losses.py
"""
