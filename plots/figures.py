"""Figures from the logs of runs.

    python plots/figures.py [RUN ...]        # curves.png of each run folder; of all in runs/ by default
"""

import contextlib
import json
import os
import pathlib
import sys

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#888888"  # Okabe & Ito: told apart by the colour-blind too


def read(path: pathlib.Path) -> dict[str, list]:
    """Columns of a JSON-lines file; a key that a row lacks is NaN there."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # the last line of a run that was killed
            rows.append(json.loads(line))
    keys = {key for row in rows for key in row}
    return {key: [row.get(key, float("nan")) for row in rows] for key in keys}


def draw_curves(run: pathlib.Path) -> pathlib.Path:
    """Draw `run`/curves.png: what happened in one run, on one page. Needs only its metrics.jsonl and eval.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    run = pathlib.Path(run)
    if not (run / "config.json").exists() or not (run / "metrics.jsonl").exists():
        sys.exit(f"{run}: no run there")
    m, e = read(run / "metrics.jsonl"), read(run / "eval.jsonl")
    config = json.loads((run / "config.json").read_text())
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), constrained_layout=True)
    (reward, gap, d3), (norm, ess, seconds) = axes
    x = m["step"]

    reward.plot(x, m["reward"], color=BLUE, alpha=0.35, linewidth=0.8)
    reward.plot(x, smooth(m["reward"]), color=BLUE, label="training reward (mean of 20)")
    if e:
        reward.plot(e["version"], e["pass@1"], "o-", color=ORANGE, label="held-out pass@1")
    reward.set(title="Reward", ylim=(0, 1))
    reward.legend()

    floor = 1e-12  # exact zeros are drawn on the floor of the log scale
    unmeasured = [float("nan")] * len(x)  # --audit 0
    gap.semilogy(x, [max(v, floor) for v in m.get("lag_kl", unmeasured)], color=BLUE, label="policy lag, log pi_k - log pi_v")
    gap.semilogy(x, [max(v, floor) for v in m.get("mismatch_kl", unmeasured)], color=ORANGE, label="kernel mismatch, log pi_v - log mu_v")
    gap.set(title="The two gaps (mean of r - 1 - log r; 0 is drawn at 1e-12)", ylim=(floor / 2, None))
    gap.legend()

    d3.semilogy(x, [max(v, floor) for v in m["d3"]], color=BLUE)
    middle = sorted(m["d3"])[len(x) // 2]
    d3.set(title=f"D3, peak / median {max(m['d3']) / middle:.2f}" if middle else "D3")

    norm.plot(x, m["grad_norm"], color=BLUE)
    norm.set(title="Gradient norm, before clipping")
    ess.plot(x, m["ess"], color=GREEN)
    ess.set(title="Effective sample size / samples", ylim=(0, 1.02))
    for key, color in (("t_rollout", ORANGE), ("t_learn", BLUE), ("t_wait", GREY), ("t_sync", GREEN)):
        seconds.plot(x, smooth(m[key]), color=color, label=key)
    seconds.set(title="Seconds per update (mean of 20)", ylim=(0, None))
    seconds.legend()
    for axis in axes.flat:
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
    figure.suptitle(f"{config['model']}, {config['env']}, {config['kernels']} kernels, lag {config['lag']}, {config['dtype']}")
    path, scratch = run / "curves.png", run / f".curves-{os.getpid()}.png"
    figure.savefig(scratch, dpi=110, metadata={"Software": None})
    scratch.rename(path)  # the drawing of an evaluation and that of the run's end may be under way at once
    plt.close(figure)
    return path


def smooth(values: list[float], window: int = 20) -> list[float]:
    """Mean over the last `window` values."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


if __name__ == "__main__":
    for folder in sys.argv[1:] or sorted(path.parent for path in pathlib.Path("runs").glob("*/metrics.jsonl")):
        print(draw_curves(pathlib.Path(folder)))
