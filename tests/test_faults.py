"""What goes wrong is survived or reported within 5 s, and a resumed run ends in the same bytes as one that nothing happened to.

Most runs here are run_async.main() in this process on one engine: a second or two each. Those that are killed are processes.
"""

import contextlib
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from test_run import FORKS, Done, in_fork

import checkpoint
import envs
import learn
import rollout
import run_async
from rollout import Engine
from run_async import Run

SETTINGS = ("--prompts 4 --group-size 4 --max-new-tokens 24 --lag 2 --steps 8 --save-every 2 --keep 2 --eval-every 3 --eval-problems 8 "
            "--learner-threads 1 --rollout-threads 1").split()  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Runs in this process, and what is done to them


class Moment:
    """now() is called when the fault strikes, for the last time if it does so repeatedly."""

    at = None

    def now(self):
        self.at = time.monotonic()


def on_call(n, function, before):
    """`function`, but before its call number n (from 0) and every later one, `before(*args)` is called."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) > n:
            before(*args)
        return function(*args, **kwargs)

    return wrapped


@pytest.fixture(scope="module")
def base_engine(engine, base_model):
    shared = engine(base_model, "bfloat16")
    shared.stop_ids, others = [1], shared.stop_ids
    shared.generate([rollout.Request([5, 6, 7], 0)], 2, 1.0, 0)  # compiles, for seconds
    yield shared
    make_idle(shared)
    shared.stop_ids = others


def make_idle(engine) -> None:
    """Whatever a fault left in it."""
    engine.version, engine.cancelled = None, False
    engine.engine.abort_request(list(engine.engine.output_processor.external_req_ids))


@pytest.fixture
def go(base_engine):
    """go(folder, *args, fault=None, code=0) -> Done: main() with `args` and, in a new folder, SETTINGS. fault(patch, moment)
    prepares what is to happen; then the end must come within 5 s of moment.now()."""

    def of(folder, *args, fault=None, code=0) -> Done:
        args = ["--resume", folder, *args] if folder.exists() else [*SETTINGS, "--out", folder, *args]
        handlers, interval, moment, runs = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], sys.getswitchinterval(), Moment(), []
        make_idle(base_engine)
        path, new_run = folder.with_name(folder.name + ".console"), run_async.Run

        def quiet(log):
            log.touch()
            return open(path, "w", buffering=1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout, "Engine", lambda *args, **kwargs: base_engine)
            patch.setattr(run_async, "quiet", quiet)
            patch.setattr(run_async, "subprocess", types.SimpleNamespace(run=lambda *args: None, Popen=lambda *args: None))  # draws
            patch.setattr(run_async, "Run", lambda *args: runs.append(new_run(*args)) or runs[-1])
            patch.setattr(os, "_exit", lambda status: None)
            path.write_text("")
            try:
                if fault:
                    fault(patch, moment)
                status = run_async.main(list(map(str, args)))
            finally:
                ended = time.monotonic()
                for run in runs:
                    run.held.close()  # the process would have ended
                for signum, handler in zip((signal.SIGINT, signal.SIGTERM), handlers):
                    signal.signal(signum, handler)
                sys.setswitchinterval(interval)
        assert status == code, path.read_text()
        assert fault is None or code == 0 or moment.at and ended - moment.at < 5, path.read_text()
        return Done(status, path.read_text(), folder)

    return of


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory, base_model) -> list[Done]:
    """Two runs at once."""
    folders = [tmp_path_factory.mktemp("reference") / name for name in "ab"]
    processes = [fork(folder, [*SETTINGS, "--out", folder]) for folder in folders]
    for process, folder in zip(processes, folders):
        process.join(120)
        assert process.exitcode == 0, console_of(folder)
    return [Done(0, console_of(folder), folder) for folder in folders]


@pytest.fixture(scope="module")
def reference(side_by_side) -> Done:
    """The run that nothing happens to, but that another is beside it; those in this process have the machine to themselves."""
    return side_by_side[0]


def fork(folder, args, hook=None):
    process = FORKS.Process(target=in_fork, args=(args, folder.with_name(folder.name + ".console"), hook))
    process.start()
    return process


def console_of(folder) -> str:
    return folder.with_name(folder.name + ".console").read_text()


def assert_same(done: Done, reference: Done):
    """Metrics (but for times), samples, evaluations, and everything in the last checkpoint that the next update depends on."""
    assert done.untimed() == reference.untimed()
    last = checkpoint.checkpoints(reference.folder)[-1].name
    assert checkpoint.checkpoints(done.folder)[-1].name == last
    for name in ("samples.jsonl", "eval.jsonl", *(f"{last}/{n}.safetensors" for n in ("model", "learner", "versions"))):
        assert done.bytes(name) == reference.bytes(name), name
    assert not list(done.folder.glob(".checkpoint*")) and not list(done.folder.glob("*.new"))


# ---------------------------------------------------------------------------------------------------------------------
# Faults that end a run, and the resume after each


class Hang:
    over = threading.Event()


def engine_raises(patch, moment):
    def fail(*_):
        moment.now()
        raise ArithmeticError("scripted fault")

    patch.setattr(Engine, "generate", on_call(6, Engine.generate, fail))


def thread_dies(patch, moment):
    sample = rollout.RolloutThread._sample
    patch.setattr(rollout.RolloutThread, "_sample", lambda self, b: moment.now() if b == 6 else sample(self, b))


def generate_hangs(patch, moment):
    def hang(*_):
        moment.now()
        Hang.over.wait(60)
        raise RuntimeError("the test is over")

    patch.setattr(Engine, "generate", on_call(6, Engine.generate, hang))


def weights_lack_a_parameter(patch, moment):
    load = Engine.load

    def lacking(self, weights, version):
        if version == 4:
            moment.now()
            weights = {name: w for name, w in weights.items() if "layers.0.self_attn.k_proj" not in name}
        load(self, weights, version)

    patch.setattr(Engine, "load", lacking)


def disk_is_full_for_metrics(patch, moment):
    def fill(run, *_):
        moment.now()
        run.files["metrics"] = open("/dev/full", "w", buffering=1)

    patch.setattr(Run, "log", on_call(5, Run.log, fill))


def disk_is_full_for_a_checkpoint(patch, moment):
    save = checkpoint.save

    def limited(*args):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        moment.now()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, hard))  # model.safetensors fits, learner.safetensors does not
        try:
            return save(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    calls = []
    patch.setattr(checkpoint, "save", lambda *args: (calls.append(1), save(*args) if len(calls) < 3 else limited(*args))[1])


def reward_raises_too_often(patch, moment):
    reward = envs.Arith.reward

    def failing(self, problem, text):
        if problem == self.train(6, 4)[1]:
            moment.now()
            raise RecursionError("scripted fault")
        return reward(self, problem, text)

    patch.setattr(envs.Arith, "reward", failing)


def gradients_stay_nan(patch, moment):
    def spoil(learner, *_):
        moment.now()
        learner.master.grad[3] = math.nan

    norm_is_taken = learn.Learner._backward
    updates = []
    update = learn.Learner.update
    patch.setattr(learn.Learner, "update", lambda self, *args, **kw: (updates.append(1), update(self, *args, **kw))[1])
    patch.setattr(learn.Learner, "_backward", lambda self, *args: (norm_is_taken(self, *args), len(updates) > 4 and spoil(self))[0])


FAULTS = {
    engine_raises: "ArithmeticError: scripted fault",
    thread_dies: "the rollout thread ended early",
    generate_hangs: "TimeoutError: rollout has hung for 2.5 s; a slow machine may need a larger --rollout-timeout",
    weights_lack_a_parameter: "weights version 4 cannot be loaded: model.layers.0.self_attn.k_proj.weight is missing or has another shape",
    disk_is_full_for_metrics: "OSError: [Errno 28] No space left on device",
    disk_is_full_for_a_checkpoint: "checkpoint-6 could not be written: Error while serializing: I/O error: File too large",
    reward_raises_too_often: "--env arith: no reward for 4 of batch 6's 16 responses: RecursionError: scripted fault",
    gradients_stay_nan: "ArithmeticError: loss or gradient was not finite in 2 updates in a row (--max-bad-steps)",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_ends_the_run_with_its_cause_and_the_resumed_run_ends_in_the_same_bytes(fault, go, tmp_path, reference):
    folder = tmp_path / "run"
    timeout = 2.5 if fault is generate_hangs else 60
    failed = go(folder, "--rollout-timeout", timeout, "--max-bad-steps", 2, fault=fault, code=1)
    assert FAULTS[fault] in failed.console
    assert failed.console.splitlines()[-1] == f"to go on: python run_async.py --resume {folder}"
    assert fault is not disk_is_full_for_a_checkpoint or not list(folder.glob(".checkpoint-*"))  # the half of it is gone
    Hang.over.set()
    assert_same(go(folder, "--rollout-timeout", 600), reference)
    Hang.over.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Faults that a run survives


def test_sigterm_saves_and_exits_143_and_the_resumed_run_ends_in_the_same_bytes(go, tmp_path, reference):
    def terminate(patch, moment):
        patch.setattr(learn.Learner, "update", on_call(4, learn.Learner.update, lambda *_: (moment.now(), os.kill(os.getpid(), signal.SIGTERM))))

    stopped = go(tmp_path / "run", fault=terminate, code=143)
    assert "stopped after update 5 of 8; to go on: " in stopped.console
    assert [p.name for p in checkpoint.checkpoints(stopped.folder)] == ["checkpoint-4", "checkpoint-5"]
    assert_same(go(tmp_path / "run"), reference)


def test_a_gradient_that_is_not_finite_takes_no_step_and_is_counted_and_the_run_goes_on(go, tmp_path, reference):
    updates = []

    def spoil_the_third(patch, moment):
        update, backward = learn.Learner.update, learn.Learner._backward

        def spoiled(self, *args):
            backward(self, *args)
            if len(updates) == 3:
                self.master.grad[3] = math.inf

        patch.setattr(learn.Learner, "update", lambda self, *args, **kwargs: (updates.append(1), update(self, *args, **kwargs))[1])
        patch.setattr(learn.Learner, "_backward", spoiled)

    done = go(tmp_path / "run", "--keep", 0, fault=spoil_the_third)
    rows = done.rows()
    assert [m["bad_step"] for m in rows] == [0, 0, 1, 0, 0, 0, 0, 0] and rows[2]["stepped"] is False
    assert rows[:2] == [m | {k: r[k] for k in m if k.startswith("t_") or k == "wall"} for m, r in zip(reference.rows()[:2], rows)]
    assert rows[3]["stepped"] and all(m["mismatch_max"] == 0 for m in rows)


def test_a_response_whose_reward_raises_gets_0_and_is_counted(go, tmp_path, reference):
    def fail_once(patch, moment):
        reward = envs.Arith.reward
        calls = []
        patch.setattr(envs.Arith, "reward", lambda *args: 1 / 0 if calls.append(1) or len(calls) == 5 else reward(*args))

    done = go(tmp_path / "run", "--steps", 2, "--eval-every", 0, fault=fail_once)
    assert [m["reward_errors"] for m in done.rows()] == [1, 0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, "much", None])
def test_a_reward_that_is_no_number_is_an_error_of_the_reward_function(reward):
    task, errors = types.SimpleNamespace(reward=lambda problem, text: reward if text else 1), {}
    assert envs.grade(task, [None, None], ["", "a"], errors) == [1.0, 0.0] and [*errors] == [1] and errors[1]


def test_a_response_that_the_verifier_cannot_take_gets_0_and_leaves_the_others_their_rewards(monkeypatch):
    def is_correct(response, answer):
        if response == "bad":
            raise RuntimeError("no verifier")
        return response == answer

    monkeypatch.setattr(envs, "is_correct", is_correct)
    task, errors = envs.Dataset("jsonl", None, 0, []), {}
    problems = [envs.Problem("q", "3"), envs.Problem("q", ("4", "5"))] * 3
    assert envs.grade(task, problems, ["3", "5", "bad", "bad", "4", "4"], errors) == [1, 1, 0, 0, 0, 1]
    assert {i: str(e) for i, e in errors.items()} == dict.fromkeys([2, 3], "RuntimeError: no verifier")


def test_bad_weights_are_a_bad_step_and_no_kernel_fault(base_engine, base_model):
    """NaN weights: no step, no MismatchError; and the engine samples as before once it has other weights again."""
    learner = learn.Learner(base_model, audit=4, lr=1.0)
    good = learner.weights()
    make_idle(base_engine)
    requests = [rollout.Request([5, 6, 7, 8], i) for i in range(4)]

    def sample(weights, version):
        base_engine.load(weights, version)
        samples = base_engine.generate(requests, 20, 1.0, version)
        for i, s in enumerate(samples):
            s.reward = i % 2
        return samples

    before = sample(good, 0)
    bad = {name: torch.full_like(w, math.nan) for name, w in good.items()}
    samples = sample(bad, 1)
    with learner.holding(bad):
        metrics = learner.update(samples, 1, weights_of=lambda version: bad)
    assert metrics["bad_step"] == 1 and metrics["stepped"] is False and metrics["mismatch_max"] == 0
    assert metrics["nonfinite"] == metrics["tokens"]
    again = sample(good, 2)
    assert all(a.response_ids == b.response_ids and torch.equal(a.logprobs, b.logprobs) for a, b in zip(before, again))
    for name, weight in learner.weights().items():
        assert torch.equal(weight, good[name])


@pytest.mark.parametrize("flag", ["keep=-1", "max_bad_steps=0"])
def test_limits_that_cannot_be_are_refused(flag):
    name, _, value = flag.partition("=")
    with pytest.raises(run_async.UserError, match="--" + name.replace("_", "-")):
        run_async.check(run_async.Config(**{name: int(value)}))


@pytest.mark.parametrize("what", ["loss", "tokens"])
def test_no_step_is_taken_when_the_loss_is_not_finite_or_no_token_is(what, base_model, monkeypatch):
    learner = learn.Learner(base_model, audit=0)
    samples = [rollout.Sample([5, 6], [7, 8], torch.tensor([-1.0, -2.0]), 0, "stop", [1, 1], reward=float(i)) for i in range(2)]
    if what == "loss":
        metrics_of = learn.Stats.metrics
        monkeypatch.setattr(learn.Stats, "metrics", lambda *args: metrics_of(*args) | {"loss": math.inf})
    else:
        for s in samples:
            s.logprobs[:] = math.nan
    before = learner.master.clone()
    metrics = learner.update(samples, 0, weights_of=None)
    assert metrics["bad_step"] == 1 and metrics["stepped"] is False and math.isfinite(metrics["grad_norm"])
    assert torch.equal(learner.master, before) and learner.state()["adam_step"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def corrupt(path: pathlib.Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


@pytest.fixture
def copy(reference, tmp_path) -> pathlib.Path:
    return shutil.copytree(reference.folder, tmp_path / "run")


def whose(folder) -> dict:
    config = run_async.Config(**json.loads((folder / "config.json").read_text()))
    return checkpoint.identity(vars(config), run_async.resolve_model(config.model))


def test_keep_leaves_the_newest_checkpoints_and_each_is_whole(reference):
    assert [p.name for p in checkpoint.checkpoints(reference.folder)] == ["checkpoint-6", "checkpoint-8"]
    path, manifest, passed_over = checkpoint.newest(reference.folder, whose(reference.folder))
    assert path.name == "checkpoint-8" and manifest["step"] == 8 and passed_over == {}
    assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}
    assert {"model.safetensors", "learner.safetensors", "versions.safetensors", "tokenizer.json", "config.json"} < set(manifest["files"])
    assert all(set(p.suffix for p in folder.iterdir()) <= {".json", ".safetensors", ".jinja"} for folder in checkpoint.checkpoints(reference.folder))


def test_a_checkpoint_under_way_is_finished_when_the_rollout_fails_meanwhile(go, tmp_path):
    def fail_meanwhile(patch, moment):
        save = checkpoint.save

        def failing(*args):
            Run.current.rollout._fail(ArithmeticError("scripted fault"))
            moment.now()
            time.sleep(0.1)  # the handler runs
            return save(*args)

        new_run = run_async.Run
        patch.setattr(Run, "current", None, raising=False)
        patch.setattr(run_async, "Run", lambda *args: setattr(Run, "current", new_run(*args)) or Run.current)
        patch.setattr(checkpoint, "save", failing)

    failed = go(tmp_path / "run", fault=fail_meanwhile, code=1)
    assert "ArithmeticError: scripted fault" in failed.console
    assert checkpoint.newest(failed.folder, whose(failed.folder))[0].name == "checkpoint-2"


def test_the_cost_of_a_checkpoint_is_in_the_row_after_it(reference):
    assert [m["t_save"] > 0 for m in reference.rows()] == [False, False, True, False, True, False, True, False]


def test_any_damage_to_the_newest_checkpoint_makes_the_one_before_it_the_newest(copy):
    last = copy / "checkpoint-8"
    names = [p.name for p in last.iterdir()]
    assert len(names) > 5
    for name in names:
        for damage in ("bit", "cut", "gone"):
            intact = (last / name).read_bytes()
            if damage == "bit":
                corrupt(last / name, random.Random(name).random())
            elif damage == "cut":
                (last / name).write_bytes(intact[:-3])
            else:
                (last / name).unlink()
            path, _, passed_over = checkpoint.newest(copy, whose(copy))
            assert path.name == "checkpoint-6" and [*passed_over] == [last] and "checkpoint-8 is not whole" in passed_over[last], (name, damage)
            (last / name).write_bytes(intact)
    intact = (last / "manifest.json").read_text()
    for text in ("null", "[]", "7", "{}", '"x"', "\0" * 9):
        (last / "manifest.json").write_text(text)
        assert checkpoint.newest(copy, whose(copy))[0].name == "checkpoint-6", text
    (last / "manifest.json").write_text(intact)
    assert checkpoint.newest(copy, whose(copy))[0] == last
    shutil.rmtree(copy / "checkpoint-6"), corrupt(last / "learner.safetensors")
    with pytest.raises(ValueError, match="no checkpoint there.*checkpoint-8 is not whole and was passed over: learner.safetensors"):
        checkpoint.newest(copy, whose(copy))


def test_a_run_whose_newest_checkpoint_is_damaged_says_so_and_ends_in_the_same_bytes(go, copy, reference):
    (copy / "checkpoint-8").rename(copy / "checkpoint-7")
    corrupt(copy / "checkpoint-7" / "learner.safetensors")
    (copy / ".checkpoint-7").mkdir()  # half-written
    resumed = go(copy)
    assert "checkpoint-7 is not whole and was passed over: learner.safetensors is not what was written" in resumed.console
    assert [p.name for p in checkpoint.checkpoints(copy)] == ["checkpoint-6", "checkpoint-8"]  # --keep 2 does not count it
    assert_same(resumed, reference)


def test_whatever_a_library_raises_a_checkpoint_that_cannot_be_written_leaves_nothing(copy):
    def full(path):
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    whole, store = copy / "checkpoint-6", rollout.WeightStore()
    with pytest.raises(OSError, match=r"checkpoint-9 could not be written: No space left on device"):
        checkpoint.save(copy, 9, learn.Learner(whole), store, types.SimpleNamespace(save_pretrained=full), whose(copy), {})
    assert not list(copy.glob("*checkpoint-9"))


def test_an_evaluation_that_ends_during_a_checkpoint_is_on_the_disk_or_among_those_waiting(tmp_path, monkeypatch):
    evaluations, saved = [("weights", 6)], []
    with open(tmp_path / "eval.jsonl", "w") as file:
        run = types.SimpleNamespace(files={"eval": file}, rollout=types.SimpleNamespace(evaluations=evaluations), timed=lambda key: contextlib.nullcontext(),
                                    folder=tmp_path, done=6, tokenizer=None, whose=None)  # fmt: skip
        monkeypatch.setattr(os, "fsync", lambda fd: evaluations.clear())  # its row is written, but perhaps after this
        monkeypatch.setattr(checkpoint, "save", lambda *args: saved.append(args[-1]))
        Run.save(run, None, None)
    assert saved == [{6: "weights"}]


def reseal(path: pathlib.Path, **changes) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest |= {key: manifest[key] | value if isinstance(value, dict) else value for key, value in changes.items()}
    del manifest["seal"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"seal": checkpoint._sha256(manifest)}))


OTHERS = {"format": {"format": 0, "files": None, "settings": None}, "model": {"model": ""}, "--max-grad-norm": {"settings": {"max_grad_norm": 2}}}


@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_format_model_or_run_is_refused_and_nothing_is_written(what, copy, capsys):
    reseal(copy / "checkpoint-8", **OTHERS[what])
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*")}
    assert run_async.main(["--resume", str(copy)]) == 2
    error = capsys.readouterr().err
    assert error == f"run_async.py: --resume {copy}: checkpoint-8 is of another {what} than this run's\n"
    assert before == {p: p.stat().st_mtime_ns for p in copy.rglob("*")}


def test_a_run_folder_belongs_to_one_process_until_that_dies(go, copy, capsys):
    code = f"import fcntl, time; held = open({str(copy / '.lock')!r}); fcntl.flock(held, fcntl.LOCK_EX); print('held', flush=True); time.sleep(99)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        assert run_async.main(["--resume", str(copy)]) == 2
        assert f"--resume {copy}: another process is running there" in capsys.readouterr().err
    finally:
        other.kill()
        other.wait()
    go(copy)


def test_of_runs_with_the_same_settings_each_gets_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_async, "Run", lambda config, folder, *_: types.SimpleNamespace(folder=folder, say=lambda line: None))
    own = run_async.Config, run_async.check, run_async.Run
    folders = [run_async.open_run([], *own).folder for _ in range(3)]
    assert [f.name for f in folders] == [f"arith-base-aligned-lag8-seed0{end}" for end in ("", "-2", "-3")]
    (folders[0] / ".config.json.new").touch()  # killed, or no space, at the first file
    assert run_async.open_run(["--out", str(folders[0])], *own).folder == folders[0]


def test_a_tracker_that_does_not_start_is_said_on_the_console_and_no_file_is_written(tmp_path, monkeypatch, capsys):
    def init(**_):
        raise RuntimeError("not logged in")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setattr(run_async, "quiet", lambda log: pytest.fail("the console is no longer where errors go"))
    assert run_async.main(["--track", "wandb", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "run_async.py: --track wandb: not logged in\n"
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n')

    def full(self, text):
        with open(self, "w") as file:
            file.write(text[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(OSError):
        checkpoint.write_whole(path, "other")
    assert checkpoint.read_rows(path) == [{"step": 0}]


# ---------------------------------------------------------------------------------------------------------------------
# Killed


def die_in_a_checkpoint():
    digest, written = checkpoint._digest, []

    def dying(path):
        if "checkpoint-4" in str(path) and (written.append(1) or len(written) == 5):
            os.kill(os.getpid(), signal.SIGKILL)
        return digest(path)

    checkpoint._digest = dying


def die_in_a_weight_load():
    import vllm

    rpc, loads = vllm.LLM.collective_rpc, []

    def dying(self, method, *args, kwargs=None):
        if method == "reload_weights" and (loads.append(1) or len(loads) == 4):
            kwargs = {"weights_iterator": half(list(kwargs["weights_iterator"]))}
        return rpc(self, method, *args, kwargs=kwargs)

    def half(weights):
        yield from weights[: len(weights) // 2]
        os.kill(os.getpid(), signal.SIGKILL)

    vllm.LLM.collective_rpc = dying


def die_in_an_evaluation():
    """In the one queued at checkpoint 6, once that is written."""
    from rollout import Engine, RolloutThread

    run_evaluations, generate, save, saved = RolloutThread._run_evaluations, Engine.generate, run_async.Run.save, []

    def saving(self, *args):
        save(self, *args)
        saved.extend([1] * (self.done == 6))

    def noted(self):
        Engine.evaluating = bool(self.evaluations)
        run_evaluations(self)
        Engine.evaluating = False

    def dying(self, requests, max_new_tokens, temperature, version):
        if Engine.evaluating and version == 6:
            while not saved:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return generate(self, requests, max_new_tokens, temperature, version)

    RolloutThread._run_evaluations, Engine.generate, run_async.Run.save = noted, dying, saving


def killed(folder, args, hook=None, after=None) -> bool:
    """Run until `hook` kills it, or `after()` has returned; False if it ended before, well."""
    process = fork(folder, args, hook)
    if after:
        after(process)
        process.kill()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL), console_of(folder)
    return process.exitcode != 0


def test_a_run_killed_in_a_checkpoint_a_weight_load_and_an_evaluation_ends_in_the_same_bytes(go, tmp_path, reference):
    folder = tmp_path / "run"
    assert killed(folder, [*SETTINGS, "--out", folder], die_in_a_checkpoint)
    assert [p.name for p in folder.glob("*checkpoint*")] in (["checkpoint-2", ".checkpoint-4"], [".checkpoint-4", "checkpoint-2"])
    assert killed(folder, ["--resume", folder], die_in_a_weight_load)
    assert killed(folder, ["--resume", folder], die_in_an_evaluation)
    done = go(folder)
    assert_same(done, reference)
    assert [e["version"] for e in done.rows("eval")] == [3, 6, 8]


def test_two_runs_at_once_do_not_disturb_each_other(go, tmp_path, side_by_side):
    alone = go(tmp_path / "run")
    for run in side_by_side:
        assert_same(run, alone)


# ---------------------------------------------------------------------------------------------------------------------
# Other people's input


def saved_again(base_model, path, **changes) -> pathlib.Path:
    """The base model in float32 files, with other settings in its configuration."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(base_model, path)
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    model.config.update(changes)
    model.save_pretrained(path)
    return path


def test_the_dtype_of_a_models_files_does_not_matter_but_that_of_the_flag(go, base_model, tmp_path, reference):
    model = saved_again(base_model, tmp_path / "model")
    assert json.loads((model / "config.json").read_text())["dtype"] == "float32"
    done = go(tmp_path / "run", "--model", model, "--steps", 3, "--save-every", 0, "--eval-every", 0)
    assert done.bytes("samples.jsonl").splitlines() == reference.bytes("samples.jsonl").splitlines()[:6]
    assert [m["grad_norm"] for m in done.rows()] == [m["grad_norm"] for m in reference.rows()[:3]]


@pytest.mark.parametrize("mode", ["aligned", "standard"])
def test_a_pad_token_that_is_the_eos_is_trained_like_any_other(mode, base_model, tmp_path):
    gradients = []
    for pad in (0, 1):  # of the base model; its eos is 1
        learner = learn.Learner(saved_again(base_model, tmp_path / str(pad), pad_token_id=pad), "float32", mode, audit=0)
        samples = [rollout.Sample([5, 1, 6], [7, 8, 1], torch.full((3,), -1.0), 0, "stop", [1] * 3, reward=float(i)) for i in range(2)]
        samples[1].response_ids = [8, 9, 1]
        learner.update(samples, 0, weights_of=None)
        gradients.append(learner.master.grad.clone())
    assert torch.equal(*gradients) and gradients[0].any()


def test_a_model_with_code_or_pickled_weights_of_its_own_or_damaged_is_refused_and_not_run(base_model, tmp_path, capsys):
    model = shutil.copytree(base_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    code = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Theirs", "AutoModelForCausalLM": "theirs.TheirModel"}}
    (model / "config.json").write_text(json.dumps(config | code))
    (model / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    pickled = shutil.copytree(base_model, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    damaged = [shutil.copytree(base_model, tmp_path / name) for name in ("tokenizer.json", "model.safetensors")]
    for folder in damaged:
        (folder / folder.name).write_bytes((folder / folder.name).read_bytes()[:100])
    for folder, message in ((model, "custom code"), (pickled, "not a valid safetensors folder"), *((folder, "--model") for folder in damaged)):
        assert run_async.main(["--model", str(folder), "--out", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert message in error and str(folder) in error and len(error.splitlines()) == 1
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_any_characters_can_be_in_a_prompt(go, tmp_path):
    def strange(patch, moment):
        text = '"\0\r\n\u2028\u0085\ufeff\U0001f600\u0301\u202e\\{}'
        patch.setattr(envs.Arith, "prompt_ids", lambda self, p: self.tokenizer.encode(text + p.prompt))
        patch.setattr(rollout, "decode", lambda tokenizer, samples, tools=True: [text] * len(samples))

    done = go(tmp_path / "run", "--steps", 2, fault=strange)
    lines = done.bytes("samples.jsonl").decode().splitlines()
    assert len(lines) == 4 and all("\u2028" in json.loads(line)["response"] for line in lines)


def test_a_prompt_longer_than_the_model_ends_the_run_with_its_length(go, tmp_path):
    def longer(patch, moment):
        ids, calls = envs.Arith.prompt_ids, []
        patch.setattr(envs.Arith, "prompt_ids", lambda self, p: ids(self, p) * (1 if calls.append(1) or len(calls) < 22 else moment.now() or 300))

    done = go(tmp_path / "run", "--eval-every", 0, fault=longer, code=1)
    assert "longer than the maximum model length of 1024" in done.console or "maximum context length is 1024 tokens" in done.console


# ---------------------------------------------------------------------------------------------------------------------
# Long


@pytest.mark.soak
def test_a_run_killed_30_times_at_random_ends_in_the_same_bytes(tmp_path, base_model):
    new, rng, kills, runs = [*SETTINGS, "--steps", 60, "--out"], random.Random(), 0, 0
    assert not killed(tmp_path / "reference", [*new, tmp_path / "reference"])
    reference = Done(0, "", tmp_path / "reference")
    while kills < 30:
        folder, runs, ended = tmp_path / f"run{runs}", runs + 1, False
        metrics = folder / "metrics.jsonl"
        while not ended:
            whole = checkpoint.checkpoints(folder)
            if not whole:
                shutil.rmtree(folder, ignore_errors=True)
            start, old = (int(whole[-1].name.split("-")[1]), metrics.stat().st_ino) if whole else (0, None)

            def some_time(process):
                """One time in ten from the beginning; else from the first update, for most of the time is set-up."""
                at_once = rng.random() < 0.1
                while not at_once and process.is_alive():
                    time.sleep(0.02)  # a resumed run begins with a new file of the old rows
                    at_once = metrics.exists() and metrics.stat().st_ino != old and len(checkpoint.read_rows(metrics)) > start
                process.join(rng.uniform(0, 4))

            ended = not killed(folder, ["--resume", folder] if whole else [*new, folder], after=some_time)
            kills += not ended
            steps = [m["step"] for m in checkpoint.read_rows(metrics)]
            assert steps == list(range(len(steps)))
        assert_same(Done(0, "", folder), reference)
    print(f"{kills} kills in {runs} runs")


@pytest.mark.soak
def test_a_long_run_does_not_grow(tmp_path, base_model):
    """2,000 updates: memory within 5% of that at update 200, as many threads and open files, and metrics.jsonl readable."""
    import psutil

    folder, seen = tmp_path / "run", {}
    small = "--prompts 2 --group-size 2 --max-new-tokens 12 --steps 2000 --save-every 100 --eval-every 400".split()
    process = fork(folder, [*SETTINGS, *small, "--out", folder])
    this = psutil.Process(process.pid)
    while process.is_alive():
        time.sleep(0.1)
        with contextlib.suppress(psutil.Error):
            usage = this.memory_info().rss, this.num_threads(), this.num_fds()
            lines = (folder / "metrics.jsonl").read_text().split("\n") if (folder / "metrics.jsonl").exists() else [""]
            rows = [json.loads(line)["step"] for line in lines[:-1]]
            assert rows == list(range(len(rows)))
            seen.setdefault(len(rows), usage)
    assert process.exitcode == 0, console_of(folder)
    early = seen[min(n for n in seen if n >= 200)]
    late = seen[max(n for n in seen if n < 2000)]
    print(f"(bytes, threads, files) at update 200: {early}, at the end: {late}")
    assert late[0] < 1.05 * early[0] and late[1] <= early[1] and late[2] <= early[2]
    assert len(checkpoint.checkpoints(folder)) == 2


@pytest.mark.soak
def test_a_batch_of_10000_prompts(go, tmp_path):
    args = "--prompts 10000 --group-size 2 --max-new-tokens 2 --steps 1 --lag 0 --eval-every 0".split()
    rows = go(tmp_path / "run", *args).rows()
    assert rows[0]["mismatch_max"] == 0 and rows[0]["tokens"] <= 40_000
