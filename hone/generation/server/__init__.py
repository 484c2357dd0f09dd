"""The program that runs inside an engine's own environment. It needs torch and the engine; of Hone only what imports no more."""
