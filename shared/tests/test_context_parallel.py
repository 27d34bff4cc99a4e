from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.context_parallel import (
    check_dcp,
    combine_shards,
    local_index,
    local_seq_lens,
    local_slot_mapping,
    owner_of,
)
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnknownNameError
from attn_shared.kv_write import slot_mapping_for

Oracle = Callable[[str], list[dict[str, Any]]]

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 6))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class TestOwnership:
    def test_by_hand(self) -> None:
        positions = torch.arange(9)
        assert owner_of(positions, 2).tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
        assert local_index(positions, 2).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]
        assert owner_of(positions, 2, 2).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0]
        assert local_index(positions, 2, 2).tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4]
        assert local_seq_lens(i32(9), 2, None, 2).tolist() == [[5, 4]]

    def test_recorded_lengths(self, oracle: Oracle) -> None:
        for row in oracle("dcp_local"):
            lens, size, interleave = i32(*row["seq_lens"]), row["dcp_size"], row["interleave"]
            every = local_seq_lens(lens, size, None, interleave)
            assert every.dtype is torch.int32
            assert every.tolist() == row["per_rank"]
            for rank in range(size):
                one = local_seq_lens(lens, size, rank, interleave)
                assert one.tolist() == [each[rank] for each in row["per_rank"]]

    @settings(derandomize=True)
    @given(length=st.integers(0, 60), sizes=SIZES)
    def test_lengths_count_the_owned_tokens_and_indices_number_them(
        self, length: int, sizes: tuple[int, int]
    ) -> None:
        world_size, interleave = sizes
        positions = torch.arange(length)
        owner = owner_of(positions, world_size, interleave)
        index = local_index(positions, world_size, interleave)
        lens = local_seq_lens(i32(length), world_size, None, interleave)
        for rank in range(world_size):
            own = index[owner == rank].tolist()
            assert own == list(range(len(own)))
            assert int(lens[0, rank]) == len(own)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0,), "world_size is 0; allowed: an integer >= 1"),
            ((2, 2), "rank is 2; allowed: 0 to 1"),
            ((2, -1), "rank is -1"),
            ((2, 0, 0), "interleave is 0"),
        ],
    )
    def test_refuses(self, arguments: tuple[int, ...], message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            local_seq_lens(i32(3), *arguments)


class TestLocalSlots:
    def test_by_hand(self) -> None:
        # Positions 3..6 in pairs over two ranks: rank 0 owns 0 1 4 5, rank 1 owns 2 3 6 7.
        # As own tokens they are 1 (rank 1), 2 and 3 (rank 0), 2 (rank 1); blocks hold two.
        table = i32(5, 8).view(1, 2)
        arguments = (table, i32(0, 4), i32(7), 2)
        zero = local_slot_mapping(*arguments, world_size=2, rank=0, interleave=2)
        one = local_slot_mapping(*arguments, world_size=2, rank=1, interleave=2)
        assert zero.tolist() == [-1, 16, 17, -1]
        assert one.tolist() == [11, -1, -1, 16]
        assert zero.dtype is torch.int64

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"block_table": [[5]]}, "block_table is a list"),
            ({"block_table": i32(5)}, r"block_table is of torch.int32 \(1,\); allowed: a tensor"),
            ({"block_table": torch.zeros(1, 1)}, "block_table is of torch.float32"),
            ({"block_table": i32().view(1, 0)}, "block_table is without a column"),
            ({"query_start_loc": i32(0, 1, 2)}, "of 1, 3 and 1 entries; allowed: B, B . 1 and B"),
            ({"seq_lens": torch.ones(1)}, "seq_lens is of torch.float32"),
            ({"seq_lens": torch.ones(1, dtype=torch.int32, device="meta")}, "on cpu, meta"),
            ({"block_size": 0}, "block_size is 0; allowed: an integer >= 1"),
            ({"block_size": 4.0}, r"block_size is 4\.0"),
            ({"rank": 2}, "rank is 2; allowed: 0 to 1"),
            ({"rank": 0.5}, r"rank is 0\.5; allowed: 0 to 1"),
            ({"world_size": 2.0}, r"world_size is 2\.0; allowed: an integer >= 1"),
            ({"interleave": True}, "interleave is True"),
        ],
    )
    def test_odd_arguments_are_refused(self, changed: dict[str, Any], words: str) -> None:
        arguments = {
            "block_table": i32(5).view(1, 1),
            "query_start_loc": i32(0, 1),
            "seq_lens": i32(3),
            "block_size": 4,
            "world_size": 2,
            "rank": 0,
        }
        with pytest.raises(InvalidInputError, match=words):
            local_slot_mapping(**{**arguments, **changed})

    def test_a_padded_row_writes_nothing(self) -> None:
        slots = local_slot_mapping(
            i32(5, 6).view(2, 1), i32(0, 1, 2), i32(0, 1), 4, world_size=1, rank=0
        )
        assert slots.tolist() == [-1, 24]

    @settings(derandomize=True)
    @given(
        requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=4),
        sizes=SIZES,
        pairs_per_block=st.integers(1, 3),
    )
    def test_each_token_has_one_owner_and_a_slot_of_its_own(
        self, requests: list[tuple[int, int]], sizes: tuple[int, int], pairs_per_block: int
    ) -> None:
        world_size, interleave = sizes
        block_size = pairs_per_block * interleave
        starts = i32(0, *torch.tensor([new for new, _ in requests]).cumsum(0).tolist())
        lens = i32(*(new + old for new, old in requests))
        table = torch.arange(len(requests) * 25, dtype=torch.int32).view(len(requests), 25)
        shares = torch.stack(
            [
                local_slot_mapping(
                    table,
                    starts,
                    lens,
                    block_size,
                    world_size=world_size,
                    rank=rank,
                    interleave=interleave,
                )
                for rank in range(world_size)
            ]
        )
        assert ((shares >= 0).sum(0) == 1).all()
        for share in shares:
            written = share[share >= 0].tolist()
            assert len(set(written)) == len(written)
        if world_size == 1:
            assert torch.equal(shares[0], slot_mapping_for(table, starts, lens, block_size))


class TestCheckDcp:
    @pytest.mark.parametrize(
        "options",
        [
            {"dcp_size": 1, "tp_size": 1},
            {"dcp_size": 2, "tp_size": 8, "interleave": 16, "block_size": 16},
            {"dcp_size": 4, "tp_size": 4, "interleave": 4, "block_size": 16, "combine": "a2a"},
        ],
    )
    def test_accepts(self, options: dict[str, Any]) -> None:
        check_dcp(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dcp_size": 0}, "dcp_size=0 is not allowed; allowed: an integer >= 1"),
            ({"dcp_size": 3}, "dcp_size=3 is not allowed; allowed: a divisor of tp_size=8"),
            ({"dcp_size": 16}, "dcp_size=16"),
            ({"dcp_size": 2, "interleave": 0}, "interleave=0"),
            ({"dcp_size": 2, "interleave": 32}, "interleave=32 .* a divisor of block_size=16"),
            ({"dcp_size": 2, "interleave": 3}, "interleave=3"),
            ({"dcp_size": 1, "combine": "a2a"}, "combine='a2a' is not allowed; allowed: ag_rs"),
        ],
    )
    def test_refuses(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            check_dcp(**{"tp_size": 8, "block_size": 16} | options)

    def test_unknown_combine(self) -> None:
        with pytest.raises(UnknownNameError, match="unknown combine 'a2q'; allowed: a2a, ag_rs"):
            check_dcp(dcp_size=2, tp_size=2, combine="a2q")


class TestCombineShards:
    def test_recorded_combines(self, oracle: Oracle) -> None:
        bases = set()
        for row in oracle("lse_combine"):
            # Recorded as (N, T, H, D) and (N, T, H), with -inf as a string.
            outputs = [torch.tensor(output) for output in row["outputs"]]
            lses = [tensor_of(lse).T for lse in row["lses"]]
            base_on_e = row["base"] == "e"
            bases.add(base_on_e)
            output, lse = combine_shards(outputs, lses, lse_base_on_e=base_on_e)
            torch.testing.assert_close(output, torch.tensor(row["combined"]), rtol=1e-6, atol=1e-6)
            expected = tensor_of(row["global_lse"]).T
            if not base_on_e:
                expected = expected * torch.log(torch.tensor(2.0))
            torch.testing.assert_close(lse, expected, rtol=1e-6, atol=1e-6)
        assert bases

    def test_every_sign_of_no_keys(self) -> None:
        nothing = torch.full((1, 1, 2), torch.nan)
        for sign in (-torch.inf, torch.inf, torch.nan):
            empty = torch.tensor([[sign]])
            output, lse = combine_shards(
                [nothing, torch.tensor([[[3.0, -4.0]]])], [empty, torch.tensor([[0.5]])]
            )
            assert output.tolist() == [[[3.0, -4.0]]]
            assert lse.tolist() == [[0.5]]
            output, lse = combine_shards([nothing, nothing], [empty, empty])
            assert output.tolist() == [[[0.0, 0.0]]]
            assert lse.tolist() == [[-torch.inf]]

    def test_mixed_bases_are_refused(self) -> None:
        shard, lse = torch.ones(1, 1, 2), torch.zeros(1, 1)
        with pytest.raises(
            InvalidInputError, match=r"lse_base_on_e is \[True, False\]; allowed: the"
        ):
            combine_shards([shard] * 2, [lse] * 2, lse_base_on_e=[True, False])
        _, base2 = combine_shards([shard] * 2, [lse] * 2, lse_base_on_e=[False, False])
        assert base2.item() == pytest.approx(0.6931472)

    def test_a_sink_enters_once(self) -> None:
        # Two shards of e^0 each, and a sink of e^0: the values' share is two thirds.
        value, lse, sinks = torch.ones(1, 1, 2), torch.zeros(1, 1), torch.zeros(1)
        output, total = combine_shards([value, value], [lse, lse], sinks=sinks)
        torch.testing.assert_close(output, torch.full((1, 1, 2), 2 / 3))
        torch.testing.assert_close(total, torch.full((1, 1), 3.0).log())
        empty = torch.full((1, 1), -torch.inf)
        output, total = combine_shards([value, value], [empty, empty], sinks=sinks)
        assert output.tolist() == [[[0.0, 0.0]]]
        assert total.tolist() == [[0.0]]
        with pytest.raises(
            InvalidInputError, match=r"sinks is torch.float32 \(2,\); allowed: .*\(1"
        ):
            combine_shards([value], [lse], sinks=torch.zeros(2))


def tensor_of(rows: Any) -> torch.Tensor:
    return torch.tensor([[float(value) for value in row] for row in rows])


@pytest.fixture(scope="module")
def ranks() -> ModuleType:
    path = Path(__file__).with_name("context_parallel_ranks.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(ranks: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two gloo processes got from each case."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(ranks.__file__), str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks.WORLD_SIZE)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, words in zip(processes, said, strict=True):
        assert process.returncode == 0, words
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks.WORLD_SIZE)]


@pytest.mark.parametrize("combine", ["ag_rs", "a2a"])
class TestCollectives:
    @pytest.mark.parametrize("interleave", [1, 4, 16])
    @pytest.mark.parametrize(
        ("kind", "dtype"),
        [
            ("torch.float32", torch.float32),
            ("log2", torch.float32),
            ("torch.bfloat16", torch.bfloat16),
            ("torch.float16", torch.float16),
        ],
    )
    def test_equals_unsharded_attention(
        self,
        ranks: ModuleType,
        results: list[dict[str, Any]],
        combine: str,
        interleave: int,
        kind: str,
        dtype: torch.dtype,
    ) -> None:
        shards, (expected, expected_lse) = ranks.problem(interleave)
        largest = max(float(output.abs().max()) for output, _ in shards)
        outputs, lses = self.joined(results, f"{combine} {interleave} {kind}")
        # Half a unit for rounding the shards, whose weights sum to one, and half for the result;
        # 1e-5 for LSEs of about 10 in float32, whose errors the weights carry.
        assert (outputs.double() - expected).abs().max() <= torch.finfo(dtype).eps * largest + 1e-5
        assert ((lses.double() - expected_lse).abs() <= 1e-6 + 4e-7 * expected_lse.abs()).all()
        assert outputs.dtype is dtype
        assert lses.dtype is torch.float32

    def test_empty_shards_add_exactly_nothing(
        self, ranks: ModuleType, results: list[dict[str, Any]], combine: str
    ) -> None:
        (out_a, lse_a), (out_b, lse_b) = ranks.problem(1)[0]
        outputs, lses = self.joined(results, f"{combine} hollow")
        assert torch.equal(outputs[0], out_b[0].float())
        assert torch.equal(lses[:, 0], lse_b[:, 0].float())
        assert torch.equal(outputs[1], out_a[1].float())
        assert torch.equal(lses[:, 1], lse_a[:, 1].float())
        assert outputs[2].eq(0).all()
        assert lses[:, 2].eq(-torch.inf).all()
        _, (expected, _) = ranks.problem(1)
        torch.testing.assert_close(outputs[3:].double(), expected[3:], rtol=1e-6, atol=1e-6)

    def test_sinks_enter_once_over_all_shards(
        self, ranks: ModuleType, results: list[dict[str, Any]], combine: str
    ) -> None:
        shards = ranks.hollow(ranks.problem(1)[0])
        plain, lse = combine_shards(*zip(*shards, strict=True))
        sinks = ranks.SINKS.double().unsqueeze(1)
        expected_lse = torch.logaddexp(lse, sinks)
        share = torch.where(lse == -torch.inf, 0.0, (lse - expected_lse).exp())
        outputs, lses = self.joined(results, f"{combine} sinks")
        expected = plain * share.T.unsqueeze(-1)
        torch.testing.assert_close(outputs.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lses.double(), expected_lse, rtol=1e-6, atol=1e-6)
        assert outputs[2].eq(0).all()  # no shard has a key

    def test_strides_are_honoured(
        self, ranks: ModuleType, results: list[dict[str, Any]], combine: str
    ) -> None:
        dense = self.joined(results, f"{combine} 1 torch.float32")
        strided = self.joined(results, f"{combine} strided")
        assert torch.equal(strided[0], dense[0])
        assert torch.equal(strided[1], dense[1])

    def test_no_tokens(
        self, ranks: ModuleType, results: list[dict[str, Any]], combine: str
    ) -> None:
        outputs, lses = self.joined(results, f"{combine} no tokens")
        assert outputs.shape == (0, ranks.HEADS, ranks.WIDTH)
        assert lses.shape == (ranks.HEADS, 0)

    def test_heads_that_do_not_divide_are_refused_before_anyone_communicates(
        self, results: list[dict[str, Any]], combine: str
    ) -> None:
        words = results[1][f"{combine} refusal"]
        assert "heads of output is 3; allowed: a multiple of the group's 2 ranks" in words

    def joined(self, results: list[dict[str, Any]], case: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay the ranks' heads side by side: (T, H, D) and (H, T)."""
        shares = [result[case] for result in results]
        assert shares[0][0].is_contiguous()
        return (
            torch.cat([output for output, _ in shares], dim=1),
            torch.cat([lse for _, lse in shares], dim=0),
        )
