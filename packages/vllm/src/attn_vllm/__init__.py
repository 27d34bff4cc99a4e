"""vLLM's engine on attn's backends, by a plugin that vLLM loads in each of its processes.

`ATTN_VLLM_BACKEND` turns it on: "auto", or the name of a backend. Importing this loads no vLLM.
"""

from __future__ import annotations

from attn_vllm.plugin import register

__all__ = ["__version__", "register"]

__version__ = "0.1.0"
