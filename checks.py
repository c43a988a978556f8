"""The alignment checks C0 to C10: do rollout and learner agree to the last bit, and if not, where do they part?

    python kernels.py --model M --dtype bfloat16

runs them in order on that model with the real engine. C3 to C7 take what the learner computes in two layers in the middle of
the model, and call the engine's own layer objects with the same inputs at any number of rows; C8 to C10 compare
log-probabilities that the engine recorded. At the first mismatch the locator runs a few sequences through both sides and
names the first operation whose output differs. With --kernels standard all checks run, and show how far apart stock kernels are.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, count
from unittest import mock

import torch

import kernels
import kernels_cuda
import rollout
import run_async
from learn import Learner
from rollout import Request, sample_seed

ROWS = [*range(1, 65), 127, 128, 129, 255, 256, 257, 511, 512]  # a row must not depend on how many are computed with it
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513]  # around blocks of 128
SEQS = 64  # sequences that the engine decodes at once


class Subject:
    """A learner and an engine that hold the same model. tokens: how many C9 compares; threads: of both sides."""

    def __init__(self, learner, engine, tokens: int = 5000, threads: int = 1):
        self.learner, self.engine, self.tokens, self.threads, self.mode = learner, engine, tokens, threads, engine.mode
        self.cuda = learner.model.device.type == "cuda"
        self.model, self.config, self.dtype, self.device = learner.model, learner.model.config, learner.model.dtype, learner.model.device
        self.head, self.D = (self.model.lm_head.weight, self.model.lm_head.bias), kernels.head_size(self.config)
        self.vllm, self.scheduler = engine.llm.llm_engine.vllm_config, engine.engine.engine_core.engine_core.scheduler
        self.longest, self.block = self.vllm.model_config.max_model_len, self.vllm.cache_config.block_size
        (self.runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
        middle = self.config.num_hidden_layers // 2
        self.middle = slice(max(0, middle - 1), middle + 1)  # the layers that C3 to C7 look at
        self.engine_layers = list(self.runner.model.model.layers)[self.middle]
        self.all_threads = [threads] if self.cuda else sorted({1, 2, threads})

    def sync(self) -> None:
        self.engine.load(self.learner.weights(), 0)

    def prompts(self, lengths, seed=0, shared=0) -> list[list[int]]:
        """Random token ids; the first `shared` are the same in all prompts."""
        draw, vocab = random.Random(seed), self.config.vocab_size
        prefix = [draw.randrange(vocab) for _ in range(shared)]
        return [(prefix + [draw.randrange(vocab) for _ in range(n)])[:n] for n in lengths]


@dataclass
class Tally:
    """What one check compared. `fault` describes the first difference."""

    check: str
    compared: str
    values: int = 0
    different: int = 0
    largest: float = 0.0
    fault: str | None = None
    seconds: float = 0.0
    details: dict = field(default_factory=dict)

    def equal(self, got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        if got.shape != expected.shape:
            return self.require(False, f"{where}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        got = got.to(expected.device)  # log-probabilities come from the engine on the CPU
        self.values += expected.numel()
        if not torch.equal(got, expected):
            self.different += int((got != expected).sum())  # NaN is different from everything
            self.largest = max(self.largest, (got.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max().item())
            self.fault = self.fault or where

    def require(self, holds: bool, text: str) -> None:
        self.values += 1
        self.different += not holds
        self.fault = self.fault or (None if holds else text)


# ---------------------------------------------------------------------------------------------------------------------
# C0 to C2: setting, weights, tokens


def c0(s: Subject, tally: Tally) -> None:
    import transformers
    import vllm
    from vllm import envs

    config, model = s.vllm, s.vllm.model_config
    tally.details = {name: value for name, value in sorted(os.environ.items()) if re.match("(VLLM|ONEDNN|DNNL|OMP|MKL)_", name)}
    tally.details |= {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
                      "model type": s.config.model_type, "cpu": torch.backends.cpu.get_cpu_capability(),
                      "device": torch.cuda.get_device_name(s.device) if s.cuda else "cpu"}  # fmt: skip
    for what, value, right in [
        ("vLLM version", vllm.__version__.split("+")[0], "0.32.0"),  # kernels.py relies on its files
        ("model dtype", model.dtype, s.dtype), ("quantization", model.quantization, None),
        ("generation_config", model.generation_config, "vllm"), ("logprobs_mode", model.logprobs_mode, "processed_logprobs"),
        ("block size", s.block, kernels_cuda.BLOCK if s.cuda else kernels.BLOCK), ("KV-cache dtype", config.cache_config.cache_dtype, "auto"),
        ("prefix caching", config.cache_config.enable_prefix_caching, True), ("enforce_eager", model.enforce_eager, True),
        ("chunked prefill", config.scheduler_config.enable_chunked_prefill and not s.cuda, False),
        ("batch invariance", envs.VLLM_BATCH_INVARIANT, s.cuda and s.mode == "aligned"),
        ("tensor parallel size", config.parallel_config.tensor_parallel_size, 1),
        ("speculative decoding", config.speculative_config, None),
        ("float32 matmul precision", torch.get_float32_matmul_precision(), "highest"),
        ("oneDNN's fpmath mode", os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT").upper(), "STRICT"),
        ("dropout", s.model.training and s.mode == "aligned", False),
    ]:  # fmt: skip
        tally.require(value == right, f"{what} is {value}, equality needs {right}")


def c1(s: Subject, tally: Tally) -> None:
    from vllm._custom_ops import cpu_prepack_moe_weight

    merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    moe = {"experts.gate.": "gate.", "routed_experts.w13_weight": "gate_up_proj", "routed_experts.w2_weight": "down_proj"}
    weights, stock = s.learner.weights(), s.mode == "standard"
    scaled = {name: w * (1 + 2**-6) for name, w in weights.items()}  # nearly every value changes
    for what, version in [("other weights", scaled), ("the weights", weights), ("the same weights again", weights)]:
        s.engine.load(version, 0)
        for name, got in s.runner.model.named_parameters(remove_duplicate=False):
            owner = s.runner.model.get_submodule(name.rpartition(".")[0])
            for its, ours in moe.items():
                name = name.replace(its, ours)
            module = name.split(".")[-2]
            parts = [name.replace(module, part) for part in merged.get(module, [module])]
            right = [version.get(part, version["model.embed_tokens.weight"]) for part in parts]  # a tied head has no name of its own
            if stock and hasattr(owner, "cpu_linear") and name.endswith("weight"):
                # stock vLLM computes with a packed copy: the identity matrix times it is the weight
                got = owner.cpu_linear(torch.eye(right[0].shape[1], dtype=s.dtype), got, None).t()
            if stock and module == "experts":
                right = [cpu_prepack_moe_weight(w, owner.quant_method.moe_kernel.fused_experts.isa) for w in right]
            for part, expected, start in zip(parts, right, accumulate(map(len, right), initial=0)):
                tally.equal(got[start : start + len(expected)].to(s.dtype), expected, f"{part} after a sync of {what}")


def c2(s: Subject, tally: Tally) -> None:
    prompts = s.prompts([1, 2, 5, 17, 129])
    samples, got, fed = engine_tensors(s, prompts, new=8)
    packed = kernels.pack([(x.prompt_ids + x.response_ids)[:-1] for x in samples], s.device)  # a response's last token is not fed
    tally.require(fed == packed.tokens, "number of tokens fed to the model")
    tally.equal(got["input_ids"].flatten(), packed.input_ids[: packed.tokens], "token ids")
    tally.equal(got["positions"].flatten(), packed.positions[: packed.tokens], "positions")
    tally.require([x.prompt_ids for x in samples] == prompts, "prompt ids of the samples")


# ---------------------------------------------------------------------------------------------------------------------
# C3 to C7: operations, the engine's at any number of rows against the learner's in one forward of 512


def operations(s: Subject, tokens: list[int], check: str):
    """What the learner computes for a sequence of T tokens in two layers, operation by operation: (check, name, the engine's
    layer, its inputs, its outputs side by side), each [T, ...]. The large ones of the head only for their own check."""
    found = learner_tensors(s, [tokens], s.middle)
    positions, before = torch.arange(len(tokens), device=s.device), [found["embedding"]]
    for i, (engine, layer) in enumerate(zip(s.engine_layers, s.model.model.layers[s.middle])):
        of = {op.split(".")[-1]: tensor for op, tensor in found.items() if op.startswith(f"layers.{i}.")}
        attn, mlp, own = engine.self_attn, engine.mlp, layer.self_attn
        projections, x, y = [own.q_proj, own.k_proj, own.v_proj], of["input norm"], of["post-attention norm"]
        widths = [projection.out_features for projection in projections]
        yield "C4", "input norm", engine.input_layernorm, before, side_by_side(x, *[of["input residual"]] * i)
        yield "C3", "q/k/v", attn.qkv_proj, [x], of["q/k/v"]
        if not s.cuda:  # there the matrix' shape decides the tiles, so both sides have one matrix
            yield "C3", "q/k/v one by one", one_by_one(projections), [x], of["q/k/v"]
        q, k, v = of["q/k/v"].split(widths, -1)  # views, with the strides that they have in the model
        if "q/k norm" in of:
            heads, (q, k) = [h.unflatten(-1, (-1, s.D)) for h in (q, k)], of["q/k norm"].split(widths[:2], -1)
            yield "C4", "q_norm", attn.q_norm, heads[:1], q
            yield "C4", "k_norm", attn.k_norm, heads[1:], k
        yield "C5", "rotary", attn.rotary_emb, [positions, q, k], of["rotary"]
        yield "C6", "attention", None, [*of["rotary"].split(widths[:2], -1), v], of["attention"]
        yield "C3", "o_proj", attn.o_proj, [of["attention"]], of["o_proj"]
        before, residual = [of["o_proj"], of["input residual"]], of["post-attention residual"]
        yield "C4", "post-attention norm", engine.post_attention_layernorm, before, side_by_side(y, residual)
        if "router" in of:
            yield "C3", "router", mlp.gate, [y], of["router"]
            for op in [op for op in ("router's choice", "experts", "combination") if op in of]:
                yield "C3", op, lambda x, op=op, mlp=mlp: engine_experts(s, mlp, x, op), [y], of[op]
            before = [of["combination"], residual]
            continue
        yield "C3", "gate/up", mlp.gate_up_proj, [y], of["gate/up"]
        yield "C5", "SwiGLU", mlp.act_fn, [of["gate/up"]], of["activation"]
        yield "C3", "down", mlp.down_proj, [of["activation"]], of["down"]
        if not s.cuda:
            yield "C3", "gate/up one by one", one_by_one([layer.mlp.gate_proj, layer.mlp.up_proj]), [y], of["gate/up"]
        before = [of["down"], residual]
    hidden = found["final norm"]
    yield "C4", "final norm", s.runner.model.model.norm, before, side_by_side(hidden, found["final residual"])
    if check == "C3":
        yield "C3", "lm_head", s.runner.model.compute_logits, [hidden], kernels.head_logits(hidden, *s.head)
    for t in (1.0, 0.7) if check == "C7" else ():
        expected = log_softmax(s, kernels.head_logits(hidden, *s.head), t)
        yield "C7", f"log-softmax, temperature {t}", lambda x, t=t: engine_log_softmax(s, x, t), [hidden], expected


def engine_experts(s: Subject, mlp, x, op: str) -> torch.Tensor:
    """An operation of the engine's mixture of experts for x [rows, hidden]; stock vLLM shows the "combination" only."""
    from vllm.forward_context import set_forward_context

    found = {}
    with set_forward_context(None, s.vllm), mock.patch.object(mlp, "trace", found.__setitem__, create=True):
        return (found | {"combination": mlp(x)})[op]


def one_by_one(layers):  # linear layers as the learner computes them
    return lambda x: side_by_side(*(kernels.linear(x, layer.weight, layer.bias) for layer in layers))


def side_by_side(*outputs) -> torch.Tensor:  # vLLM's linear layers give (output, None)
    return torch.cat([x.flatten(1) for x in outputs if x is not None], -1)


def compare_operations(s: Subject, tally: Tally) -> None:
    """The operations of one of C3, C4, C5, C7."""
    check, (tokens,) = tally.check.split()[0], s.prompts([512])
    torch.set_num_threads(1)
    whole = list(operations(s, tokens, check))
    if check == "C5" and s.mode == "aligned":  # the tokens stand at the first 512 positions only
        tally.equal(s.engine_layers[0].self_attn.rotary_emb.cos_sin_cache.to(s.dtype), s.learner.cos_sin, "rotary table")
    for threads in s.all_threads:
        torch.set_num_threads(threads)
        for kind, name, engine_op, inputs, expected in whole:
            for n in ROWS if kind == check else ():
                places = sorted({0, 512 - n, (512 - n) * 3 // 7})  # a row's place in the batch must not matter either
                for start in places[-1:] if name.startswith(("lm_head", "log-softmax")) else places:  # one, for the time it takes
                    rows = slice(start, start + n)
                    # copies, as some operations write in place, with the strides of what they are copied from
                    taken = [x[rows].new_empty_strided(x[rows].shape, x.stride()).copy_(x[rows]) for x in inputs]
                    got = engine_op(*taken)
                    got = side_by_side(*got) if isinstance(got, tuple) else got.flatten(1)
                    tally.equal(got, expected[rows], f"{name}: {n} rows from row {start}, {threads} threads")
        for n in [n for n in ROWS if n % kernels.ROWS == 0]:  # the learner pads its tokens to a multiple of 16
            for (kind, name, *_, got), (*_, expected) in zip(operations(s, tokens[:n], check), whole, strict=True):
                if kind == check:
                    tally.equal(got, expected[:n], f"{name}: {n} rows, {threads} threads, learner")
                if not torch.equal(got, expected[:n]):
                    break  # what follows differs because of it


def c6(s: Subject, tally: Tally) -> None:
    L = max(LENGTHS)
    (tokens,) = s.prompts([L])
    torch.set_num_threads(1)
    *_, (qkv, whole) = (of[-2:] for of in operations(s, tokens, "C6") if of[0] == "C6")
    filled = engine_attention(s, *qkv, [(0, L)])[1]  # its later tokens are what a reused block holds: stale values
    ends = [min(L, LENGTHS[i * 7 % len(LENGTHS)] + i // len(LENGTHS)) for i in range(SEQS)]
    cases = [  # (what, [from, to) of each request, KV cache)
        *((f"prefill of {n} tokens", [(0, n)], None) for n in LENGTHS),
        *((f"decode of token {n}", [(n - 1, n)], filled) for n in LENGTHS),
        *((f"prefill of {n} tokens in chunks, the second from {chunk}", [(chunk, n)], filled)
          for n in LENGTHS for chunk in (1, 16, 100, 127, 128, 129, 256) if chunk < n),
        *((f"decode of {n} sequences", [(end - 1, end) for end in ends[:n]], filled) for n in range(1, SEQS + 1)),
        (f"prefill of {len(LENGTHS)} sequences", [(0, n) for n in LENGTHS], filled),
        ("decode and prefill in one batch", [(0, 40), (128, 129), (100, 300), (0, 1), (511, 512), (128, 257)], filled),
    ]  # fmt: skip
    for threads in s.all_threads:
        torch.set_num_threads(threads)
        for what, spans, cache in cases:
            got = engine_attention(s, *qkv, spans, cache)[0]
            tally.equal(got, torch.cat([whole[a:b] for a, b in spans]), f"{what}, {threads} threads")
        got = learner_attention(s, [tokens[:n] for n in LENGTHS])
        tally.equal(got, torch.cat([whole[:n] for n in LENGTHS]), f"the learner's batch of {len(LENGTHS)}, {threads} threads")
    if s.mode == "aligned" and not s.cuda:  # there no lock is needed
        attention_at_once(s, tally, tokens, qkv, whole)


def attention_at_once(s: Subject, tally: Tally, tokens, qkv, whole, seconds: float = 2.0) -> None:
    """The learner's and the engine's attention at once, in two threads, as in a run: the lock keeps them apart."""
    end = time.monotonic() + seconds

    def repeat(compute):
        torch.set_num_threads(s.threads)
        return [compute() for _ in iter(lambda: time.monotonic() < end, False)]

    with ThreadPoolExecutor() as pool:
        sides = [lambda: learner_attention(s, [tokens]), lambda: engine_attention(s, *qkv, [(0, len(whole))])[0]]
        for side, results in zip(("learner", "engine"), pool.map(repeat, sides)):
            for got in results:
                tally.equal(got, whole, f"attention of both threads at once, {side}")


def learner_attention(s: Subject, sequences):
    return learner_tensors(s, sequences, s.middle)[f"layers.{len(s.engine_layers) - 1}.attention"]


def engine_attention(s: Subject, q, k, v, spans, cache=None):
    """The engine's attention, through its own metadata builder and implementation, for requests that have the same tokens
    and compute those from a to b each: ([rows, H*D], KV cache). Without a cache: an empty one."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    builder, layer = s.runner.attn_groups[0][0].get_metadata_builder(), s.engine_layers[-1].self_attn.attn
    own, blocks = s.runner.kv_caches[0], -(-len(q) // s.block)
    cache = own.new_zeros(blocks, *own.shape[1:]) if cache is None else cache
    slots = torch.cat([torch.arange(a, b, device=s.device) for a, b in spans])
    ends = torch.tensor([b for _, b in spans], dtype=torch.int32, device=s.device)
    starts = torch.tensor([0, *accumulate(b - a for a, b in spans)], dtype=torch.int32, device=s.device)
    metadata = builder.build(0, CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.cpu(), seq_lens=ends, num_reqs=len(spans), num_actual_tokens=len(slots),
        max_query_len=max(b - a for a, b in spans), max_seq_len=max(b for _, b in spans), slot_mapping=slots,
        block_table_tensor=torch.arange(blocks, dtype=torch.int32, device=s.device).repeat(len(spans), 1),
    ))  # fmt: skip
    q, k, v = (x[slots].view(len(slots), -1, s.D) for x in (q, k, v))
    out = torch.zeros_like(q)
    layer.impl.do_kv_cache_update(layer, k, v, cache, slots)
    layer.impl.forward(layer, q, k, v, cache, metadata, out)
    return out.flatten(1), cache


def c7(s: Subject, tally: Tally) -> None:
    compare_operations(s, tally)
    hidden = learner_tensors(s, s.prompts([512]), s.middle)["final norm"]
    targets = torch.arange(512, device=s.device) % s.config.vocab_size
    for t in (1.0, 0.7):
        got = kernels.token_logprobs(hidden, s.model.lm_head, targets, t)[0]
        expected = log_softmax(s, kernels.head_logits(hidden, *s.head), t).gather(1, targets[:, None])[:, 0]
        tally.equal(got, expected, f"token log-probability, temperature {t}")


def engine_log_softmax(s: Subject, hidden, temperature: float) -> torch.Tensor:
    """[rows, V] float32: what the engine's sampler samples from and records."""
    logits = s.runner.model.compute_logits(hidden)
    if s.cuda:  # its sampler is the functions that this calls
        return log_softmax(s, logits, temperature)
    logits = s.runner.sampler.apply_temperature(logits.float(), torch.full((len(hidden),), temperature), True)
    generators = {i: torch.Generator().manual_seed(i) for i in range(len(hidden))}
    return s.runner.sampler.topk_topp_sampler(logits, generators, None, None)[1]


def log_softmax(s: Subject, logits, temperature: float) -> torch.Tensor:
    """[rows, V] float32, which kernels.TokenLogprobs computes and does not return."""
    tempered = kernels.tempered(logits, temperature)
    if s.cuda:
        ids = torch.arange(logits.shape[1], device=s.device).expand(logits.shape)
        return kernels_cuda.token_logprobs(logits, tempered, ids, temperature)
    return torch.log_softmax(tempered, -1)


# ---------------------------------------------------------------------------------------------------------------------
# C8 to C10: sampled tokens


def run_requests(s: Subject, prompts, lengths, first: int = 0, keep_cache: bool = False, prompt_logprobs=None) -> list:
    """vLLM's outputs for one request per prompt, the i-th of lengths[i] tokens at temperature 1 with seed first + i."""
    from vllm import SamplingParams

    if not keep_cache:
        s.engine.llm.reset_prefix_cache()
    plain = dict(temperature=1.0, logprobs=0, prompt_logprobs=prompt_logprobs, flat_logprobs=True, ignore_eos=True, detokenize=False)
    params = [SamplingParams(max_tokens=n, seed=first + i, **plain) for i, n in enumerate(lengths)]
    return s.engine.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def same_samples(tally: Tally, got: list, expected: list, where: str) -> None:
    for a, b in zip(got, expected, strict=True):
        a, b = a.outputs[0], b.outputs[0]
        n = [*map(int.__eq__, a.token_ids, b.token_ids), False].index(False)  # what follows another token is not comparable
        tally.equal(torch.tensor(a.logprobs.logprobs[:n]), torch.tensor(b.logprobs.logprobs[:n]), f"{where}: log-probabilities")
        tally.require(n == len(a.token_ids) == len(b.token_ids), f"{where}: sampled tokens")


def c8(s: Subject, tally: Tally) -> None:
    s.sync()
    # Request i samples i + 2 tokens, so that 64, 63, ..., 1 sequences are decoded at once; then all is read as one prompt.
    prompts, lengths = s.prompts([LENGTHS[i % 5] for i in range(SEQS)]), list(range(2, SEQS + 2))
    together = run_requests(s, prompts, lengths)
    for i in range(0, SEQS, 8):
        part = [output.outputs[0] for output in together[i : i + 8]]
        whole = [prompt + list(out.token_ids) for prompt, out in zip(prompts[i:], part)]
        for out, output in zip(part, run_requests(s, whole, [1] * 8, prompt_logprobs=0), strict=True):
            prefill = output.prompt_logprobs.logprobs[-len(out.token_ids) :]
            for step, (a, b) in enumerate(zip(torch.tensor(out.logprobs.logprobs), torch.tensor(prefill))):
                tally.equal(a, b, f"decode of {min(SEQS, SEQS + 1 - step)} sequences at once against prefill")
    for i in (0, 5, 30):
        alone = run_requests(s, [prompts[i]], [lengths[i]], first=i)
        same_samples(tally, alone, [together[i]], "one long sequence against 64 at once")

    prompts = s.prompts([128, 129, 200, 256, 257, 300], seed=1, shared=150)
    miss = [run_requests(s, [prompt], [8], first=i)[0] for i, prompt in enumerate(prompts)]
    run_requests(s, prompts, [1] * len(prompts))
    hit = run_requests(s, prompts, [8] * len(prompts), keep_cache=True)
    tally.require(not any(output.num_cached_tokens for output in miss), "prefix cache: a miss was a hit")
    whole = [(len(prompt) - 1) // s.block * s.block for prompt in prompts]  # in whole blocks; the last token is computed
    tally.require([output.num_cached_tokens for output in hit] == whole, "prefix cache: no hit")
    same_samples(tally, hit, miss, "prefix-cache hit against miss")

    prompts, pool = s.prompts([100, 90, 120, 110, 95, 127], seed=2), s.scheduler.kv_cache_manager.block_pool
    roomy = run_requests(s, prompts, [40] * 6)
    s.engine.llm.reset_prefix_cache()
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 640 // s.block)  # leave 640 tokens: the six sequences become 882
    with mock.patch.object(s.scheduler, "_preempt_request", wraps=s.scheduler._preempt_request) as preempt:
        cramped = run_requests(s, prompts, [40] * 6, keep_cache=True)
    pool.free_blocks(held)
    tally.require(preempt.called, "no request was preempted")
    same_samples(tally, cramped, roomy, "after preemption and block reuse")


def same_logprobs(s: Subject, tally: Tally, samples, where: str) -> None:
    for part in s.learner.microbatches(samples):
        part = [samples[i] for i in part]
        tally.equal(torch.cat([x.logprobs for x in part]), s.learner.score(part)[0], where)


def c9(s: Subject, tally: Tally) -> None:
    s.sync()
    draw, all_threads, new = random.Random(0), s.all_threads, min(64, s.longest // 4)
    for round in count():
        n = min([SEQS, 1, 7, 43, 44, 20][round % 6], max(1, (s.tokens - tally.values) // new))
        lengths = [draw.choice([*range(1, 40), 127, 128, 129]) for _ in range(n)]
        lengths[0] = [s.longest - new, 257, 1, 513, 1025][round % 5]
        prompts = s.prompts([min(length, s.longest - new) for length in lengths], seed=round)
        requests = [Request(ids, sample_seed(round, i)) for i, ids in enumerate(prompts)]
        temperature, threads = (1.0, 0.7)[round // 2 % 2], all_threads[round % len(all_threads)]
        torch.set_num_threads(threads)
        samples = s.engine.generate(requests, new, temperature, 0)
        torch.set_num_threads(s.threads)
        with mock.patch.object(s.learner, "temperature", temperature):
            same_logprobs(s, tally, samples, f"batch of {n} sequences, temperature {temperature}, {threads} threads")
        if tally.values >= s.tokens:
            return


def c10(s: Subject, tally: Tally) -> None:
    learner, store, pool = s.learner, rollout.WeightStore(), s.scheduler.kv_cache_manager.block_pool
    prompts = s.prompts([135, 150], seed=3, shared=130)

    def requests(b):
        return [Request(prompt, sample_seed(b, i, j)) for i, prompt in enumerate(prompts) for j in range(4)]

    def grade(b, samples):
        for i, sample in enumerate(samples):
            sample.group, sample.reward = i // 4, random.Random(f"{b}/{i}").random()

    store.publish(0, learner.weights())
    s.engine.version = None  # whatever it holds, load version 0
    thread = rollout.RolloutThread(
        s.engine, store, requests, grade, start=0, steps=4, lag=1, schedule="fixed", max_new_tokens=24, temperature=1.0,
        timeout=600, threads=s.threads, on_error=lambda: None,
    )  # fmt: skip
    # an optimizer without state, which is 8 bytes per parameter less; each step is 0.02% of the weights' norm
    sgd = torch.optim.SGD([learner.master], lr=0.2 * learner.master.detach().norm().item())
    with (
        mock.patch.multiple(learner, optimizer=sgd, max_grad_norm=1e-3, audit=0, tokens_per_microbatch=256),
        mock.patch.object(pool, "touch", wraps=pool.touch) as touch,  # called with the blocks that the prefix cache gives a request
        contextlib.closing(thread),
    ):
        thread.start()
        for k in range(4):
            batch = thread.next(lambda: False)
            metrics = learner.update(batch.samples, k, weights_of=store.get)
            store.publish(k + 1, learner.weights())
            with learner.holding(store.get(version := batch.samples[0].version)):
                same_logprobs(s, tally, batch.samples, f"batch {k}, sampled by version {version}")
            moved = any(not torch.equal(w, store.get(k)[name]) for name, w in store.get(k + 1).items())
            store.drop_before(k)
            tally.require(moved, f"update {k} changed nothing (gradient norm {metrics['grad_norm']:.3g})")
        tally.require(any(call.args[0] for call in touch.call_args_list), "prefix cache: no hit")
    s.engine.cancelled = False  # which closing the thread set


CHECKS = {
    "C0 setting": (c0, "versions, flags, sampling settings"),
    "C1 weights": (c1, "engine's parameters, three syncs"),
    "C2 tokens": (c2, "token ids and positions fed to the model"),
    "C3 linear": (compare_operations, "linear layers, rows and merged matrices"),
    "C4 norm": (compare_operations, "RMSNorm, with and without residual"),
    "C5 elementwise": (compare_operations, "rotary embedding, SwiGLU"),
    "C6 attention": (c6, "attention: decode, prefill, chunks, batches"),
    "C7 log-probability": (c7, "head, temperature, log-softmax"),
    "C8 engine with itself": (c8, "engine with itself: batch, cache, preemption"),
    "C9 learner with engine": (c9, "learner's log-probabilities of sampled tokens"),
    "C10 over updates": (c10, "the same while training, prefix cache in use"),
}


@torch.no_grad()
def run_check(name: str, s: Subject) -> Tally:
    torch.set_num_threads(s.threads)
    (check, compared), started = CHECKS[name], time.perf_counter()
    tally = Tally(name, compared)
    check(s, tally)
    torch.set_num_threads(s.threads)
    tally.seconds = time.perf_counter() - started
    kernels.return_freed_memory()  # or each check's pieces add to the next one's peak
    return tally


# ---------------------------------------------------------------------------------------------------------------------
# The locator


# Modules of vLLM's model and of transformers': the operations that give a module's second output (a residual) or, if it has
# none, its inputs, and last the one that gives its output. Several modules of one operation are taken side by side.
MODULES = {"embed_tokens": ["embedding"], "input_layernorm": ["input residual", "input norm"],
           **dict.fromkeys(["qkv_proj", "q_proj", "k_proj", "v_proj"], ["q/k/v"]), **dict.fromkeys(["q_norm", "k_norm"], ["q/k norm"]),
           "attn": ["rotary", "rotary", None], "o_proj": ["attention", "o_proj"],
           "post_attention_layernorm": ["post-attention residual", "post-attention norm"],
           **dict.fromkeys(["gate_up_proj", "gate_proj", "up_proj"], ["gate/up"]), "down_proj": ["activation", "down"],
           "gate": ["router"], "mlp": ["combination"],  # of a mixture of experts
           "norm": ["final residual", "final norm"], "logits_processor": ["logits"]}  # fmt: skip


@contextlib.contextmanager
def watched(model):
    """(a dict that has, when this is closed, what a model's modules computed: {operation: its outputs side by side, for all
    forwards}; keep(operation, tensor), which adds an output to the forward under way)."""
    found, forwards = {}, []

    def keep(op, x):
        rows = min(len(forwards[-1]["input_ids"][0]), x.numel() // x.shape[-1])  # a token's heads side by side; logits have fewer
        forwards[-1][op].append(x.reshape(rows, -1).clone())  # later operations write in place

    def see(name, args, out):
        *before, last = MODULES[name.split(".")[-1]]
        out, *second = out if isinstance(out, tuple) else (out, None)
        for op, x in [*zip(before, args if second == [None] else second), (last, out)]:
            if op:
                keep(re.search(r"layers\.\d+\.|$", name)[0] + op, x)

    def begin(module, args, inputs):
        ids = {op: [inputs[op].flatten().clone()] for op in ("input_ids", "positions") if op in inputs}
        forwards.append(defaultdict(list, ids))

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(begin, with_kwargs=True))
        for name, module in model.named_modules():
            if hasattr(module, "experts"):  # kernels_moe.py's block in the engine shows what is no module
                trace = lambda op, x, name=name: keep(re.search(r"layers\.\d+\.", name)[0] + op, x)  # noqa: E731
                hooks.enter_context(mock.patch.object(module, "trace", trace, create=True))
            if name.split(".")[-1] in MODULES:
                hooks.enter_context(module.register_forward_hook(lambda _, args, out, name=name: see(name, args, out)))
        yield found, keep
    found |= {op: torch.cat([torch.cat(forward[op], -1) for forward in forwards]) for op in forwards[0]}


def engine_tensors(s: Subject, prompts, new: int) -> tuple[list, dict[str, torch.Tensor], int]:
    """Sample `new` tokens after each prompt, which must be in the order of their lengths: the samples, what every operation of
    the engine computed on the way, a row for each token in the order of the samples (logits: for each sampled token), and how
    many tokens the engine was fed."""
    s.sync()
    with watched(s.runner.model) as (found, _), mock.patch.object(s.engine, "stop_ids", []):
        samples = s.engine.generate([Request(ids, i) for i, ids in enumerate(prompts)], new, 1.0, 0)
    n, ends = len(prompts), [*accumulate(map(len, prompts))]
    # the first forward was of all prompts, laid end to end, and each later one of one token of each
    steps = range(ends[-1], ends[-1] + n * (new - 1), n)
    fed = [at for i, end in enumerate(ends) for at in [*range(end - len(prompts[i]), end), *(step + i for step in steps)]]
    sampled = [at for i in range(n) for at in range(i, n * new, n)]
    return samples, {op: x[sampled if op == "logits" else fed] for op, x in found.items()}, len(found["input_ids"])


def learner_tensors(s: Subject, sequences: list[list[int]], layers=slice(None)) -> dict[str, torch.Tensor]:
    """What every operation of the learner, or of some of its layers, computes: [tokens, ...] for sequences laid end to end."""
    stock = sys.modules[type(s.model).__module__]  # transformers' code of the architecture
    rotate, calls = stock.apply_rotary_pos_emb, count()  # which is no module

    def rotary(*args, **kwargs):
        q, k = rotate(*args, **kwargs)  # [1, heads, L, D]
        at = f"layers.{next(calls) % len(s.model.model.layers)}.rotary"
        keep(at, q.transpose(1, 2)), keep(at, k.transpose(1, 2))
        return q, k

    with mock.patch.object(s.model.model, "layers", s.model.model.layers[layers]):
        if s.mode == "aligned":
            found, packed = {}, kernels.pack(sequences, s.device)
            kernels.hidden_states(s.model, packed, s.learner.cos_sin, trace=found.__setitem__)
            return {op: x[: packed.tokens] for op, x in found.items()}
        with watched(s.model.model) as (found, keep), mock.patch.object(stock, "apply_rotary_pos_emb", rotary):
            for sequence in sequences:
                s.model.model(input_ids=torch.tensor([sequence], device=s.device), use_cache=False)
        return found


@torch.no_grad()
def locate(s: Subject, lengths=(1, 5, 17, 33, 129), new: int = 6) -> dict | None:
    """The first operation whose output differs between engine and learner, in one pass over each: prompts of these lengths
    and `new` sampled tokens. {"layer", "op", "values", "different", "largest"}, or None when all are equal."""
    samples, got, _ = engine_tensors(s, s.prompts(lengths, seed=9), new)
    sequences = [(x.prompt_ids + x.response_ids)[:-1] for x in samples]  # a response's last token is not fed
    expected = learner_tensors(s, sequences)
    sampled = [i for x, end in zip(samples, accumulate(map(len, sequences))) for i in range(end - len(x.response_ids), end)]
    hidden, targets = expected["final norm"][sampled], torch.tensor([t for x in samples for t in x.response_ids], device=s.device)
    expected["logits"], got["log-softmax"] = kernels.head_logits(hidden, *s.head), torch.cat([x.logprobs for x in samples])
    expected["log-softmax"] = kernels.token_logprobs(hidden, s.model.lm_head, targets)[0]
    for op, x in expected.items():  # in the order of computation
        if op in got:
            tally = Tally("", "")
            tally.equal(got[op], x, op)
            if tally.fault:
                layer, label = re.fullmatch(r"(?:layers\.(\d+)\.)?(.*)", op).groups()
                layer = layer and int(layer)
                return {"layer": layer, "op": label, "values": tally.values, "different": tally.different, "largest": tally.largest}
    return None


def describe(found: dict | None) -> str:
    if found is None:
        return "locator: no operation differs in 5 sequences alone, so the difference lies in what the check above varied"
    layer = "" if found["layer"] is None else f"layer {found['layer']}, "
    return f"first difference: {layer}{found['op']}: {found['different']:,} of {found['values']:,} values, by up to {found['largest']:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# The command


def main(argv: list[str] | None = None) -> int:
    """0: all is exact; 1: something differs; 2: cannot be checked."""
    from tqdm import tqdm
    from transformers import AutoConfig

    parser = argparse.ArgumentParser(prog="kernels.py", description="Alignment checks C0 to C10: do rollout and learner agree to the bit?")
    parser.add_argument("--model", default="base", help='"base" (a small model made here), a local Hugging Face folder, or a hub name')
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the weights that both sides compute with")
    parser.add_argument("--kernels", default="aligned", choices=["aligned", "standard"], help="standard: how far apart stock vLLM and stock transformers are")
    parser.add_argument("--engine-device", help="cpu or cuda:N, here the learner's too; the default is the first GPU if there is one")
    parser.add_argument("--only", nargs="+", metavar="C", choices=[name.split()[0] for name in CHECKS], help="run these checks alone, for example C6 C9")
    parser.add_argument("--tokens", type=int, default=5000, help="sampled tokens that C9 compares (default 5000)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of both sides; the default is all. C3 to C7 run on 1 and 2 as well")
    args = parser.parse_args(argv)
    chosen = [name for name in CHECKS if not args.only or name.split()[0] in args.only]
    try:
        run_async.require(args, {"tokens": 1, "threads": 0}, {})
        args.threads = args.threads or run_async.default_threads(0)
        both = args.engine_device or kernels_cuda.choose_devices()[1]  # one, as the engine's layers are given the learner's tensors
        device, _, memory = run_async.devices(run_async.Config(kernels=args.kernels, engine_device=both, learner_device=both))
        path = str(run_async.resolve_model(args.model))
        config = AutoConfig.from_pretrained(path)
        kernels.require_supported(config)
        if config.max_position_embeddings < max(LENGTHS):
            raise run_async.UserError(f"--model {args.model}: has {config.max_position_embeddings} positions, the checks need {max(LENGTHS)}")
        if args.json:
            open(args.json, "a").close()  # now, rather than after minutes
    except (run_async.UserError, ValueError, OSError) as error:
        print("kernels.py:", str(error).splitlines()[0], file=sys.stderr)
        return 2
    tallies, found = [], None
    with quiet() as console, tqdm(chosen, file=console, desc="loading", unit="check", dynamic_ncols=True) as bar:
        if device != "cpu":
            torch.cuda.set_device(device)  # Triton launches on the current one
        learner = Learner(path, args.dtype, args.kernels, allow_mismatch=True, tokens_per_microbatch=2048, device=device)
        cache_bytes, gpu = rollout._kv_cache_bytes, kernels_cuda.engine_settings
        with (  # room for 8 sequences of full length is enough for what is sampled here; hooks see nothing of a compiled model
            mock.patch.object(rollout, "_kv_cache_bytes", lambda model, dtype, length, seqs: cache_bytes(model, dtype, length, 7)),
            mock.patch.object(kernels_cuda, "engine_settings", lambda *given: gpu(*given) | {"enforce_eager": True}),
        ):
            length = min(config.max_position_embeddings, 2048)
            engine = rollout.Engine(path, args.dtype, args.kernels, length, SEQS, (), device=device, gpu_memory_utilization=memory)
        s = Subject(learner, engine, args.tokens, args.threads)
        s.sync()
        for name in bar:
            bar.set_description(name)
            tallies.append(run_check(name, s))
            if tallies[-1].fault and args.kernels == "aligned":
                break
        if not (exact := not any(t.fault for t in tallies)):
            bar.set_description("locating")
            found = locate(s)
    print(f"{args.model}, {args.dtype}, {args.kernels} kernels, {args.threads} threads")
    print(f"{'check':<23} {'compared':<46} {'values':>13} {'largest difference':>19}  {'exact':<5} {'seconds':>7}")
    for t in tallies:
        print(f"{t.check:<23} {t.compared:<46} {t.values:>13,} {t.largest:>19.3g}  {'no' if t.fault else 'yes':<5} {t.seconds:>7.1f}")
    for t in tallies:
        if t.fault:
            print(f"{t.check.split()[0]}: {t.different:,} of {t.values:,} values differ; the first: {t.fault}")
    print("all exact" if exact else describe(found))
    if args.json:
        result = {key: getattr(args, key) for key in ("model", "dtype", "kernels", "threads")} | {"exact": exact, "first_difference": found}
        checked = [vars(t) | {"exact": t.fault is None} for t in tallies]
        pathlib.Path(args.json).write_text(json.dumps(result | {"checks": checked}, indent=2))
    return 0 if exact else 1


@contextlib.contextmanager
def quiet():
    """While open, what vLLM and others write goes to a log file. Gives the console, for the progress bar."""
    saved, log = os.dup(1), tempfile.NamedTemporaryFile(prefix="kernels-", suffix=".log", delete=False).name
    with run_async.quiet(log) as console:
        try:
            yield console
        except BaseException:
            print(f"kernels.py: failed; vLLM's log is {log}", file=console)
            raise
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os.dup2(saved, 1), os.dup2(console.fileno(), 2), os.close(saved)
