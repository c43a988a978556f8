"""Tasks: problems, prompts and rewards.

A task is an object with `train(batch, n)`, `heldout(n)`, `prompt_ids(problem)` and `reward(problem, response)` and, for tools,
`stop` and `follow_up`; that is all the rollout and the evaluation know about it. Rewards are computed from text, training is
on token ids: nothing here re-tokenises a response.
"""

import ast
import copy
import functools
import gzip
import hashlib
import io
import json
import math
import operator
import pathlib
import random
import re
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction

from sandbox import require_sandbox, run_python
from verify import WORKERS, final_answer, is_correct, last_boxed

HUB = {  # task: dataset on the hub, its configuration, training split and, unless problems are held out by hash, test split
    "gsm8k": ("openai/gsm8k", "main", "train", "test"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "default", "train", "test"),
    "dapo": ("open-r1/DAPO-Math-17k-Processed", "en", "train"),
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", None, "train"),
    "countdown": ("Jiayi-Pan/Countdown-Tasks-3to4", None, "train"),
}
HUB["python"] = HUB["dapo"]
ENVS = ("arith", "calc", *HUB, "jsonl")
BOXED_INSTRUCTION = "Put your final answer within \\boxed{}."
STEPS_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
PYTHON_INSTRUCTION = "You may write Python in a ```python block and stop: you are then shown what it prints. Use print."
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FENCED_PYTHON = re.compile(r"```python[ ]*\n(.*?)\n```(?=\n|$|<)", re.DOTALL)
HELDOUT_SHARE = 8  # one problem in eight is held out


@dataclass(frozen=True)
class Problem:
    prompt: str  # as the task states it, before any chat template
    answer: str | tuple[str, ...]  # what the reward compares with; of several, each is right


def load_env(name: str, tokenizer, seed: int = 0, difficulty: int | str = "", max_turns: int = 4, unsafe_sandbox: bool = False,
             data: str | None = None, data_fields: str = "", skip_bad_rows: bool = False) -> "Arith | Dataset":
    """The task called `name`. `tokenizer` is a Hugging Face tokenizer; `seed` picks the training problems only; no difficulty
    is the task's own; the rest is run_async.py's flags. `note` is a line on what a data set holds.

    Raises ValueError, one line that names the flag, for an unknown task, a bad difficulty, or data that cannot be read.
    """
    if name not in ENVS:
        raise ValueError(f"--env {name}: unknown task; there are {', '.join(ENVS)}")
    if name == "jsonl" and data is None:
        raise ValueError(f"--env {name}: --data FILE says where the problems are")
    if name in ("arith", "calc"):
        task = (Calc if name == "calc" else Arith)(tokenizer, seed, difficulty)
    else:
        sources = [data] if data else [(*HUB[name][:2], split) for split in HUB[name][2:]]
        where = f"--data {data}" if data else f"--env {name}, or --data FILE"
        found = [read_problems(source, where, name, data_fields, skip_bad_rows) for source in sources]
        task = (PythonDataset if name == "python" else Dataset)(name, tokenizer, seed, *(problems for problems, _ in found))
        if not task.problems:
            raise ValueError(f"{where}: no problem is left to train on")
        skipped = sum(bad for _, bad in found)
        task.note = f"{name}: {len(task.problems)} problems to train on, {len(task.test)} held out, {skipped} rows skipped"
    if isinstance(task, PythonTool):
        task.use_python(max_turns, unsafe_sandbox)
    return task


def grade(task, problems: list[Problem], responses: list[str], errors: dict[int, str] | None = None) -> list[float]:
    """The reward of each response; of a data set's WORKERS at a time, as verify.py has as many processes. One that the task's
    own function cannot take gets 0, and `errors` what was wrong, by its index."""
    errors = {} if errors is None else errors

    def reward(i: int, problem: Problem, response: str) -> float:
        try:
            value = float(task.reward(problem, response))
            if math.isfinite(value):
                return value
            errors[i] = f"it is {value}"
        except Exception as error:
            traceback.print_exc()  # a run's log.txt
            errors[i] = f"{type(error).__name__}: {error}"
        return 0.0

    each = range(len(problems)), problems, responses
    if not isinstance(task, Dataset):
        return list(map(reward, *each))
    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(reward, *each))


def too_long(task, problems: list[Problem], limit: int) -> list[Problem]:
    """Those of `problems` whose prompts have more than `limit` tokens. A token is at least a byte, so that few are tokenized."""
    room = limit - len(task.prompt_ids(Problem("", "")))
    return [p for p in problems if len(p.prompt.encode()) > room and len(task.prompt_ids(p)) > limit]


def chat_text(tokenizer, *contents: str) -> str:
    """Messages of user and assistant in turn in the tokenizer's chat template, ready for the answer."""
    chat = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    today = datetime(2025, 1, 1).strftime  # for templates that give the date: tomorrow's run must be the same
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, strftime_now=today)


def chat_ids(tokenizer, content: str) -> list[int]:
    """Token ids of one user message in the tokenizer's chat template, ready for the answer."""
    return tokenizer.encode(chat_text(tokenizer, content), add_special_tokens=False)  # the template wrote the special tokens itself


class Arith:
    """Mental arithmetic with one integer answer.

    difficulty: the number of one-digit terms of a sum, "3+8+5+9=", whose result is to be boxed; or "words", for chat models, the
    product of two digits, "What is seven times eight?": there the response's last number counts, for a model of 135M parameters
    does not box (of 64 responses at temperature 1 none was right in a box, 5 ended in the right number).

    Whether a problem is for training or held out is a hash of its prompt, so the two never meet, whatever the seed.
    """

    name = "arith"
    # the default, a pattern of all, and how an error calls them
    difficulties = "4", "words|0?[2-9]|[1-9][0-9]", "one of: 2 to 99 (terms of a sum), words (products in words)"
    note = ""
    stop = ()  # strings that end a turn
    follow_up = None  # a task with tools: what to go on with after a turn; see rollout.Request

    def __init__(self, tokenizer, seed: int = 0, difficulty: int | str = ""):
        default, possible, meaning = self.difficulties
        self.tokenizer, self.seed, self.difficulty = tokenizer, seed, str(difficulty) or default
        if not re.fullmatch(possible, self.difficulty):
            raise ValueError(f"--difficulty {difficulty} is not {meaning}")

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
        """Token ids of the prompt: in the tokenizer's chat template, with an instruction how to answer, if it has one, else plain."""
        if not self.tokenizer.chat_template:
            return self.tokenizer.encode(problem.prompt)
        instruction = "Answer with a number." if self.difficulty == "words" else BOXED_INSTRUCTION
        return chat_ids(self.tokenizer, f"{problem.prompt}\n{instruction}")

    def reward(self, problem: Problem, response: str) -> float:
        """1.0 if the last `\\boxed{...}` of `response` is closed and holds the right integer (words: if its last number is
        that), else 0.0."""
        for token in self.tokenizer.all_special_tokens:
            response = response.replace(token, "")
        if self.difficulty == "words":
            *_, answer = None, *re.findall(r"-?[0-9]+(?:[.,][0-9]+)*", response)
        else:
            answer = last_boxed(response)
        # at most 20 digits: int() raises on a run of thousands, and a policy will find one
        is_integer = answer is not None and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", answer)
        return float(bool(is_integer) and int(answer) == int(problem.answer))

    def draw(self, rng: random.Random) -> Problem:
        if self.difficulty == "words":
            a, b = rng.randrange(10), rng.randrange(10)
            return Problem(f"What is {DIGIT_WORDS[a]} times {DIGIT_WORDS[b]}?", str(a * b))
        digits = [rng.randrange(10) for _ in range(int(self.difficulty))]
        return Problem("+".join(map(str, digits)) + "=", str(sum(digits)))

    def _draw(self, rng: random.Random, heldout: bool) -> Problem:
        while _is_heldout((problem := self.draw(rng)).prompt) != heldout:
            pass
        return problem


def _digest(prompt: str) -> bytes:
    return hashlib.sha256(prompt.encode()).digest()


def _is_heldout(prompt: str) -> bool:
    return _digest(prompt)[0] % HELDOUT_SHARE == 0


class PythonTool:
    """Tool use for a task: the model writes a fenced Python block, the sandbox runs it, and what it printed is appended, as
    tokens that the model did not sample. A turn ends with the block's closing fence or an end-of-sequence token."""

    stop = ("\n```\n",)

    def use_python(self, max_turns: int, unsafe_sandbox: bool) -> None:
        """Raises ValueError, one line, where the sandbox cannot run."""
        require_sandbox(unsafe_sandbox)
        self.max_turns, self.lock, threads = max_turns, threading.Lock(), ThreadPoolExecutor(8)
        # the responses of a group often hold the same program: it runs for the first of them, as it prints the same every time
        self.start = functools.lru_cache(1024)(lambda code: threads.submit(lambda: run_python(code, unsafe=unsafe_sandbox)))
        # For output: a special token that a program printed is text. A tokenizer of its own, because split_special_tokens as an
        # argument is a state of the tokenizer, in which other threads would encode their templates.
        self.plain = copy.deepcopy(self.tokenizer)
        self.plain.split_special_tokens = True
        self.plain.encode("")  # only now does the state change

    def follow_up(self, turn_ids: list[int], calls: int) -> list[int] | None:
        """After a turn, and `calls` of the tool before it: token ids to append and sample on, or None when the response is complete."""
        text = self.tokenizer.decode(turn_ids, skip_special_tokens=True)  # in which vLLM looks for `stop`
        blocks = list(FENCED_PYTHON.finditer(text))
        ended = self.stop[0] not in text  # by an end-of-sequence token; a model may have several
        if not blocks:
            return None if ended else []  # another fence than Python's: go on
        if calls + 1 >= self.max_turns or "\\boxed{" in text[blocks[-1].end() :]:
            return None
        end = self.tokenizer.decode(turn_ids[-1:]) if ended else ""
        return self.tool_ids(self.run_once(blocks[-1].group(1)), end)

    def run_once(self, code: str) -> str:
        """What the program prints."""
        with self.lock:  # or two threads that miss the cache at once would both start it
            run = self.start(code)
        return run.result()

    def tool_ids(self, output: str, end: str) -> list[int]:
        """The tokens of a tool's output: the next message of the chat template if there is one, else a fenced block. end: the
        end-of-sequence token that the model wrote, which the template would write too."""
        before, after = "```output\n", "\n```\n"
        if self.tokenizer.chat_template:  # what the template writes between an answer's end and the next answer
            text = chat_text(self.tokenizer, "?", "@1", f"{before}@2{after}")
            before, after = text.rpartition("@1")[2].removeprefix(end).split("@2")
        texts = (self.tokenizer, before), (self.plain, output.strip("\n")), (self.tokenizer, after)
        return [i for tokenizer, text in texts for i in tokenizer.encode(text, add_special_tokens=False)]


class Calc(PythonTool, Arith):
    """Sums of two numbers of `difficulty` digits, "347+862=", which the small base model can only guess, or compute in Python."""

    name = "calc"
    difficulties = "3", "[1-9]", "a number of digits from 1 to 9"

    def draw(self, rng: random.Random) -> Problem:
        digits = int(self.difficulty)
        a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        return Problem(f"{a}+{b}=", str(a + b))


# ---------------------------------------------------------------------------------------------------------------------
# Data sets

FIELDS = {  # unless --data-fields names it, the first of these that a row has; a dot goes into an object
    "prompt": "problem question prompt input",
    "answer": "answer final_answer target reward_model.ground_truth ground_truth solution",
    "nums": "nums", "target": "target",  # countdown; fmt: skip
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {r"\times": "*", r"\cdot": "*", "×": "*", r"\div": "/", "÷": "/", "−": "-", r"\left": "", r"\right": ""}


class Dataset:
    """Problems to train on, each once per epoch in an order that the seed shuffles anew; of several with the same prompt the
    first counts. test: those of a test split; without one, a hash of the prompt holds one problem in eight out."""

    stop, follow_up = (), None  # no tools

    def __init__(self, name: str, tokenizer, seed: int, problems: list[Problem], test: list[Problem] | None = None):
        self.name, self.tokenizer, self.seed = name, tokenizer, seed
        unique = {p.prompt: p for p in reversed(problems)}
        if test is None:  # in the order of their hashes: the first n are of all kinds, however the file is sorted
            test = [unique[p] for p in sorted(unique, key=_digest) if _is_heldout(p)]
        self.test, tested = test, {p.prompt for p in test}
        self.problems = [p for p in reversed(unique.values()) if p.prompt not in tested]

    def train(self, batch: int, n: int) -> list[Problem]:
        """Training batch `batch`, of `n` problems: a pure function of (seed, batch, index). No problem comes twice in an
        epoch as long as `n` stays the same."""
        places = [divmod(batch * n + i, len(self.problems)) for i in range(n)]
        return [self.problems[shuffled(len(self.problems), f"{self.name}/{self.seed}/{epoch}")[i]] for epoch, i in places]

    def heldout(self, n: int) -> list[Problem]:
        """The first `n` held-out problems, whatever the seed; fewer if there are fewer."""
        return self.test[:n]

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of the prompt with the boxed-answer instruction, unless it asks for \\boxed itself: in the tokenizer's
        chat template if it has one, else as plain text."""
        text = problem.prompt if "\\boxed" in problem.prompt else f"{problem.prompt}\n{STEPS_INSTRUCTION}"
        return chat_ids(self.tokenizer, text) if self.tokenizer.chat_template else self.tokenizer.encode(text + "\n")

    def reward(self, problem: Problem, response: str) -> float:
        """1.0 if `response` gives the problem's answer, or one of several, else 0.0."""
        if self.name == "countdown":
            return float(solves_countdown(response, problem.answer))
        answers = [problem.answer] if isinstance(problem.answer, str) else problem.answer
        return float(any(is_correct(response, answer) for answer in answers))


class PythonDataset(PythonTool, Dataset):
    """Problems of a data set, solved with Python as a tool."""

    def prompt_ids(self, problem: Problem) -> list[int]:
        return super().prompt_ids(Problem(f"{problem.prompt}\n{PYTHON_INSTRUCTION}", problem.answer))


@functools.lru_cache(maxsize=2)  # a batch can lie in two epochs
def shuffled(n: int, key: str) -> list[int]:
    return random.Random(key).sample(range(n), n)


def read_rows(source) -> list:
    """Rows of a dataset on the hub, if `source` is (name, configuration, split); or of a JSON-lines, JSON or Parquet file,
    gzipped or not, told apart by how it begins: dicts, or lines yet to be parsed."""
    if isinstance(source, tuple):
        import datasets

        return datasets.load_dataset(*source[:2], split=source[2])
    content = pathlib.Path(source).read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if content[:4] == b"PAR1":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    return json.loads(content) if content.lstrip()[:1] == b"[" else content.split(b"\n")


def read_problems(source, where: str, name: str, data_fields: str = "", skip: bool = False) -> tuple[list[Problem], int]:
    """(problems, number of rows skipped) of `read_rows(source)`. Raises ValueError, which begins with `where`, if that fails;
    for rows that cannot be read, with the number of the first, unless `skip`; and if there are none."""
    fields = dict(pair.partition("=")[::2] for pair in data_fields.split(",") if pair)
    if not all(fields.values()) or not fields.keys() <= FIELDS.keys():
        raise ValueError(f"--data-fields {data_fields}: is not of the form prompt=NAME,answer=NAME (countdown: nums=,target=)")
    problems, bad = [], []
    try:
        rows = read_rows(source)
    except Exception as error:  # the hub, gzip, Parquet and JSON have a dozen kinds
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{where}: cannot read {source} ({reason})") from None
    for number, row in enumerate(rows, start=1):
        try:
            if not isinstance(row, bytes) or row.strip():  # an empty line is no row
                problems.append(to_problem(json.loads(row) if isinstance(row, bytes) else row, name, fields))
        except (ValueError, RecursionError) as error:
            bad.append(f"row {number}: {error}")
    if bad and not skip:
        raise ValueError(f"{where}: {bad[0]} (bad rows: {len(bad)}; --skip-bad-rows leaves them out)")
    if not problems:
        raise ValueError(f"{where}: holds no problem")
    return problems, len(bad)


def to_problem(row, name: str, fields: dict[str, str]) -> Problem:
    """A row of task `name` as a problem. Raises ValueError if it cannot be one."""

    def field(role):
        for path in fields.get(role, FIELDS[role]).split():
            value = row
            for key in path.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                return path, value
        raise ValueError(f"no field {' or '.join(fields.get(role, FIELDS[role]).split())}; --data-fields {role}=NAME names it")

    if name == "countdown":
        nums, target = field("nums")[1], field("target")[1]
        if not (isinstance(nums, list) and nums and all(type(x) is int for x in [*nums, target])):
            raise ValueError("nums and target are not integers")
        shown = " ".join(map(str, nums))
        return Problem(f"Use the numbers {shown}, each exactly once, with + - * / and parentheses to make {target}. "
                       "Give the expression as the answer.", f"{shown} = {target}")  # fmt: skip
    path, prompt = field("prompt")
    if isinstance(prompt, list):  # chat messages: the last of the user's
        prompt = ([m.get("content") for m in prompt if isinstance(m, dict) and m.get("role") == "user"] or [None])[-1]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{path} holds no text")
    path, value = field("answer")
    several = value if isinstance(value, list) and value else [value]
    answers = tuple(dict.fromkeys(to_answer(v, path, name) for v in several))
    "".join([prompt, *answers]).encode()  # raises for half a surrogate pair, which JSON can hold and no tokenizer takes
    return Problem(prompt, answers[0] if len(answers) == 1 else answers)


def to_answer(value, path: str, name: str) -> str:
    """The answer that a field gives: what follows ####, what is in the last box, or else (not of a solution) all of it."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value != value:
        raise ValueError(f"{path} holds neither a text nor a number")
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
    answer = final_answer(text) or ("" if name == "gsm8k" or path.endswith("solution") else text)
    if not answer.strip():
        raise ValueError(f"{path} holds no answer")
    return answer.strip()


def solves_countdown(response: str, answer: str) -> bool:
    """Whether the last box of `response` holds an expression of numbers, + - * / and parentheses that uses each number of
    `answer` ("3 4 5 = 35") exactly once and gives its target, exactly."""
    nums, _, target = answer.partition(" = ")
    text, used = (last_boxed(response) or "").partition("=")[0].strip(), []
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)

    def value(node) -> Fraction:
        if isinstance(node, ast.Constant):
            used.append(node.value)
            return Fraction(node.value)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    try:  # these characters only, so no name; a power, a call or a sign in front is a KeyError or an AttributeError
        tree = ast.parse(re.fullmatch(r"[0-9+\-*/() ]{1,200}", text).group(), mode="eval")
        return value(tree.body) == int(target) and sorted(used) == sorted(map(int, nums.split()))
    except (SyntaxError, ZeroDivisionError, KeyError, AttributeError):
        return False
