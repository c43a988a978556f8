"""run_ray.py gives the bytes of run_async.py: with 1, 2 and 3 engines, when an engine is killed or a learner is lost.

Most runs here are run_ray.main() in this process, on engines that the tests share: a second or two each.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest
import torch
from test_run import FORKS, Done, in_fork

import run_async
import run_ray
from rollout import Request, Weights, sample_seed

ROOT = pathlib.Path(run_ray.__file__).parent
SETTINGS = ("--prompts 5 --group-size 4 --max-new-tokens 24 --lag 2 --steps 6 --save-every 3 --eval-every 3 --eval-problems 8 "
            "--learner-threads 1 --rollout-threads 1").split()  # fmt: skip
ASIDE = ("weight_bytes",)  # besides timing keys


@pytest.fixture(scope="module")
def plain(tmp_path_factory, base_model) -> Done:
    """The run of run_async.py that all others must equal."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return in_run_async(folder, *SETTINGS, "--out", folder)


def in_run_async(folder, *args) -> Done:
    process = FORKS.Process(target=in_fork, args=(args, folder.parent / "console", None))
    process.start()
    process.join(180)
    assert process.exitcode == 0, (folder.parent / "console").read_text()
    return Done(0, "", folder)


def assert_same(done: Done, plain: Done) -> None:
    """Byte for byte, but for timing keys and what only this run measures."""
    assert without(ASIDE, done) == plain.untimed()
    assert done.bytes("samples.jsonl") == plain.bytes("samples.jsonl")
    assert [e["version"] for e in done.rows("eval")] == [3, 6] and done.bytes("eval.jsonl") == plain.bytes("eval.jsonl")
    for name in ("model.safetensors", "learner.safetensors", "versions.safetensors"):
        assert done.bytes(f"checkpoint-6/{name}") == plain.bytes(f"checkpoint-6/{name}")


def without(keys, done: Done) -> bytes:
    """metrics.jsonl without these and the timing keys."""
    rows = [{k: v for k, v in m.items() if k not in keys} for m in done.rows()]
    return Done.untimed(types.SimpleNamespace(rows=lambda: rows))


# ---------------------------------------------------------------------------------------------------------------------
# Runs in this process, on three engines


@pytest.fixture(scope="module")
def pool(base_model):
    """Engine actors, made when first asked for: pool(config, args, settings) -> --engines of them."""
    config, actors, starting = run_ray.Config(engines=4), [], []
    run_ray.start_ray(config, types.SimpleNamespace(model_path=base_model))
    make = run_ray.engine_actors

    def of(config, args, settings):
        if not actors:
            actors.extend(make(dataclasses.replace(config, engines=3), args, settings))
            starting.extend(actor.start.remote() for actor in actors)  # all at once
        return actors[: config.engines]

    yield of
    run_ray.ray.shutdown()


@pytest.fixture
def go(pool, monkeypatch):
    """go(folder, *args, code=0) -> Done: run_ray.main() with `args` and, in a new folder, SETTINGS."""

    def of(folder, *args, code=0) -> Done:
        args = ["--resume", folder, *args] if folder.exists() else [*SETTINGS, "--out", folder, *args]
        handlers, interval, runs = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], sys.getswitchinterval(), of.runs
        path = folder.with_name("console")
        new_run = run_ray.Run

        def quiet(log):
            log.touch()
            return open(path, "a", buffering=1)

        with monkeypatch.context() as patch:
            patch.setattr(run_ray, "start_ray", lambda config, run: None)
            patch.setattr(run_ray, "engine_actors", pool)
            patch.setattr(run_async, "quiet", quiet)
            patch.setattr(run_async, "subprocess", types.SimpleNamespace(run=lambda *args: None, Popen=lambda *args: None))  # draws
            patch.setattr(run_ray, "Run", lambda *args: runs.append(new_run(*args)) or runs[-1])
            try:
                status = run_ray.main(list(map(str, args)))
            finally:
                for run in runs:
                    run.held.close()  # the process would have ended
                for signum, handler in zip((signal.SIGINT, signal.SIGTERM), handlers):
                    signal.signal(signum, handler)
                sys.setswitchinterval(interval)
        assert status == code, path.read_text()
        return Done(status, path.read_text(), folder)

    of.runs = []
    return of


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_metrics_samples_evaluations_and_weights_are_those_of_run_async_with_1_2_and_3_engines(engines, go, plain, tmp_path):
    done = go(tmp_path / "run", "--engines", engines)
    size = sum(w.nbytes for w in run_ray.unpack(run_ray.pack(weights_of(plain))).values())
    assert [m["weight_bytes"] for m in done.rows()] == [size, 0, 0, size, size, size]  # versions 0, 0, 0, 1, 2, 3, once each
    assert all(m["t_put"] >= 0 for m in done.rows())
    assert_same(done, plain)


def weights_of(done: Done) -> Weights:
    from transformers import AutoModelForCausalLM

    return Weights(AutoModelForCausalLM.from_pretrained(done.folder / "checkpoint-6").named_parameters())


def test_a_run_resumed_on_another_number_of_engines_ends_in_the_same_bytes(go, plain, tmp_path):
    folder = tmp_path / "run"
    go(folder, "--engines", 2)
    shutil.rmtree(folder / "checkpoint-6")
    assert_same(go(folder, "--engines", 1), plain)


def test_a_run_of_run_async_goes_on_in_run_ray_on_two_learners_and_then_in_run_async_again(go, plain, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(plain.folder, folder)
    shutil.rmtree(folder / "checkpoint-6")
    assert_same(go(folder, "--engines", 2, "--learners", 2), plain)
    shutil.rmtree(folder / "checkpoint-6")
    assert_same(in_run_async(folder, "--resume", folder), plain)
    for program, also in ((run_ray, True), (run_async, False)):  # what may change is said
        assert program.main(["--resume", str(folder), "--lag", "9"]) == 2
        assert ("--learners" in (error := capsys.readouterr().err)) == also and "--lag" in error and "--steps" in error


def processes(name: str, of: int | None = None) -> list[psutil.Process]:
    """Descendants of a process (this one) that Ray has given a name that begins so."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith(f"ray::{name}"):
                found.append(process)
        except psutil.Error:
            pass
    return found


def in_a_call(name: str, after, of: int | None = None) -> psutil.Process:
    """One process, stopped while it is in a call of that name, once after() is true."""
    limit = time.monotonic() + 600
    while time.monotonic() < limit:
        time.sleep(0.005)
        for process in processes(name, of) if after() else ():
            with contextlib.suppress(psutil.Error):  # gone
                process.suspend()
                if " ".join(process.cmdline()).startswith(f"ray::{name}"):  # still
                    return process
                process.resume()
    raise TimeoutError(name)


def test_an_engine_killed_in_the_middle_of_a_batch_is_started_again_and_the_run_ends_in_the_same_bytes(go, plain, tmp_path):
    metrics, before = tmp_path / "run" / "metrics.jsonl", set()

    def kill():
        process = in_a_call("EngineActor.generate", lambda: metrics.exists() and metrics.read_text())
        before.update(p.pid for p in processes("EngineActor"))
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    done = go(tmp_path / "run", "--engines", 3)
    killer.join()
    after = {p.pid for p in processes("EngineActor")}
    assert len(before - after) == len(after - before) == 1  # one is another process
    assert_same(done, plain)


def test_a_hung_engine_ends_the_run_at_its_timeout(go, tmp_path):
    metrics, stopped = tmp_path / "run" / "metrics.jsonl", []

    def stop():
        stopped.append(in_a_call("EngineActor.generate", lambda: metrics.exists() and metrics.read_text()))
        go.runs[-1].rollout.timeout = 1  # from now on: on a busy machine a batch may well take longer

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        done = go(tmp_path / "run", "--engines", 2, "--steps", 1000, code=1)
    finally:
        stopper.join()
        stopped[0].resume()
    assert "run_ray.py: TimeoutError: rollout has hung for 1 s" in done.console


@pytest.fixture
def restarted(tmp_path, monkeypatch):
    """restarted(error) -> the arguments with which the run starts itself again after the error; None if it ends."""

    def of(error):
        started, run = [], run_ray.Run.__new__(run_ray.Run)
        (tmp_path / "run").mkdir()
        vars(run).update(config=types.SimpleNamespace(max_restarts=1), say=print, folder=tmp_path / "run", args=["--lag", "2"],
                         console=types.SimpleNamespace(fileno=lambda: 2))  # fmt: skip
        with monkeypatch.context() as patch:
            for module, name in ((run_ray.ray, "shutdown"), (os, "dup2"), (run_async.Run, "fail")):
                patch.setattr(module, name, lambda *_: None)
            patch.setattr(os, "execve", lambda program, args, environment: started.append(args[2:]))
            run.fail(error)
        return started[0] if started else None

    return of


def test_an_engine_that_dies_in_every_attempt_ends_the_run_with_its_last_error(pool, base_model, restarted):
    others, killed, over = {p.pid for p in processes("EngineActor")}, set(), threading.Event()

    def kill():
        while not over.wait(0.02):
            for process in processes("EngineActor.start"):
                if process.pid not in others | killed:
                    process.kill()
                    killed.add(process.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(RuntimeError, match="an engine died 3 times in a row: The actor") as raised:
            run_ray.Engines(run_ray.Config(), base_model, device="cpu", max_seqs=4)
    finally:
        over.set(), killer.join()
    assert len(killed) == 3
    assert restarted(raised.value) is None  # it would only die again


def test_an_error_in_an_engine_is_raised_as_it_was_and_ends_the_run(pool, base_model, restarted):
    with pytest.raises(ValueError, match="--env chess") as raised:
        run_ray.Engines(run_ray.Config(env="chess"), base_model, device="cpu", max_seqs=4)
    assert restarted(raised.value) is None


def test_engines_for_which_ray_has_no_room_end_the_run_in_time(pool, base_model, monkeypatch):
    monkeypatch.setattr(run_ray, "START", 1.0)
    with pytest.raises(TimeoutError, match="--engines 20"):
        run_ray.Engines(run_ray.Config(engines=20, prompts=20), base_model, device="cpu", max_seqs=4)


def test_learners_for_which_ray_has_no_room_end_the_run_in_time(pool, base_model, monkeypatch):
    monkeypatch.setattr(run_ray, "START", 1.0)
    with pytest.raises(TimeoutError, match="--learners 20"):
        run_ray.Learners(run_ray.Config(learners=20), base_model, "bfloat16", "aligned", device="cpu")


def test_weights_are_one_object_that_is_read_in_place_and_freed_with_its_version(pool):
    for dtype in (torch.bfloat16, torch.float32):
        original = {"a": torch.randn(300, 70).to(dtype), "b": torch.randn(7).to(dtype), "c": torch.tensor(3.0, dtype=dtype)}
        weights = Weights(original)
        ref = run_ray.put(weights)
        assert run_ray.put(weights) is ref
        for got in (weights, run_ray.unpack(run_ray.ray.get(ref))):
            assert list(got) == list(original) and all(got[n].dtype == dtype and torch.equal(got[n], original[n]) for n in original)
        assert weights["a"].data_ptr() == run_ray.unpack(run_ray.ray.get(ref))["a"].data_ptr() != original["a"].data_ptr()
        assert weights["a"].data_ptr() % 64 == 0
        at = ref.hex().encode()
        assert at in held()
        del weights, ref, got
        limit = time.monotonic() + 10
        while at in held():
            assert time.monotonic() < limit
            time.sleep(0.05)


def held() -> set[bytes]:
    """Objects to which this process has references."""
    return set(run_ray.ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def test_a_request_with_a_tool_is_answered_by_the_actors_own_task(tiny, engine):
    def tool(turn_ids, turn):
        return None if turn == 2 else [50 + turn_ids[0] % 50, 77]

    made = engine(tiny("qwen3", "bfloat16"), "bfloat16")
    stop_ids, made.stop_ids = made.stop_ids, list(range(24))
    try:
        requests = [Request([(7 * i + j) % 128 for j in range(20 + i)], sample_seed(0, i), tool) for i in range(8)]
        expected = made.generate(requests, 32, 1.0, 0)
        actor = run_ray.EngineActor(run_ray.Config(), (), {})
        actor.engine, actor.task = made, types.SimpleNamespace(follow_up=tool)
        got = actor.generate([None], 0, [dataclasses.replace(r, follow_up=True) for r in requests], 32, 1.0)
    finally:
        made.stop_ids = stop_ids
    assert any(0 in s.mask for s in expected)
    for a, b in zip(got, expected, strict=True):
        assert a.response_ids == b.response_ids and a.mask == b.mask and torch.equal(torch.tensor(a.logprobs), b.logprobs)


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def command(tmp_path, base_model):
    """command(*args) -> (process, Done after it has ended): `python run_ray.py` with SETTINGS and args."""
    folder, console, started = tmp_path / "run", tmp_path / "console", []

    def of(*args):
        with open(console, "w") as out:
            started.append(subprocess.Popen([sys.executable, "run_ray.py", *SETTINGS, "--out", folder, *map(str, args)], cwd=ROOT, stdout=out, stderr=out))

        def end(code=0):
            assert started[-1].wait(600) == code, console.read_text()
            return Done(code, console.read_text(), folder)

        return started[-1], end

    yield of
    for process in started:
        process.kill()


def rows(folder, n):
    return lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") >= n


def test_the_command_saves_and_stops_at_sigterm_goes_on_with_resume_and_leaves_no_process(command, plain, tmp_path):
    process, end = command("--steps", 100_000, "--eval-every", 3, "--save-every", 3)
    limit = time.monotonic() + 300
    while not rows(tmp_path / "run", 7)():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    ours = psutil.Process(process.pid).children(recursive=True)
    assert processes("EngineActor", process.pid)
    process.send_signal(signal.SIGTERM)
    done = end(143)
    assert f"python run_ray.py --resume {tmp_path / 'run'}" in done.console and "Traceback" not in done.console
    assert "ray" not in done.console.replace("run_ray.py", "").replace(str(tmp_path), "").lower()  # our own lines only
    gone, alive = psutil.wait_procs(ours, timeout=20)
    assert not alive
    del done.folder  # of another length
    assert (tmp_path / "run" / "samples.jsonl").read_bytes().startswith((plain.folder / "samples.jsonl").read_bytes())
    for name in ("model.safetensors", "learner.safetensors"):
        assert (tmp_path / "run" / "checkpoint-6" / name).read_bytes() == plain.bytes(f"checkpoint-6/{name}")


@pytest.mark.parametrize("saved", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_lost_learner_ends_in_a_restart_from_the_newest_checkpoint_or_the_start_and_in_the_same_bytes(saved, command, plain, tmp_path):
    process, end = command("--learners", 2, "--save-every", 3 if saved else 0, "--max-restarts", 1)
    in_a_call("LearnerActor.update", rows(tmp_path / "run", 4 if saved else 2), process.pid).kill()
    done = end()
    assert "restart 1 of 1 (--max-restarts)" in done.console, done.console
    before, after = done.console.split("restart 1 of 1 (--max-restarts)")
    assert ("| 3/6 [" if saved else "| 0/6 [") in after, after  # where its progress bar starts
    assert_same(done, plain)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def test_a_learner_lost_while_a_checkpoint_is_written_is_a_lost_learner(tmp_path, restarted):
    error = OSError("checkpoint-6 could not be written")
    error.__cause__ = run_ray.ray.exceptions.RayActorError()
    assert restarted(error) == ["--lag", "2", "--out", str(tmp_path / "run")]


def test_a_figure_that_was_being_drawn_is_no_other_run_to_one_that_starts_again(tmp_path, capsys):
    for name in ("curves.png", ".curves-7.png"):
        (tmp_path / name).touch()
    assert run_ray.main(["--lag", "-1", "--out", str(tmp_path)]) == 2
    assert "--lag -1" in capsys.readouterr().err  # and not --out


@pytest.mark.parametrize("args", ["--engines 0", "--engines 6", "--learners 0", "--tensor-parallel 2", "--max-restarts -1",
                                  "--ray-address nowhere", "--ray-address 127.0.0.1:1", "--lag -1"])  # fmt: skip
def test_bad_input_is_refused_in_one_line_that_names_the_flag(args, capsys, tmp_path, base_model):
    assert run_ray.main([*SETTINGS, *args.split(), "--out", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("run_ray.py: " + args.split()[0])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_an_address_where_something_else_than_ray_listens_is_refused(said):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(said), daemon=True).start()  # and closes
        with pytest.raises(run_ray.UserError, match="--ray-address .*(something else answers|reset)"):
            run_ray.check(run_ray.Config(ray_address="127.0.0.1:%d" % server.getsockname()[1]))


def test_rays_own_address_is_taken(pool):
    run_ray.check(run_ray.Config(ray_address=run_ray.ray.get_runtime_context().gcs_address))


def test_without_ray_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['ray'] = None; import run_ray"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "requirements-ray.txt" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Soak


@pytest.mark.soak
@pytest.mark.parametrize("settings", ["--lag 8 --steps 40", "--lag 8 --steps 12 --env calc --max-new-tokens 64 --eval-every 6",
                                      "--lag 4 --steps 12 --model base-moe"])  # fmt: skip
def test_default_runs_are_the_same_on_two_engines_also_when_one_is_killed(settings, tmp_path):
    runs = {}
    for name, program, args in (("async", "run_async.py", ""), ("ray", "run_ray.py", "--engines 2"), ("killed", "run_ray.py", "--engines 2")):
        folder = tmp_path / name
        process = subprocess.Popen([sys.executable, program, *settings.split(), *args.split(), "--out", folder], cwd=ROOT)
        if name == "killed":
            in_a_call("EngineActor.generate", rows(folder, 5), process.pid).kill()
        assert process.wait(3600) == 0
        runs[name] = Done(0, "", folder)
    for name in ("ray", "killed"):
        steps = runs["async"].rows()[-1]["step"] + 1
        assert without(ASIDE, runs[name]) == runs["async"].untimed()
        for file in ("samples.jsonl", "eval.jsonl", f"checkpoint-{steps}/learner.safetensors", f"checkpoint-{steps}/model.safetensors"):
            assert runs[name].bytes(file) == runs["async"].bytes(file)
