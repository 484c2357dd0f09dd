"""How tokens are made: the engine protocol, the native engine and the slow golden path."""
