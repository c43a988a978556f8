"""The answer verifier: what is right and what is not, and that nothing an answer holds can do more than be wrong."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import verify
from verify import final_answer, is_correct

# Reference answer, then what a box may hold to be right. Each line is a kind; most were wrong in Math-verify as it comes.
RIGHT = [
    ("25", "25", " 25 ", "25.", "025", "25.0", "$25$", r"\frac{50}{2}", "x = 25", "5^2", r"25\text{ apples}", r"25^\circ", r"\$25"),
    ("70000", "70,000", "70 000", "70{,}000", r"70,\!000", r"\$70{,}000", "7e4", r"7\times 10^4"),
    ("1/3", r"\frac13", r"\dfrac{1}{3}", "0.333333", "0.3333333333333333", r"\left(\frac{1}{3}\right)"),
    ("0.333333", "1/3"),
    (r"\frac\pi2", "pi/2", r"\frac{\pi}{2}", "π/2", r"\frac12\pi"),
    (r"\frac{\sqrt{2}}{2}", "sqrt(2)/2", "√2/2", r"\frac{1}{\sqrt2}", r"\sqrt{\frac12}"),
    (r"\frac34", "0.75", r"75\%", "75 percent"),
    ("28", r"28\%"),
    (r"17.5\%", "17.5", "0.175"),
    (r"\frac52", "2 1/2", r"2\frac{1}{2}", "2.5"),
    ("2^{n+1}", "2^(n+1)", "2**(n+1)", r"2\cdot 2^n"),
    ("x^{10}", "x^10"),
    ("x^2-1", "(x-1)(x+1)", "-1 + x^2", "x**2 - 1"),
    ("0.5x", "x/2"),
    ("6+9i", "9i+6", "6.0+9.0i"),
    ("3.3e-10", r"3.3 \times 10^{-10}", "0.00000000033"),
    (r"4.4677 \times 10^{14}", "446770000000000"),
    ("2516_8", "2516", "2516_{8}"),
    ("(1,2)", "(1, 2)", r"\left(1,2\right)", "(1,2.0)"),
    ("1,2", "2, 1", r"\{1,2\}", "1 and 2", "2 or 1"),
    (r"\pm 3", "-3, 3", r"\{3,-3\}"),
    ("[0,1)", r"\left[0,1\right)", r"0 \le x < 1", "0 ≤ x < 1"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2.0\end{bmatrix}"),
    ("f(x)=x+22", "f(x) = 22+x", "x+22"),
    (r"\text{Monday}", "Monday", r"\text{ Monday }"),
    ("10:30", "10:30"),
    ("1:3", "1:3", "2:6", "a:b = 1:3"),
    ("a:b = 11:21", "11:21"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
    (r"\boxed{7}", "7"),
    ("So 3 + 4 = 7.\n#### 7", "7"),
]

WRONG = [
    ("25", "-25", "2 5", "5 5", r"25\sqrt2", r"25\sqrt(2)", "25, 26", "x", "", r"\text{}", "{}", r"\frac{25}{0}", r"25 \text{ or } 26"),
    ("1/3", "0.33", "0.33333", r"\infty", r"\frac{1}{0}", r"\frac{0}{0}", r"\emptyset", r"\mathbb{R}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", "0", "1e-30"),
    ("0", r"10^{-20}", "0.0000000001", "1 000"),
    ("10^{30}", "10^{30}+1", r"10^{30}+\sqrt{2}"),
    ("12345678", "12345679.0"),
    (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}"),
    (r"3.3 \times 10^{-20} x", r"3.4 \times 10^{-20} x"),
    (r"\{10^{-20},1\}", r"\{10^{-21},1\}"),
    (r"(10^{-20},1)", "(10^{-21},1)", "(1,10^{-20})"),
    (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}"),
    ("-5,7", r"(-\infty,\infty)"),
    ("f(x)=x+22", "f(x)=x+23", "x+23"),
    ("x^2=-1", "x^2=-2"),  # equations without solutions
    ("2516_8", "2516_7", "2517"),
    ("1,000", "1, 000"),
    ("1.22", "1,22"),
    ("10:30", "1:3"),
    ("36", "12 3"),
    ("0.28", "28"),
    ("x=5", "y=5"),
    ("(1,2)", "(2,1)", "[1,2]"),
    ("1,3,n", r"1,2,\ldots,n"),
    ("a-b", "a+b"),
    ("x>5", "x<5", r"x \ge 5"),
]


def are_correct(pairs):
    with ThreadPoolExecutor(verify.WORKERS) as threads:
        return list(threads.map(lambda pair: is_correct(*pair), pairs))


@pytest.mark.parametrize("cases, expected", [(RIGHT, True), (WRONG, False)], ids=["right", "wrong"])
def test_an_answer_is_right_in_every_form_of_its_value_and_in_no_other(cases, expected):
    pairs = [(rf"so it is \boxed{{{given}}}.", gold) for gold, *forms in cases for given in forms]
    verdicts = are_correct(pairs)
    assert [pair for pair, verdict in zip(pairs, verdicts) if verdict is not expected] == []


FINAL = {
    r"\boxed{5} but \boxed{7}": "7",
    r"\boxed{5} but \fbox{7}": "7",
    r"\fbox{5} but \boxed{7}": "7",
    r"\boxed{42} then \boxed{": None,
    r"\boxed{42} then \fbox{4": None,
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{\left\{ 1 \right.}": r"\left\{ 1 \right.",
    r"\boxed{\frac{1}{2}}}": r"\frac{1}{2}",
    "The answer is 27.": None,
    "{27}": None,
    "#### 42": "42",
    "#### 42 " + 500 * "x": "42",
    "so #### 42.\nQuestion: what next?": "42",
    "#### 41\n#### 42": "42",
    "#### Step 1\n" + r"\boxed{5}" + "\n#### 2. Check": "5",
    "#### 42 \\boxed{": None,
    "####": None,
    "": None,
}


@pytest.mark.parametrize("response", FINAL, ids=lambda response: repr(response)[:30])
def test_the_last_box_is_the_answer_and_a_gsm8k_line_only_without_any(response):
    assert final_answer(response) == FINAL[response]
    assert not (FINAL[response] is None and is_correct(response, "42"))


def test_no_text_of_an_answer_is_run(tmp_path):
    trace = tmp_path / "trace"
    call = f"__import__('os').system('touch {trace}')"
    texts = [
        call, call.replace("_", r"\_"), f"1+{call}", f"x={call}", rf"\text{{{call}}}", rf"\mathrm{{{call}}}", rf"\frac{{{call}}}{{2}}",
        rf"\operatorname{{{call}}}", rf"f({call})", f"$${call}$$", f"[{call}]", f"final answer is: ${call}$. I hope", f"{{{call}}}",
        f"eval(\"{call}\")", f"lambda: {call}", f"1 if {call} else 2", rf"\sqrt[{call}]{{2}}", f"x_{{{call}}}", f"x_{{{call}}}^5-x=1",
    ]  # fmt: skip
    golds = ["2", "x", r"\text{a}", "x=1", "x^5-x=1", *texts[:5]]
    are_correct([(rf"\boxed{{{text}}}", gold) for text in texts for gold in golds])
    are_correct([(text, gold) for text in texts for gold in golds] + [(f"#### {text}", "2") for text in texts])
    assert not trace.exists()


def test_python_eval_is_out_of_reach_in_a_worker():
    """Even if a string gets as far as sympy's own reader."""
    script = "import socket, sys, verify; ours, theirs = socket.socketpair(); theirs.sendall(b'');"
    script += "verify.socket.socket = lambda fileno: theirs; ours.shutdown(socket.SHUT_WR); verify._work(); import sympy\n"
    script += "for read in (sympy.sympify, sympy.parse_expr):\n    try:\n        read('print(__name__)')\n        print('ran')\n"
    script += "    except (TypeError, ValueError, sympy.SympifyError):\n        print('refused')\n"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=os.path.dirname(verify.__file__))
    assert run.stdout.split() == ["refused", "refused"], run.stderr


def idle():
    return [worker for worker in verify._workers.queue if worker]


@pytest.fixture
def started(monkeypatch):
    """The processes of the workers that are started in a test, which has no others."""
    processes, start = [], verify._start_worker

    def start_and_note():
        worker = start()
        processes.append(worker[0])
        return worker

    monkeypatch.setattr(verify, "_start_worker", start_and_note)
    verify._workers.queue[:] = [None] * verify.WORKERS
    return processes


HUGE = ["9999999^{9999999^{9999999}}", "9^{9^{9}}", "10000000!", r"\sum_{k=1}^{10^9} \frac{1}{k^3}", 120 * "(" + "1" + 120 * ")"]


def test_an_answer_that_hangs_is_wrong_within_the_deadline_and_the_next_is_graded(started):
    for text in HUGE:
        assert is_correct(r"\boxed{1+x}", "x+1")  # a worker is there: its start does not count
        start = time.monotonic()
        assert not is_correct(rf"\boxed{{{text}}}", "x+10")
        assert time.monotonic() - start < verify.DEADLINE + 1
        assert is_correct(r"\boxed{1+x}", "x+1")
    ended = [process.returncode for process in started if process.returncode]
    assert len(ended) >= 2 and set(ended) <= {-signal.SIGKILL, -signal.SIGPROF}  # by the clock or by their own limit


@pytest.mark.parametrize(
    "text", ["\0", "\ud800", "\n", 1000000 * "9", 1000000 * "{", 1000000 * "\\", 300000 * "####", 5000 * "9", 900 * "9", 160 * r"\sqrt{",
             "1e999999999", "0" * 998 + "7", "99999^" * 100, "{" * 400 + "}" * 400, "٢٥", "½", "\\", "\\boxed", "_" * 500],
    ids=lambda text: ascii(text)[:20],
)  # fmt: skip
def test_no_string_raises(text):
    for response in (text, rf"\boxed{{{text}}}", rf"\boxed{{{text}", f"#### {text}"):
        assert is_correct(response, "x+7") is False
        assert is_correct(r"\boxed{7+y}", text) is False
        assert is_correct(response, text) in (False, True)
    assert not is_correct(r"\boxed{}", "")


def kill_workers(number=signal.SIGKILL):
    for process, _ in idle():
        os.kill(process.pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_workers_are_replaced(number, started):
    pairs = [(rf"\boxed{{{i}+x}}", f"x+{i + i % 2}") for i in range(20)]
    expected = [i % 2 == 0 for i in range(20)]
    assert are_correct(pairs) == expected
    before = len(started)
    kill_workers(number)
    assert are_correct(pairs) == expected
    assert len(started) > before and -number in [process.returncode for process in started]


def test_a_worker_killed_while_it_grades_costs_no_verdict(started):
    assert is_correct(r"\boxed{1+x}", "x+1")
    (process,) = started
    os.kill(process.pid, signal.SIGSTOP)  # so that it is killed with the answer in its hands
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
    assert is_correct(r"\boxed{1+x}", "x+1")
    assert process.returncode == -signal.SIGKILL and len(started) == 2 and [p for p, _ in idle()] == started[1:]


def test_a_hung_worker_is_replaced_within_the_deadline(started):
    are_correct([(rf"\boxed{{{i}+x}}", f"x+{i}") for i in range(20)])
    hung = len(started)
    kill_workers(signal.SIGSTOP)
    start = time.monotonic()
    assert not any(are_correct([(r"\boxed{1+x}", "x+1")] * hung))
    assert time.monotonic() - start < verify.DEADLINE + 1
    assert [process.returncode for process in started] == [-signal.SIGKILL] * hung
    assert is_correct(r"\boxed{1+x}", "x+1")


def test_threads_share_the_workers():
    pairs = [(rf"\boxed{{{i}+x}}", f"x+{i + i % 2}") for i in range(60)]
    found = {}
    threads = [threading.Thread(target=lambda k=k: found.update({k: are_correct(pairs)})) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == 4 * [[i % 2 == 0 for i in range(60)]]
    assert len(verify._workers.queue) == verify.WORKERS


def test_ordinary_answers_need_no_worker(monkeypatch):
    monkeypatch.setattr(verify, "_ask", None)
    assert is_correct(r"\boxed{25}", "25") and not is_correct(r"\boxed{24}", "25") and is_correct("#### 1,250.0", "1250")
    assert is_correct(r"\boxed{\dfrac{1}{2}}", r"\frac12") and is_correct(r"\boxed{ (x+1)^2 }", "$(x+1)^2$")


def test_workers_end_with_their_parent_and_do_not_import_its_main_script(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "import json, os, signal, sys\n"
        f"sys.path.insert(0, {os.path.dirname(os.path.abspath(verify.__file__))!r})\n"
        "import verify\nprint('imported')\n"
        "assert verify.is_correct('\\\\boxed{1+x}', 'x+1')\n"
        "print(json.dumps([w[0].pid for w in verify._workers.queue if w]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True)
    first, pids = run.stdout.splitlines()
    assert run.returncode == -signal.SIGKILL and first == "imported"
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in json.loads(pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_thousand_answers_take_two_cores_at_most_20_seconds(started):
    """Of the workers' processor time: other programs may have the cores."""
    import psutil

    forms = [("{0}", "{0}"), (r"\frac{{{0}}}{{7}}", "{0}/7"), ("x+{0}", "{0}+x"), ("({0},1)", "(1,{0})"), (r"{0}\sqrt{{2}}", "{0}sqrt(2)")]
    pairs = [(rf"\boxed{{{given.format(i)}}}", gold.format(i)) for i in range(2, 202) for gold, given in forms]
    assert are_correct(pairs) == 200 * [True, True, True, False, True]
    times = [psutil.Process(process.pid).cpu_times() for process, _ in idle()]
    assert times and sum(t.user + t.system for t in times) < 2 * 20


def test_the_cases_kept_beside_the_checkout_are_all_right():
    for path in pathlib.Path(__file__).parents[1].parent.glob("shared/cases/answers.jsonl"):
        cases = [json.loads(line) for line in path.read_text().splitlines()]
        verdicts = are_correct([(case["response"], case["gold"]) for case in cases])
        assert [case for case, verdict in zip(cases, verdicts) if verdict != case["right"]] == []
