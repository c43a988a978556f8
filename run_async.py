"""REINFORCE Zero: asynchronous reinforcement learning of a language model, with rollout and learner equal to the bit.

    python run_async.py --lag 8

A thread samples batches with vLLM (rollout.py), this loop trains on them (learn.py). Batch b is sampled by weights
version max(0, b - lag), update k turns version k into k + 1, and every random number is a function of (seed, batch,
prompt, sample): the run is asynchronous, and yet the same to the last bit whenever it is repeated.
"""

import _thread
import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from typing import ClassVar, Literal

import tyro
from tqdm import tqdm

import checkpoint

# Before torch loads OpenMP: a thread that waits for others spins 1,000 times, some microseconds, and then sleeps. By
# default it spins for milliseconds, and when another program has one of two cores, an update of 0.2 s takes 3 s.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
ROOT = pathlib.Path(__file__).resolve().parent


@dataclass
class Config:
    """Train a language model by REINFORCE with rollouts up to --lag updates old."""

    program: ClassVar[str] = "run_async.py"
    model: str = "base"
    """"base" (a small model made here for the task), "base-moe" (a mixture of experts), a local Hugging Face folder, or a hub name."""
    env: str = "arith"
    """Task: arith, calc, gsm8k, math, dapo, deepscaler, countdown, python or jsonl; see envs.py."""
    difficulty: str = ""
    """Setting of the task; arith: number of terms of a sum (4), or "words" for chat models; calc: digits of a number (3)."""
    data: str | None = None
    """File with the task's problems (jsonl, json, parquet; gzipped or not) instead of the hub; --env jsonl takes any."""
    data_fields: str = ""
    """Names of the file's fields, if they are not found: prompt=NAME,answer=NAME (countdown: nums=NAME,target=NAME)."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be read; by default they end the run."""
    max_turns: int = 4
    """Of a response in a task with tools: turns that the model writes, with what the tool gave in between."""
    unsafe_sandbox: bool = False
    """Run the programs that the model writes without bubblewrap: with your rights, on your files."""
    kernels: Literal["aligned", "standard"] = "aligned"
    """aligned: rollout and learner give bit-identical log-probabilities; standard: stock vLLM and stock transformers."""
    routing: Literal["own", "replay"] = "own"
    """Baseline for a mixture of experts with standard kernels: the learner takes the experts that the engine chose."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights that both sides compute with; master weights and optimizer are float32."""
    lag: int = 8
    """Updates between the weights that sample a batch and the weights that learn from it; 0 is synchronous training."""
    schedule: Literal["fixed", "bound"] = "fixed"
    """fixed: batch b is sampled by version max(0, b - lag), reproducible; bound: by the newest there is, at least b - lag."""
    steps: int = 400
    """Updates in all."""
    prompts: int = 32
    """Prompts per update."""
    group_size: int = 8
    """Responses per prompt; the group's mean reward is the baseline."""
    max_new_tokens: int = 48
    """Length limit of a response."""
    temperature: float = 1.0
    """Of sampling; the learner divides its logits by the same number."""
    top_p: float = 1.0
    """Only 1 is possible: see the error that any other value gives."""
    lr: float = 4e-5
    """Learning rate of AdamW, constant."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it; 0 turns clipping off."""
    seed: int = 0
    """Of the training problems and of every sampled token."""
    gate: Literal["none", "seq", "token"] = "none"
    """Baseline: reject sequences (mean of r - 1 - log r above --gate-threshold) or tokens (ratio out of [0.5, 5])."""
    gate_threshold: float = 0.01
    """Of --gate seq."""
    ratio_cap: float | None = None
    """Baseline: truncate importance ratios at this value; none by default."""
    importance_sampling: bool = True
    """Weigh tokens by pi / mu; without it old samples count as if they were new."""
    audit: int = 8
    """Samples per update on which kernel mismatch and policy lag are measured apart."""
    allow_mismatch: bool = False
    """Go on when aligned kernels turn out not to be aligned."""
    tokens_per_microbatch: int = 8192
    """Tokens per forward and backward; bounds the memory, does not change the gradient."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward: less memory, a third more time."""
    eval_every: int = 50
    """Updates between evaluations (pass@1 on held-out problems, newest weights); 0: never."""
    eval_problems: int = 256
    """Held-out problems per evaluation, one sampled response each."""
    eval_temperature: float | None = None
    """Of evaluations; 0 is greedy; as in training by default."""
    eval_top_p: float = 1.0
    """Of evaluations."""
    eval_max_new_tokens: int = 0
    """Of evaluations; 0: as in training."""
    save_every: int = 0
    """Updates between checkpoints; 0: only at the end."""
    keep: int = 0
    """Newest checkpoints to keep, 2 or more to survive a damaged one; 0: all."""
    max_bad_steps: int = 10
    """Updates in a row whose loss or gradient is not finite (they take no step) that end the run."""
    out: str | None = None
    """Run folder; runs/ and a name made of the settings by default."""
    resume: str | None = None
    """Run folder to continue from its newest whole checkpoint, with its own settings; --steps may grow."""
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Log the same metrics there too; the package must be installed."""
    rollout_timeout: float = 600.0
    """Seconds after which a batch that is not finished counts as hung and ends the run."""
    rollout_threads: int = 0
    """CPU threads of the engine; 0: all when --lag 0, half of them otherwise."""
    learner_threads: int = 0
    """CPU threads of the learner; 0: as above."""
    engine_device: str | None = None
    """cpu, cuda or cuda:N; by default the last GPU, the CPU if there is none."""
    learner_device: str | None = None
    """As above; by default the first."""
    gpu_memory_utilization: float | None = None
    """Share of its GPU's memory that the engine takes; by default 0.4 where the learner is too, otherwise 0.9."""


class UserError(Exception):
    """Bad input: one line that names the flag to change."""


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(config: Config, run: "Run", set_up) -> int:
    """Rollout in its thread, updates here; everything else is setting up and writing down. Returns the exit status."""
    import torch

    from kernels import keep_freed_memory, return_freed_memory

    keep_freed_memory()
    torch.set_num_threads(config.learner_threads or default_threads(config.lag))
    sys.setswitchinterval(5e-5)  # the learner waits for Python's lock after each operation: 5 ms (the default) adds up
    learner, engine, store = set_up(config, run)
    rollout = start_rollout(config, run, engine, store)
    try:
        for version in run.waiting:
            evaluate(config, run, store, version)
        for k in run.progress():
            with run.timed("t_wait"):
                batch = rollout.next(lambda: run.stopped_by)
            if batch is None:
                break
            with run.timed("t_learn"):
                metrics = learner.update(batch.samples, k, weights_of=store.get)
                store.publish(k + 1, learner.weights())
                store.drop_before(k + 1 - config.lag)
            run.log(metrics, batch)
            if run.due(config.eval_every, k + 1) and config.eval_every:
                evaluate(config, run, store, k + 1)
            if run.due(config.save_every, k + 1):
                run.save(learner, store)
            if k % 20 == 19:
                return_freed_memory()  # kept, it lies in pieces, which add up: 15 GB after 50 updates of SmolLM2-135M
        return run.finish(learner, store)
    finally:
        if not rollout.close(wait=1.0 if rollout.error else 30.0):
            run.hung = True  # a thread inside the engine cannot be stopped; leave without it


def set_up(config: Config, run: "Run", Learner=None, Engine=None):
    """Learner, engine and weight store, as they were after run.done updates. Learner, Engine: those of learn.py and rollout.py,
    or what has their interface."""
    import torch

    import kernels_cuda
    import learn
    import rollout

    engine_device, learner_device, memory = devices(config)
    if stream := kernels_cuda.own_stream(learner_device):
        torch.cuda.set_stream(stream)  # this thread's; the engine makes its own
    learner = (Learner or learn.Learner)(
        run.model_path, config.dtype, config.kernels, lr=config.lr, max_grad_norm=config.max_grad_norm,
        temperature=config.temperature, tokens_per_microbatch=config.tokens_per_microbatch, audit=config.audit,
        gates=learn.Gates(config.gate, config.gate_threshold, ratio_cap=config.ratio_cap, importance_sampling=config.importance_sampling),
        gradient_checkpointing=config.gradient_checkpointing, allow_mismatch=config.allow_mismatch, device=learner_device,
        routing=config.routing,
    )  # fmt: skip
    store = rollout.WeightStore()
    if run.saved:
        checkpoint.load(run.saved, learner, store)
    store.publish(run.done, learner.weights())
    engine = (Engine or rollout.Engine)(
        str(run.model_path), config.dtype, config.kernels, max_model_len=min(learner.model.config.max_position_embeddings, 32768),
        max_seqs=min(config.prompts * config.group_size, 256), stop_ids=eos_of(run.model_path, run.tokenizer),
        seed=config.seed, stop=run.task.stop, device=engine_device, gpu_memory_utilization=memory,
    )  # fmt: skip
    torch.set_num_threads(config.learner_threads or default_threads(config.lag))
    return learner, engine, store


def start_rollout(config, run, engine, store):
    """Start the rollout thread on the batch of the next update."""
    import envs
    from rollout import Request, RolloutThread, decode, sample_seed

    task, problems = run.task, {}  # of the batches under way

    def make_requests(b):
        problems[b] = task.train(b, config.prompts)
        return [
            Request(task.prompt_ids(p), sample_seed(config.seed, b, i, j), task.follow_up)
            for i, p in enumerate(problems[b])
            for j in range(config.group_size)
        ]

    def grade(b, samples):
        errors: dict[int, str] = {}
        of_samples = [p for p in problems.pop(b) for _ in range(config.group_size)]
        rewards = envs.grade(task, of_samples, decode(run.tokenizer, samples, tools=False), errors)
        for i, (sample, reward) in enumerate(zip(samples, rewards)):
            sample.group, sample.reward, sample.reward_error = i // config.group_size, reward, errors.get(i, "")
        if len(errors) > len(samples) / 10:
            last = [*errors.values()][-1]
            raise RuntimeError(f"--env {config.env}: no reward for {len(errors)} of batch {b}'s {len(samples)} responses: {last}")
        return decode(run.tokenizer, samples)

    run.rollout = RolloutThread(
        engine, store, make_requests, grade, start=run.done, steps=config.steps, lag=config.lag, schedule=config.schedule,
        max_new_tokens=config.max_new_tokens, temperature=config.temperature, timeout=config.rollout_timeout,
        threads=config.rollout_threads or default_threads(config.lag),
        on_error=lambda: _thread.interrupt_main(signal.SIGINT),  # the main thread runs Run's handler, now
    )  # fmt: skip
    run.rollout.start()
    return run.rollout


def evaluate(config, run, store, version: int) -> None:
    """Queue an evaluation of `version`, by eval.py's functions: pass@1 on held-out problems. Generated between two batches."""
    from eval import requests_of, score

    problems = run.task.heldout(config.eval_problems)
    sampling = {"temperature": config.temperature if config.eval_temperature is None else config.eval_temperature,
                "top_p": config.eval_top_p, "max_new_tokens": config.eval_max_new_tokens or config.max_new_tokens}  # fmt: skip

    def done(samples, version_end):
        run.log_eval({"version": samples[0].version, "version_end": version_end} | score(run.task, problems, samples)[0] | sampling)

    requests = requests_of(run.task, problems, 1, config.seed, sampling["top_p"])
    run.rollout.evaluate(store.get(version), version, requests, sampling["max_new_tokens"], sampling["temperature"], done)


# ---------------------------------------------------------------------------------------------------------------------
# Checks before anything slow starts


def check(config: Config) -> None:
    """Raise UserError, one line that names the flag, for settings that cannot work."""
    from envs import ENVS

    least = {"lag": 0, "steps": 1, "prompts": 1, "max_turns": 1, "max_new_tokens": 1, "audit": 0, "tokens_per_microbatch": 1, "eval_every": 0,
             "eval_problems": 1, "save_every": 0, "seed": 0, "lr": 0.0, "max_grad_norm": 0.0, "rollout_threads": 0, "learner_threads": 0,
             "eval_temperature": 0, "eval_top_p": 1e-9, "eval_max_new_tokens": 0, "keep": 0, "max_bad_steps": 1, "rollout_timeout": 0.1,
             "ratio_cap": 1e-9}  # fmt: skip
    require(config, least, {"eval_top_p": 1, "eval_temperature": 100, "seed": 2**32 - 1})
    if config.group_size < 2:
        raise UserError(f"--group-size {config.group_size}: the baseline is the group's mean, so a group needs at least 2 responses")
    if config.env not in ENVS:
        raise UserError(f"--env {config.env}: unknown task; there are {', '.join(ENVS)}")
    if not 0 < config.temperature < float("inf"):
        raise UserError(f"--temperature {config.temperature:g}: must be above 0 (greedy decoding has no log-probability to learn from)")
    if config.data and config.env in ("arith", "calc"):
        raise UserError(f"--data {config.data}: --env {config.env} makes its own problems; --env jsonl reads any file")
    if config.top_p != 1:
        raise UserError(f"--top-p {config.top_p:g}: must be 1; a truncated distribution gives probability 0 to tokens that the "
                        "learner's gives more, and importance sampling then no longer corrects for the lag")  # fmt: skip
    if config.routing == "replay" and config.kernels == "aligned":
        raise UserError("--routing replay: aligned kernels choose the same experts on both sides; it is for --kernels standard")
    if config.track != "none" and importlib.util.find_spec(config.track) is None:
        raise UserError(f"--track {config.track}: pip install {config.track}")
    devices(config)


def devices(config: Config) -> tuple[str, str, float]:
    """Device of the engine, of the learner, and the share of its GPU's memory that the engine takes. Raises UserError."""
    import kernels_cuda

    try:
        engine, learner = kernels_cuda.choose_devices(config.engine_device, config.learner_device)
        if engine != "cpu" and config.kernels == "aligned":
            kernels_cuda.require_cuda(engine, learner)
    except ValueError as error:
        raise UserError(str(error)) from None
    share = config.gpu_memory_utilization if config.gpu_memory_utilization is not None else 0.4 if engine == learner else 0.9
    if not 0 < share <= 1:
        raise UserError(f"--gpu-memory-utilization {share:g}: must be above 0 and at most 1")
    return engine, learner, share


def require(config, least: dict, most: dict) -> None:
    """Raise UserError for a setting below its least value, or above its most if it has one."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and not bound <= value <= most.get(name, value):
            limit = f" and at most {most[name]}" if name in most else ""
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {bound}{limit}")


def open_model(path: pathlib.Path, kernels_mode: str, device: str):
    """Configuration and tokenizer of a model folder. Raises UserError, also for what has no aligned kernels on the device."""
    from transformers import AutoConfig, AutoTokenizer

    import kernels

    try:
        model, tokenizer = (auto.from_pretrained(path, trust_remote_code=False) for auto in (AutoConfig, AutoTokenizer))
        for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(model, name, None) not in (None, 1):
                raise ValueError(f"model type {model.model_type!r} scales its logits ({name}), the learner does not; choose another --model")
        if kernels_mode == "aligned":
            kernels.require_supported(model, device)
    except Exception as error:  # of the libraries in Rust, too
        raise UserError(f"--model {path}: {str(error).strip().splitlines()[0]}") from None
    return model, tokenizer


def check_model(config: Config, path: pathlib.Path):
    """Checks that need the model's configuration and tokenizer, not its weights. Raises UserError; returns the tokenizer, the
    task, and a line that says what the kept weight versions take."""
    import psutil
    import torch

    from envs import load_env, too_long

    learner = devices(config)[1]
    model, tokenizer = open_model(path, config.kernels, learner)
    size = parameters(path) * (4 if config.dtype == "float32" else 2) / 1e9
    try:
        task = load_env(config.env, tokenizer, config.seed, config.difficulty, config.max_turns, config.unsafe_sandbox,
                        config.data, config.data_fields, config.skip_bad_rows)  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.routing == "replay" and model.model_type != "qwen3_moe":
        raise UserError(f"--routing replay: --model {config.model} is not a Qwen3-MoE model")
    heldout = task.heldout(config.eval_problems if config.eval_every else 0)
    if config.eval_every and not heldout:
        raise UserError(f"--eval-every {config.eval_every}: the task has no held-out problems; use --eval-every 0")
    everything = getattr(task, "problems", None) or task.train(0, config.prompts)
    for flag, length, problems in (("--max-new-tokens", config.max_new_tokens, everything),
                                   ("--eval-max-new-tokens", config.eval_max_new_tokens or config.max_new_tokens, heldout)):  # fmt: skip
        if long := too_long(task, problems, model.max_position_embeddings - length):
            raise UserError(f"{flag} {length}: with {len(long)} of {len(problems)} prompts it exceeds the model's "
                            f"{model.max_position_embeddings} positions (the longest has {max(len(task.prompt_ids(p)) for p in long)} tokens); lower it, or use other --data or a --model with more")  # fmt: skip
    free = (psutil.virtual_memory().available if learner == "cpu" else torch.cuda.mem_get_info(learner)[0]) / 1e9
    need = (config.lag + 1) * size
    keeps = f"keeps {config.lag + 1} weight versions ({need:.3g} GB)"
    if need > free / 2:  # the other half is for the model, its gradients and optimizer, and the engine
        raise UserError(f"--lag {config.lag}: it {keeps}, {free:.3g} GB are free; use a smaller --lag")
    return tokenizer, task, f"{task.note}\nlag {config.lag} {keeps}".lstrip()


def parameters(path: pathlib.Path) -> int:
    """Number of weights in a model folder's safetensors files, from their headers. Raises UserError."""
    from huggingface_hub import get_local_safetensors_metadata

    try:
        return sum(get_local_safetensors_metadata(path).parameter_count.values())
    except Exception as error:  # none there, or a damaged one
        raise UserError(f"--model {path}: {str(error).strip().splitlines()[0]}") from None


def resolve_model(name: str, env: str = "arith") -> pathlib.Path:
    """A local folder for --model: an embedded base (made if need be), a folder, or a hub name (downloaded)."""
    if name in ("base", "base-calc", "base-moe"):
        import base

        return base.make_base("calc" if "calc" in (env, name[5:]) else "arith", moe=name == "base-moe")
    path = pathlib.Path(name)
    if (path / "metrics.jsonl").exists():  # a run of this project
        path = next(reversed(checkpoint.checkpoints(path)), None)
        if path is None:
            raise UserError(f"--model {name}: the run has no checkpoint")
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"--model {name}: the folder has no config.json")
        if not (path / "tokenizer_config.json").exists() and not (path / "tokenizer.json").exists():
            raise UserError(f"--model {name}: the folder has no tokenizer")
        return path
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise UserError(f"--model {name}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:
        raise UserError(f"--model {name}: neither a folder nor a model that the hub gives ({type(error).__name__})") from None


def eos_of(path, tokenizer) -> set[int]:
    """Ids that end a response: the tokenizer's end-of-sequence token, and those of the model's generation_config.json, the one
    thing that is taken from it."""
    try:
        ids = json.loads((pathlib.Path(path) / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError):
        ids = None
    return {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}


def default_threads(lag: int) -> int:
    """All cores when the two sides take turns, half of them each when they run at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if lag == 0 else max(1, cores // 2)


# ---------------------------------------------------------------------------------------------------------------------
# The run folder


class Run:
    """The run folder, the console, and what is written where. Exits of every kind come through here."""

    def __init__(self, config: Config, folder: pathlib.Path, model_path: pathlib.Path, tokenizer, task, held, whose, saved, manifest):
        """held: the lock; whose, manifest: see checkpoint.py; saved: the checkpoint to go on from, or None."""
        self.track = tracker(config, folder)  # first: where it cannot be, no file is written
        self.config, self.folder, self.model_path, self.held, self.whose, self.saved = config, folder, model_path, held, whose, saved
        self.tokenizer, self.task = tokenizer, task
        self.rollout, self.hung, self.saving, self.stopped_by, self.bar = None, False, False, None, None
        self.error, self.times, self.done, self.files, rows = None, {"t_save": 0.0}, manifest["step"], {}, {}  # done: updates
        checkpoint.write_whole(folder / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        for name, key in (("metrics", "step"), ("samples", "step"), ("eval", "version")):
            path, end = folder / f"{name}.jsonl", self.done + (name == "eval")
            rows[name] = [row for row in checkpoint.read_rows(path) if row[key] < end]  # a resumed run writes the others again
            checkpoint.write_whole(path, "".join(json.dumps(row) + "\n" for row in rows[name]))
            self.files[name] = open(path, "a", buffering=1)
        self.history = rows["metrics"]
        self.wall = self.history[-1]["wall"] if self.history else 0.0
        self.waiting = [v for v in manifest["waiting"] if v not in {row["version"] for row in rows["eval"]}]  # to be evaluated
        self.console = quiet(folder / "log.txt")  # last: what is raised here is for the console
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)

    # -- console

    def say(self, text: str) -> None:
        tqdm.write(text, file=self.console)
        self.console.flush()

    def progress(self):
        self.started = time.perf_counter()  # of training; the start-up before it does not count
        interval = 0.2 if self.console.isatty() else 15.0
        self.bar = tqdm(total=self.config.steps, initial=self.done, file=self.console, unit="update", mininterval=interval, dynamic_ncols=True)
        for k in range(self.done, self.config.steps):
            if self.stopped_by:
                return
            yield k
            self.bar.update()

    # -- signals

    def _on_signal(self, signum, frame):
        if self.rollout is not None and self.rollout.error is not None and self.error is None:
            if self.saving:
                return  # finish the checkpoint: the next look at the rollout raises the error
            self.error = self.rollout.error  # once: not again while it is being handled
            raise self.error
        if self.stopped_by and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.stopped_by = signum

    # -- writing

    @contextlib.contextmanager
    def timed(self, key: str):
        """Note the seconds that the block takes as a metric of this update."""
        start = time.perf_counter()
        yield
        self.times[key] = time.perf_counter() - start

    def due(self, every: int, done: int) -> bool:
        """After `done` updates: is it time for what happens every so many updates (0: never) and at the end?"""
        return done == self.config.steps or bool(every) and done % every == 0

    def log(self, metrics: dict, batch) -> None:
        metrics |= self.times | {"t_rollout": batch.t_rollout, "t_sync": batch.t_sync}
        metrics |= {"wall": self.wall + time.perf_counter() - self.started}
        self._write("metrics", metrics)
        self.history.append(metrics)
        self.done, self.times["t_save"] = self.done + 1, 0.0
        for i in (0, len(batch.samples) // 2):
            s = batch.samples[i]
            prompt = self.tokenizer.decode(s.prompt_ids)
            self._write("samples", {"step": metrics["step"], "version": s.version, "reward": s.reward, "prompt": prompt,
                                    "response": batch.texts[i], "finish": s.finish})  # fmt: skip
        shown = {"reward": f"{metrics['reward']:.3f}", "d3": f"{metrics['d3']:.2e}", "lag": f"{metrics['lag']:g}"}
        self.bar.set_postfix(shown | {"mismatch": f"{metrics.get('mismatch_max', float('nan')):g}"}, refresh=False)
        if self.track:
            self.track(metrics, metrics["step"])
        if sum(m["bad_step"] for m in self.history[-self.config.max_bad_steps :]) == self.config.max_bad_steps:
            raise ArithmeticError(f"loss or gradient was not finite in {self.config.max_bad_steps} updates in a row (--max-bad-steps)")

    def log_eval(self, result: dict) -> None:
        self._write("eval", result)
        self.say(f"version {result['version']}: held-out pass@1 {result['pass@1']:.3f} on {result['problems']} problems")
        subprocess.Popen([sys.executable, ROOT / "plots" / "figures.py", self.folder])  # beside the run: it takes 2 s
        if self.track:
            self.track({f"eval/{k}": v for k, v in result.items()}, result["version"])

    def _write(self, name: str, row: dict) -> None:
        self.files[name].write(json.dumps(row) + "\n")  # line-buffered: in the file after each row

    def save(self, learner, store) -> None:
        self.saving = True
        with self.timed("t_save"):  # of the next row: this update's is written before its checkpoint, or a kill could lose it
            # before the rows are synced: an evaluation that ends in between still counts as waiting, so that it is not lost
            waiting = {version: weights for weights, version, *_ in list(self.rollout.evaluations)}
            for file in self.files.values():
                os.fsync(file.fileno())
            self.saved = checkpoint.save(self.folder, self.done, learner, store, self.tokenizer, self.whose, waiting)
        self.saving = False

    # -- endings

    def finish(self, learner, store) -> int:
        """After the last update, or after a signal: wait for evaluations, save, draw, sum up. Returns the exit status."""
        rollout = self.rollout
        while self.done == self.config.steps and rollout.evaluations and not self.stopped_by:
            if rollout.error or not rollout.is_alive():
                raise rollout.error or RuntimeError("the rollout thread ended early")
            time.sleep(0.02)
        stopped = self.done < self.config.steps or rollout.evaluations
        if stopped:
            if self.done and not (self.saved and self.saved.name == f"checkpoint-{self.done}"):
                self.save(learner, store)
            self.say(f"stopped after update {self.done} of {self.config.steps}; {self.how_to_resume()}")
        self.bar.close()
        if self.history:
            subprocess.run([sys.executable, ROOT / "plots" / "figures.py", self.folder])
            self.say(self.summary())
        return 128 + self.stopped_by if stopped else 0

    def summary(self) -> str:
        h = self.history
        tenth = max(1, len(h) // 10)
        first, last = (sum(m["reward"] for m in part) / tenth for part in (h[:tenth], h[-tenth:]))
        d3 = sorted(m["d3"] for m in h)
        median = d3[len(d3) // 2]
        ratio = f"{d3[-1] / median:.2f}" if median else "-"
        seconds = h[-1]["wall"] - h[0]["wall"]
        samples = self.config.prompts * self.config.group_size
        mismatch = [m["mismatch_max"] for m in h if "mismatch_max" in m]
        exact = f"{max(mismatch):g}" + (" (exact)" if max(mismatch) == 0 else "") if mismatch else "not measured (--audit 0)"
        speed = f"{samples * (len(h) - 1) / seconds:.0f} samples/s, {seconds / (len(h) - 1):.3f} s per update" if len(h) > 1 else "-"
        rows = [
            ("reward, first and last tenth", f"{first:.3f} -> {last:.3f}"),
            ("D3 peak / median", f"{ratio}  ({d3[-1]:.2e} / {median:.2e})"),
            ("kernel mismatch, largest", exact),
            ("lag, mean and largest", f"{sum(m['lag'] for m in h) / len(h):.3g}, {max(m['lag_max'] for m in h)}"),
            ("speed", speed),
            ("files", f"{self.folder}/  (metrics.jsonl, eval.jsonl, samples.jsonl, curves.png, {self.saved.name if self.saved else '-'}/)"),
        ]  # fmt: skip
        return "\n".join(f"  {name:<30} {value}" for name, value in rows)

    def how_to_resume(self) -> str:
        if not any(self.folder.glob("checkpoint-*")):
            return "no checkpoint was saved (--save-every)"
        return f"to go on: python {self.config.program} --resume {self.folder}"

    def fail(self, error: BaseException) -> None:
        """The error, and the end of the log when the cause may be there."""
        with contextlib.suppress(OSError):  # the disk may be full
            traceback.print_exception(error)
            sys.stderr.flush()
        if self.bar is not None:
            self.bar.close()
        if not isinstance(error, UserError):
            tail = (self.folder / "log.txt").read_text(errors="replace").splitlines()[-30:]
            self.say("\n".join(["", f"the end of {self.folder}/log.txt:", *("  | " + line for line in tail)]))
        self.say(f"{self.config.program}: {type(error).__name__ + ': ' if not isinstance(error, UserError) else ''}{error}")
        self.say(self.how_to_resume())


def quiet(log: pathlib.Path):
    """Send file descriptors 1 and 2 (vLLM, transformers, C++ libraries) to a file; returns the console they were."""
    console = os.fdopen(os.dup(2), "w", buffering=1)
    sys.stdout.flush(), sys.stderr.flush()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1), os.dup2(fd, 2), os.close(fd)
    os.environ.setdefault("VLLM_LOGGING_COLOR", "0")
    return console


def tracker(config: Config, folder: pathlib.Path):
    """A function (metrics, step) that logs to --track's service, imported only when asked for; None without it."""
    if config.track == "none":
        return None
    try:
        if config.track == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder / "tensorboard")
            return lambda metrics, step: [writer.add_scalar(k, v, step) for k, v in metrics.items()]
        service = importlib.import_module(config.track)
        service.init(project="reinforce-zero", name=folder.name, config=dataclasses.asdict(config))
    except Exception as error:  # not logged in, no network, no space
        raise UserError(f"--track {config.track}: {error}") from None
    return lambda metrics, step: service.log(metrics, step=step)


# ---------------------------------------------------------------------------------------------------------------------


def open_run(args: list[str] | None, Config, check, Run) -> Run:
    """The run folder: a new one, or that of --resume with its settings and its newest checkpoint. Raises UserError before
    anything is written or anything slow is started."""
    config = with_full_path(tyro.cli(Config, args=args))
    resuming = config.resume is not None
    name = f"runs/{config.env}-{pathlib.Path(config.model).name}-{config.kernels}-lag{config.lag}-seed{config.seed}"
    folders = [pathlib.Path(name + suffix) for suffix in ["", *(f"-{i}" for i in range(2, 10000))]]
    if resuming:
        folders = [folder := pathlib.Path(config.resume)]
        try:
            written = dict(json.loads((folder / "config.json").read_text()))
            saved = Config(**{k: v for k, v in written.items() if k not in checkpoint.FREE or hasattr(Config, k)})  # or of run_ray.py
        except FileNotFoundError:
            raise UserError(f"--resume {folder}: no run there (no config.json)") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"--resume {folder}: its config.json is no run's, or of another version ({error})") from None
        config = with_full_path(dataclasses.replace(tyro.cli(Config, args=args, default=saved), resume=None))  # flags given win
        changed = [f.name for f in dataclasses.fields(Config) if getattr(config, f.name) != getattr(saved, f.name)]
        if others := [name.replace("_", "-") for name in changed if name not in checkpoint.FREE]:
            free = ", ".join(f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(Config) if f.name in checkpoint.FREE)
            raise UserError(f"--{others[0]}: --resume goes on with the run's own settings; only {free} may change")
        if config.steps < saved.steps:
            raise UserError(f"--steps {config.steps}: the run to resume has {saved.steps}; it may grow, not shrink")
    elif config.out:
        folders = [folder := pathlib.Path(config.out)]
        if folder.exists() and (not folder.is_dir() or {p.name for p in folder.iterdir() if p.name[0] != "."} - {"curves.png"}):
            raise UserError(f"--out {folder}: holds another run; choose another folder, or --resume {folder}")
    check(config)
    path = resolve_model(config.model, config.env)
    tokenizer, task, note = check_model(config, path)
    for folder in folders:  # the first that no other run, perhaps one that is starting now, has taken
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=len(folders) == 1)
            break
    held, whose = open(folder / ".lock", "a"), checkpoint.identity(dataclasses.asdict(config), path)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it ends
        saved, manifest, passed_over = checkpoint.newest(folder, whose) if resuming else (None, {"step": 0, "waiting": []}, {})
    except BlockingIOError:
        raise UserError(f"--{'resume' if resuming else 'out'} {folder}: another process is running there") from None
    except ValueError as error:
        raise UserError(f"--resume {folder}: {error}") from None
    for damaged in passed_over:
        shutil.rmtree(damaged)  # or --keep would count it, and a later --resume might find it whole, without its rows of the logs
    run = Run(config, folder, path, tokenizer, task, held, whose, saved, manifest)
    for line in [note, *passed_over.values()]:
        run.say(line)
    return run


def with_full_path(config: Config) -> Config:
    """--model as a full path if it is a folder, and --data, so that the run can be resumed from anywhere."""
    path = pathlib.Path(config.model)
    config = dataclasses.replace(config, data=config.data and str(pathlib.Path(config.data).resolve()))
    return dataclasses.replace(config, model=str(path.resolve())) if path.is_dir() and not config.model.startswith("base") else config


def main(args: list[str] | None = None) -> int:
    return run_to_end(args, Config, check, Run, set_up)


def run_to_end(args, Config, check, Run, set_up) -> int:
    """A run from its flags to its exit status, with this file's Config, check, Run and set_up or with those of run_ray.py."""
    try:
        run = open_run(args, Config, check, Run)
    except (UserError, OSError) as error:
        print(f"{Config.program}: {error}", file=sys.stderr)
        return 2
    try:
        status = train(run.config, run, set_up)
    except KeyboardInterrupt:
        run.say("interrupted twice: left without saving")
        status = 130
    except BaseException as error:
        run.fail(error)
        status = 2 if isinstance(error, UserError) else 1
    if run.hung:
        os._exit(status)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
