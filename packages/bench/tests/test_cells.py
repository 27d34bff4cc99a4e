from __future__ import annotations

import pytest
from attn_bench_testing import CPU, FakeContender, workload

from attn_bench.cells import make_cells
from attn_bench.limits import LimitRunner
from attn_bench.results import Settings
from attn_bench.runners import Runner
from attn_bench.timing import PlanTime

BATCH = workload((1, 1), (5, 9))  # 1792 + 512 bytes, 1792 operations
SETTINGS = Settings(rounds=3)


def runner(name: str, *times: float, plans: tuple[float, ...] = ()) -> Runner:
    prepared = FakeContender(name).prepare(BATCH, CPU, 1, is_captured=False)
    found = Runner(prepared, None, [f"about {name}"])
    found.times = list(times)
    found.plans = [PlanTime(host_us=plan - 1, done_us=plan) for plan in plans]
    return found


def limits(*times: float) -> list[LimitRunner]:
    found = []
    for name, amount in (("read", 9216), ("matmul", 3584)):
        limit = LimitRunner(name, lambda: None, amount, 1.0)
        limit.times = list(times)
        found.append(limit)
    return found


def test_figures_by_hand() -> None:
    (cell,) = make_cells(
        BATCH,
        SETTINGS,
        runner("OURS", 2.0, 4.0, 3.0, plans=(5.0, 9.0, 7.0)),
        [runner("PEER", 4.0, 4.0, 3.0)],
        limits(6.0, 6.0, 12.0),
        ["about the rounds"],
    )
    assert (cell.backend, cell.peer) == ("OURS", "PEER")
    assert (cell.time_us, cell.peer_time_us) == (3.0, 4.0)
    assert cell.gb_per_s == pytest.approx(2304 / 3e-6 / 1e9)
    assert cell.tflop_per_s == pytest.approx(1792 / 3e-6 / 1e12)
    assert cell.ratio == 1.0  # of 0.5, 1.0 and 1.0, not of the medians, which would be 0.75
    # a quarter of the bytes in 2/6, 4/6 and 3/12 of the time: 3/4, 3/8 and 1 of the rate
    assert cell.share_of_read == pytest.approx(0.75)
    assert cell.share_of_matmul == pytest.approx(1.5)
    assert (cell.plan_us, cell.plan_host_us, cell.plan_waits) == (7.0, 6.0, None)
    assert (cell.host_us, cell.host_interval_us, cell.rounds) == (None, None, 3)
    assert (cell.peer_plan_us, cell.peer_plan_host_us, cell.peer_host_us) == (None, None, None)
    assert (cell.cache_state, cell.mode, cell.peer_mode) == ("cold", "eager", "eager")
    assert cell.notes == ("about OURS", "about PEER", "about the rounds")
    assert (cell.label, cell.batch, cell.context, cell.query_len) == ("2x9", 2, 9, 1)


def test_intervals_hold_their_medians() -> None:
    (cell,) = make_cells(
        BATCH, SETTINGS, runner("OURS", 2.0, 4.0, 3.0), [runner("PEER", 4.0, 4.0, 3.0)],
        limits(1.0, 1.0, 1.0), [],
    )  # fmt: skip
    assert cell.interval_us == (2.0, 4.0)
    assert cell.ratio_interval == (0.5, 1.0)
    assert cell.peer_interval_us == (3.0, 4.0)


def test_each_peer_gets_a_cell_with_the_same_time() -> None:
    peers = [runner("A", 1.0), runner("B", 4.0)]
    cells = make_cells(BATCH, SETTINGS, runner("OURS", 2.0), peers, limits(1.0), [])
    assert [(cell.peer, cell.ratio) for cell in cells] == [("A", 2.0), ("B", 0.5)]
    assert {cell.time_us for cell in cells} == {2.0}


def test_without_peers_there_is_one_cell() -> None:
    (cell,) = make_cells(BATCH, SETTINGS, runner("OURS", 2.0), [], limits(1.0), [])
    assert (cell.peer, cell.ratio, cell.peer_time_us, cell.peer_mode) == (None, None, None, None)
    assert cell.plan_us is None


def test_the_hosts_work_of_both_sides() -> None:
    ours, peer = runner("OURS", 2.0, plans=(9.0,)), runner("PEER", 4.0, plans=(5.0,))
    ours.hosts, peer.hosts = [20.0, 24.0, 22.0], [80.0]
    ours.plan_waits, peer.plan_waits = False, True
    (cell,) = make_cells(BATCH, SETTINGS, ours, [peer], limits(1.0), [])
    assert (cell.host_us, cell.host_interval_us) == (22.0, (20.0, 24.0))
    assert (cell.peer_host_us, cell.peer_host_interval_us) == (80.0, (80.0, 80.0))
    assert (cell.peer_plan_us, cell.peer_plan_host_us) == (5.0, 4.0)
    assert (cell.plan_waits, cell.peer_plan_waits) == (False, True)
