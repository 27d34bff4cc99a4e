"""The modules that import vLLM, each inside a function."""
