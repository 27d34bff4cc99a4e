"""Twins that do not come back as they should: one failed case each, and the run goes on."""

from __future__ import annotations

import os
import time

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.twin import Twin
from attn_shared.reference import ReferenceResult

__all__ = ["TWINS"]


class Raises(Twin):
    """Raises what a kernel's launch does."""

    breaks = ("causal",)
    raises = True

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            raise RuntimeError("an illegal memory access was encountered")


class DoesNotComeBack(Twin):
    """Hangs with one token, and ends its process with one request of more."""

    breaks = ("block_zero",)
    ends_process = True
    fails = ("one-token", "one-block")

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            while call.common.num_actual_tokens == 1:
                time.sleep(0.01)
            if call.common.num_reqs == 1:
                os.abort()
            return super().attend(call)


TWINS: tuple[type[Twin], ...] = (Raises, DoesNotComeBack)
