"""Tasks: problems, prompts and rewards.

A task is an object with `train(batch, n)`, `heldout(n)`, `prompt_ids(problem)` and `reward(problem, response)`; that is all the
rollout and the evaluation know about it. Rewards are computed from text, training is on token ids: nothing here re-tokenises
a response.
"""

import hashlib
import random
import re
from dataclasses import dataclass

from verify import last_boxed

ENVS = ("arith",)
BOXED_INSTRUCTION = "Put your final answer within \\boxed{}."
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELDOUT_SHARE = 8  # one problem in eight is held out


@dataclass(frozen=True)
class Problem:
    prompt: str  # as the task states it, before any chat template
    answer: str  # what the reward compares with


def load_env(name: str, tokenizer, seed: int = 0, difficulty: int | str = 4) -> "Arith":
    """The task called `name`. `tokenizer` is a Hugging Face tokenizer; `seed` picks the training problems only.

    Raises ValueError, one line that names the flag, for an unknown task or difficulty.
    """
    if name not in ENVS:
        raise ValueError(f"--env {name} is not a task; use one of: {', '.join(ENVS)}")
    return Arith(tokenizer, seed, difficulty)


class Arith:
    """Mental arithmetic with one integer answer.

    difficulty: an int (or its digits), the number of one-digit terms of a sum, "3+8+5+9="; or "words", for chat models, the
    product of two digits, "What is seven times eight?".

    Whether a problem is for training or held out is a hash of its prompt, so the two never meet, whatever the seed.
    """

    name = "arith"

    def __init__(self, tokenizer, seed: int = 0, difficulty: int | str = 4):
        if difficulty != "words" and not (re.fullmatch("[0-9]{1,2}", str(difficulty)) and int(difficulty) >= 2):
            raise ValueError(f"--difficulty {difficulty} is not one of: 2 to 99 (terms of a sum), words (products in words)")
        self.tokenizer = tokenizer
        self.seed = seed
        self.terms = None if difficulty == "words" else int(difficulty)  # None: products in words

    def train(self, batch: int, n: int) -> list[Problem]:
        """`n` training problems: a pure function of (seed, batch, index), the same in every process. Repeats can occur."""
        return [self._draw(random.Random(f"arith/{self.seed}/{batch}/{i}"), heldout=False) for i in range(n)]

    def heldout(self, n: int) -> list[Problem]:
        """The first `n` held-out problems, all different, whatever the seed. Fewer if the task has fewer: about 1,250 at
        difficulty 4, about 12 in words."""
        rng = random.Random("arith/heldout")
        found = {}  # a dict keeps the order of arrival; 50 draws for each problem wanted find nearly all of a small task
        for _ in range(50 * n):
            if len(found) == n:
                break
            found[self._draw(rng, heldout=True)] = None
        return list(found)

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of the prompt: in the tokenizer's chat template with a boxed-answer instruction if it has one, else plain."""
        if not self.tokenizer.chat_template:
            return self.tokenizer.encode(problem.prompt)
        message = {"role": "user", "content": f"{problem.prompt}\n{BOXED_INSTRUCTION}"}
        text = self.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template wrote the special tokens itself

    def reward(self, problem: Problem, response: str) -> float:
        """1.0 if the last `\\boxed{...}` of `response` is closed and holds the right integer, else 0.0."""
        for token in self.tokenizer.all_special_tokens:
            response = response.replace(token, "")
        boxed = last_boxed(response)
        # at most 20 digits: int() raises on a run of thousands, and a policy will find one
        is_integer = boxed is not None and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", boxed)
        return float(bool(is_integer) and int(boxed) == int(problem.answer))

    def _draw(self, rng: random.Random, heldout: bool) -> Problem:
        while True:
            digits = [rng.randrange(10) for _ in range(self.terms or 2)]
            if self.terms:
                problem = Problem("+".join(map(str, digits)) + "=", str(sum(digits)))
            else:
                a, b = digits
                problem = Problem(f"What is {DIGIT_WORDS[a]} times {DIGIT_WORDS[b]}?", str(a * b))
            if (hashlib.sha256(problem.prompt.encode()).digest()[0] % HELDOUT_SHARE == 0) == heldout:
                return problem
