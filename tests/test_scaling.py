"""plots/scaling.py: the simulation in cases that can be worked out by hand, and SCALING.md against what it prints."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "plots"))

import scaling  # noqa: E402


def constant(rollout, learn, sync, updates=60):
    """Two engines, of which the second takes half as long."""
    share = np.full((updates, 2), [rollout, rollout / 2])
    return share, np.full(updates, learn), np.full(updates, sync)


def test_synchronous_is_the_sum_of_the_phases():
    found = scaling.simulate(*constant(3.0, 2.0, 0.5), lag=0)
    assert found["updates_per_s"] == pytest.approx(1 / 5.5)
    assert found["learner_idle"] == pytest.approx(3.5 / 5.5)
    assert found["engines_idle"] == pytest.approx(1 - (2.25 + 0.5) / 5.5)
    assert found["lag"] == 0


@pytest.mark.parametrize("rollout, learn, period", [(3.0, 2.0, 3.5), (1.0, 2.0, 2.0)])
@pytest.mark.parametrize("lag", [2, 8])
def test_asynchronous_is_the_longer_phase(rollout, learn, period, lag):
    found = scaling.simulate(*constant(rollout, learn, 0.5), lag=lag)
    assert found["updates_per_s"] == pytest.approx(1 / period)
    assert found["lag"] == lag


def test_bound_samples_by_the_newest_version():
    slow_rollout, slow_learner = (scaling.simulate(*constant(*t, 0.0), lag=8, schedule="bound") for t in ((3.0, 2.0), (1.0, 2.0)))
    assert slow_rollout["lag"] == 1  # update b - 1 is under way when batch b starts
    assert slow_learner["lag"] == 8  # as old as allowed


def test_engines_that_do_not_wait_share_their_spread():
    share = np.array([[2.0, 1.0], [1.0, 2.0]] * 30)
    waiting, free = (scaling.simulate(share, np.full(60, 0.1), np.zeros(60), 8, barrier=barrier, skip=29) for barrier in (True, False))
    assert waiting["updates_per_s"] == pytest.approx(1 / 2.0)
    assert free["updates_per_s"] == pytest.approx(1 / 1.5)


def arguments():
    return type("args", (), {name.replace("-", "_"): value for name, (value, _) in scaling.FLAGS.items()})


def test_decoding_reads_weights_and_cache_at_each_step():
    m, args = scaling.MODELS[0], arguments()
    bandwidth, prompt = args.hbm * args.hbm_share, args.prompt
    one = sum(2 * m.params + (prompt + t + 0.5) * m.kv for t in range(3)) / bandwidth + 3 * args.step_overhead
    assert scaling.decode_seconds(np.array([3.0]), m, args) == pytest.approx(one)
    two = (2 * m.params + (prompt + 3.5) * m.kv) / bandwidth + args.step_overhead  # a second that ends after 3 of 4 tokens
    both = one + two + 3 * (prompt + 1.5) * m.kv / bandwidth
    assert scaling.decode_seconds(np.array([4.0, 3.0]), m, args) == pytest.approx(both)


def test_lengths_have_the_mean_and_the_tail_asked_for():
    args = arguments()
    args.lengths, args.length_cap = None, 1e9
    lengths = scaling.draw_lengths(args, 1_000_000, np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(args.length_mean, rel=0.01)
    assert np.percentile(lengths, 99) == pytest.approx(args.length_p99, rel=0.01)


def test_lengths_of_a_file(tmp_path):
    (tmp_path / "lengths").write_text("3\n5\n")
    args = arguments()
    args.lengths = tmp_path / "lengths"
    assert set(scaling.draw_lengths(args, 100, np.random.default_rng(0))) == {3, 5}


def test_every_number_of_the_page_is_printed():
    printed = subprocess.run([sys.executable, ROOT / "plots" / "scaling.py"], capture_output=True, text=True, check=True).stdout
    page = (ROOT / "SCALING.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows and set(rows) <= set(printed.splitlines())
    prose = "\n".join(line for line in re.sub(r"```.*?```", "", page, flags=re.S).splitlines() if not line.startswith("|"))
    number = r"\d[\d,]*\.?\d*(?:e\d+)?"
    known = {n.rstrip(",.") for n in re.findall(number, printed)}
    assert not {n for n in (n.rstrip(",.") for n in re.findall(number, prose)) if n not in known and len(n) > 1}


@pytest.mark.parametrize("args", ["--network 0", "--length-p99 100", "--length-p99 70000", "--lengths nowhere", "--check nowhere", "--memory 1e9"])
def test_what_cannot_be_is_refused_by_its_flag(args, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling.py", *args.split()])
    with pytest.raises(SystemExit) as raised:
        scaling.main()
    said = raised.value.code if isinstance(raised.value.code, str) else capsys.readouterr().err
    assert args.split()[0] in said.splitlines()[-1]
