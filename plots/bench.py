"""Speed of this code against its own standard kernels, plain vLLM, synchronous training and the cores' matmul rate.

    python plots/bench.py                                    # engine, learner, load, training, Ray: the default task and model
    python plots/bench.py --only engine learner --model base-moe     # the mixture of experts
    python plots/bench.py --large PATH                       # the learner on a larger model, e.g. SmolLM2-135M, against matmul
    make bench-trl                                     # TRL's GRPOTrainer on the same model, task and batch

Everything that is compared runs in turn, A B A B, in one process on one machine; the table gives medians and the median
of the pairwise ratios. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as run_async.py, which says why
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PROMPTS, GROUP, NEW_TOKENS = 32, 8, 48  # the default run's update
BOUNDS = {"base": (0.95, 1.10), "base-moe": (0.85, 1.30)}  # aligned / standard: engine's tokens/s, learner's seconds


def in_turn(repeats: int, *functions) -> list[list[float]]:
    """Seconds of each function in each of `repeats` rounds, one warm-up round first; functions take turns."""
    times = [[] for _ in functions]
    for round_ in range(repeats + 1):
        for function, seconds in zip(functions, times):
            start = time.perf_counter()
            function()
            if round_:
                seconds.append(time.perf_counter() - start)
    return times


def ratio(a: list[float], b: list[float]) -> float:
    """Median of a_i / b_i."""
    return statistics.median(x / y for x, y in zip(a, b))


def row(what: str, value: str, bound: str = "") -> None:
    print(f"| {what} | {value} | {bound} |", flush=True)


def setting(model):
    """Base model, task and the requests of one update."""
    from transformers import AutoTokenizer

    from envs import load_env
    from rollout import Request, sample_seed
    from run_async import resolve_model

    path = str(resolve_model(model))
    tokenizer = AutoTokenizer.from_pretrained(path)
    task = load_env("arith", tokenizer)
    problems = task.train(0, PROMPTS)
    requests = [Request(task.prompt_ids(p), sample_seed(0, 0, i, j)) for i, p in enumerate(problems) for j in range(GROUP)]
    return path, tokenizer, task, problems, requests


def bench_engine(repeats: int, model: str) -> None:
    """Engine: aligned against standard, and against plain LLM.generate; weight load."""
    from vllm import SamplingParams

    from learn import Learner
    from rollout import Engine

    path, tokenizer, task, problems, requests = setting(model)
    engines = {}
    for mode in ("aligned", "standard"):
        engines[mode] = Engine(path, "bfloat16", mode, 1024, PROMPTS * GROUP, {tokenizer.eos_token_id})
        engines[mode].load(Learner(path, kernels_mode="standard").weights(), 0)
    tokens = {}

    def generate(mode):
        tokens[mode] = sum(len(s.response_ids) for s in engines[mode].generate(requests, NEW_TOKENS, 1.0, 0))

    # plain vLLM: LLM.generate on the same engine, as a user would call it to get ids and log-probabilities
    params = [SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, seed=r.seed, logprobs=0, detokenize=False,
                             stop_token_ids=[tokenizer.eos_token_id]) for r in requests]  # fmt: skip
    inputs = [{"prompt_token_ids": r.prompt_ids} for r in requests]

    def plain():
        outputs = engines["aligned"].llm.generate(inputs, params, use_tqdm=False)
        tokens["plain"] = sum(len(o.outputs[0].token_ids) for o in outputs)

    a, s, p = in_turn(repeats, lambda: generate("aligned"), lambda: generate("standard"), plain)
    rates = [statistics.median(tokens[name] / t for t in times) for name, times in (("aligned", a), ("standard", s), ("plain", p))]
    row("engine, aligned / standard, tokens/s", f"{rates[0]:,.0f} / {rates[1]:,.0f} = {ratio(s, a) * tokens['aligned'] / tokens['standard']:.2f}", f"at least {BOUNDS[model][0]:.2f}")
    row("Engine.generate / LLM.generate, tokens/s", f"{rates[0]:,.0f} / {rates[2]:,.0f} = {ratio(p, a) * tokens['aligned'] / tokens['plain']:.2f}", "at least 0.95")
    weights = Learner(path).weights()
    version = iter(range(1, 1000))
    (load,) = in_turn(3 * repeats, lambda: engines["aligned"].load(weights, next(version)))
    row(f"weight load, {sum(w.numel() for w in weights.values()) / 1e6:.1f}M parameters", f"{statistics.median(load) * 1e3:.1f} ms", "at most 30 ms" if model == "base" else "")


def bench_learner(repeats: int, model: str) -> None:
    """Learner: one update on the same batch, aligned against standard."""
    from learn import Learner
    from rollout import Engine

    path, tokenizer, task, problems, requests = setting(model)
    engine = Engine(path, "bfloat16", "aligned", 1024, PROMPTS * GROUP, {tokenizer.eos_token_id})
    aligned, standard = (Learner(path, kernels_mode=mode) for mode in ("aligned", "standard"))
    weights = aligned.weights()
    engine.load(weights, 0)
    samples = engine.generate(requests, NEW_TOKENS, 1.0, 0)
    for i, sample in enumerate(samples):
        sample.group = i // GROUP
        sample.reward = task.reward(problems[sample.group], tokenizer.decode(sample.response_ids))
    a, s = in_turn(repeats, *(lambda learner=learner: learner.update(samples, 0, lambda v: weights) for learner in (aligned, standard)))
    row("learner update, aligned / standard, s", f"{statistics.median(a):.3f} / {statistics.median(s):.3f} = {ratio(a, s):.2f}", f"at most {BOUNDS[model][1]:.2f}")


def bench_training(steps: int) -> None:
    """Asynchronous (lag 8) against synchronous training: whole runs of the default settings."""
    results = {}
    for lag in (8, 0, 8, 0):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, ROOT / "run_async.py", "--lag", str(lag), "--steps", str(steps), "--eval-every", "0", "--out", f"{out}/run"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
            rows = [json.loads(line) for line in (pathlib.Path(out) / "run/metrics.jsonl").read_text().splitlines()][10:]
        per_update = (rows[-1]["wall"] - rows[0]["wall"]) / (len(rows) - 1)
        phases = [statistics.median(r[key] for r in rows) for key in ("t_rollout", "t_learn", "t_sync")]
        results.setdefault(lag, []).append((per_update, *phases))
    asynchronous, synchronous = (list(map(statistics.mean, zip(*results[lag]))) for lag in (8, 0))
    speedup = synchronous[0] / asynchronous[0]
    _, rollout, learn, _ = synchronous
    allowed = (rollout + learn) / max(rollout, learn)
    for name, (total, rollout_, learn_, sync) in (("lag 8", asynchronous), ("lag 0", synchronous)):
        row(f"training, {name}, s per update", f"{total:.3f} (rollout {rollout_:.3f}, learn {learn_:.3f}, weights {sync:.3f})")
    row("asynchronous / synchronous, updates/s", f"{speedup:.2f}", "at least 1.25")
    row("of what the synchronous run's phases allow", f"{speedup:.2f} / {allowed:.2f} = {speedup / allowed:.2f}", "at least 0.85")
    trl = ROOT / ".venv-trl/bin/python"
    if trl.exists():
        for dtype in ("bfloat16", "float32"):
            command = [trl, ROOT / "plots/trl_baseline.py", "--dtype", dtype]
            env = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}  # TRL as its users run it
            line = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.splitlines()[-1])
            step = line["seconds_per_step"]
            row(f"TRL GRPOTrainer, {dtype}, s per step / ours, lag 8", f"{step:.3f} / {asynchronous[0]:.3f} = {step / asynchronous[0]:.2f}", "at least 1.8 (bfloat16)")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    row("peak memory of a run", f"{peak:.2f} GiB", "under 3 GB")


def bench_ray(steps: int) -> None:
    """run_ray.py, one engine and one learner, against run_async.py, lag 8: whole runs of the default settings."""
    results = {}
    for program in ("run_ray.py", "run_async.py") * 2:
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, ROOT / program, "--lag", "8", "--steps", str(steps), "--eval-every", "0", "--out", f"{out}/run"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
            rows = [json.loads(line) for line in (pathlib.Path(out) / "run/metrics.jsonl").read_text().splitlines()][10:]
        per_update = (rows[-1]["wall"] - rows[0]["wall"]) / (len(rows) - 1)
        keys = ("t_rollout", "t_learn", "t_wait", "t_sync", "t_put", "weight_bytes")
        results.setdefault(program, []).append((per_update, *(statistics.median(r.get(key, 0) for r in rows) for key in keys)))
    means = {program: list(map(statistics.mean, zip(*runs))) for program, runs in results.items()}
    for program, (total, rollout, learn, wait, sync, put, size) in means.items():
        moved = f"; {size / 1e6:.2f} MB a version, {put * 1e3:.1f} ms to put them into the object store" if size else ""
        row(f"{program}, s per update", f"{total:.3f} (rollout {rollout:.3f}, learn {learn:.3f}, wait {wait:.3f}, weights {sync:.3f}{moved})")
    slower = ratio(*([run[0] for run in results[program]] for program in ("run_ray.py", "run_async.py")))
    row("run_ray.py / run_async.py, s per update", f"{slower:.2f}", "at most 1.15")


def bench_large(path: str, repeats: int, dtype: str) -> None:
    """The learner's update on 8,192 tokens of a larger model as a share of the matmul rate of the same cores."""
    import torch

    from learn import Learner
    from rollout import Sample

    x = torch.randn(4096, 2048, dtype=getattr(torch, dtype))
    w = torch.randn(2048, 2048, dtype=getattr(torch, dtype))
    learner = Learner(path, dtype, allow_mismatch=True)
    generator = torch.Generator().manual_seed(0)
    vocab, prompt, response = learner.model.config.vocab_size, 56, 200
    samples = []
    for i in range(8192 // (prompt + response)):
        ids = torch.randint(vocab, (prompt + response,), generator=generator).tolist()
        logprobs = torch.full((response,), -12.0)
        samples.append(Sample(ids[:prompt], ids[prompt:], logprobs, 0, "stop", [1] * response, i // 8, float(i % 2)))
    weights = learner.weights()
    update, matmul = in_turn(repeats, lambda: learner.update(samples, 0, lambda v: weights), lambda: [x @ w.t() for _ in range(20)])
    rate = 20 * 2 * 4096 * 2048 * 2048 / statistics.median(matmul)
    head = learner.model.lm_head.weight.numel()
    body = sum(p.numel() for p in learner.model.model.layers.parameters())
    flop = 6 * (body * len(samples) * (prompt + response) + head * len(samples) * response)  # logits of responses only
    seconds = statistics.median(update)
    row(f"learner, {pathlib.Path(path).name}, {dtype}, 8,192 tokens", f"{seconds:.1f} s = {flop / seconds / 1e9:.0f} GFLOP/s")
    row("  of the matmul rate of the same cores", f"{rate / 1e9:.0f} GFLOP/s: {flop / seconds / rate:.0%}", "at least 40%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each comparison, after a warm-up")
    parser.add_argument("--model", default="base", choices=list(BOUNDS), help="of the engine's and the learner's comparison")
    parser.add_argument("--steps", type=int, default=60, help="updates of each training run")
    parser.add_argument("--only", choices=["engine", "learner", "training", "ray", "large"], nargs="*", help="parts to run")
    parser.add_argument("--large", metavar="PATH", help="folder of a larger model for the learner's share of the matmul rate")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of --large")
    args = parser.parse_args()
    parts = args.only or (["large"] if args.large else ["engine", "learner", "training", "ray"])
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    from kernels import keep_freed_memory

    keep_freed_memory()
    print(f"machine: {os.cpu_count()} cores, {cpu_name()}, torch {torch.__version__}\n\n| what | measured | bound |\n|---|---|---|")
    if "engine" in parts:
        torch.set_num_threads(1)  # as in asynchronous training on two cores
        bench_engine(args.repeats, args.model)
    if "learner" in parts:
        torch.set_num_threads(1)
        bench_learner(args.repeats, args.model)
    if "training" in parts:
        bench_training(args.steps)
    if "ray" in parts:
        bench_ray(args.steps)
    if "large" in parts:
        torch.set_num_threads(os.cpu_count())
        bench_large(args.large, 2, args.dtype)


def cpu_name() -> str:
    try:
        return next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown CPU"


if __name__ == "__main__":
    main()
