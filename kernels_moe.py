"""Mixture of experts: one function, `moe`, called by the rollout engine's block and by the learner's decoder layer alike.

A token's result depends on no other token: its experts are the largest probabilities in a fixed order, each expert's matmuls
see whole groups of 16 rows, and the experts' outputs are added in the order of the experts' numbers.
"""

import torch
import torch.nn.functional as F

import kernels


def route(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, E] -> (weights [T, k] float32, experts [T, k] int64, ascending): the k most probable, the lower of equally
    probable ones. Softmax in float32; `normalise` divides the weights by their sum."""
    probabilities = torch.softmax(logits, -1, dtype=torch.float32)
    experts = probabilities.sort(stable=True, dim=-1, descending=True)[1][:, :top_k].sort(-1)[0]
    weights = probabilities.gather(1, experts)
    if normalise:  # added column by column: a reduction's order could follow the shape
        weights = weights / sum(weights.unbind(-1))[:, None]
    return weights, experts


def moe(x, logits, gate_up, down, top_k: int, normalise: bool, trace=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over a token's experts e of weight_e * SwiGLU_e(x) [T, H], experts [T, k]) for x [T, H], router logits [T, E] and
    the experts' matrices gate_up [E, 2I, H] and down [E, H, I]. Summed in float32 in ascending e, then rounded once."""
    weights, experts = route(logits, top_k, normalise)
    # A row for each (token, expert), sorted by expert, those of an expert filled up with zeros to a multiple of 16. Rows are
    # moved by F.embedding: its backward adds in a fixed order.
    chosen = experts.flatten()
    by_expert, count = chosen.argsort(stable=True), chosen.bincount(minlength=len(gate_up))
    fill = -count % kernels.ROWS
    sizes, place = (count + fill).tolist(), torch.empty_like(chosen)
    place[by_expert] = torch.arange(len(chosen)) + (fill.cumsum(0) - fill)[chosen[by_expert]]
    token = torch.full((sum(sizes),), len(x)).index_copy(0, place, torch.arange(len(chosen)) // top_k)  # len(x): zeros
    rows = F.embedding(token, F.pad(x, (0, 0, 0, 1))).split(sizes)
    hidden = torch.cat([kernels.linear(part, weight) for part, weight in zip(rows, gate_up) if len(part)])
    active = kernels.SwiGLU.apply(hidden).split(sizes)
    outputs = torch.cat([kernels.linear(part, weight) for part, weight in zip(active, down) if len(part)])
    outputs = F.embedding(place.view_as(experts), outputs)  # [T, k, H]
    if trace:
        trace("router's choice", experts)
        trace("experts", outputs.flatten(1))
    return sum((outputs.float() * weights[:, :, None]).unbind(1)).to(x.dtype), experts


def block(mlp, x, trace) -> torch.Tensor:
    """The learner's: a transformers Qwen3MoeSparseMoeBlock on x [T, H]."""
    gate, experts, logits = mlp.gate, mlp.experts, kernels.linear(x, mlp.gate.weight)
    trace("router", logits)
    out, gate.chosen = moe(x, logits, experts.gate_up_proj, experts.down_proj, gate.top_k, gate.norm_topk_prob, trace)
    trace("combination", out)
    return out


def replacements():
    """What `kernels.engine_kernels` puts in vLLM's place for Qwen3-MoE: (owner, name, new). Experts' weights stay as they are
    loaded, where vLLM packs them for its own kernel (fused_moe/experts/cpu_moe.py)."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.models import qwen3_moe

    class Block(qwen3_moe.Qwen3MoeSparseMoeBlock):
        def forward(self, x):
            (logits, _), router, weights = self.gate(x), self.experts.router, self.experts.routed_experts
            trace = getattr(self, "trace", None)  # for the locator in checks.py
            out, chosen = moe(x, logits, weights.w13_weight, weights.w2_weight, router.top_k, router.renormalize, trace)
            if router.capture_fn:
                router.capture_fn(chosen)
            return out

    unpacked = CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None
    return [(qwen3_moe, "Qwen3MoeSparseMoeBlock", Block), unpacked]
