"""The learner: REINFORCE with unclipped token-level importance sampling, and every metric of a run.

    advantage   A_i  = R_i - mean of R over the samples of the same prompt
    ratio       w_it = exp(log pi_k(a_it) - log mu_v(a_it))
    loss        -(1/B) sum_i (1/T_i) sum_t stop_grad(w_it) A_i log pi_k(a_it)

log mu_v is what the engine recorded when it sampled with weights version v; pi_k is the learner after k updates. No
clip, no value model, no KL term, no division by a standard deviation. Gates and a cap on w exist as baselines.
"""

import contextlib
import itertools
import math
from dataclasses import dataclass

import torch

import kernels
import kernels_cuda
from rollout import Sample, Weights


@dataclass
class Gates:
    """Baselines for samples with large ratios; all off by default. Rejected samples stay in B and in T_i.

    gate "seq" drops a response whose mean of (w - 1 - log w) exceeds `threshold` (default 0.01, verl's seq_mean_k3);
    "token" drops tokens whose ratio leaves [low, high] (default [0.5, 5.0], IcePop, arXiv 2510.18855);
    ratio_cap truncates w from above; without importance_sampling w is 1, as if samples were not old.
    """

    gate: str = "none"
    threshold: float = 0.01
    low: float = 0.5
    high: float = 5.0
    ratio_cap: float | None = None
    importance_sampling: bool = True


class MismatchError(RuntimeError):
    """Aligned kernels, equal weights, and yet a log-probability of rollout and learner differs."""


def advantages(samples: list[Sample]) -> list[float]:
    """R_i minus the mean of R over the sample's group; exactly 0 when all rewards of a group are equal."""
    groups: dict[int, list[float]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s.reward)
    mean = {g: r[0] if len(set(r)) == 1 else sum(r) / len(r) for g, r in groups.items()}
    return [s.reward - mean[s.group] for s in samples]


def token_weights(logp, logmu, mask, owner, gates: Gates):
    """Importance weights of packed response tokens and what the gates did with them.

    logp, logmu: [N] float32, log pi_k and log mu_v; mask: [N] bool, True for sampled tokens; owner: [N] int64, the
    response that a token belongs to. Returns (weights [N] float32, valid [N] bool, rejected [N] bool): `valid` leaves
    out unsampled tokens and those whose log-probability or ratio is not finite; weights are 0 where not valid or
    rejected.
    """
    log_ratio = logp - logmu
    ratio = torch.exp(log_ratio)
    valid = mask & torch.isfinite(log_ratio) & torch.isfinite(ratio)  # inf - inf is NaN, so log_ratio tells of both
    rejected = torch.zeros_like(valid)
    if gates.gate == "seq":
        count, total = (torch.zeros(int(owner.max()) + 1, dtype=torch.float64) for _ in range(2))
        count.index_add_(0, owner, valid.double())
        total.index_add_(0, owner, torch.where(valid, k3(log_ratio.double()), 0.0))
        rejected = valid & (total > gates.threshold * count)[owner]
    elif gates.gate == "token":
        rejected = valid & ((ratio < gates.low) | (ratio > gates.high))
    weights = ratio if gates.ratio_cap is None else ratio.clamp(max=gates.ratio_cap)
    if not gates.importance_sampling:
        weights = torch.ones_like(ratio)
    return torch.where(valid & ~rejected, weights, 0.0), valid, rejected


class Learner:
    """A transformers causal language model, its float32 master weights and Adam, and the update.

    model: local Hugging Face folder; dtype: "bfloat16" or "float32" of the model that computes; kernels_mode: "aligned"
    (kernels.py) or "standard" (the stock transformers forward); device: "cpu" or "cuda:N". The model computes there; what
    is per token (ratios, gates, metrics) is on the CPU; routing: "own", or "replay" for the experts that the engine chose (with
    standard kernels). Raises ValueError for what has no aligned kernels.
    """

    def __init__(self, model, dtype="bfloat16", kernels_mode="aligned", *, lr=1e-4, max_grad_norm=1.0, temperature=1.0,
                 tokens_per_microbatch=8192, gates=Gates(), audit=8, gradient_checkpointing=False, allow_mismatch=False,
                 device=None, routing="own"):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.device = device or kernels_cuda.choose_devices()[1]
        if self.device != "cpu":
            kernels_cuda.prepare(kernels_mode, self.device)
        config = AutoConfig.from_pretrained(model)
        if kernels_mode == "aligned":
            kernels.require_supported(config, self.device)
            kernels.load_ops()
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), use_safetensors=True)
        self.params = self._place()
        self.model.eval()  # no dropout
        self.model.get_input_embeddings().padding_idx = None  # a pad that is also the eos learns like any other token
        self.mode, self.temperature, self.gates = kernels_mode, temperature, gates
        self.tokens_per_microbatch, self.audit, self.allow_mismatch = tokens_per_microbatch, audit, allow_mismatch
        self.gradient_checkpointing, self.max_grad_norm = gradient_checkpointing, max_grad_norm
        if kernels_mode == "aligned":
            self.cos_sin = kernels.rotary_table(self.model.config, self.model.dtype, self.device)
        elif gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        # Of a Qwen3 mixture of experts. A router's `chosen` [tokens, k] are the last forward's; `fed`: which of its rows the
        # engine had too, all but the last of each sequence.
        qwen3 = self.model.config.model_type == "qwen3_moe"
        self.routers = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "experts")] if qwen3 else []
        self.replay, self.fed, self.replayed = routing == "replay", None, None
        if kernels_mode == "standard":
            for i, router in enumerate(self.routers):
                router.register_forward_hook(lambda router, _, out, i=i: self._route(router, i, *out))

        # Float32 master weights, flat: one tensor for the optimizer, the gradient and its norm. A bfloat16 weight would
        # swallow updates below 1/256 of its size.
        self.master = torch.nn.Parameter(torch.cat([p.detach().float().flatten() for p in self.params.values()]))
        self.master.grad = torch.zeros_like(self.master)
        sizes = [p.numel() for p in self.params.values()]
        views = zip(self.params.values(), self.master.detach().split(sizes), self.master.grad.split(sizes))
        self.views = [(p, m.view_as(p), g.view_as(p)) for p, m, g in views]
        self.optimizer = torch.optim.AdamW([self.master], lr=lr, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
        moments = {name: torch.zeros_like(self.master) for name in ("exp_avg", "exp_avg_sq")}  # or none were there to save at first
        self.optimizer.state[self.master] = {"step": torch.tensor(0.0, device=self.device)} | moments

    def _place(self) -> dict[str, torch.Tensor]:
        """Put the model on its device; returns the parameters, name -> tensor (in learn_fsdp.py, the rows that lie here)."""
        self.model.to(self.device)
        return dict(self.model.named_parameters())

    # -- weights

    def weights(self) -> Weights:
        """A copy of the current weights, parameter name -> tensor in the model's dtype, safe to publish."""
        return Weights((name, p.detach().clone()) for name, p in self.params.items())

    @contextlib.contextmanager
    def holding(self, weights: dict[str, torch.Tensor] | None):
        """Compute with other weights for a while (None: the current ones), by exchanging tensors, not copying."""
        saved = {name: p.data for name, p in self.params.items()}
        try:
            for name, tensor in (weights or {}).items():
                self.params[name].data = tensor
            yield
        finally:
            for name, tensor in saved.items():
                self.params[name].data = tensor

    # -- log-probabilities

    def score(self, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log pi, entropy) of the responses' tokens, end to end: [N] float32 each, in one forward. Differentiable."""
        sequences = [s.prompt_ids + s.response_ids for s in samples]
        targets = torch.tensor([t for s in samples for t in s.response_ids], device=self.device)
        lengths = [len(s) for s in sequences]
        longest, packs = max(lengths), self.mode == "aligned"  # or pads, on the right
        starts = list(itertools.accumulate(lengths, initial=0)) if packs else [i * longest for i in range(len(lengths))]
        if self.routers:
            self.fed = torch.cat([torch.arange(a, a + n - 1) for a, n in zip(starts, lengths)]).to(self.device)
            self.replayed = torch.cat([s.experts for s in samples]).to(self.device).long() if self.replay else None
        if packs:
            packed = kernels.pack(sequences, self.device)
            hidden = kernels.hidden_states(self.model, packed, self.cos_sin, self.gradient_checkpointing)
        else:
            ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=self.device)
            mask = torch.tensor([[1] * n + [0] * (longest - n) for n in lengths], device=self.device)
            hidden = self.model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.flatten(0, 1)
        # the rows that predict a response's tokens
        rows = [i for a, n, s in zip(starts, lengths, samples) for i in range(a + len(s.prompt_ids) - 1, a + n - 1)]
        hidden = hidden[torch.tensor(rows, device=self.device)]
        return kernels.token_logprobs(hidden, self.model.lm_head, targets, self.temperature)

    def _route(self, router, layer, logits, scores, experts):
        """After a stock router: note its choice; with --routing replay, put the engine's choice in its place."""
        router.chosen = experts
        if self.replay:
            experts = experts.index_copy(0, self.fed, self.replayed[:, layer])
            scores = torch.softmax(logits, -1, dtype=torch.float32).gather(1, experts)
            if router.norm_topk_prob:
                scores = scores / scores.sum(-1, keepdim=True)
            return logits, scores.to(logits.dtype), experts

    def microbatches(self, samples: list[Sample]) -> list[list[int]]:
        """Indices of samples, in order, cut where the tokens (prompts and responses) exceed --tokens-per-microbatch."""
        cut, tokens = [[]], 0
        for i, s in enumerate(samples):
            n = len(s.prompt_ids) + len(s.response_ids)
            if cut[-1] and tokens + n > self.tokens_per_microbatch:
                cut, tokens = [*cut, []], 0
            cut[-1].append(i)
            tokens += n
        return [m for m in cut if m]

    # -- one update

    def update(self, samples: list[Sample], step: int, weights_of) -> dict[str, float]:
        """One gradient step on a batch. `step` is k; weights_of(v) gives the weights of a version that sampled some of
        the batch. Returns the metrics of the run's table. Raises MismatchError (aligned kernels only)."""
        advantage, lr = advantages(samples), self.optimizer.param_groups[0]["lr"]
        self.master.grad.zero_()
        stats, logp_now = self._passes(samples, [-a / len(samples) for a in advantage])
        # in parts: one float32 sum over 2^28 squares would be several per cent too small
        parts = torch.stack([part.norm() for part in self._grad_parts(2**16)])
        norm = math.sqrt(sum(part**2 for part in parts.tolist()))
        metrics = batch_metrics(samples, step) | stats.metrics(self.gates.gate) | expert_metrics(samples, self.model.config)
        # bad: not one token to learn from counts too, for its gradient is a finite 0
        bad = not math.isfinite(norm + metrics["loss"]) or metrics["nonfinite"] == metrics["tokens"]
        stepped = any(advantage) and not bad
        if stepped:
            if norm > self.max_grad_norm > 0:
                self.master.grad.mul_(self.max_grad_norm / norm)
            self.optimizer.step()
            self._round_master()
        audited = self._audit(samples, logp_now, weights_of)
        metrics |= audited | {"grad_norm": norm, "lr": lr, "stepped": stepped, "bad_step": int(bad)}
        if self.mode == "aligned" and audited.get("mismatch_max") and not self.allow_mismatch:
            raise MismatchError(
                f"update {step}: log-probabilities of rollout and learner differ by up to {audited['mismatch_max']:.3g} at "
                "equal weights; `python kernels.py --model ...` finds the operation, --allow-mismatch goes on"
            )
        return metrics

    def _passes(self, samples, scale: list[float]) -> tuple["Stats", list[torch.Tensor]]:
        """Score all samples and accumulate the gradient; scale: of each sample, the -A_i / B of the loss. Returns the sums for
        the metrics, and log pi_k of each sample."""
        stats, logp_now = Stats(), [None] * len(samples)
        # Responses without an advantage have no gradient: they are scored for the metrics, without a backward.
        for learn in (True, False):
            chosen = [i for i, a in enumerate(scale) if (a != 0) == learn]
            for microbatch in self.microbatches([samples[i] for i in chosen]):
                indices = [chosen[j] for j in microbatch]
                batch = [samples[i] for i in indices]
                with torch.set_grad_enabled(learn):
                    logp, entropy = self.score(batch)  # [N] each
                sizes = torch.tensor([len(s.response_ids) for s in batch])
                owner = torch.repeat_interleave(torch.arange(len(batch)), sizes)
                logmu = torch.cat([s.logprobs for s in batch])
                mask = torch.tensor([m for s in batch for m in s.mask], dtype=torch.bool)
                now, entropy = logp.detach().cpu(), entropy.cpu()
                w, valid, rejected = token_weights(now, logmu, mask, owner, self.gates)
                factor = torch.tensor([scale[i] for i in indices], dtype=torch.float64)
                factor /= torch.zeros(len(batch), dtype=torch.float64).index_add_(0, owner, valid.double()).clamp_(min=1)
                coefficient = w * factor.float()[owner]
                stats.add(now, logmu, entropy, mask, valid, rejected, owner, coefficient)
                for i, part in zip(indices, now.split(sizes.tolist())):
                    logp_now[i] = part
                if learn:
                    self._backward(logp, coefficient)
        return stats, logp_now

    def _backward(self, logp: torch.Tensor, coefficient: torch.Tensor) -> None:
        """Accumulate the gradient of sum(coefficient * logp) into the float32 gradient."""
        logp.backward(coefficient.to(logp.device))
        used = [(p, grad) for p, _, grad in self.views if p.grad is not None]
        torch._foreach_add_([grad for _, grad in used], [p.grad for p, _ in used])
        for p, _ in used:
            p.grad = None

    def _grad_parts(self, size: int):
        return self.master.grad.split(size)

    @torch.no_grad()
    def _round_master(self) -> None:
        """Write the master weights, rounded to the model's dtype, into the model."""
        torch._foreach_copy_([p for p, _, _ in self.views], [master for _, master, _ in self.views])

    @torch.no_grad()
    def _audit(self, samples, logp_now, weights_of) -> dict[str, float]:
        """Kernel mismatch (log pi_v - log mu_v) and policy lag (log pi_k - log pi_v), apart, on --audit samples: the
        learner's own kernels at the weights that sampled them. Means of r - 1 - log r (Schulman 2020, k3)."""
        if not (count := min(self.audit, len(samples))):
            return {}
        chosen = [i * len(samples) // count for i in range(count)]
        mismatch, lag, flips = [], [], []
        for version in sorted({samples[i].version for i in chosen}):
            indices = [i for i in chosen if samples[i].version == version]
            with self.holding(weights_of(version)):
                logp_v = self.score([samples[i] for i in indices])[0].cpu()
            sampled = torch.tensor([m for i in indices for m in samples[i].mask], dtype=torch.bool)
            logmu = torch.cat([samples[i].logprobs for i in indices])
            same = (logp_v == logmu) | (logp_v.isnan() & logmu.isnan())  # NaN on both sides: bad weights, not other kernels
            mismatch.append((logp_v - logmu).masked_fill(same, 0.0)[sampled])
            lag.append((torch.cat([logp_now[i] for i in indices]) - logp_v)[sampled])
            if self.routers and samples[0].experts is not None:
                own = torch.stack([router.chosen[self.fed] for router in self.routers], 1).cpu()  # [fed, layers, k]
                engine = torch.cat([samples[i].experts for i in indices])
                flips.append((own.sort(-1)[0] != engine.sort(-1)[0]).flatten(1).any(1))
        mismatch, lag = torch.cat(mismatch).double(), torch.cat(lag).double()
        metrics = {"mismatch_kl": k3(mismatch).mean().item(), "mismatch_max": mismatch.abs().max().item(),
                   "mismatch_exact": (mismatch == 0).double().mean().item(), "lag_kl": k3(lag).mean().item()}  # fmt: skip
        return metrics | ({"route_flips": torch.cat(flips).double().mean().item()} if flips else {})

    # -- state for checkpoints

    def state(self) -> dict[str, torch.Tensor]:
        """Everything besides the model's weights that the next update depends on: flat tensors."""
        adam = self.optimizer.state[self.master]
        moments = {name: adam[name] for name in ("exp_avg", "exp_avg_sq")}
        return {"master": self.master.detach(), "adam_step": adam["step"]} | moments

    @torch.no_grad()
    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `state` gave. Raises ValueError if it belongs to another model."""
        if state["master"].shape != self.master.shape:
            raise ValueError(f"checkpoint holds {state['master'].numel():,} parameters, the model {self.master.numel():,}; check --model")
        self.master.copy_(state["master"])
        self._round_master()
        for name, tensor in self.optimizer.state[self.master].items():
            tensor.copy_(state["adam_step" if name == "step" else name])


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r for log r: non-negative, exactly 0 at 0 (http://joschu.net/blog/kl-approx.html, k3)."""
    return torch.expm1(log_ratio) - log_ratio


class Stats:
    """Sums over the sampled tokens of a batch, in float64, in the samples' order of computation."""

    def __init__(self):
        self.parts: list[tuple] = []
        self.nonfinite = self.rejected_tokens = self.rejected_sequences = self.sequences = 0

    def add(self, logp, logmu, entropy, mask, valid, rejected, owner, coefficient) -> None:
        """Tensors of packed tokens, each [N]; see `token_weights`. coefficient: the factor of log pi in the loss."""
        self.nonfinite += int((mask & ~valid).sum())
        self.sequences += int(owner.max()) + 1
        self.rejected_tokens += int(rejected.sum())
        self.rejected_sequences += owner[rejected].unique().numel()
        self.parts.append(((logp - logmu)[valid], entropy[valid], (coefficient * logp)[valid]))

    def metrics(self, gate: str) -> dict[str, float]:
        log_ratio, entropy, loss = (torch.cat(x).double() for x in zip(*self.parts))
        n = max(len(log_ratio), 1)
        w = log_ratio.exp() if len(log_ratio) else torch.tensor([math.nan])
        rejected = self.rejected_sequences / self.sequences if gate == "seq" else self.rejected_tokens / n
        return {
            "kl": -log_ratio.sum().item() / n,
            "d3": k3(log_ratio).sum().item() / n,
            "ratio_max": w.max().item(),
            "ratio_min": w.min().item(),
            "ess": (w.sum() ** 2 / (n * w.square().sum())).item(),
            "rejected": rejected,
            "entropy": entropy.sum().item() / n,
            "loss": loss.sum().item(),
            "nonfinite": self.nonfinite,
        }


def batch_metrics(samples: list[Sample], step: int) -> dict[str, float]:
    """Metrics of a batch that need no model."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    groups, mixed = {s.group for s in samples}, {s.group for s, a in zip(samples, advantages(samples)) if a != 0}
    lags = [step - s.version for s in samples]
    sampled = [sum(s.mask) for s in samples]
    return {
        "step": step,
        "lag": sum(lags) / len(lags),
        "lag_max": max(lags),
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "groups_mixed": len(mixed) / len(groups),
        "response_len": sum(sampled) / len(sampled),
        "tool_calls": sum(a > b for s in samples for a, b in zip(s.mask, s.mask[1:])) / len(samples),
        "truncated": sum(s.finish == "length" for s in samples) / len(samples),
        "tokens": sum(sampled),
        "reward_errors": sum(bool(s.reward_error) for s in samples),
    }


def expert_metrics(samples: list[Sample], config) -> dict[str, float]:
    """Load balance: each expert's share of the choices, a mean over layers (expert_0, ...); the largest of any layer (expert_max)."""
    if samples[0].experts is None:
        return {}
    chosen = torch.cat([s.experts for s in samples]).transpose(0, 1).flatten(1)  # [layers, tokens * k]
    experts = getattr(config, "num_experts", 0) or config.num_local_experts
    share = torch.stack([layer.bincount(minlength=experts) for layer in chosen]).double() / chosen.shape[1]
    return {f"expert_{e}": s for e, s in enumerate(share.mean(0).tolist())} | {"expert_max": share.max().item()}
