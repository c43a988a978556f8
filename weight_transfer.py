"""Weights from the learner's GPU to the engines of run_ray.py by vLLM's own weight transfer over NCCL.

Written from the source of vLLM 0.32, vllm/distributed/weight_transfer/ (nccl_engine.py, base.py). No GPU has run it yet.
"""

import socket

import ray


def result_of(calls):
    """Of calls of actors; raises what a call raised, or a RayError if its process or node is gone."""
    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from error


def free_address() -> tuple[str, int]:
    with socket.socket() as s:
        s.bind(("", 0))
        return ray.util.get_node_ip_address(), s.getsockname()[1]


class Sender:
    """Rank 0 of the transfer, and what vLLM's trainer engine asks of a WeightSource and a VLLMWeightSyncClient (base.py). engines: actors
    of run_ray.EngineActor; tensor_parallel: GPUs, and so ranks, of each."""

    def __init__(self, engines: list, tensor_parallel: int):
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self.engines, self.tensor_parallel = engines, tensor_parallel
        info = NCCLTrainerInitInfo(*free_address(), world_size=1 + len(engines) * tensor_parallel, rank=0)
        self.trainer = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=self)

    def send(self, weights: dict, version: int) -> None:
        self.weights, self.version = weights, version
        self.trainer.send_weights()

    def metadata(self) -> list:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, w.dtype, tuple(w.shape)) for name, w in self.weights.items()]

    def __iter__(self):
        return iter(self.weights.items())

    def init_weight_transfer_engine(self, info: dict) -> None:  # each engine is a vLLM of its own and takes itself for the first
        self._all("init_weight_transfer_engine", lambda i: [{"init_info": info | {"rank_offset": 1 + i * self.tensor_parallel}}])

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, info: dict) -> None:
        self._all("update_weights", lambda i: [{"update_info": info}])

    def finish_weight_update(self, weight_version=None) -> None:
        self._all("finish_weight_update")
        result_of([engine.loaded.remote(self.version) for engine in self.engines])

    def _all(self, method: str, args=lambda i: []) -> None:
        result_of([engine.transfer.remote(method, *args(i)) for i, engine in enumerate(self.engines)])
