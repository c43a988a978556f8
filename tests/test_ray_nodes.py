"""run_ray.py on two machines: two network namespaces of this one, joined by a cable (a veth pair) that the test pulls out.

A Ray head with the learner and an engine in one, a Ray worker with the other engine in the other.
"""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from test_run import Done

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAD, WORKER, PORT = "10.211.77.1", "10.211.77.2", 6379
SETTINGS = ("--prompts 4 --group-size 4 --max-new-tokens 24 --lag 2 --steps 40 --eval-every 0 --learner-threads 1 --rollout-threads 1").split()
TOKEN = secrets.token_hex(32)  # Ray's nodes show it to each other
UNTIMED = ("weight_bytes",)  # of run_ray.py alone


def ip(*args) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def cable():
    """Two namespaces and the cable between them: (head's, worker's, connect(True or False))."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and iproute2's ip, for network namespaces")
    a, b = names = [f"rz-{side}-{os.getpid()}" for side in ("head", "worker")]
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"needs network namespaces: {error.stderr.strip()}")
    try:
        ip("link", "add", "rz0", "netns", a, "type", "veth", "peer", "name", "rz1", "netns", b)
        for name, device, address in ((a, "rz0", HEAD), (b, "rz1", WORKER)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "route", "add", "default", "dev", device)  # Ray asks which address leads out
        yield a, b, lambda up: ip("-n", b, "link", "set", "rz1", "up" if up else "down")
    finally:
        for name in names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in map(int, pids):  # Ray's processes, whoever their parents are by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "del", name)


def start(namespace, console, *command) -> subprocess.Popen:
    """A process in the namespace; the fixture `cable` kills it at the end."""
    with open(console, "w") as out:
        return subprocess.Popen(["ip", "netns", "exec", namespace, *map(str, command)], cwd=ROOT, stdout=out, stderr=out, start_new_session=True,
                                env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN})  # fmt: skip


def until(true, seconds: float, process, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, f"ended before {what}"
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def engines_in(namespace: str) -> int:
    """Engine actors whose process is in the namespace."""
    inode, found = os.stat(f"/var/run/netns/{namespace}").st_ino, 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.stat(f"/proc/{process.pid}/ns/net").st_ino == inode and "ray::EngineActor" in " ".join(process.cmdline()):
                found += 1
    return found


@pytest.mark.soak
def test_a_run_over_two_machines_outlives_a_link_cut_for_20_s_and_one_cut_for_good(cable, tmp_path, base_model):
    head, worker, connect = cable
    plain = subprocess.run([sys.executable, "run_async.py", *SETTINGS, "--out", tmp_path / "plain"], cwd=ROOT, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    ray, limits = shutil.which("ray", path=pathlib.Path(sys.executable).parent), ["--object-store-memory", 100 << 20, "--block"]
    folder = tempfile.mkdtemp(prefix="rz", dir="/tmp")  # short, for Ray puts sockets there
    own_folder = f'mount -t tmpfs tmpfs {folder} && exec "$0" "$@"'  # the worker's; what it lacks has to come over the cable
    try:
        node = start(head, tmp_path / "head", ray, "start", "--head", "--node-ip-address", HEAD, "--port", PORT, "--num-cpus", 2,
                     "--include-dashboard", "false", "--temp-dir", folder, *limits)  # fmt: skip
        until(lambda: "Ray runtime started" in (tmp_path / "head").read_text(), 120, node, "Ray's head has started")
        node = start(worker, tmp_path / "worker", "sh", "-c", own_folder, ray, "start", "--address", f"{HEAD}:{PORT}", "--node-ip-address", WORKER,
                     "--num-cpus", 1, *limits)  # fmt: skip
        until(lambda: "Ray runtime started" in (tmp_path / "worker").read_text(), 120, node, "Ray's worker has joined")
        out = tmp_path / "run"
        run = start(head, tmp_path / "console", sys.executable, "run_ray.py", *SETTINGS, "--engines", 2, "--ray-address", f"{HEAD}:{PORT}",
                    "--out", out)  # fmt: skip
        done = lambda: (out / "metrics.jsonl").read_text().count("\n") if (out / "metrics.jsonl").exists() else 0  # noqa: E731
        until(lambda: done() >= 5, 600, run, "5 updates")
        assert engines_in(head) == engines_in(worker) == 1

        connect(False)
        before = done()
        time.sleep(20)
        stalled = done()
        assert before <= stalled <= before + 5  # what was under way; half of each batch is on the other side
        connect(True)
        until(lambda: done() >= stalled + 5, 200, run, "5 updates more, after the link came back")  # Ray by itself: 300 s
        assert engines_in(head) == engines_in(worker) == 1  # nobody was taken for dead

        connect(False)
        until(lambda: run.poll() is not None or engines_in(head) == 2, 300, run, "the lost engine is started on the head")
        assert run.wait(600) == 0, (tmp_path / "console").read_text()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    plain, done = (Done(0, "", tmp_path / name) for name in ("plain", "run"))
    of_ray = [{k: v for k, v in m.items() if k not in UNTIMED and not k.startswith("t_") and k != "wall"} for m in done.rows()]
    assert "\n".join(map(json.dumps, of_ray)).encode() == plain.untimed()
    for name in ("model.safetensors", "learner.safetensors"):
        assert done.bytes(f"checkpoint-40/{name}") == plain.bytes(f"checkpoint-40/{name}")
