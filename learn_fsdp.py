"""The learner over several processes, a rank each: PyTorch's FSDP2 (gloo on CPUs, NCCL on GPUs), with the bits of learn.Learner.

Weights, gradient and Adam's states are cut by rows; a layer's weights are gathered while it computes. The microbatches are
those of one Learner: rank r of M takes the r-th, the (r + M)-th, ... Rounding depends on the order of additions, so:

    gradient    FSDP's reduce-scatter is replaced by an exchange. Each rank gets its rows of every rank's gradient, in the model's
                dtype, and adds them to its float32 sum one after another, in the microbatches' order, as Learner does
    norm        of the blocks of the whole gradient that Learner cuts, gathered a parameter at a time
    Adam        elementwise, but its scalar code, for what does not fill a vector, rounds differently: a rank's part is padded
    metrics     from every rank's log-probabilities, put in the microbatches' order

Metrics, weights and states are then Learner's to the bit, whatever M, if each rank has as many threads as it and the model a
multiple of 16 parameters. With fewer than M microbatches some ranks idle: --tokens-per-microbatch cuts more of them.

All methods are collective: every rank calls them with the same arguments. What is gathered whole, a parameter at a time, only
rank 0 keeps or writes. The caller starts torch.distributed: "gloo", or with a GPU for each rank "cpu:gloo,cuda:nccl", which is
written from PyTorch's source: no GPU has run it yet.
"""

import contextlib
import dataclasses
import functools
import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor

import kernels
from learn import Learner, Stats
from rollout import Weights

PADDING = "padding"  # of a rank's part, named as if it were a last parameter


class ShardedLearner(Learner):
    """learn.Learner over all ranks of torch.distributed, 2 or more, with the same arguments; `params`, `master` and the optimizer
    hold this rank's rows. Without gradient_checkpointing a layer's merged matrices (kernels._merged) live until the backward."""

    def __init__(self, model, *args, **settings):
        self.rank, self.learners = dist.get_rank(), dist.get_world_size()
        if self.learners < 2:
            raise ValueError("--learners 1: one learner is learn.Learner")
        super().__init__(model, *args, **settings)
        grads = {name: grad.flatten() for name, (_, _, grad) in zip(self.dtensors, self.views)}
        for module, prefix in self.modules:
            names = [name for name in grads if name.startswith(prefix)]  # of the root: what the layers left
            padded = [math.ceil(p.shape[0] / self.learners) * math.prod(p.shape[1:]) for p in map(self.dtensors.get, names)]
            module.set_custom_reduce_scatter(InOrder(self, [grads.pop(name) for name in names], padded))

    def _place(self) -> dict[str, torch.Tensor]:
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mesh, layers = init_device_mesh(device.type, (self.learners,)), self.model.model.layers
        self.modules = [(layer, f"model.layers.{i}.") for i, layer in enumerate(layers)] + [(self.model, "")]
        for module, _ in self.modules:
            # True for the root too, or it would keep the weights of a forward without a backward, and use them after a step
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            module.set_reduce_scatter_unused_params(True)  # InOrder counts on all of them
        # FSDP gathers a module's weights around its forward, or around a method registered here
        for layer in layers:
            layer.aligned_forward = functools.partial(kernels._decoder_layer, layer)
            register_fsdp_forward_method(layer, "aligned_forward")
        self.model.compute = lambda function: function()
        register_fsdp_forward_method(self.model, "compute")
        self.model.save_pretrained = self._save_pretrained
        self.dtensors = dict(self.model.named_parameters())
        rows = {name: p.to_local().detach() for name, p in self.dtensors.items()}
        padding = -sum(p.numel() for p in rows.values()) % 64
        return rows | {PADDING: torch.zeros(padding, dtype=self.model.dtype, device=device)}

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole parameter: as many as any other's, but for the end."""
        n = math.ceil(len(tensor) / self.learners)
        return tensor[self.rank * n : (self.rank + 1) * n]

    def _gather(self, rows):
        """Parameters, or what is laid out like them (flat or not), one after another: this rank's rows -> the whole."""
        for (name, p), part in zip(self.dtensors.items(), rows):
            part = part.view_as(self.params[name])
            yield DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()

    def weights(self) -> Weights:
        """As Learner's, on the CPU; empty but on rank 0."""
        whole = zip(self.dtensors, self._gather(self.params.values()))
        return Weights((name, w.cpu()) for name, w in whole if self.rank == 0)

    def _save_pretrained(self, folder) -> None:
        weights = self.weights()
        if self.rank == 0:
            type(self.model).save_pretrained(self.model, folder, state_dict=weights)

    @contextlib.contextmanager
    def holding(self, weights: dict[str, torch.Tensor] | None):
        saved = {name: self.params[name].clone() for name in weights or {}}
        try:
            for name in saved:
                self.params[name].copy_(self._rows(weights[name]))
            yield
        finally:
            for name, rows in saved.items():
                self.params[name].copy_(rows)

    def score(self, samples):
        return self.model.compute(functools.partial(super().score, samples))

    def _passes(self, samples, scale):
        # Ranks compute in step. One without a microbatch takes a response without a sampled token, which counts nowhere.
        shortest = min(samples, key=lambda s: len(s.prompt_ids) + len(s.response_ids))
        idle, mine = dataclasses.replace(shortest, mask=[0] * len(shortest.mask)), []
        for learn in (True, False):
            chosen = [i for i, a in enumerate(scale) if (a != 0) == learn]
            cut = [[chosen[j] for j in microbatch] for microbatch in self.microbatches([samples[i] for i in chosen])]
            self.left = len(cut)  # microbatches, for InOrder
            cut += [[]] * (-len(cut) % self.learners)
            for indices in cut[self.rank :: self.learners]:
                batch, factors = [samples[i] for i in indices] or [idle], [scale[i] for i in indices] or [float(learn)]
                mine.append((indices, *super()._passes(batch, factors)))
                self.left -= self.learners
        ranks = [None] * self.learners
        dist.all_gather_object(ranks, mine)
        stats, logp_now = Stats(), [None] * len(samples)
        for indices, part, logp in itertools.chain(*zip(*ranks)):
            for name, value in vars(part).items() if indices else ():  # lists and counts
                setattr(stats, name, getattr(stats, name) + value)
            for i, x in zip(indices, logp):
                logp_now[i] = x
        return stats, logp_now

    def _backward(self, logp, coefficient) -> None:
        logp.backward(coefficient.to(logp.device))  # InOrder adds to the gradient
        self.model.zero_grad()  # what FSDP takes for it

    def _grad_parts(self, size: int):
        rest = self.master.grad[:0]
        for grad in self._gather(grad for _, _, grad in self.views):
            *parts, rest = torch.cat([rest, grad.flatten()]).split(size)
            yield from parts
        yield rest

    def state(self) -> dict[str, torch.Tensor]:
        """As Learner's, on the CPU; empty but on rank 0."""
        state = super().state()
        for name in ("master", "exp_avg", "exp_avg_sq"):
            rows = state[name].split([p.numel() for p in self.params.values()])
            whole = [w.flatten().cpu() for w in self._gather(rows) if self.rank == 0]
            state[name] = torch.cat(whole) if whole else None
        return state if self.rank == 0 else {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """As Learner's: the whole, on every rank."""
        sizes = [p.numel() for p in self.dtensors.values()]
        if len(state["master"]) != sum(sizes):
            raise ValueError(f"checkpoint holds {len(state['master']):,} parameters, the model {sum(sizes):,}; check --model")
        mine = {"adam_step": state["adam_step"]}
        for name in ("master", "exp_avg", "exp_avg_sq"):
            rows = [self._rows(w.view(p.shape)).flatten() for w, p in zip(state[name].split(sizes), self.dtensors.values())]
            mine[name] = torch.cat([*rows, torch.zeros(len(self.params[PADDING]))])
        super().load_state(mine)


class InOrder(DefaultReduceScatter):
    """In place of FSDP's reduce-scatter of a module's gradients: adds this rank's rows of every rank's to `grads`, flat float32,
    in the ranks' order. padded: numbers of each parameter in a rank's part (the layout is ranks, parameters, rows). FSDP's own
    sum, output_tensor, is left as it was allocated: `_backward` drops it."""

    def __init__(self, learner: ShardedLearner, grads: list[torch.Tensor], padded: list[int]):
        self.learner, self.grads, self.padded = learner, grads, padded

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for part in received.view(self.learner.learners, -1)[: self.learner.left]:
            torch._foreach_add_(self.grads, [rows[: len(grad)] for rows, grad in zip(part.split(self.padded), self.grads)])
