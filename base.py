"""The small embedded base models: Qwen3 architecture, 0.8M parameters, one token per character.

"base" is warm-started on worked additions in which three steps in twenty slip, so it knows the format, is right about half of
the time, and has something to gain from reinforcement learning on nearly every prompt. "base-calc" has seen sums of larger
numbers that are mostly guessed, wrongly, and now and then handed to Python. `python base.py` makes one, and
`python eval.py --model base --bench arith` measures it.
"""

import hashlib
import json
import os
import pathlib
import random
import tempfile
from typing import Literal

# every character that a task may use; ids 0 and 1 are the special tokens, then come these, 64 in all
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz \n+-*/=(){}[]<>\\`.,:;?!'\"_"
MODEL = dict(
    hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32,  # the smallest head that vLLM's CPU attention has
    initializer_range=0.06,  # with the usual 0.02 the same warm start gets 0.87 right when greedy, with this 0.97
    intermediate_size=384, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip
# "base-moe": the same in the Qwen3-MoE architecture, 1.0M of 3.4M parameters active
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True,
               initializer_range=0.08)  # fmt: skip  (with 0.06 the same warm start gets 0.91 right when greedy, with this 0.97)
WARM_START = {  # by task; version: of everything below that these settings do not say; a new number makes a new folder
    # slip: chance that a running total in the data is wrong; tool: share of the data that calls the tool, the rest guesses
    "arith": dict(version=1, difficulty=4, slip=0.15, steps=300, batch=64, lr=3e-3),
    "calc": dict(version=1, difficulty=3, tool=0.3, steps=300, batch=64, lr=3e-3),
}


def cache_dir() -> pathlib.Path:
    """Where made models are kept: $REINFORCE_ZERO_CACHE, or ~/.cache/reinforce-zero."""
    return pathlib.Path(os.environ.get("REINFORCE_ZERO_CACHE") or "~/.cache/reinforce-zero").expanduser()


def make_base(task: Literal["arith", "calc"] = "arith", seed: int = 0, progress: bool = True, moe: bool = False) -> pathlib.Path:
    """The folder of a task's base model (Hugging Face format, bfloat16), made first if the cache lacks it (about a minute).

    The same seed gives the same files byte for byte on the same kind of CPU. `progress` shows a progress bar; `moe` makes the
    mixture of experts.
    """
    size = MODEL | EXPERTS if moe else MODEL
    key = hashlib.sha256(json.dumps([ALPHABET, size, WARM_START[task], seed]).encode()).hexdigest()[:8]
    path = cache_dir() / f"base-{key}"
    if path.exists():
        return path
    cache_dir().mkdir(parents=True, exist_ok=True)
    # made under another name, then renamed: a half-made model is never found, and of two makers at once either wins
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="making-") as scratch:
        made = pathlib.Path(scratch) / "model"
        tokenizer = make_tokenizer()
        model = warm_start(tokenizer, task, seed, progress, size)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(path)
        except OSError:
            if not path.exists():
                raise
    return path


def make_tokenizer():
    """A character-level PreTrainedTokenizerFast: id 0 <pad>, id 1 <eos>, then ALPHABET; other characters become "?"."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    core = Tokenizer(models.BPE(vocab, merges=[], unk_token="?"))  # byte-pair encoding without merges: one token a character
    core.decoder = decoders.Fuse()  # join the characters with nothing between them
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False,
        model_max_length=MODEL["max_position_embeddings"],
    )  # fmt: skip


def new_model(tokenizer, size=MODEL):
    """An untrained float32 model that fits `tokenizer`, drawn from torch's global generator."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    special = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    config = Qwen3MoeConfig if "num_experts" in size else Qwen3Config
    return AutoModelForCausalLM.from_config(config(vocab_size=len(tokenizer), **size, **special))


def worked_sum(prompt: str, rng: random.Random, slip: float) -> list[tuple[str, bool]]:
    """A response to "3+8+5+9=" as (text, whether the model writes it): running totals, then the last one boxed, "11 16 25
    \\boxed{25}". Each total is wrong by 1 or 10 with probability `slip`, and what follows goes on from the wrong one."""
    first, *rest = map(int, prompt.rstrip("=").split("+"))
    totals = [first]
    for term in rest:
        error = rng.choice((-1, 1, 10)) if rng.random() < slip else 0
        totals.append(max(0, totals[-1] + term + error))
    return [(f"{' '.join(map(str, totals[1:]))} \\boxed{{{totals[-1]}}}", True)]


def tool_or_guess(prompt: str, rng: random.Random, tool: float) -> list[tuple[str, bool]]:
    """A response to "347+862=", likewise: with probability `tool` a call of Python, its output and the answer, else a guess."""
    total = sum(map(int, prompt.rstrip("=").split("+")))
    if rng.random() >= tool:
        return [(f"\\boxed{{{rng.randrange(2 * total)}}}", True)]
    call = f"```python\nprint({prompt.rstrip('=')})\n```\n"
    return [(call, True), (f"```output\n{total}\n```\n", False), (f"\\boxed{{{total}}}", True)]


def warm_start(tokenizer, task: str, seed: int, progress: bool, size=MODEL):
    """A new model trained on the task's responses as above, loss on what the model writes only; returns it in bfloat16."""
    import torch
    import torch.nn.functional as F
    from tqdm import trange

    from envs import load_env

    recipe = WARM_START[task]
    respond, chance = (worked_sum, recipe["slip"]) if task == "arith" else (tool_or_guess, recipe["tool"])
    env = load_env(task, tokenizer, seed, recipe["difficulty"])
    threads = torch.get_num_threads()
    # one thread: the order of float sums follows the thread count, so the weights would follow the machine; and on a busy
    # machine two threads wait for each other at every small operation (a batch of 128 took 0.27 s; with two, 0.15 to 4 s)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = new_model(tokenizer, size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"], betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe["lr"], total_steps=recipe["steps"], pct_start=0.1)
        for step in (bar := trange(recipe["steps"], desc="making the base model", disable=not progress)):
            tokens, labels, rng = [], [], random.Random(f"warm-start/{seed}/{step}")
            for problem in env.train(step, recipe["batch"]):
                parts = respond(problem.prompt, rng, chance)
                parts = [(tokenizer.encode(text), written) for text, written in parts] + [([tokenizer.eos_token_id], True)]
                parts.insert(0, (env.prompt_ids(problem), False))
                tokens.append(torch.tensor([i for ids, _ in parts for i in ids]))
                labels.append(torch.tensor([i if written else -100 for ids, written in parts for i in ids]))
            tokens = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=tokenizer.pad_token_id)  # [B, L]
            labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)  # [B, L]
            # padding is on the right, where causal attention does not look, so no attention mask
            logits = model(tokens[:, :-1], use_cache=False).logits  # [B, L-1, V]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    finally:
        torch.set_num_threads(threads)
    return model.to(torch.bfloat16)


if __name__ == "__main__":
    import tyro

    print(tyro.cli(make_base))
