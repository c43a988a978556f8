"""Seconds per step of TRL's GRPOTrainer on the model, task and batch of our default run: the synchronous baseline. With --model
and a chat model the task is products in words.

    make bench-trl ARGS="--steps 8"

One step is 32 prompts x 8 completions: generate with transformers, score, update once. Prints one line of JSON. Where TRL has
a setting that costs time and buys nothing at this size, the faster value is taken, to compare with TRL at its best: no gradient
checkpointing (1.07 s a step with it, 0.88 s without) and weights in --dtype outright, not float32 under autocast (1.02 s).
On a CPU, --dtype float32 is faster still (0.7 s); the default is bfloat16 because that is what our own run computes in.

Run it on an otherwise idle machine. Two programs that each keep a thread on every core wait for each other at every kernel: on
two cores that made the same step take 19 s instead of 0.9 s. The load at the start is printed for that reason.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from base import make_base  # noqa: E402
from envs import Problem, load_env  # noqa: E402


class StepClock(transformers.TrainerCallback):
    """Notes the time when each step ends; a step takes from one such moment to the next."""

    def __init__(self):
        self.ends = []

    def on_train_begin(self, *args, **kwargs):
        self.ends.append(time.perf_counter())

    def on_step_end(self, *args, **kwargs):
        self.ends.append(time.perf_counter())


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Hugging Face model; the small base model if not given")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of weights and activations")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are run but not counted")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest completion")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the problems and of the sampling")
    return parser.parse_args()


def main():
    args = parse_args()
    load = os.getloadavg()[0]
    path = args.model or str(make_base())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype)
    env = load_env("arith", tokenizer, args.seed, "words" if tokenizer.chat_template else "")
    total_steps = args.warmup + args.steps

    problems = [problem for step in range(total_steps) for problem in env.train(step, args.prompts)]
    dataset = Dataset.from_list(
        [dict(prompt=tokenizer.decode(env.prompt_ids(p)), question=p.prompt, answer=p.answer) for p in problems]
    )
    tokens, mean_reward = [], []  # one number per step

    def reward(completions, completion_ids, question, answer, **_):
        scores = [env.reward(Problem(q, a), text) for q, a, text in zip(question, answer, completions)]
        tokens.append(sum(map(len, completion_ids)))
        mean_reward.append(statistics.mean(scores))
        return scores

    clock = StepClock()
    with tempfile.TemporaryDirectory() as scratch:
        config = trl.GRPOConfig(
            output_dir=scratch, report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), seed=args.seed,
            per_device_train_batch_size=args.prompts * args.group, gradient_accumulation_steps=1, steps_per_generation=1,
            max_steps=total_steps, num_generations=args.group, num_iterations=1, max_completion_length=args.max_tokens,
            temperature=1.0, beta=0.0, learning_rate=args.lr, lr_scheduler_type="constant",
            bf16=False, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model, args=config, processing_class=tokenizer, train_dataset=dataset, reward_funcs=reward, callbacks=[clock]
        )
        trainer.remove_callback(transformers.PrinterCallback)  # standard output holds the JSON line and nothing else
        trainer.train()

    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:])][args.warmup :]
    timed_tokens = tokens[args.warmup :]
    result = dict(
        seconds_per_step=round(statistics.median(seconds), 3),
        slowest_step=round(max(seconds), 3),
        tokens_per_second=round(sum(timed_tokens) / sum(seconds), 1),
        mean_response_tokens=round(statistics.mean(timed_tokens) / (args.prompts * args.group), 2),
        mean_reward=round(statistics.mean(mean_reward), 3),
        completions_per_step=args.prompts * args.group,
        steps=args.steps,
        dtype=args.dtype,
        device=str(trainer.accelerator.device),
        threads=torch.get_num_threads(),
        load_at_start=round(load, 2),
        trl=trl.__version__,
        transformers=transformers.__version__,
        torch=torch.__version__,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
