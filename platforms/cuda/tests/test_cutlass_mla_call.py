from __future__ import annotations

import pytest
import torch
from mla_testing import decodes, latent_layer

from attn_conformance.stubs.modules import stub_vendor
from attn_conformance.stubs.vendors.cutlass_mla import VLLM_CUTLASS_MLA
from attn_cuda._cutlass_mla_call import PAGE_SIZE, CutlassMLACall, workspace_bytes
from attn_shared.mla_edges import to_contract_lse


@pytest.mark.parametrize("num_heads", [8, 16, 128])
@pytest.mark.parametrize("block_size", [128, 256])
def test_heads_are_padded_and_cut_off(num_heads: int, block_size: int) -> None:
    given = decodes(
        latent_layer(block_size=block_size, num_heads=num_heads), [1, 1, 1], [1, 300, 0]
    )
    with stub_vendor(VLLM_CUTLASS_MLA) as recorder:
        size = workspace_bytes(300, 3, 148)
        call, space = CutlassMLACall(given.layer, 512), torch.empty(size, dtype=torch.uint8)
        arguments = (given.query, given.kv_cache, given.step(PAGE_SIZE), space)
        output, lse = call(*arguments, with_lse=True)
        plain, nothing = call(*arguments)
    assert output.shape == (3, num_heads, 512)
    assert lse is not None
    assert given.problems(output, to_contract_lse(lse)) == ()
    assert torch.equal(plain, output)
    assert nothing is None
    assert recorder.calls[1].arguments["q_nope"].shape == (3, 128, 512)


def test_the_kernel_refuses_heads_that_were_not_padded() -> None:
    with stub_vendor(VLLM_CUTLASS_MLA):
        from attn_cuda._vendor import vllm_cutlass_mla

        query = torch.zeros(1, 8, 576, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"q_nope must be \(1, 128, 512\), not \(1, 8, 512"):
            vllm_cutlass_mla.interface().sm100_cutlass_mla_decode(
                out=torch.empty(1, 128, 512, dtype=torch.bfloat16),
                lse=torch.empty(0),
                q_nope=query[..., :512].contiguous(),
                q_pe=query[..., 512:].contiguous(),
                kv_c_and_k_pe_cache=torch.zeros(1, 128, 576, dtype=torch.bfloat16),
                seq_lens=torch.ones(1, dtype=torch.int32),
                page_table=torch.zeros(1, 1, dtype=torch.int32),
                workspace=torch.empty(1, dtype=torch.uint8),
                scale=0.1,
                num_kv_splits=-1,
            )
