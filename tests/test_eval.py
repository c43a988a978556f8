"""eval.py: its statistics against brute force and simulation, its answers against the engine's and the online evaluation's."""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from conftest import Beside

import eval as evaluation
import run_async
from envs import Dataset, Problem, last_boxed, load_env
from eval import Config, compare, load_bench, mean_and_interval, pass_at_k, requests_of, score

ROOT = pathlib.Path(run_async.__file__).parent
DATA = Beside()


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_sets_of_k_samples_that_hold_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        sets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, sets)) / len(sets), abs=1e-12)
    assert pass_at_k(n, n, 1) == 1 and pass_at_k(n, 0, n) == 0


def test_pass_at_k_is_unbiased_where_the_share_of_problems_with_one_in_k_right_is_meant():
    rng = np.random.default_rng(1)
    right = rng.binomial(8, 0.3, size=20_000)
    assert np.mean([pass_at_k(8, int(c), 4) for c in right]) == pytest.approx(1 - 0.7**4, abs=0.01)


def test_the_interval_covers_the_true_pass_at_1_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(200):  # 80 problems, whose difficulties are a draw themselves, 4 samples each
        values = rng.binomial(4, rng.beta(0.6, 0.9, size=80)) / 4
        r = mean_and_interval(values)
        assert r["low"] <= r["pass@1"] <= r["high"] and r["pass@1"] == pytest.approx(values.mean())
        covered += r["low"] <= 0.6 / 1.5 <= r["high"]
    assert 0.90 <= covered / 200 <= 0.985


def test_the_interval_is_the_same_each_time_and_narrows_with_more_problems():
    values = np.random.default_rng(3).random(400)
    assert mean_and_interval(values) == mean_and_interval(values)
    widths = [r["high"] - r["low"] for r in map(mean_and_interval, (values[:25], values[:100], values))]
    assert 1.6 < widths[0] / widths[1] < 2.5 and 1.6 < widths[1] / widths[2] < 2.5


def test_the_macro_average_weighs_benchmarks_alike_and_resamples_each_by_itself():
    rng = np.random.default_rng(4)
    small, large = rng.random(30), rng.random(300) / 2
    macro = mean_and_interval(small, large)
    assert macro["pass@1"] == pytest.approx((small.mean() + large.mean()) / 2)
    sd = np.sqrt(small.var() / 30 + large.var() / 300) / 2  # of independent means
    assert macro["high"] - macro["low"] == pytest.approx(2 * 1.96 * sd, rel=0.1)
    twice = mean_and_interval(small, small)  # were both resampled alike, this would be as wide as one
    assert (twice["high"] - twice["low"]) / (mean_and_interval(small)["high"] - mean_and_interval(small)["low"]) == pytest.approx(0.71, abs=0.06)


def model(name, **rewards):
    """What evaluate_model gives: rewards of each benchmark, [P][N]."""
    answers = {b: [{"responses": [{"reward": r} for r in of_problem]} for of_problem in rows] for b, rows in rewards.items()}
    return {"model": name, "answers": answers, "results": {b: {"pass@1": float(np.mean(rows))} for b, rows in rewards.items()}}


def test_models_are_compared_problem_by_problem():
    a = [[1, 0], [0, 0], [1, 1], [1, 0]] * 20
    b = [[1, 1], [1, 0], [1, 1], [1, 1]] * 20  # right wherever a is
    rows = compare([model("A", x=a, y=a), model("B", x=b, y=a), model("C", x=a, y=b)])
    assert [(r["model"], r["benchmark"]) for r in rows] == [
        (m, b) for m in ("A", "B", "B - A", "C", "C - A") for b in ("x", "y", "macro average")
    ]
    by = {(r["model"], r["benchmark"]): r for r in rows}
    assert by["A", "x"]["pass@1"] == 0.5 and by["B", "x"]["pass@1"] == 0.875 and by["B", "macro average"]["pass@1"] == 0.6875
    gain = by["B - A", "x"]
    assert gain["pass@1"] == pytest.approx(0.375) and 0.3 < gain["low"] < 0.375 < gain["high"] < 0.45
    unpaired = mean_and_interval(np.mean(a, axis=1))
    assert gain["high"] - gain["low"] < unpaired["high"] - unpaired["low"]  # what is paired varies less
    same = by["B - A", "y"]
    assert same["pass@1"] == same["low"] == same["high"] == 0
    assert by["B - A", "macro average"]["pass@1"] == by["C - A", "macro average"]["pass@1"] == pytest.approx(0.1875)
    assert [r["benchmark"] for r in compare([model("A", x=a)])] == ["x"]  # no macro average of one


# ---------------------------------------------------------------------------------------------------------------------
# The real engine


@pytest.fixture(scope="module")
def arith(base_model):
    from transformers import AutoTokenizer

    return load_env("arith", AutoTokenizer.from_pretrained(base_model))


def answer(engine, task, problems, samples=1, seed=0, temperature=1.0, top_p=1.0, length=32):
    requests = requests_of(task, problems, samples, seed, top_p)
    return score(task, problems, engine.generate(requests, length, temperature, engine.version))


def test_results_are_those_of_the_answers(engine, base_model, arith):
    problems = arith.heldout(12)
    results, answers = answer(engine(base_model, "bfloat16"), arith, problems, samples=4)
    assert [(a["prompt"], a["answer"]) for a in answers] == [(p.prompt, p.answer) for p in problems]
    rewards = np.array([[r["reward"] for r in a["responses"]] for a in answers])
    assert rewards.shape == (12, 4) and 0 < rewards.mean() < 1
    for p, a in zip(problems, answers):
        assert [r["reward"] for r in a["responses"]] == [arith.reward(p, r["text"]) for r in a["responses"]]
    assert results["pass@1"] == pytest.approx(rewards.mean()) and results["pass@4"] == rewards.any(axis=1).mean()
    assert results["pass@2"] == pytest.approx(np.mean([pass_at_k(4, int(c), 2) for c in rewards.sum(axis=1)]))
    assert (results["problems"], results["samples"]) == (12, 4) and "pass@8" not in results
    responses = [r for a in answers for r in a["responses"]]
    assert results["response_len"] == np.mean([r["tokens"] for r in responses])
    assert results["truncated"] == np.mean([r["finish"] == "length" for r in responses])


def test_an_answer_depends_on_its_problem_sample_and_seed_only_and_not_on_what_else_is_asked(engine, base_model, arith):
    engine, problems = engine(base_model, "bfloat16"), arith.heldout(10)
    _, all_of_them = answer(engine, arith, problems, samples=3)
    _, first = answer(engine, arith, problems[:4], samples=3)
    _, one_each = answer(engine, arith, problems, samples=1)
    assert first == all_of_them[:4]
    assert [a["responses"][0] for a in all_of_them] == [a["responses"][0] for a in one_each]
    assert len({r["text"] for a in all_of_them for r in a["responses"]}) > 15
    assert answer(engine, arith, problems, samples=3, seed=1)[1] != all_of_them


def test_greedy_and_a_top_p_of_almost_nothing_give_the_same_answers_and_other_settings_do_not(engine, base_model, arith):
    engine, problems = engine(base_model, "bfloat16"), arith.heldout(6)
    _, greedy = answer(engine, arith, problems, samples=2, temperature=0.0)
    assert all(a["responses"][0] == a["responses"][1] for a in greedy)
    assert answer(engine, arith, problems, samples=2, top_p=1e-6)[1] == greedy
    assert answer(engine, arith, problems, samples=2, temperature=0.2, top_p=0.5)[1] != answer(engine, arith, problems, samples=2)[1]
    results, _ = answer(engine, arith, problems, length=3)
    assert results["truncated"] == 1 and results["response_len"] == 3


def test_problems_of_a_data_set_are_asked_and_graded_with_the_verifier(engine, base_model, arith):
    problems = [Problem("3+8+5+9=", "25"), Problem("3+8=", ("10+1", "-1"))]
    task = Dataset("jsonl", arith.tokenizer, 0, [], problems)
    task.prompt_ids = arith.prompt_ids  # the base model knows its own prompts only
    results, answers = answer(engine(base_model, "bfloat16"), task, problems, samples=8)
    for p, a in zip(problems, answers):
        right = {"3+8+5+9=": "25", "3+8=": "11"}[p.prompt]
        assert [r["reward"] for r in a["responses"]] == [float(last_boxed(r["text"]) == right) for r in a["responses"]]
    assert 0 < results["pass@1"] <= 1


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs

EVAL = "--eval-every 2 --eval-problems 24 --eval-temperature 0.7 --eval-top-p 0.9 --eval-max-new-tokens 20".split()
TRAIN = "--prompts 4 --group-size 4 --max-new-tokens 24 --lag 1 --steps 4 --save-every 2".split()


def python(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base_model) -> pathlib.Path:
    """A run with evaluations of its own sampling settings."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = python("run_async.py", *TRAIN, *EVAL, "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def evaluated(trained):
    """(what eval.py printed, its JSON) of that run's two checkpoints: one by its folder, one by the run's."""
    sampling = "--problems 24 --temperature 0.7 --top-p 0.9 --max-new-tokens 20".split()
    models = ["--model", trained / "checkpoint-2", "--model", trained]
    done = python("eval.py", *models, "--bench", "arith", *sampling, "--out", trained.parent / "eval.json")
    assert done.returncode == 0, done.stderr
    return done, json.loads((trained.parent / "eval.json").read_text())


def rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_online_evaluation_equals_that_of_the_saved_checkpoint_of_its_version(trained, evaluated):
    online = rows(trained / "eval.jsonl")
    assert [e["version"] for e in online] == [e["version_end"] for e in online] == [2, 4]
    for e, m in zip(online, evaluated[1]["models"], strict=True):
        assert m["path"].endswith(f"checkpoint-{e['version']}")
        for key, value in m["results"]["arith"].items():  # pass@1, its interval, length, share truncated
            assert e[key] == value, key
        assert (e["temperature"], e["top_p"], e["max_new_tokens"]) == (0.7, 0.9, 20)
        assert 0 < e["pass@1"] < 1 and e["problems"] == 24
    texts = [[r["text"] for a in m["answers"]["arith"] for r in a["responses"]] for m in evaluated[1]["models"]]
    assert texts[0] != texts[1]  # two versions


def test_evaluations_with_other_sampling_settings_leave_the_training_as_it_is(trained, tmp_path):
    done = python("run_async.py", *TRAIN, "--eval-every", 0, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr

    def untimed(folder):
        return [{k: v for k, v in m.items() if not k.startswith("t_") and k != "wall"} for m in rows(folder / "metrics.jsonl")]

    assert untimed(tmp_path / "run") == untimed(trained) and rows(tmp_path / "run" / "samples.jsonl") == rows(trained / "samples.jsonl")
    name = "checkpoint-4/model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (trained / name).read_bytes()


def test_the_screen_has_a_table_and_a_progress_bar_and_the_file_every_answer(trained, evaluated):
    done, saved = evaluated
    table = done.stdout.splitlines()
    assert table[0].split()[:3] == ["model", "benchmark", "pass@1"] and len(table) == 1 + 3 + 1 and "eval.json" in table[-1]
    assert f"{trained} - {trained / 'checkpoint-2'}" in table[3]
    assert "24/24" in done.stderr and "WARNING" not in done.stderr and "leaked" not in done.stderr  # that is in the log
    assert "vllm" in (trained.parent / "eval.log").read_text().lower()
    assert saved["settings"]["temperature"] == 0.7 and saved["models"][0]["dtype"] == "bfloat16"
    for m in saved["models"]:
        assert len(m["answers"]["arith"]) == 24
        assert all(set(a["responses"][0]) == {"text", "reward", "tokens", "finish"} for a in m["answers"]["arith"])
    before, after, gain = saved["results"]
    assert gain["pass@1"] == pytest.approx(after["pass@1"] - before["pass@1"]) and gain["low"] <= gain["pass@1"] <= gain["high"]


def test_a_run_on_a_file_of_problems_writes_what_it_read_and_its_rewards(base_model, tmp_path):
    problems = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, problems)) + "\n{}")
    args = "--prompts 3 --group-size 2 --max-new-tokens 16 --lag 0 --steps 2 --eval-every 1 --eval-problems 5 --env jsonl --data".split()
    done = python("run_async.py", *args, tmp_path / "p.jsonl", "--out", tmp_path / "refused")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not (tmp_path / "refused").exists()
    assert "row 101: no field" in done.stderr and "--skip-bad-rows" in done.stderr
    done = python("run_async.py", *args, tmp_path / "p.jsonl", "--skip-bad-rows", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "1 rows skipped" in done.stderr
    assert all(m["mismatch_max"] == 0 and 0 <= m["reward"] <= 1 for m in rows(tmp_path / "run" / "metrics.jsonl"))
    assert {s["prompt"].partition("\n")[0] for s in rows(tmp_path / "run" / "samples.jsonl")} <= {p["question"] for p in problems}
    assert [e["problems"] for e in rows(tmp_path / "run" / "eval.jsonl")] == [5, 5]


# ---------------------------------------------------------------------------------------------------------------------
# Benchmarks, models and bad input


@pytest.mark.parametrize("bench, problems", {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "minerva": 272,
                                             "olympiad": 675, "gsm8k": 1319}.items())  # fmt: skip
def test_every_benchmark_is_found_in_the_data_folder_with_all_its_problems(bench, problems, arith):
    config = Config(model=["base"], data_dir=str(DATA / ""))
    task, found = load_bench(bench, arith.tokenizer, config)
    assert len(found) == problems and task.problems == []
    config.problems = 7
    assert load_bench(bench, arith.tokenizer, config)[1] == found[:7]


def test_a_file_can_be_a_benchmark_and_arith_can_have_a_difficulty(arith):
    config = Config(model=["base"])
    assert len(load_bench(str(DATA / "mawps.jsonl"), arith.tokenizer, config)[1]) == 2065
    assert load_bench("arith-6", arith.tokenizer, config)[1] == load_env("arith", None, 0, 6).heldout(256)


@pytest.mark.parametrize("bench, data_dir, message", [("chess", None, "--bench chess: "), ("arith-1", None, "--difficulty 1"),
                                                      ("aime24", "/nowhere", "--data-dir /nowhere: "), (".", None, "--bench .: ")])  # fmt: skip
def test_a_benchmark_that_is_not_there_is_refused_with_the_flag_named(bench, data_dir, message, arith):
    with pytest.raises(ValueError) as error:
        load_bench(bench, arith.tokenizer, Config(model=["base"], data_dir=data_dir))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("flag, value", [("samples", 0), ("problems", -1), ("temperature", -1), ("temperature", "nan"), ("top-p", 0),
                                         ("top-p", 1.5), ("max-new-tokens", -1), ("seed", -1), ("model", "nowhere/at/all")])  # fmt: skip
def test_settings_that_cannot_be_are_refused_before_anything_starts(flag, value, base_model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "in_a_process", None)
    assert evaluation.main(["--model", str(base_model), f"--{flag}", str(value), "--out", str(tmp_path / "x" / "e.json")]) == 2
    assert capsys.readouterr().err.startswith(f"eval.py: --{flag} ") and not (tmp_path / "x").exists()


@pytest.mark.parametrize("args", ["--max-new-tokens 1020", "--bench chess"])
def test_what_is_found_out_later_is_one_line_too(args, base_model, capfd, tmp_path):
    assert evaluation.main(["--model", "base", *args.split(), "--out", str(tmp_path / "e.json")]) == 2
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1 and args in err and not (tmp_path / "e.json").exists()


@pytest.mark.parametrize("how", ["Ctrl-C", "killed"])
def test_an_evaluation_that_is_stopped_ends_at_once_and_says_so_in_a_line(how, base_model, tmp_path):
    command = [sys.executable, "eval.py", "--model", "base", "--model", "base", "--samples", "50", "--out", tmp_path / "e.json"]
    with open(tmp_path / "err", "w") as err:  # SIGINT is ignored in what a shell starts in the background
        process = subprocess.Popen(command, cwd=ROOT, stderr=err, start_new_session=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    try:
        while not (tmp_path / "e.log").exists():  # the first model's process
            assert process.poll() is None
            time.sleep(0.1)
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            with open(tmp_path / "e.log") as log:
                (child,) = [c for c in psutil.Process(process.pid).children() if log.name in str(c.open_files())]
            child.kill()
        assert process.wait(30) == {"Ctrl-C": 130, "killed": 2}[how]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = {"Ctrl-C": "eval.py: interrupted\n", "killed": f"eval.py: --model base: the evaluation failed or was killed, perhaps for memory; {tmp_path}/e.log says more\n"}
    assert (tmp_path / "err").read_text() == said[how] and not (tmp_path / "e.json").exists()


def test_a_run_folder_means_its_newest_checkpoint_and_one_without_is_refused(tmp_path, base_model):
    import shutil

    for step in (9, 10):
        shutil.copytree(base_model, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "config.json").write_text("{}")  # the run's, not a model's
    (tmp_path / "metrics.jsonl").touch()
    assert run_async.resolve_model(str(tmp_path)) == tmp_path / "checkpoint-10"
    for step in (9, 10):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    with pytest.raises(run_async.UserError, match=f"^--model {tmp_path}: .*checkpoint"):
        run_async.resolve_model(str(tmp_path))


def test_a_checkpoints_weights_are_counted_without_what_a_resume_needs(trained, base_model):
    assert run_async.parameters(trained / "checkpoint-4") == run_async.parameters(base_model)
