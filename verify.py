"""Is an answer right? Math-verify decides, in processes of its own: whatever an answer holds costs that answer, not the run.

Where strings allow two readings, this is how they are read here:
- The answer is what the last `\\boxed{...}` or `\\fbox{...}` holds, the last that opens; never closed, it is no answer. Only
  a response without any box is searched for GSM8K's `#### 42`; the last one counts, whatever follows. No other text is an
  answer. A reference answer is read in the same way; without box and `####` it is the whole string.
- `1,000`, `1 000` and `1{,}000` are a thousand; `1,22` and `1, 000` are lists (no decimal comma); `2 1/2` is two and a half.
- A percent sign may be missing or too many: 28% equals 0.28 and 28. A sign `$`, degrees, units and the base of `204_5` may be
  missing; another base is wrong. `x = 5` equals 5.
- Next to a decimal, numbers are equal up to 1e-6, or 1e-6 of the larger if that is less: 0.333333 is 1/3, 0.33 is not.
  Without decimals, and beside variables, equal is equal.
- Sets, and lists without brackets, have no order; tuples have. `(1,2)` is a tuple or an interval. `10:30` is a time of day.
- Plain text is read as it was meant: `pi/2`, `sqrt(2)`, `x**2`, `2^10`, `2^(1/2)`, `1e-5`.
- What takes more than DEADLINE, CPU_TIME, MEMORY or LONGEST is wrong, unless it is the same string.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
from fractions import Fraction

DEADLINE, CPU_TIME = 2.0, 1.0  # seconds per answer, by the clock and of a core: a busy machine should turn no verdict
MEMORY = 2**30  # bytes of address space
LONGEST = 1000  # characters of an answer
WORKERS = min(os.cpu_count() or 1, 8)  # answers at a time

_workers = queue.LifoQueue()  # process and socket of each, None for one that is not started
for _ in range(WORKERS):
    _workers.put(None)

NUMBER = r"[-+]?((\d{1,3}(,\d{3})+|\d+)(\.\d*)?|\.\d+)"

SYMBOLS = {"−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "√": r"\sqrt", "∞": r"\infty ", "≤": r"\le ",
           "≥": r"\ge ", "°": r"^\circ ", "²": "^2", "³": "^3", "∪": r"\cup ", "±": r"\pm "}  # fmt: skip
WORDS = "pi|sqrt|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|theta|alpha|beta|gamma|lambda|omega|phi|infty"
REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in [
    (r"\\?\$|(?<!\\)\\!\s*|\\(?:left|right)(?![a-zA-Z])|\s*\.\s*$", ""),
    (r"\{,\}", ","),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s+", " "),
    (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?[\d/])", lambda match: match[0].replace(" ", "")),  # thousands
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac ?(\\[a-zA-Z]+|\w) ?(\\[a-zA-Z]+|\w)", r"\\frac{\1}{\2}"),
    (r"(?<![\d.])(\d+) (\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d)(?<![_^]\d) (?=\d)", ", "),  # not a product
    (r"(?<![\d.a-zA-Z])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\d.])", r"\1 \\times 10^{\2}"),
    (r"(?<=\d)i(?![a-zA-Z])", " i"),  # or Math-verify takes it for a real variable
    (rf"(?<![\\a-zA-Z])({WORDS})(?![a-zA-Z])", r"\\\1"),
    (r"\*\*", "^"),
    (r"(\\sqrt|\^) ?\(((?:[^()]|\([^()]*\))*)\)", r"\1{\2}"),
    (r"\^ ?([-+]?\d+)", r"^{\1}"),
]]  # fmt: skip


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` or `\\fbox{...}` of `text` holds, braces balanced; None if none or never closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start, depth = text.index("{", start) + 1, 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):  # \{ and \} are text
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def final_answer(response: str) -> str | None:
    """The answer that `response` commits to, by the rules at the top; None if it has none."""
    lines = [] if "\\boxed{" in response or "\\fbox{" in response else re.findall(r"####\s*(\S+)", response)
    return lines[-1].rstrip(".,;:*") if lines else last_boxed(response)


def is_correct(response: str, answer: str) -> bool:
    """Whether the final answer of `response` equals `answer`, by the rules at the top. From any thread; at most DEADLINE
    seconds, the start of a worker (a second or two) and the wait for a free one not counted.

    Raises RuntimeError if Math-verify cannot be started; nothing on account of what the strings hold.
    """
    given, gold = final_answer(response), final_answer(answer) or answer
    if given is None or max(len(given), len(gold)) > LONGEST:
        return given == gold != ""
    given, gold = _plain(given), _plain(gold)
    if given == gold:  # this and the next decide on most answers, however busy the machine is
        return gold != ""
    if re.fullmatch(NUMBER, gold, re.ASCII) and re.fullmatch(NUMBER, given, re.ASCII):
        right, number = (Fraction(text.replace(",", "")) for text in (gold, given))
        return abs(right - number) <= (min(1, max(abs(right), abs(number))) / 10**6 if "." in gold + given else 0)
    bases = [base[1] for base in (re.search(r"\d_\{?(\d+)\}?$", text) for text in (gold, given)) if base]
    if len(set(bases)) == 2 or re.fullmatch(r"\d?\d:\d\d", gold):  # a time is no ratio
        return False
    return _ask(gold, given)


def _plain(text: str) -> str:
    text = text.strip().translate(str.maketrans(SYMBOLS))
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip()


# ---------------------------------------------------------------------------------------------------------------------
# A worker is `python verify.py`, with a socket for its standard input. Forking a process that runs vLLM and torch is not
# safe, and multiprocessing would import the main script again. It ends itself after CPU_TIME, and with its parent.


def _ask(gold: str, given: str) -> bool:
    """Math-verify's verdict; False if it takes too long. A worker that does, or that crashes, is replaced."""
    worker = _workers.get()
    try:
        for _ in range(2):  # a crash may have come from outside: once more
            process, connection = worker = worker or _start_worker()
            try:
                connection.sendall(json.dumps([gold, given]).encode() + b"\n")
                verdict = connection.recv(1)
            except OSError as error:
                verdict = None if isinstance(error, TimeoutError) else b""
            if verdict:
                return verdict == b"1"
            worker = None
            process.kill()
            connection.close()
            if process.wait() == -signal.SIGPROF or verdict is None:
                return False
        return False
    finally:
        _workers.put(worker)


def _start_worker() -> tuple[subprocess.Popen, socket.socket]:
    connection, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # the order of a set decides what sympy does next
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__)], stdin=theirs, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
    if connection.recv(1) != b"!":
        raise RuntimeError("Math-verify does not start: `python verify.py` says why")
    connection.settimeout(DEADLINE)
    return process, connection


def _work() -> None:
    import logging
    import resource

    import sympy
    from math_verify import LatexExtractionConfig, grader, parse, verify
    from sympy.parsing import sympy_parser

    latex = [LatexExtractionConfig(boxed_match_priority=0)]  # its ExprExtractionConfig reads with Python's eval
    original_eq, percent = grader.sympy_numeric_eq, sympy.UnevaluatedExpr(sympy.Rational(1, 100))

    def equal(gold: str, given: str) -> bool:
        gold, given = (parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None) for text in (gold, given))
        return verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True)

    def numeric_eq(gold, given, *precision) -> bool:
        """Math-verify's own rounds to six places and drops what is below 1e-15: to it, any two small numbers are equal."""
        if isinstance(gold, (sympy.MatrixBase, sympy.MatrixExpr)):
            return original_eq(gold, given, *precision)  # which calls this for each element
        without = [x.xreplace({percent: sympy.Integer(1)}) for x in (gold, given)]
        if without != [gold, given] and numeric_eq(*without):
            return True
        if gold.free_symbols or given.free_symbols:
            return False  # Math-verify goes on with sympy's simplify
        decimal = gold.has(sympy.Float) or given.has(sympy.Float)
        gold, given = (sympy.nsimplify(x, rational=True) if decimal else x.doit() for x in (gold.doit(), given.doit()))
        size, difference = max(abs(gold).evalf(30), abs(given).evalf(30)), abs(gold - given).evalf(30, maxn=200)
        tolerance = min(1, size) * sympy.Float("1.0000001e-6") if decimal else size * sympy.Float("1e-60")
        return bool(size.is_finite and difference <= tolerance)

    def solve(*equation):
        """Math-verify compares the solutions of two equations one by one, so that any two without solutions are equal."""
        if solutions := sympy.solve(*equation):
            return solutions
        raise ValueError("nothing to compare")

    logging.disable()  # it warns that it has no time limit
    for pair in WARM_UP:  # imports what sympy puts off
        equal(*pair)
    grader.sympy_numeric_eq, grader.solve = numeric_eq, solve
    # sympy reads every string that it meets with Python's eval, LaTeX's numbers among them; now it reads numbers only
    sympy_parser.parse_expr = lambda text, **_: sympy.Float(text) if "." in text else sympy.Integer(text)
    for module in ("sympy.parsing.sympy_parser", "sympy.utilities.lambdify"):
        sys.modules[module].eval = sys.modules[module].exec = None  # and if another way led there, it would end here
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    connection = socket.socket(fileno=0)
    connection.send(b"!")
    for line in connection.makefile():
        signal.setitimer(signal.ITIMER_PROF, CPU_TIME)  # SIGPROF ends the process, whatever it is doing
        try:
            right = equal(*json.loads(line))
        except Exception:
            right = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(b"1" if right else b"0")


WARM_UP = [(r"\frac{1}{2}x^{2}+\sqrt{3}", r"x^{2}/2+\sqrt{3}"), (r"(1,2)\cup[3,4.5)", r"\{1,2\}"), (r"x = 28\%", "0.28"),
           (r"\sin(x)\le 1", r"(-1,\infty)"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}")]  # fmt: skip

if __name__ == "__main__":
    _work()
