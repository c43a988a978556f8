"""pass@1 of a model on benchmarks, with intervals; or of several, with the differences.

    python eval.py --model runs/NAME --model base --bench aime24,arith --samples 8
"""

import dataclasses
import json
import math
import multiprocessing
import pathlib
import sys
import threading
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tyro

from envs import Dataset, grade, load_env, read_problems
from run_async import UserError, default_threads, eos_of, open_model, quiet, require, resolve_model

BENCHMARKS = {  # name: (file in --data-dir, dataset on the hub, its configuration, split)
    "aime24": ("aime24", "HuggingFaceH4/aime_2024", None, "train"),
    "aime25": ("aime25", "math-ai/aime25", None, "test"),
    "amc23": ("amc23", "math-ai/amc23", None, "test"),
    "math500": ("math500", "HuggingFaceH4/MATH-500", None, "test"),
    "minerva": ("minerva", "math-ai/minervamath", None, "test"),
    "olympiad": ("olympiadbench", "math-ai/olympiadbench", None, "test"),
    "gsm8k": ("gsm8k_test", "openai/gsm8k", "main", "test"),
}
RESAMPLES = 2000  # of the bootstrap


@dataclass
class Config:
    """pass@1 of models on benchmarks, and how far each is from the first."""

    model: tyro.conf.UseAppendAction[list[str]]
    """A run folder (its newest checkpoint), a local Hugging Face folder, a hub name or "base"; several: --model A --model B."""
    bench: str = "arith"
    """Benchmarks, with commas: aime24, aime25, amc23, math500, minerva, olympiad, gsm8k, arith, calc (arith-6: difficulty 6), or a file."""
    data_dir: str | None = None
    """Folder with the benchmarks' files, such as aime24.jsonl; the hub by default."""
    samples: int = 1
    """Responses per problem."""
    problems: int = 0
    """Only the first problems of each benchmark; 0: all (arith and calc: 256)."""
    temperature: float = 1.0
    """Of sampling; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the most likely tokens that have this probability together."""
    max_new_tokens: int = 0
    """Length limit of a response; 0: what the model has positions for, at most 4096."""
    seed: int = 0
    """Of every sampled token, with the number of the problem and of the sample."""
    kernels: Literal["aligned", "standard"] = "aligned"
    """As in training; with aligned ones a response does not depend on what else is in the batch."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: as the model was saved, which for a checkpoint is as it was trained."""
    out: str | None = None
    """JSON file for settings, results and every answer with its verdict, and beside it a log; runs/eval-TIME.json by default."""


# ---------------------------------------------------------------------------------------------------------------------
# The online evaluation of run_async.py is these too


def requests_of(task, problems: list, samples: int, seed: int, top_p: float = 1.0) -> list:
    """rollout.Requests, `samples` for each problem, each with a seed of its own."""
    from rollout import Request, sample_seed

    prompts = [task.prompt_ids(p) for p in problems]
    return [Request(ids, sample_seed(seed, "eval", i, j), task.follow_up, top_p) for i, ids in enumerate(prompts) for j in range(samples)]


def score(task, problems: list, samples: list) -> tuple[dict, list[dict]]:
    """(results, answers) of N samples for each of P problems, in the order of `requests_of`: [P] answers of N responses."""
    from rollout import decode

    n, texts = len(samples) // len(problems), decode(task.tokenizer, samples)
    graded, errors = decode(task.tokenizer, samples, tools=False), {}
    rewards = np.array(grade(task, [p for p in problems for _ in range(n)], graded, errors)).reshape(-1, n)
    results = mean_and_interval(rewards.mean(axis=1)) | {"problems": len(problems), "samples": n}
    for k in (2**i for i in range(1, n.bit_length())):
        results[f"pass@{k}"] = float(np.mean([pass_at_k(n, int(c), k) for c in (rewards == 1).sum(axis=1)]))
    results["response_len"] = float(np.mean([sum(s.mask) for s in samples]))
    results["truncated"] = float(np.mean([s.finish == "length" for s in samples]))
    results["reward_errors"] = len(errors)  # each is a 0 in pass@1
    each = zip(texts, rewards.flatten().tolist(), samples)
    rows = [{"text": text, "reward": reward, "tokens": sum(s.mask), "finish": s.finish} for text, reward, s in each]
    return results, [dataclasses.asdict(p) | {"responses": rows[i * n : i * n + n]} for i, p in enumerate(problems)]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Share of the sets of k out of n samples that hold one of the c right ones: unbiased (Chen et al., arXiv 2107.03374)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def mean_and_interval(*values: np.ndarray) -> dict:
    """pass@1 of a benchmark, from the mean reward of each problem [P], with the 95% interval (low, high) of the bootstrap over
    problems; of several benchmarks, their macro average. Or of the differences between two models."""
    rng = np.random.default_rng(0)
    resampled = np.mean([[v[rng.integers(len(v), size=len(v))].mean() for _ in range(RESAMPLES)] for v in values], axis=0)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"pass@1": float(np.mean([v.mean() for v in values])), "low": float(low), "high": float(high)}


# ---------------------------------------------------------------------------------------------------------------------
# python eval.py


def load_bench(name: str, tokenizer, config: Config):
    """(task, problems) of a benchmark. Raises ValueError that names the flag."""
    kind, _, difficulty = name.partition("-")
    if kind in ("arith", "calc"):
        task = load_env(kind, tokenizer, difficulty=difficulty)
        return task, task.heldout(config.problems or 256)
    source, where = name, f"--bench {name}"
    if name in BENCHMARKS:
        source, where = BENCHMARKS[name][1:], f"--bench {name}, or --data-dir DIR"
        if config.data_dir:
            files = sorted(pathlib.Path(config.data_dir).glob(f"{BENCHMARKS[name][0]}.*"))
            source, where = files[0] if files else f"{BENCHMARKS[name][0]}.jsonl", f"--data-dir {config.data_dir}"
    elif not pathlib.Path(name).is_file():
        raise ValueError(f"--bench {name}: neither a file nor one of: {', '.join(BENCHMARKS)}, arith, calc")
    task = Dataset(name, tokenizer, 0, [], read_problems(source, where, name)[0])
    return task, task.heldout(config.problems or None)


def in_a_process(config: Config, name: str, path: pathlib.Path, log: pathlib.Path) -> dict:
    """`evaluate_model` in a process of its own: only when that ends, vLLM's memory is free. Raises UserError if it fails. (Not by a
    ProcessPoolExecutor: now and then it waits forever for a worker that was killed.)"""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_evaluate_and_send, args=(sender, config, name, path, log))
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        raise UserError(f"--model {name}: the evaluation failed or was killed, perhaps for memory; {log} says more") from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, UserError):
        raise found
    return found


def _evaluate_and_send(sender, *args) -> None:
    try:
        found = evaluate_model(*args)
    except UserError as error:
        found = error
    sender.send(found)


def evaluate_model(config: Config, name: str, path: pathlib.Path, log: pathlib.Path) -> dict:
    """Results and answers of one model."""
    console = quiet(log)
    import torch
    from tqdm import tqdm

    from kernels_cuda import choose_devices
    from rollout import Engine

    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which this process, ended by a kill, would leave behind
    model, tokenizer = open_model(path, config.kernels, choose_devices()[0])
    try:
        benches = {bench: load_bench(bench, tokenizer, config) for bench in config.bench.split(",")}
    except ValueError as error:
        raise UserError(str(error)) from None
    requests = {b: requests_of(task, problems, config.samples, config.seed, config.top_p) for b, (task, problems) in benches.items()}
    longest, positions = max(len(r.prompt_ids) for several in requests.values() for r in several), model.max_position_embeddings
    new = config.max_new_tokens or min(positions - longest, 4096)
    if not 0 < new <= positions - longest:
        raise UserError(f"--bench {config.bench}, --max-new-tokens {config.max_new_tokens}: the longest prompt has {longest} tokens, the "
                        f"model {positions} positions")  # fmt: skip
    dtype = config.dtype if config.dtype != "auto" else "float32" if model.dtype == torch.float32 else "bfloat16"
    engine = Engine(str(path), dtype, config.kernels, max_model_len=longest + new, max_seqs=256, stop_ids=eos_of(path, tokenizer),
                    stop={s for task, _ in benches.values() for s in task.stop})  # fmt: skip
    engine.engine.set_weight_version("0")
    engine.version = 0  # what vLLM has read from the files
    torch.set_num_threads(default_threads(0))
    found = {"model": name, "path": str(path), "dtype": dtype, "max_new_tokens": new, "results": {}, "answers": {}}
    for bench, (task, problems) in benches.items():
        with tqdm(total=len(requests[bench]), desc=f"{name} {bench}", file=console, unit="response", mininterval=1.0) as bar:
            samples = engine.generate(requests[bench], new, config.temperature, 0, progress=bar.update)
        found["results"][bench], found["answers"][bench] = score(task, problems, samples)
    return found


def compare(models: list[dict]) -> list[dict]:
    """Rows of the table: each model's benchmarks and their macro average, and the same of its differences to the first model."""
    rows, first = [], {}
    for m in models:
        own = {}  # benchmark: mean reward of each problem [P]
        for bench, answers in m["answers"].items():
            own[bench] = np.array([np.mean([r["reward"] for r in a["responses"]]) for a in answers])
        shown = {m["model"]: own}
        if first:
            shown |= {f"{m['model']} - {models[0]['model']}": {bench: own[bench] - first[bench] for bench in own}}
        first = first or own
        for label, values in shown.items():
            for bench, v in values.items():
                rows.append({"model": label, "benchmark": bench} | (m["results"][bench] if values is own else mean_and_interval(v)))
            if len(values) > 1:
                rows.append({"model": label, "benchmark": "macro average"} | mean_and_interval(*values.values()))
    return rows


def main(args: list[str] | None = None) -> int:
    config = tyro.cli(Config, args=args)
    out = pathlib.Path(config.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}.json")
    log = out.with_suffix(".log")
    try:
        least = {"samples": 1, "problems": 0, "max_new_tokens": 0, "seed": 0, "temperature": 0, "top_p": 1e-9}
        require(config, least, {"temperature": 100, "top_p": 1})
        paths = [resolve_model(name) for name in config.model]
        out.parent.mkdir(parents=True, exist_ok=True)
        models = [in_a_process(config, *m, log) for m in zip(config.model, paths)]
    except (UserError, OSError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eval.py: interrupted", file=sys.stderr)
        return 130
    import pandas  # here: 60 MB, of which the evaluations of a training run need none

    rows = compare(models)
    out.write_text(json.dumps({"settings": dataclasses.asdict(config), "results": rows, "models": models}, indent=1) + "\n")
    print(pandas.DataFrame(rows, dtype=object).to_string(index=False, na_rep="", float_format="{:.3f}".format))
    print(f"answers and verdicts: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
