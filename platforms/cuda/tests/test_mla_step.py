from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_cuda._mla_schedules import Schedules
from attn_cuda._mla_step import in_pages, kernel_table, with_safe_rows
from attn_cuda._mla_steps import StepMaker
from attn_shared.errors import UnsupportedOptionError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_edges import to_contract_lse
from attn_shared.signed_scale import Scale
from attn_shared.spec import BuildConfig


def test_blocks_become_pages_without_a_copy() -> None:
    cache = torch.arange(2 * 6 * 3).reshape(2, 6, 3)
    pages = in_pages(cache, 2)
    assert pages.shape == (6, 2, 3)
    assert pages.data_ptr() == cache.data_ptr()
    assert in_pages(cache, 6) is cache
    table = kernel_table(torch.tensor([[1, 0]], dtype=torch.int32), 3)
    assert torch.equal(pages[table[0].long()].flatten(0, 1), cache[[1, 0]].flatten(0, 1))


class NothingReadByTheHost(TorchDispatchMode):
    """Refuses what makes the host wait for a number of the device's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lens", [[0, 3, 0], [2, 1, 5], [0, 0, 0]])
def test_safe_rows_are_found_without_a_wait(lens: list[int]) -> None:
    table = torch.tensor([[7, 7], [4, 5], [9, 9]], dtype=torch.int32)
    with NothingReadByTheHost():
        safe = with_safe_rows(table, torch.tensor(lens, dtype=torch.int32))
    page = next((int(row[0]) for row, length in zip(table, lens, strict=True) if length), 0)
    for row, given, length in zip(safe, table, lens, strict=True):
        assert row.tolist() == (given.tolist() if length else [page, page])


def test_padded_blocks_are_not_cut() -> None:
    cache = torch.zeros(2, 8, 3)[:, :6]
    with pytest.raises(UnsupportedOptionError, match=r"stride of 24 elements.*allowed.*18"):
        in_pages(cache, 2)


def test_a_table_grows_to_a_multiple_of_columns() -> None:
    table = torch.tensor([[4, 2, 9]], dtype=torch.int32)
    assert kernel_table(table, 1) is table
    assert kernel_table(table, 1, width_multiple=4).tolist() == [[4, 2, 9, 0]]
    assert kernel_table(table, 2, width_multiple=4).tolist() == [[8, 9, 4, 5, 18, 19, 0, 0]]


def test_rows_without_keys_name_a_page_that_has_some() -> None:
    table = torch.tensor([[-7, -7], [5, -7], [-7, 9]], dtype=torch.int32)
    safe = with_safe_rows(table, torch.tensor([0, 3, 0], dtype=torch.int32))
    assert safe.tolist() == [[5, 5], [5, -7], [5, 5]]
    assert not with_safe_rows(table, torch.zeros(3, dtype=torch.int32)).any()


def test_an_lse_in_bits_and_with_plus_infinity() -> None:
    found = to_contract_lse(torch.tensor([3.0, math.inf, -math.inf]), is_log2=True)
    assert found.tolist() == [pytest.approx(3 * math.log(2)), -math.inf, -math.inf]


def test_the_sign_of_a_scale_goes_to_the_query() -> None:
    query = torch.ones(1, 1, 8)
    assert (Scale(-2.0).value, Scale(0.0).value, Scale(3.0).value) == (2.0, 1.0, 3.0)
    assert Scale(-2.0).query(query).sum() == -8
    assert Scale(0.0).query(query).sum() == 0
    assert Scale(1.0).query(query) is query


def test_an_eager_schedule_is_shared_until_it_is_renewed() -> None:
    made: list[object] = []
    schedules = Schedules(lambda: made.append(object()) or made[-1])
    cpu = torch.device("cpu")
    first = schedules.of("a", cpu)
    assert schedules.of("b", cpu) is first
    schedules.renew()
    assert schedules.of("a", cpu) is not first


def test_a_second_call_of_a_layer_begins_another_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    schedules = Schedules(object)
    cuda, layers = torch.device("cuda"), (object(), object())
    first = schedules.of(layers[0], cuda)
    assert schedules.of(layers[1], cuda) is first
    again = schedules.of(layers[0], cuda)
    assert again is not first
    assert schedules.of(layers[1], cuda) is again


class CountedOperations(TorchDispatchMode):
    """Counts what a GPU would be launched for: views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def captured_batch(lens: list[int], *, is_exact: bool = True) -> CommonAttentionMetadata:
    table = torch.arange(3 * 2, dtype=torch.int32).view(3, 2) + 1
    batch = CommonAttentionMetadata.from_lengths(
        query_lens=[1, 1, 1], seq_lens=lens, block_table=table, block_size=64
    )
    return batch if is_exact else batch.with_fields(seq_lens_cpu_is_exact=False)


@pytest.mark.parametrize("block_size", [64, 128])
def test_a_captured_table_stays_where_it_is_whoever_has_keys(block_size: int) -> None:
    maker = StepMaker(
        BuildConfig(capture_sizes=(3,)),
        torch.device("cpu"),
        block_size=block_size,
        page_size=64,
        loads_keyless=True,
    )
    tables = [
        maker.make(captured_batch(lens, is_exact=is_exact)).block_table
        for lens, is_exact in (([9, 0, 70], True), ([9, 9, 70], True), ([9, 0, 70], False))
    ]
    assert len({table.data_ptr() for table in tables}) == 1
    assert (tables[0][1] // (block_size // 64) == 5).all()  # where the longest request begins
    whole = maker.make(captured_batch([9, 9, 70])).block_table
    assert torch.equal(
        whole, kernel_table(captured_batch([9, 9, 70]).block_table, block_size // 64)
    )


def test_a_captured_table_costs_few_operations() -> None:
    maker = StepMaker(
        BuildConfig(capture_sizes=(3,)),
        torch.device("cpu"),
        block_size=64,
        page_size=64,
        loads_keyless=True,
    )
    for lens, is_exact, allowed in (([9, 9, 70], True, 1), ([9, 0, 70], True, 6)):
        batch = captured_batch(lens, is_exact=is_exact)
        maker.make(batch)
        with CountedOperations() as counted:
            maker.make(batch)
        on_host = ("min", "_local_scalar_dense")  # of the lengths that the host has
        launched = [name for name in counted.names if name not in on_host]
        assert len(launched) <= allowed, launched
