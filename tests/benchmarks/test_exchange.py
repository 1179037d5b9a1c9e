"""The benchmark of exchange: its nodes go away, its count is what a reader would count, its figures have names."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import exchange, exchange_plan, exchange_ranks, network
from benchmarks.exchange_load import Load
from benchmarks.exchange_plot import PARTS, plot, print_parts, print_plan, print_steps, print_sweep
from turbogr.tables.placement import Placement

SMALL = Load(items=1000, tokens=8, negatives=4, dim=4)
WITHOUT = network.unavailable()
networked = pytest.mark.skipif(WITHOUT is not None, reason=WITHOUT or "")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_batches_are_a_function_of_rank_and_step_and_share_hot_rows() -> None:
    """Catches: variants that are measured on different ids, popularity that is not there."""
    load = Load(items=5000, tokens=512, negatives=2)
    assert load.ids(1, 3).equal(load.ids(1, 3)) and not load.ids(1, 3).equal(load.ids(2, 3))
    assert len(load.ids(0, 0)) == load.ids_per_rank
    counts = np.bincount(load.ids(0, 0)[: 2 * load.tokens].numpy(), minlength=load.items)
    assert np.sort(counts)[-50:].sum() > 0.3 * counts.sum()
    assert set(load.ids(0, 0)[:512].tolist()) & set(load.ids(1, 0)[:512].tolist())


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 1), (3, 2)])
def test_the_count_is_what_goes_from_node_to_node(nodes: int, per_node: int) -> None:
    """Catches: rows of a rank's own node that are counted, a copy's list that is counted once for several copies."""
    planned = exchange_plan.plan(SMALL, nodes, per_node)
    flat, whole = Placement(SMALL.items), nodes * per_node
    wanted = [set(flat.positions(SMALL.ids(rank, 0)).tolist()) for rank in range(whole)]
    run, shard = -(-SMALL.items // whole), -(-SMALL.items // per_node)
    crossing = sum(place // run // per_node != rank // per_node for rank, own in enumerate(wanted) for place in own)
    assert planned.flat == pytest.approx(crossing * (8 + 2 * 4 * SMALL.dim) / nodes)
    of_node = [set().union(*wanted[node * per_node : (node + 1) * per_node]) for node in range(nodes)]
    longest = [max(sum(place // shard == at for place in own) for own in of_node) for at in range(per_node)]
    row = 8 + 4 * SMALL.dim
    assert planned.gathered == pytest.approx((nodes - 1) * sum(longest) * row)
    assert planned.hierarchical in (planned.gathered, planned.by_owners)
    lists, sums = sum(map(len, of_node)), len(set().union(*of_node))
    assert planned.by_owners == pytest.approx((lists / nodes + sums) * (nodes - 1) / nodes * row)


@networked
def test_nodes_go_away_also_after_an_error() -> None:
    """Catches: namespaces that a failed run leaves on the machine."""
    with pytest.raises(ZeroDivisionError), network.network(2) as net:
        assert all(name in namespaces() for name in net.names)
        raise ZeroDivisionError
    assert not any(name in namespaces() for name in net.names)


@networked
def test_what_a_killed_run_left_is_swept() -> None:
    """Catches: leftovers that pile up, or the nodes of a run that is alive being taken away."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"{network.PREFIX}-{gone.pid}-n0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with network.network(1) as alive:
        assert name not in namespaces()
        assert network.left_behind() == [] and alive.names[0] in namespaces()


@networked
@pytest.mark.slow
def test_ranks_on_two_nodes_measure_what_is_counted(tmp_path: Path) -> None:
    """Catches: ranks of one node that talk over the slow link, bytes of another interface, a variant that is wrong."""
    load = Load(items=4000, tokens=64, negatives=16, dim=64)
    job = exchange_ranks.Job({"flat": 1, "hierarchical": 2}, [load], rounds=3, seconds=20)
    answers = exchange_ranks.launch(2, 2, job, tmp_path / "job", limit_s=240, rate="1gbit")
    found = exchange.topology(answers)
    planned = [exchange_plan.plan(load, 2, 2, step) for step in range(3, 6)]  # after two rounds to warm up
    for name in ("flat", "hierarchical"):
        expected = float(np.median([getattr(one, name) for one in planned]))
        sent = exchange.total(found["parts"][name], "sent")
        assert 0.98 * expected < sent < 1.1 * expected + 20_000
    assert found["parts"]["hierarchical"]["lookup"]["sent"] < 10_000
    assert found["check"][0]["flat"]["row_error"] == 0


def made_up() -> dict[str, Any]:
    def parts(*ms: float) -> dict[str, dict[str, float]]:
        return {part: {"ms": one, "sent": one, "received": one} for part, one in zip(PARTS, ms, strict=True)}

    variants = {"flat": parts(100, 80, 0), "hierarchical": parts(20, 10, 60)}
    stages = {"stages": {"lookup": 1.0}, "sent": 1.0, "received": 1.0}
    steps = {"flat": {"ms": 300.0, **stages}, "hierarchical": {"ms": 200.0, **stages}}
    sweep = [{"tokens": 8, "parts": {name: parts(1, 1, float(name != "flat")) for name in variants}}]
    sweep.append({"tokens": 64, "parts": variants})
    planned = exchange_plan.sweep(SMALL, [4, 8], 2, 2)
    return {
        "rate": "1gbit",
        "2x2": {"parts": variants, "steps": steps, "sweep": sweep},
        "4x1": {"parts": variants},
        "planned_16x8": planned,
    }


def test_figures_tables_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a ratio that is turned round."""
    details = made_up()
    found = exchange.figures_of(details["2x2"])
    assert found == pytest.approx(
        {"lookup_latency_reduction": 0.8, "total_ratio": 0.5, "slow_link_bytes_reduction": 0.5}
    )
    assert exchange.step_x(details["2x2"]["steps"]) == 1.5
    assert exchange.flat_wins_below(details["2x2"]["sweep"]) == 8
    print_parts(details["2x2"]["parts"], "made up")
    print_steps(details["2x2"]["steps"])
    print_sweep(details["2x2"]["sweep"])
    print_plan(details["planned_16x8"], "made up")
    assert "hierarchical" in capsys.readouterr().out
    plot(details, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_without_namespaces_every_measured_figure_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: an error where there is no root, figures that are made up."""
    monkeypatch.setattr(exchange, "unavailable", lambda: "no root here")
    monkeypatch.setattr(exchange, "PLANNED", SMALL)
    monkeypatch.setattr(exchange, "Load", lambda: SMALL)
    arguments = argparse.Namespace(quick=True, device="cpu", data=None, out=tmp_path)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self: arguments)
    exchange.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in (*exchange.MEASURED, "step_x", *exchange.FULL_ONLY):
        assert figures[name] is None and figures["reasons"][name] == "no root here"
    assert figures["planned_ratio_16x8"] > 0
