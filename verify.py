"""Is an answer right? Math-verify decides, in processes of its own: whatever an answer holds costs that answer, never the run.

Where strings allow two readings, this is how they are read here:
- The answer is what the last `\\boxed{...}` or `\\fbox{...}` holds, the last that opens; never closed, it is no answer. Only
  a response without any box is searched for GSM8K's `#### 42`; the last one counts, whatever follows. No other text is an
  answer. A reference answer is read in the same way; without box and `####` it is the whole string.
- `1,000`, `1 000` and `1{,}000` are a thousand; `1,22` and `1, 000` are lists (no decimal comma); `2 1/2` is two and a half.
- A percent sign may be missing or too many: 28% equals 0.28 and 28. Dollars, degrees, units and the base of `204_5` may be
  missing; another base is wrong. `x = 5` equals 5.
- A number written as a decimal may differ by 1e-6, or by 1e-6 of the right one if that is less: 0.333333 is 1/3, 0.33 is
  not. All else is exact, decimals beside variables too.
- A set, and a list without brackets, has no order; a tuple has. `(1,2)` is a tuple or an interval. `10:30` equals only itself.
- Plain text is read as it was meant: `pi/2`, `sqrt(2)`, `x**2`, `2^10`, `2^(1/2)`, `1e-5`.
- What takes more than DEADLINE, MEMORY or LONGEST is wrong, unless it is the same string.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

DEADLINE = 2.0  # seconds per answer
MEMORY = 2**30  # bytes of address space
LONGEST = 1000  # characters of an answer
WORKERS = min(os.cpu_count() or 1, 8)  # answers at a time

events = Counter()  # "timeouts": answers past DEADLINE; "crashes": processes that died or hung, each replaced
_slots, _lock = threading.Semaphore(WORKERS), threading.Lock()
_server = None  # its process and our socket, once started

NUMBER = r"[-+]?((\d{1,3}(,\d{3})+|\d+)(\.\d*)?|\.\d+)"

SYMBOLS = {"−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "√": r"\sqrt", "∞": r"\infty ", "≤": r"\le ",
           "≥": r"\ge ", "°": r"^\circ ", "²": "^2", "³": "^3", "∪": r"\cup ", "±": r"\pm "}  # fmt: skip
WORDS = "pi|sqrt|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|theta|alpha|beta|gamma|lambda|omega|phi|infty"
REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in [
    (r"\\?\$|\\!\s*|\\(?:left|right)(?![a-zA-Z])|\s*\.\s*$", ""),
    (r"\{,\}", ","),
    (r"\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s+", " "),
    (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?[\d/])", lambda match: match[0].replace(" ", "")),  # thousands
    (r"\\[dtc]?frac ?(\\[a-zA-Z]+|\w) ?(\\[a-zA-Z]+|\w)", r"\\frac{\1}{\2}"),
    (r"(?<![\d.])(\d+) (\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d) (?=\d)", ", "),  # not a product
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
    seconds, the start of Math-verify (a second or two) and the wait for a free slot not counted.

    Raises RuntimeError if Math-verify cannot be started; nothing on account of what the strings hold.
    """
    given, gold = final_answer(response), final_answer(answer) or answer
    if given is None or given.strip() == gold.strip() or max(len(given), len(gold)) > LONGEST:
        return given is not None and given.strip() == gold.strip() != ""
    given, gold = _plain(given), _plain(gold)
    numbers = [Fraction(s.replace(",", "")) for s in (gold, given) if re.fullmatch(NUMBER, s, re.ASCII)]
    if given == gold or len(numbers) == 2:  # most answers: decided here, however busy the machine is
        return given == gold != "" or len(numbers) == 2 and _near(*numbers, decimal="." in gold + given)
    bases = [base[1] for base in (re.search(r"\d_\{?(\d+)\}?$", s) for s in (gold, given)) if base]
    if len(set(bases)) == 2 or re.fullmatch(r"\d?\d:\d\d", gold):
        return False
    outcome = _ask(gold, given)
    return (_ask(gold, given) if outcome == "crashes" else outcome) == "right"  # a crash may have come from outside; not two


def are_correct(pairs: list[tuple[str, str]]) -> list[bool]:
    """`is_correct(response, answer)` of each pair, WORKERS at a time."""
    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(lambda pair: is_correct(*pair), pairs))


def _plain(text: str) -> str:
    text = text.strip().translate(str.maketrans(SYMBOLS))
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip()


def _near(gold, given, decimal: bool) -> bool:
    return bool(abs(gold - given) <= (min(1, abs(gold)) / 10**6 if decimal else 0))


# ---------------------------------------------------------------------------------------------------------------------
# `python verify.py` serves the process whose socket is its standard input. It imports Math-verify once and forks for each
# answer, which then can hang, crash or eat its memory without a trace, and never depends on those before it. Forking a
# process that runs vLLM and torch is not safe, and multiprocessing would import the main script again.


def _ask(gold: str, given: str) -> str:
    """"right", "wrong", "timeouts" or "crashes", counted in `events`."""
    with _slots:
        server, reply, start = _start_server(), b"", time.monotonic()
        ours, theirs = socket.socketpair()
        try:
            with ours:
                with theirs:
                    socket.send_fds(server[1], [b"."], [theirs.fileno()])
                ours.settimeout(DEADLINE + 1)
                ours.sendall(json.dumps([gold, given]).encode() + b"\n")
                reply = ours.recv(1)
            outcome = "timeouts" if time.monotonic() - start >= DEADLINE else "crashes"
        except OSError:  # not the answer's process: the server died, or hangs
            _stop_server(server)
            outcome = "crashes"
        outcome = {b"1": "right", b"0": "wrong"}.get(reply, outcome)
    with _lock:
        events[outcome] += 1
    return outcome


def _start_server() -> tuple[subprocess.Popen, socket.socket]:
    global _server
    with _lock:
        if not _server:
            ours, theirs = socket.socketpair()
            environment = {**os.environ, "PYTHONHASHSEED": "0"}  # the order of a set decides what sympy does next
            with theirs:
                process = subprocess.Popen([sys.executable, "-P", os.path.abspath(__file__)], stdin=theirs, env=environment,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
            if ours.recv(1) != b"!":
                raise RuntimeError("Math-verify does not start: `python verify.py </dev/null` says why")
            _server = process, ours
        return _server


def _stop_server(server) -> None:
    global _server
    with _lock:
        if _server is server:
            _server = None
            server[0].kill()
            server[0].wait()
            server[1].close()


def _serve() -> None:
    import gc
    import logging
    import resource

    import sympy
    from math_verify import LatexExtractionConfig, grader, parse, verify
    from sympy.parsing import sympy_parser

    latex = [LatexExtractionConfig(boxed_match_priority=0)]  # its ExprExtractionConfig reads with Python's eval
    original, percent = grader.sympy_numeric_eq, sympy.UnevaluatedExpr(sympy.Rational(1, 100))

    def equal(gold: str, given: str) -> bool:
        gold, given = (parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None) for text in (gold, given))
        return verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True)

    def number_or_name(text: str, **_):
        """What sympy makes of a string. LaTeX's numbers are strings too; by itself sympy gives them all to Python's eval."""
        if re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", text, re.ASCII):
            return sympy.Float(text) if "." in text else sympy.Integer(text)
        if not re.fullmatch(r"[a-zA-Z_]\w*", text, re.ASCII):
            raise ValueError("neither a number nor a name")
        return sympy.Symbol(text)

    def numeric_eq(gold, given, *precision) -> bool:
        """Math-verify's own rounds to six places and drops what is below 1e-15: to it, any two small numbers are equal."""
        if isinstance(gold, (sympy.MatrixBase, sympy.MatrixExpr)):
            return original(gold, given, *precision)  # which calls this for each element
        if gold.has(percent) or given.has(percent):
            if numeric_eq(*(x.xreplace({percent: sympy.Integer(1)}) for x in (gold, given))):
                return True
        gold, given, decimal = gold.doit(), given.doit(), gold.has(sympy.Float) or given.has(sympy.Float)
        if decimal:
            gold, given = (sympy.nsimplify(x, rational=True) for x in (gold, given))
        if gold.free_symbols or given.free_symbols:
            return decimal and sympy.simplify(gold - given) == 0  # without decimals Math-verify does this next
        size, difference = abs(gold), abs(gold - given)
        if not (size.is_Rational and difference.is_Rational):
            size, difference = size.evalf(30), difference.evalf(30, maxn=200)
            difference = 0 if difference <= size * sympy.Float("1e-60") else difference
        return _near(size, size - difference, decimal)

    logging.disable()  # it warns that it has no time limit
    for pair in WARM_UP:
        equal(*pair)
    sympy_parser.parse_expr, grader.sympy_numeric_eq = number_or_name, numeric_eq
    for module in ("sympy.parsing.sympy_parser", "sympy.utilities.lambdify"):
        sys.modules[module].eval = sys.modules[module].exec = None  # if another way led to them, it would end here
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the end of the process, whatever it is doing
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    with socket.socket(fileno=0) as control:
        control.send(b"!")
        while True:
            message, (*connection,), _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return  # the trainer is gone
            if os.fork() == 0:
                try:
                    control.close()
                    signal.setitimer(signal.ITIMER_REAL, DEADLINE)
                    connection, reply = socket.socket(fileno=connection[0]), b"0"
                    with contextlib.suppress(Exception):
                        reply = b"1" if equal(*json.loads(connection.makefile().readline())) else b"0"
                    connection.sendall(reply)
                finally:
                    os._exit(0)
            os.close(connection[0])


WARM_UP = [(r"\frac{1}{2}x^{2}+\sqrt{3}", r"x^{2}/2+\sqrt{3}"), (r"(1,2)\cup[3,4.5)", r"\{1,2\}"), (r"x = 28\%", "0.28"),
           (r"\sin(x)\le 1", r"(-1,\infty)"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}")]  # fmt: skip

if __name__ == "__main__":
    _serve()
