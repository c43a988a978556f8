"""Whole runs: `python run_async.py`, real engine, base model, a few updates. One run is looked at from many sides.

The first run is the command itself. The others call its main() in processes forked from one that has imported torch and
vLLM already: 5 s a run, not 12.
"""

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

import run_async

ROOT = pathlib.Path(run_async.__file__).parent
SETTINGS = "--prompts 4 --group-size 4 --max-new-tokens 24 --lag 2 --eval-every 0 --eval-problems 8".split()
STEPS = 6
KEYS = set(
    "step lag lag_max reward reward_std groups_mixed response_len tool_calls truncated kl d3 mismatch_kl mismatch_max mismatch_exact lag_kl "
    "ratio_max ratio_min ess rejected entropy loss grad_norm lr nonfinite t_wait t_learn t_rollout t_sync tokens wall".split()
)

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers.models.qwen3.modeling_qwen3", "vllm.v1.engine.llm_engine",
                              "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3", "matplotlib.pyplot"])  # fmt: skip


@dataclass
class Done:
    """A process that has ended, and what it left."""

    code: int
    console: str
    folder: pathlib.Path

    def rows(self, name: str = "metrics") -> list[dict]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def untimed(self) -> bytes:
        """metrics.jsonl without the timing keys."""
        return "\n".join(json.dumps({k: v for k, v in m.items() if not k.startswith("t_") and k != "wall"}) for m in self.rows()).encode()

    def bytes(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


def in_fork(args, console, hook):
    fd = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(fd, 1), os.dup2(fd, 2)
    if hook:
        hook()
    sys.exit(run_async.main(list(map(str, args))))


@pytest.fixture
def start(tmp_path, base_model):
    """start(*args, hook=None) -> process of a run in tmp_path/run; args are added to SETTINGS. hook() runs first, there."""
    started = []

    def of(*args, hook=None):
        process = FORKS.Process(target=in_fork, args=([*SETTINGS, "--out", tmp_path / "run", *args], tmp_path / "console", hook))
        process.start()
        started.append(process)
        return process

    yield of
    for process in started:
        if process.is_alive():
            process.kill()


@pytest.fixture
def run(start, tmp_path):
    """run(*args, hook=None) -> Done, after its end; `code` is the exit status expected."""

    def of(*args, hook=None, code=0):
        process = start(*args, hook=hook)
        process.join(120)
        console = (tmp_path / "console").read_text()
        assert process.exitcode == code, console
        return Done(process.exitcode, console, tmp_path / "run")

    return of


def command(*args, **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "run_async.py", *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, **kwargs)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory, base_model) -> Done:
    """The run that most tests look at."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    process = command(*SETTINGS, "--steps", STEPS, "--save-every", 3, "--eval-every", 2, "--out", folder)
    console, _ = process.communicate(timeout=180)
    assert process.returncode == 0, console
    return Done(process.returncode, console, folder)


# ---------------------------------------------------------------------------------------------------------------------
# One run, from many sides


def test_metrics_have_every_key_and_log_probabilities_are_equal_at_every_update(plain):
    rows = plain.rows()
    assert [m["step"] for m in rows] == list(range(STEPS))
    for m in rows:
        assert KEYS <= set(m)
        assert m["mismatch_max"] == m["mismatch_kl"] == 0.0 and m["mismatch_exact"] == 1.0
        assert m["nonfinite"] == 0 and m["rejected"] == 0 and 0 <= m["reward"] <= 1 and 0 < m["ess"] <= 1
        assert m["tokens"] == m["response_len"] * 16
        assert m["ratio_min"] <= 1 <= m["ratio_max"]


def test_lag_is_lag_in_the_steady_state_and_d3_is_the_policy_lag(plain):
    rows = plain.rows()
    assert [m["lag"] for m in rows] == [m["lag_max"] for m in rows] == [0, 1, 2, 2, 2, 2]
    assert rows[0]["d3"] == rows[0]["lag_kl"] == rows[0]["kl"] == 0.0  # equal weights, so equal bits
    assert rows[0]["ratio_max"] == rows[0]["ratio_min"] == 1.0
    assert all(m["d3"] > 0 and m["lag_kl"] > 0 for m in rows[1:])


def test_samples_and_evaluations_are_written_with_their_versions(plain):
    samples = plain.rows("samples")
    assert {s["step"] for s in samples} == set(range(STEPS))
    for s in samples:
        assert s["version"] == max(0, s["step"] - 2)
        assert re.fullmatch(r"(\d\+)+\d=", s["prompt"]) and s["finish"] in ("stop", "length") and s["reward"] in (0, 1)
        right = s["response"].rstrip().endswith("\\boxed{%d}" % eval(s["prompt"][:-1]))
        assert s["reward"] == right
    evaluations = plain.rows("eval")
    assert [e["version"] for e in evaluations] == [2, 4, 6]
    assert all(e["problems"] == 8 and 0 <= e["pass@1"] <= 1 for e in evaluations)


def test_config_json_holds_every_setting(plain):
    config = json.loads(plain.bytes("config.json"))
    assert run_async.Config(**config) == run_async.Config(
        prompts=4, group_size=4, max_new_tokens=24, lag=2, steps=STEPS, save_every=3, eval_every=2, eval_problems=8, out=str(plain.folder)
    )


def test_a_checkpoint_is_a_model_folder_of_transformers_with_the_last_weights(plain, base_model):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for step in (3, 6):
        folder = plain.folder / f"checkpoint-{step}"
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert tokenizer.decode(tokenizer.encode("3+8=")) == "3+8="
        master, at = load_file(folder / "learner.safetensors")["master"], 0
        for p in model.parameters():  # the model's weights are the master weights, rounded
            assert torch.equal(p.detach().flatten(), master[at : at + p.numel()].bfloat16())
            at += p.numel()
        assert at == len(master)
    first = AutoModelForCausalLM.from_pretrained(base_model)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), first.parameters()))  # it has learned something
    assert not list(plain.folder.glob(".checkpoint*"))


def test_curves_are_drawn(plain):
    picture = plain.bytes("curves.png")
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_the_console_shows_our_lines_only_and_the_log_has_the_rest(plain):
    ours = re.compile(r"\s*$|.*\bupdate/s|.*\d+/6 \[|version \d+: held-out pass@1|  \w.*  |lag 2 keeps 3 weight versions")
    for line in re.split("[\r\n]", plain.console):
        assert ours.match(line), line
    for word in ("reward, first", "D3 peak / median", "kernel mismatch", "samples/s", str(plain.folder), "checkpoint-6"):
        assert word in plain.console
    assert "lag 2 keeps 3 weight versions" in plain.console  # and how much memory that takes
    assert "vllm" in plain.bytes("log.txt").decode().lower()


# ---------------------------------------------------------------------------------------------------------------------
# The same bytes again


def disturb():
    """Threads that sleep at random, differently on every run."""
    import learn
    import rollout

    def sleepy(function):
        rng = random.Random()

        def wrapped(*args, **kwargs):
            time.sleep(rng.random() * 0.2)
            result = function(*args, **kwargs)
            time.sleep(rng.random() * 0.2)
            return result

        return wrapped

    rollout.RolloutThread._sample = sleepy(rollout.RolloutThread._sample)
    learn.Learner.update = sleepy(learn.Learner.update)


def test_a_run_is_the_same_to_the_last_byte_with_other_timings_and_without_evaluations(run, plain):
    again = run("--steps", STEPS, "--save-every", 3, hook=disturb)
    assert again.untimed() == plain.untimed()
    assert again.bytes("samples.jsonl") == plain.bytes("samples.jsonl")
    for name in ("checkpoint-3/model.safetensors", "checkpoint-6/model.safetensors", "checkpoint-6/learner.safetensors"):
        assert again.bytes(name) == plain.bytes(name)
    assert again.rows("eval") == [] and len(plain.rows("eval")) == 3


def test_a_resumed_run_goes_on_to_the_same_bytes_and_steps_may_grow(run, plain, tmp_path):
    shutil.copytree(plain.folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoint-6")
    process = FORKS.Process(target=in_fork, args=(["--resume", tmp_path / "copy", "--steps", 7], tmp_path / "console", None))
    process.start()
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "console").read_text()
    resumed = Done(0, "", tmp_path / "copy")
    assert len(resumed.rows()) == 7
    assert resumed.untimed().splitlines()[:STEPS] == plain.untimed().splitlines()
    assert resumed.rows("samples")[: 2 * STEPS] == plain.rows("samples")
    assert resumed.rows("eval")[:3] == plain.rows("eval")
    for name in ("model.safetensors", "learner.safetensors", "versions.safetensors"):
        assert resumed.bytes(f"checkpoint-6/{name}") == plain.bytes(f"checkpoint-6/{name}")
    assert [m["wall"] for m in resumed.rows()] == sorted(m["wall"] for m in resumed.rows())
    assert json.loads(resumed.bytes("config.json"))["steps"] == 7  # so that the next --resume goes on to there


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def test_lag_0_is_synchronous_and_d3_is_exactly_0(run):
    for m in run("--lag", 0, "--steps", 3).rows():
        assert m["lag"] == m["lag_max"] == m["d3"] == m["kl"] == m["lag_kl"] == m["mismatch_max"] == 0
        assert m["ratio_max"] == m["ratio_min"] == m["ess"] == 1


def test_lag_64_works_in_a_run_that_is_shorter(run):
    done = run("--lag", 64, "--steps", 3)
    assert [m["lag"] for m in done.rows()] == [0, 1, 2]
    assert {s["version"] for s in done.rows("samples")} == {0}


def test_standard_kernels_run_and_have_a_mismatch(run):
    rows = run("--kernels", "standard", "--lag", 0, "--steps", 3).rows()
    assert all(KEYS <= set(m) for m in rows)
    assert all(0 < m["mismatch_max"] < 0.5 and m["mismatch_exact"] < 1 and m["d3"] > 0 for m in rows)


def test_bound_schedule_runs_with_a_lag_within_the_bound(run):
    rows = run("--schedule", "bound", "--steps", STEPS).rows()
    assert len(rows) == STEPS
    assert all(0 <= m["lag"] <= m["lag_max"] <= 2 and m["mismatch_max"] == 0 for m in rows)


def test_float32_at_another_temperature_is_exact(run):
    rows = run("--dtype", "float32", "--temperature", 0.8, "--steps", 4).rows()
    assert all(m["mismatch_max"] == 0 for m in rows) and rows[0]["d3"] == 0 and rows[-1]["d3"] > 0


def test_the_other_flags_of_the_learner_keep_log_probabilities_equal(run, plain):
    flags = "--temperature 0.8 --tokens-per-microbatch 64 --gradient-checkpointing --gate token --ratio-cap 2 --max-grad-norm 0 --audit 3"
    done = run("--steps", 3, "--seed", 1, *flags.split())
    assert all(m["mismatch_max"] == 0 for m in done.rows()) and done.rows()[0]["d3"] == 0
    assert {s["prompt"] for s in done.rows("samples")}.isdisjoint(s["prompt"] for s in plain.rows("samples")[:4])  # another seed


def test_the_models_generation_config_has_no_say_in_sampling(run, plain, base_model, tmp_path):
    model = shutil.copytree(base_model, tmp_path / "model")
    settings = {"repetition_penalty": 1.5, "top_k": 5, "temperature": 0.3, "do_sample": True, "eos_token_id": 1}
    (model / "generation_config.json").write_text(json.dumps(settings))
    done = run("--model", model, "--steps", 2)
    assert done.untimed().splitlines() == plain.untimed().splitlines()[:2]
    assert done.rows("samples") == plain.rows("samples")[:4]


# ---------------------------------------------------------------------------------------------------------------------
# Endings


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path, base_model):
    folder = tmp_path / "run"
    process = command(*SETTINGS, "--steps", 100_000, "--out", folder)
    metrics, limit = folder / "metrics.jsonl", time.monotonic() + 100
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    console, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    done = len(metrics.read_text().splitlines())
    assert f"python run_async.py --resume {folder}" in console and f"stopped after update {done}" in console
    assert [p.name for p in folder.glob("checkpoint-*")] == [f"checkpoint-{done}"]
    assert "Traceback" not in console


def interrupt_while_setting_up():
    import rollout

    init = rollout.Engine.__init__

    def interrupted(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        init(self, *args, **kwargs)

    rollout.Engine.__init__ = interrupted


def test_ctrl_c_before_the_first_update_promises_no_resume(run):
    done = run("--steps", 100, hook=interrupt_while_setting_up, code=130)
    assert done.rows() == [] and not list(done.folder.glob("checkpoint-*"))
    assert "--resume" not in done.console and "Traceback" not in done.console


def fail_at_batch_3():
    import rollout

    generate, calls = rollout.Engine.generate, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) > 3:
            pathlib.Path(os.environ["FAILED_AT"]).write_text(str(time.time()))
            raise ArithmeticError("scripted fault")
        return generate(self, *args)

    rollout.Engine.generate = failing


def hang_at_batch_1():
    import rollout

    generate, calls = rollout.Engine.generate, []

    def hanging(self, *args):
        calls.append(1)
        if len(calls) > 1:
            pathlib.Path(os.environ["FAILED_AT"]).write_text(str(time.time()))
            time.sleep(1000)
        return generate(self, *args)

    rollout.Engine.generate = hanging


@dataclass
class InFork:
    """A hook that sets the environment first."""

    hook: callable
    path: pathlib.Path

    def __call__(self):
        os.environ["FAILED_AT"] = str(self.path)
        self.hook()


def test_an_exception_in_the_rollout_ends_the_run_with_that_error_and_the_end_of_the_log(run, tmp_path):
    done = run("--steps", 100, "--save-every", 1, hook=InFork(fail_at_batch_3, tmp_path / "at"), code=1)
    assert time.time() - float((tmp_path / "at").read_text()) < 3
    assert "run_async.py: ArithmeticError: scripted fault" in done.console
    assert f"the end of {done.folder}/log.txt" in done.console and "in failing" in done.console
    assert done.console.rstrip().splitlines()[-1].endswith(f"--resume {done.folder}")  # there is a checkpoint
    assert len(done.rows()) <= 3


def test_a_hanging_rollout_ends_the_run_at_its_timeout(run, tmp_path):
    done = run("--steps", 100, "--rollout-timeout", 4, hook=InFork(hang_at_batch_1, tmp_path / "at"), code=1)
    assert 3.5 < time.time() - float((tmp_path / "at").read_text()) < 4 + 3
    assert "TimeoutError: rollout has hung for 4 s" in done.console and "--rollout-timeout" in done.console


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: one line, the flag's name, exit status 2, nothing written

BAD = {
    "--model": ["--model ./nowhere", "--model /nowhere/at/all"],
    "--env": ["--env chess"],
    "--difficulty": ["--difficulty 1", "--difficulty none"],
    "--lag": ["--lag -1"],
    "--steps": ["--steps 0"],
    "--prompts": ["--prompts 0"],
    "--group-size": ["--group-size 1", "--group-size 0"],
    "--max-new-tokens": ["--max-new-tokens 0"],
    "--top-p": ["--top-p 0.9"],
    "--temperature": ["--temperature 0", "--temperature -1", "--temperature nan", "--temperature inf"],
    "--lr": ["--lr nan", "--lr -1"],
    "--ratio-cap": ["--ratio-cap 0", "--ratio-cap nan"],
    "--rollout-timeout": ["--rollout-timeout 0"],
    "--track": ["--track wandb"],
    "--resume": ["--resume nowhere"],
}


class NotRefused(BaseException):
    """Its argument is the Config."""


@pytest.fixture
def nothing_starts(monkeypatch):
    """A setting that is not refused ends in NotRefused, before this process's output is sent to a log."""

    def start(config, *_):
        raise NotRefused(config)

    monkeypatch.setattr(run_async, "Run", start)


def refused(capsys, folder, *args) -> str:
    """The one line on the console of a call that must exit with status 2 and write nothing."""
    assert run_async.main([*args, "--out", str(folder)] if "--resume" not in args else list(args)) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and not folder.exists()
    return err


@pytest.mark.parametrize("flag, args", [(flag, args) for flag, several in BAD.items() for args in several], ids=lambda x: x)
def test_bad_input_is_refused_in_one_line_that_names_the_flag(flag, args, capsys, tmp_path, monkeypatch, base_model, nothing_starts):
    find_spec, trackers = importlib.util.find_spec, ("tensorboard", "wandb", "trackio")  # transformers asks, too, when it is imported
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *args: None if name in trackers else find_spec(name, *args))
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    try:
        err = refused(capsys, tmp_path / "run", *args.split())
    except SystemExit as exit:  # refused by tyro already
        assert exit.code == 2
        err = capsys.readouterr().err
    assert flag in err


def test_a_model_that_is_neither_a_folder_nor_on_the_hub_is_refused(capsys, tmp_path, monkeypatch, nothing_starts):
    def not_found(name, **kwargs):
        raise OSError("404, or no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", not_found)
    assert "--model nosuch/model" in refused(capsys, tmp_path / "run", "--model", "nosuch/model")


@pytest.mark.parametrize("missing", ["tokenizer", "config.json"])
def test_a_model_folder_without_its_tokenizer_or_configuration_is_refused(missing, capsys, tmp_path, base_model, nothing_starts):
    model = shutil.copytree(base_model, tmp_path / "model")
    for path in model.glob(f"{missing}*"):
        path.unlink()
    err = refused(capsys, tmp_path / "run", "--model", str(model))
    assert f"--model {model}" in err and missing in err


def test_a_folder_of_another_run_is_refused_and_left_alone(capsys, plain, nothing_starts):
    before = {p: p.stat().st_mtime_ns for p in plain.folder.rglob("*")}
    assert run_async.main(["--out", str(plain.folder)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and f"--out {plain.folder}" in err and "--resume" in err
    assert before == {p: p.stat().st_mtime_ns for p in plain.folder.rglob("*")}


def test_resuming_with_other_settings_or_fewer_steps_or_no_checkpoint_is_refused(capsys, plain, tmp_path, nothing_starts):
    # --lag 8 is the default, and yet not what the run has; --lag 2 is
    for args in (["--lag", "5"], ["--seed", "3"], ["--lag", "8"], ["--steps", "3"]):
        assert args[0] in refused(capsys, tmp_path / "run", "--resume", str(plain.folder), *args)
    with pytest.raises(NotRefused) as accepted:
        run_async.main(["--resume", str(plain.folder), "--lag", "2", "--steps", str(run_async.Config.steps)])
    assert accepted.value.args[0].steps == run_async.Config.steps
    (tmp_path / "none").mkdir()
    shutil.copy(plain.folder / "config.json", tmp_path / "none")
    assert "no checkpoint" in refused(capsys, tmp_path / "run", "--resume", str(tmp_path / "none"))


@pytest.mark.parametrize("args", ["--max-new-tokens 1020", "--lag 100000000"])
def test_what_does_not_fit_the_model_or_the_memory_is_refused(args, run):
    done = run(*args.split(), code=2)
    assert args in done.console and len(done.console.strip().splitlines()) == 1
    assert not done.folder.exists()


def test_an_architecture_without_aligned_kernels_is_refused(run, base_model, tmp_path):
    model = shutil.copytree(base_model, tmp_path / "model")
    shape = {"vocab_size": 64, "n_positions": 512, "n_embd": 64, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **shape}))
    done = run("--model", model, code=2)
    assert "gpt2" in done.console and "--model" in done.console and "--kernels standard" in done.console
    assert len(done.console.strip().splitlines()) == 1
    assert not done.folder.exists()


# ---------------------------------------------------------------------------------------------------------------------
# Found by newcomers


def test_a_seed_that_the_engine_cannot_take_is_refused_with_its_flag():
    for seed in (-1, 2**32):
        with pytest.raises(run_async.UserError, match="--seed"):
            run_async.check(run_async.Config(seed=seed))


def test_the_summary_does_not_call_exact_what_was_not_measured_and_averages_the_lag_over_the_run():
    import types

    rows = [{"reward": 0.5, "d3": 0.1, "wall": float(i), "lag": float(i), "lag_max": i} for i in range(3)]
    run = types.SimpleNamespace(history=rows, config=run_async.Config(), folder="runs/x", saved=None)
    text = run_async.Run.summary(run)
    assert "not measured" in text and "exact" not in text and "1, 2" in text
    for row in rows:
        row["mismatch_max"] = 0.0
    assert "0 (exact)" in run_async.Run.summary(run)


def test_a_model_folder_is_kept_as_a_full_path(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run_async.with_full_path(run_async.Config(model="m")).model == str((tmp_path / "m").resolve())
    assert run_async.with_full_path(run_async.Config(model="base")).model == "base"
    assert run_async.with_full_path(run_async.Config(model="some/hub-name")).model == "some/hub-name"


def test_a_run_that_was_cut_off_in_the_middle_of_a_row_can_be_drawn(tmp_path):
    from plots.figures import read

    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "d3": 0.5}\n{"step": 1, "d')
    assert read(tmp_path / "metrics.jsonl") == {"step": [0], "d3": [0.5]}


def test_a_config_of_another_version_cannot_be_resumed(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"flag_of_another_version": 1}')
    assert run_async.main(["--resume", str(tmp_path)]) == 2
    assert "another version" in capsys.readouterr().err


def test_a_run_without_an_audit_can_be_drawn(tmp_path):
    from plots.figures import draw_curves

    row = dict.fromkeys(["reward", "d3", "grad_norm", "ess", "t_rollout", "t_learn", "t_wait", "t_sync"], 0.5) | {"step": 0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(run_async.Config(audit=0))))
    assert draw_curves(tmp_path).read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".curves*"))
