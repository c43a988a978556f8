"""Tasks: problems, prompts and rewards.

A task is an object with `train(batch, n)`, `heldout(n)`, `prompt_ids(problem)` and `reward(problem, response)`; that is all the
rollout and the evaluation know about it. Rewards are computed from text, training is on token ids: nothing here re-tokenises
a response.
"""

import hashlib
import random
import re
from dataclasses import dataclass

from sandbox import require_sandbox, run_python
from verify import last_boxed

ENVS = ("arith", "calc")
BOXED_INSTRUCTION = "Put your final answer within \\boxed{}."
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FENCED_PYTHON = re.compile(r"```python[ ]*\n(.*?)\n```(?=\n|$|<)", re.DOTALL)
HELDOUT_SHARE = 8  # one problem in eight is held out


@dataclass(frozen=True)
class Problem:
    prompt: str  # as the task states it, before any chat template
    answer: str  # what the reward compares with


def load_env(name: str, tokenizer, seed: int = 0, difficulty: int | str = "", max_turns: int = 4, unsafe_sandbox: bool = False) -> "Arith":
    """The task called `name`. `tokenizer` is a Hugging Face tokenizer; `seed` picks the training problems only; no
    difficulty is the task's own; the rest is for tasks with tools.

    Raises ValueError, one line that names the flag, for an unknown task or difficulty.
    """
    if name not in ENVS:
        raise ValueError(f"--env {name} is not a task; use one of: {', '.join(ENVS)}")
    given = () if difficulty == "" else (difficulty,)
    if name == "calc":
        return Calc(tokenizer, seed, *given, max_turns=max_turns, unsafe_sandbox=unsafe_sandbox)
    return Arith(tokenizer, seed, *given)


class Arith:
    """Mental arithmetic with one integer answer.

    difficulty: an int (or its digits), the number of one-digit terms of a sum, "3+8+5+9="; or "words", for chat models, the
    product of two digits, "What is seven times eight?".

    Whether a problem is for training or held out is a hash of its prompt, so the two never meet, whatever the seed.
    """

    name = "arith"
    stop = ()  # strings that end a turn
    follow_up = None  # a task with tools: what to go on with after a turn; see rollout.Request

    def __init__(self, tokenizer, seed: int = 0, difficulty: int | str = 4):
        if difficulty != "words" and not (re.fullmatch("[0-9]{1,2}", str(difficulty)) and int(difficulty) >= 2):
            raise ValueError(f"--difficulty {difficulty} is not one of: 2 to 99 (terms of a sum), words (products in words)")
        self.tokenizer = tokenizer
        self.seed = seed
        self.terms = None if difficulty == "words" else int(difficulty)  # None: products in words

    def train(self, batch: int, n: int) -> list[Problem]:
        """`n` training problems: a pure function of (seed, batch, index), the same in every process. Repeats can occur."""
        return [self._draw(random.Random(f"{self.name}/{self.seed}/{batch}/{i}"), heldout=False) for i in range(n)]

    def heldout(self, n: int) -> list[Problem]:
        """The first `n` held-out problems, all different, whatever the seed. Fewer if the task has fewer: about 1,250 at
        difficulty 4, about 12 in words."""
        rng = random.Random(f"{self.name}/heldout")
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
            if _is_heldout(problem.prompt) == heldout:
                return problem


def _is_heldout(prompt: str) -> bool:
    return hashlib.sha256(prompt.encode()).digest()[0] % HELDOUT_SHARE == 0


class PythonTool:
    """Tool use for a task: the model writes a fenced Python block, the sandbox runs it, and what it printed is appended, as
    tokens that the model did not sample. A turn ends with the block's closing fence or the end-of-sequence token."""

    stop = ("\n```\n",)

    def use_python(self, max_turns: int, unsafe_sandbox: bool) -> None:
        """Raises ValueError, one line, where the sandbox cannot run."""
        require_sandbox(unsafe_sandbox)
        self.max_turns, self.unsafe_sandbox = max_turns, unsafe_sandbox

    def follow_up(self, turn_ids: list[int], turn: int) -> list[int] | None:
        """After turn number `turn` (from 0): token ids to append and sample on, or None when the response is complete."""
        text = self.tokenizer.decode(turn_ids)
        blocks = list(FENCED_PYTHON.finditer(text))
        ended = turn_ids[-1] == self.tokenizer.eos_token_id
        if not blocks:
            return None if ended else []  # another fence than Python's: go on
        if turn + 1 >= self.max_turns or "\\boxed{" in text[blocks[-1].end() :]:
            return None
        return self.tool_ids(run_python(blocks[-1].group(1), unsafe=self.unsafe_sandbox), ended)

    def tool_ids(self, output: str, ended: bool) -> list[int]:
        """The tokens of a tool's output: the next message of the chat template if there is one, else a fenced block."""
        encode = lambda text: self.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        before, after = "```output\n", "\n```\n"
        if self.tokenizer.chat_template:  # what the template writes between an answer's end and the next answer
            chat = [{"role": role, "content": content} for role, content in (("user", "?"), ("assistant", "@1"), ("user", f"{before}@2{after}"))]
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            before, after = text.rpartition("@1")[2].split("@2")
            if ended:
                before = before.removeprefix(self.tokenizer.eos_token)
        # a special token that the program printed is text, not a special token
        return encode(before) + self.tokenizer.encode(output.strip("\n"), add_special_tokens=False, split_special_tokens=True) + encode(after)


class Calc(PythonTool, Arith):
    """Sums of two numbers of `difficulty` digits (1 to 9), "347+862=", which the small base model can only guess, or compute by calling Python."""

    name = "calc"

    def __init__(self, tokenizer, seed: int = 0, difficulty: int | str = 3, max_turns: int = 4, unsafe_sandbox: bool = False):
        if not re.fullmatch("[1-9]", str(difficulty)):
            raise ValueError(f"--difficulty {difficulty} is not a number of digits from 1 to 9")
        self.tokenizer, self.seed, self.digits = tokenizer, seed, int(difficulty)
        self.use_python(max_turns, unsafe_sandbox)

    def _draw(self, rng: random.Random, heldout: bool) -> Problem:
        while True:
            a, b = (rng.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(2))
            if _is_heldout(prompt := f"{a}+{b}=") == heldout:
                return Problem(prompt, str(a + b))
