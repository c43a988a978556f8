"""run_async.py on a Ray cluster, to the same bits: rollout engines, and with --learners M the learner, in processes anywhere.

    python run_ray.py --engines 2 --lag 8                        # a Ray of its own, on this machine
    python run_ray.py --engines 8 --ray-address HOST:6379        # on a cluster, from one of its nodes

Each engine is rollout.Engine in a Ray actor and samples a fixed share of a batch's prompts. Every response has its own seed, and
aligned kernels do not depend on what shares the batch: which engine samples what changes no bit, nor does sampling it again after
a crash. All nodes see the model, the data and this code under the same paths.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from dataclasses import dataclass
from typing import ClassVar

import run_async  # before torch: it sets what OpenMP reads then

import torch

import checkpoint
import envs
import kernels
import kernels_cuda
from rollout import Engine, Weights
from run_async import UserError, default_threads, devices

# A link that was down for 20 s can leave a connection that one end has given up and the other waits on. Ray asks after 300 s; its
# servers allow it every 60 s.
os.environ.setdefault("RAY_grpc_client_keepalive_time_ms", "65000")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: beside any other load engines would get next to no CPU
try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
except ImportError:
    print("run_ray.py: Ray is not installed: pip install --no-deps -r requirements-ray.txt", file=sys.stderr)
    raise SystemExit(2) from None
from weight_transfer import Sender, free_address, result_of

DEATHS = 3  # of an engine in a row, which end the run
START = 600.0  # seconds in which the engines, and the learners, must be there


@dataclass
class Config(run_async.Config):
    """Train a language model by REINFORCE with rollouts up to --lag updates old, on a Ray cluster."""

    program: ClassVar[str] = "run_ray.py"

    engines: int = 1
    """Rollout engines; each samples a fixed share of a batch's prompts. The run is the same whatever their number."""
    tensor_parallel: int = 1
    """GPUs of an engine; more than one with --kernels standard only."""
    learners: int = 1
    """1: the learner is in this process; more: ranks of FSDP2 (learn_fsdp.py), a process and on GPUs a GPU each."""
    ray_address: str | None = None
    """HOST:PORT of a Ray cluster that this machine is a node of, or auto (any there is, also another run's); by default one of its own."""
    max_restarts: int = 3
    """How often the run goes on by itself from its newest checkpoint (or the start) after it has lost a learner."""


def check(config: Config) -> None:
    """Raise UserError, one line that names the flag, for settings that cannot work."""
    run_async.check(config)
    run_async.require(config, {"engines": 1, "tensor_parallel": 1, "learners": 1, "max_restarts": 0}, {"engines": config.prompts})
    if config.tensor_parallel > 1 and (devices(config)[0] == "cpu" or config.kernels == "aligned"):
        raise UserError(f"--tensor-parallel {config.tensor_parallel}: needs GPUs and --kernels standard, for it sums in parts")
    if config.ray_address and config.ray_address != "auto":
        host, _, port = config.ray_address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=10) as s:  # of anything but gRPC Ray would ask for minutes
                s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                if s.recv(9)[3:4] != b"\4" and not os.environ.get("RAY_USE_TLS"):
                    raise OSError("something else answers")
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(f"--ray-address {config.ray_address}: no Ray there; HOST:PORT of `ray start --head` ({error})") from None


def set_up(config: Config, run: "Run"):
    """As in run_async.py, but engines, and learners if there are several, are Ray actors."""
    start_ray(config, run)
    learners = functools.partial(Learners, config) if config.learners > 1 else None
    learner, engines, store = run_async.set_up(config, run, learners, functools.partial(Engines, config))
    engines.learner = learner
    return learner, engines, store


def start_ray(config: Config, run: "Run") -> None:
    """Join --ray-address, or start a Ray for this run, which ends with this process, however that ends."""
    handlers, local = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}, {}
    if not config.ray_address:
        store = (config.lag + 3) * run_async.parameters(run.model_path) * (4 if config.dtype == "float32" else 2) + (256 << 20)  # bytes
        local = {"num_cpus": config.engines + config.learners, "object_store_memory": store, "include_dashboard": False}
        if devices(config)[1] != "cpu":  # Ray gives away all GPUs but the one that this process computes on
            gpus = [i for i in range(torch.cuda.device_count()) if config.learners > 1 or f"cuda:{i}" != devices(config)[1]]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(config.ray_address or "local", logging_level="error", **local)  # what actors print goes to log.txt
    except Exception as error:
        raise UserError(f"--ray-address {config.ray_address}: Ray does not start: {error}") from error
    finally:
        for signum, handler in handlers.items():  # Ray has put its own in their place
            signal.signal(signum, handler)


# ---------------------------------------------------------------------------------------------------------------------
# Weights: a version is one object in Ray's store, which all processes of a node read in place. It is freed with the last reference
# to it: when the WeightStore has dropped the version and no evaluation waits for it.


def put(weights: Weights) -> ray.ObjectRef:
    """The object of a version's weights, made when it is first asked for; from then on `weights` are views of it."""
    return weights.ref if hasattr(weights, "ref") else share(weights, ray.put(pack(weights))).ref


def share(weights: Weights, ref: ray.ObjectRef) -> Weights:
    weights.ref = ref
    weights.update(unpack(ray.get(ref)))
    return weights


def pack(tensors: dict) -> dict:
    """Bytes as NumPy arrays, which Ray takes as they are; torch's tensors would be copied into a pickle and out of it."""
    return {name: (w.dtype, w.shape, w.cpu().contiguous().flatten().view(torch.uint8).numpy()) for name, w in tensors.items()}


def unpack(packed: dict) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only memory; nobody writes to published weights
        return {name: torch.from_numpy(array).view(dtype).view(shape) for name, (dtype, shape, array) in packed.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Rollout engines


class NotLoaded(RayError):
    """GPUs: an engine's process is a new one, and no rank of the weight transfer. The run starts again, as for a lost learner."""


class EngineActor:
    """rollout.Engine in a process of its own. It is made in a call, not in __init__: when the process dies while it makes its
    engine, that call has failed, and Ray counts it."""

    def __init__(self, config: Config, args, settings):
        self.config, self.args, self.settings, self.engine = config, args, settings, None

    def start(self) -> None:
        if self.engine is None:
            from transformers import AutoTokenizer

            c = self.config
            kernels.keep_freed_memory()
            self.task = envs.load_env(c.env, AutoTokenizer.from_pretrained(self.args[0]), c.seed, c.difficulty, c.max_turns,
                                      c.unsafe_sandbox, data=c.data, data_fields=c.data_fields, skip_bad_rows=c.skip_bad_rows)  # fmt: skip
            self.engine = Engine(*self.args, **self.settings)
            torch.set_num_threads(c.rollout_threads or default_threads(c.lag))

    def load(self, refs: list, version: int) -> None:
        """refs: the object of the weights, in a list, or Ray would fetch it even if it is loaded already. GPUs: empty."""
        self.start()
        if self.engine.version != version:
            if not refs:
                raise NotLoaded(f"an engine was lost, and with it weights version {version}")
            self.engine.load(unpack(ray.get(refs[0])), version)

    def generate(self, refs: list, version: int, requests: list, max_new_tokens: int, temperature: float) -> list:
        """A call needs nothing from the ones before it, so Ray can repeat it in a new process."""
        self.load(refs, version)
        for request in requests:
            request.follow_up = self.task.follow_up if request.follow_up else None
        samples = self.engine.generate(requests, max_new_tokens, temperature, version)
        for s in samples:  # small tensors are slow to pickle
            s.logprobs, s.experts = s.logprobs.numpy(), None if s.experts is None else s.experts.numpy()
        return samples

    def transfer(self, method: str, *args) -> None:
        """A step of vLLM's weight transfer; see Sender."""
        self.engine.version = None
        with kernels.engine_kernels(self.engine.mode, self.engine.device), torch.cuda.stream(self.engine.stream):
            getattr(self.engine.llm, method)(*args)

    def loaded(self, version: int) -> None:
        self.engine.loaded(version)


def engine_actors(config: Config, args, settings) -> list:
    gpus = 0 if settings["device"] == "cpu" else config.tensor_parallel
    actor = ray.remote(EngineActor).options(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD", max_restarts=-1, max_task_retries=DEATHS - 1)
    return [actor.remote(config, args, settings) for _ in range(config.engines)]


class Engines:
    """rollout.Engine's interface over --engines actors. Ray starts an actor that has died again, on any node, and repeats its call;
    a call during which it dies DEATHS times ends the run with a RuntimeError."""

    def __init__(self, config: Config, *args, **settings):
        self.config, self.version, self.cancelled, self.sender = config, None, False, None
        self.moved = {}  # version -> metrics of its way to the engines
        self.on_gpu = settings["device"] != "cpu"
        settings["max_seqs"] = min(-(-config.prompts // config.engines) * config.group_size, settings["max_seqs"])
        if self.on_gpu:  # "cuda:0": of those that Ray gives the actor
            settings |= {"device": "cuda:0", "device_ids": list(range(config.tensor_parallel)),
                         "tensor_parallel_size": config.tensor_parallel, "weight_transfer_config": {"backend": "nccl"}}  # fmt: skip
        self.actors = engine_actors(config, args, settings)
        late = f"--engines {config.engines}: not all are there after {START:g} s; has Ray room for them?"
        self._all([actor.start.remote() for actor in self.actors], START, late)

    def load(self, weights: Weights, version: int) -> None:
        """CPUs: the weights become one object, which all engines read. GPUs: they are broadcast."""
        self.version, start = None, time.perf_counter()
        self.refs = self._send(weights, version) if self.on_gpu else [put(weights)]
        moved = {"weight_bytes": sum(w.nbytes for w in weights.values()), "t_put": time.perf_counter() - start}
        self.moved.setdefault(version, moved)
        self._all([actor.load.remote(self.refs, version) for actor in self.actors])
        self.version = version

    def _send(self, weights: Weights, version: int) -> list:
        if isinstance(self.learner, Learners):
            result_of(self.learner.actors[0].send.remote(put(weights), version, self.actors, self.config.tensor_parallel))
            return []
        torch.cuda.set_device(self.learner.device)
        with kernels_cuda.reading(weights, kernels_cuda.own_stream(self.learner.device)):
            self.sender = self.sender or Sender(self.actors, self.config.tensor_parallel)
            self.sender.send(weights, version)
        return []

    def generate(self, requests: list, max_new_tokens: int, temperature: float, version: int) -> list:
        """As rollout.Engine.generate. The prompts, each with all its requests, are divided into equal consecutive shares."""
        if version != self.version:
            raise RuntimeError(f"engines hold weights version {self.version}, batch needs {version}")
        # a follow-up is a method of the task, of which actors have their own
        requests = [dataclasses.replace(r, follow_up=r.follow_up is not None) for r in requests]
        prompts = [list(same) for _, same in itertools.groupby(requests, key=lambda r: r.prompt_ids)]
        cuts = [i * len(prompts) // len(self.actors) for i in range(len(self.actors) + 1)]
        calls = [actor.generate.remote(self.refs, version, sum(prompts[a:b], []), max_new_tokens, temperature)
                 for actor, a, b in zip(self.actors, cuts, cuts[1:]) if a < b]  # fmt: skip
        samples = sum(self._all(calls), [])
        for s in samples:
            s.logprobs, s.experts = torch.tensor(s.logprobs), None if s.experts is None else torch.tensor(s.experts)
        return samples

    def _all(self, calls: list, timeout: float = math.inf, message: str = "") -> list:
        """Results of calls, in order. Raises what a call raised, within 0.1 s."""
        pending, end = calls, time.monotonic() + timeout
        try:
            while pending:
                if self.cancelled:
                    raise RuntimeError("generation cancelled")
                if time.monotonic() > end:
                    raise TimeoutError(message)
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.1)
                result_of(done)
            return result_of(calls)
        except RayActorError as error:
            raise RuntimeError(f"an engine died {DEATHS} times in a row: {' '.join(str(error).split())}") from None

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


# ---------------------------------------------------------------------------------------------------------------------
# Learners


class LearnerActor:
    """A rank of torch.distributed with its ShardedLearner."""

    address = staticmethod(free_address)

    def start(self, ranks: list, address: tuple, threads: int, args, settings) -> None:
        """ranks: ids of all actors, in order."""
        from learn_fsdp import ShardedLearner

        kernels.keep_freed_memory()
        torch.set_num_threads(threads)
        backend, rank = "gloo" if settings["device"] == "cpu" else "cpu:gloo,cuda:nccl", ranks.index(ray.get_runtime_context().get_actor_id())
        torch.distributed.init_process_group(backend, init_method="tcp://%s:%d" % address, rank=rank, world_size=len(ranks))
        self.learner, self.sender = ShardedLearner(*args, **settings), None

    def update(self, samples: list, step: int, refs: dict) -> dict:
        return self.learner.update(samples, step, weights_of=lambda version: unpack(ray.get(refs[version])))

    def packed(self, what: str) -> dict:
        """what: weights or state; empty but on rank 0."""
        return pack(getattr(self.learner, what)())

    def load_state(self, packed: dict) -> None:
        self.learner.load_state(unpack(packed))

    def send(self, packed: dict, version: int, engines: list, tensor_parallel: int) -> None:
        self.sender = self.sender or Sender(engines, tensor_parallel)
        self.sender.send({name: w.to(self.learner.device) for name, w in unpack(packed).items()}, version)


class Learners:
    """learn.Learner's interface over --learners actors. Raises a RayError when a process or a node is lost."""

    def __init__(self, config: Config, *args, **settings):
        from transformers import AutoModelForCausalLM

        self.device, on_gpu = "cpu", settings["device"] != "cpu"  # device: of the weights that this process gets
        actor = ray.remote(LearnerActor).options(num_cpus=1, num_gpus=int(on_gpu))
        self.actors = [actor.remote() for _ in range(config.learners)]
        ranks, settings["device"] = [actor._actor_id.hex() for actor in self.actors], "cuda:0" if on_gpu else "cpu"
        threads = config.learner_threads or default_threads(config.lag)
        try:
            address, *_ = ray.get([actor.address.remote() for actor in self.actors], timeout=START)
        except GetTimeoutError:
            raise TimeoutError(f"--learners {config.learners}: not all are there after {START:g} s; has Ray room for them?") from None
        self._all("start", ranks, address, threads, args, settings)
        # for its configuration, and to write checkpoints here, where the run folder is
        self.model = AutoModelForCausalLM.from_pretrained(args[0], dtype=getattr(torch, args[1])).to("meta")
        save = self.model.save_pretrained
        self.model.save_pretrained = lambda folder: save(folder, state_dict=dict(self.newest))

    def update(self, samples: list, step: int, weights_of) -> dict:
        refs = {version: put(weights_of(version)) for version in {s.version for s in samples}}
        return ray.get(self._all("update", ray.put(samples), step, refs)[0])

    def weights(self) -> Weights:
        self.newest = share(Weights(), self._all("packed", "weights")[0])
        return self.newest

    def state(self) -> dict:
        return unpack(ray.get(self._all("packed", "state")[0]))

    def load_state(self, state: dict) -> None:
        self._all("load_state", ray.put(pack(state)))

    def _all(self, method: str, *args) -> list:
        """Call every rank and wait for all; returns the objects of their results."""
        calls = [getattr(actor, method).remote(*args) for actor in self.actors]
        try:
            result_of(calls)
        except Exception:  # a lost rank may show first as a broken connection in another
            for call in ray.wait(calls, num_returns=len(calls), timeout=10)[0]:
                with contextlib.suppress(RayTaskError):
                    ray.get(call)
            raise
        return calls


# ---------------------------------------------------------------------------------------------------------------------
# The run folder


class Run(run_async.Run):
    """That of run_async.py; it starts itself again when it has lost a learner."""

    def __init__(self, args: list[str], *rest):
        self.args = args
        super().__init__(*rest)

    def log(self, metrics: dict, batch) -> None:
        """With the first batch of a version: weight_bytes, put into the object store or broadcast, in t_put seconds."""
        moved, version = self.rollout.engine.moved, batch.samples[0].version
        super().log(metrics | moved[version], batch)
        moved[version] = dict.fromkeys(moved[version], 0)

    def fail(self, error: BaseException) -> None:
        name = "REINFORCE_ZERO_RESTARTS"
        restarts, cause = int(os.environ.get(name, 0)), error
        while cause and (isinstance(cause, RayTaskError) or not isinstance(cause, RayError)):  # a RayTaskError is what a call raised
            cause = cause.__cause__  # of a checkpoint that could not be written, say
        if not cause or restarts == self.config.max_restarts:
            return super().fail(error)
        self.say(f"restart {restarts + 1} of {self.config.max_restarts} (--max-restarts): {' '.join(str(error).split())}")
        args = ["--resume", str(self.folder)]
        if not checkpoint.checkpoints(self.folder):
            args = [*self.args, "--out", str(self.folder)]
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)  # curves may be being drawn
        ray.shutdown()
        # what a user would do, in a new process with no trace of this one but its id
        os.dup2(self.console.fileno(), 1), os.dup2(self.console.fileno(), 2)
        os.execve(sys.executable, [sys.executable, __file__, *args], os.environ | {name: str(restarts + 1)})


def main(args: list[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else args
    return run_async.run_to_end(args, Config, check, functools.partial(Run, args), set_up)


if __name__ == "__main__":
    from run_ray import main  # so that Ray's processes find its classes by their names

    raise SystemExit(main())
