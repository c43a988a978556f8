"""The alignment checks C0 to C10: do rollout and learner agree to the last bit, and if not, where do they part?

    python kernels.py --model M --dtype bfloat16

runs them in order on that model with the real engine. C3 to C7 call the engine's own layer objects at any number of rows
and compare them with what the learner computes for the same rows; C8 to C10 compare log-probabilities that the engine
recorded. At the first mismatch the locator runs a few sequences through both sides and names the first operation whose
output differs. With --kernels standard all checks run, and show how far apart the stock kernels are.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from unittest import mock

import torch
import torch.nn.functional as F

import kernels
import run_async

ROWS = [*range(1, 65), 127, 128, 129, 255, 256, 257, 511, 512]  # a row must not depend on how many are computed with it
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513]  # around blocks of 128
SEQS = 64  # sequences that the engine decodes at once


@dataclass
class Subject:
    """What is checked: a learner and an engine that hold the same model. threads: of both, outside of C3 to C7."""

    learner: object  # learn.Learner
    engine: object  # rollout.Engine
    tokens: int = 5000  # sampled tokens that C9 compares
    threads: int = 1

    def __post_init__(self):
        self.mode, self.model, self.config = self.engine.mode, self.learner.model, self.learner.model.config
        self.dtype, self.head = self.model.dtype, kernels.head_size(self.config)
        (self.runner,) = self.engine.llm.collective_rpc(lambda worker: worker.model_runner)
        self.scheduler = self.engine.engine.engine_core.engine_core.scheduler
        middle = self.config.num_hidden_layers // 2
        self.layer, self.engine_layer = self.model.model.layers[middle], self.runner.model.model.layers[middle]
        self.longest = self.runner.max_model_len

    def sync(self) -> None:
        self.engine.load(self.learner.weights(), 0)

    def random(self, *shape, scale=1.0, seed=0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(self.dtype)

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
        self.values += expected.numel()
        if torch.equal(got, expected):
            return
        if got.shape != expected.shape:
            return self.require(False, f"{where}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        self.different += int((got != expected).sum())  # NaN is different from everything
        self.largest = max(self.largest, (got.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max().item())
        self.fault = self.fault or where

    def require(self, holds: bool, text: str) -> None:
        self.values += 1
        if not holds:
            self.different += 1
            self.fault = self.fault or text


# ---------------------------------------------------------------------------------------------------------------------
# C0 to C2: setting, weights, tokens


def c0(s: Subject, tally: Tally) -> None:
    """versions, flags, sampling settings"""
    import transformers
    import vllm

    config, model = s.engine.llm.llm_engine.vllm_config, s.engine.llm.llm_engine.model_config
    flags = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("VLLM_", "ONEDNN_", "DNNL_", "OMP_", "MKL_"))}
    tally.details = flags | {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
                             "model type": s.config.model_type, "cpu": torch.backends.cpu.get_cpu_capability()}  # fmt: skip
    for what, value, right in [
        ("vLLM version", vllm.__version__.split("+")[0], "0.32.0"),  # kernels.py relies on its files
        ("model dtype", model.dtype, s.dtype),
        ("quantization", model.quantization, None),
        ("generation_config", model.generation_config, "vllm"),
        ("logprobs_mode", model.logprobs_mode, "processed_logprobs"),
        ("block size", config.cache_config.block_size, kernels.BLOCK),
        ("KV-cache dtype", config.cache_config.cache_dtype, "auto"),
        ("prefix caching", config.cache_config.enable_prefix_caching, True),
        ("chunked prefill", config.scheduler_config.enable_chunked_prefill, False),
        ("tensor parallel size", config.parallel_config.tensor_parallel_size, 1),
        ("enforce_eager", model.enforce_eager, True),
        ("speculative decoding", config.speculative_config, None),
        ("float32 matmul precision", torch.get_float32_matmul_precision(), "highest"),
        ("oneDNN's fpmath mode", os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT").upper(), "STRICT"),
        ("dropout", s.model.training and s.mode == "aligned", False),
    ]:
        tally.require(value == right, f"{what} is {value}, equality needs {right}")


def c1(s: Subject, tally: Tally) -> None:
    """engine's parameters, three syncs"""
    weights = s.learner.weights()
    scaled = {name: w * (1 + 2**-6) for name, w in weights.items()}  # nearly every value changes
    for i, (what, version) in enumerate([("other weights", scaled), ("the weights", weights), ("the same weights again", weights)]):
        s.engine.load(version, i)
        for name, got in s.runner.model.named_parameters(remove_duplicate=False):
            owner = s.runner.model.get_submodule(name.rpartition(".")[0])
            if hasattr(owner, "cpu_linear") and s.mode == "standard" and name.endswith("weight"):
                # stock vLLM computes with a packed copy: the identity matrix times it is the weight
                got = owner.cpu_linear(torch.eye(getattr(owner, "input_size", s.config.hidden_size), dtype=s.dtype), got, None).t()
            start = 0
            for part in _parts(name):
                expected = version.get(part, version["model.embed_tokens.weight"])  # a tied head has no name of its own
                tally.equal(got[start : start + len(expected)].to(s.dtype), expected, f"{part} after a sync of {what}")
                start += len(expected)
    s.sync()


def _parts(name: str) -> list[str]:
    """The learner's parameters that one of the engine's is merged from."""
    merged = name.split(".")[-2].removesuffix("_proj")
    return [name.replace(f"{merged}_proj", part) for part in MERGED.get(merged, [f"{merged}_proj"])]


def c2(s: Subject, tally: Tally) -> None:
    """token ids and positions fed to the model"""
    from rollout import Request

    s.sync()
    requests = [Request(ids, i) for i, ids in enumerate(s.prompts([1, 2, 5, 17, 129]))]
    with Recorder(s) as record:
        samples = s.engine.generate(requests, 8, 1.0, 0)
    sequences = [x.prompt_ids + x.response_ids for x in samples]
    packed, index = kernels.pack(sequences), record.index(sequences)
    tally.equal(record.tensors["ids"], packed.input_ids[index], "token ids")
    tally.equal(record.tensors["positions"], packed.positions[index], "positions")
    fed = sum(map(len, sequences)) - len(sequences)  # the last token of a response is not fed
    tally.require(len(index) == fed == len(set(index.tolist())), "number of tokens fed to the model")
    tally.require([x.prompt_ids for x in samples] == [r.prompt_ids for r in requests], "prompt ids of the samples")


# ---------------------------------------------------------------------------------------------------------------------
# C3 to C7: operations. The engine's layer at any number of rows against the learner's operation on 512 rows


def compare_rows(s: Subject, tally: Tally, name: str, engine_op, learner_op, *inputs, offsets=3) -> None:
    torch.set_num_threads(1)
    whole, size = learner_op(*inputs), len(inputs[0])
    for threads in sorted({1, 2, s.threads}):
        torch.set_num_threads(threads)
        for n in ROWS:
            starts = sorted({0, size - n, (size - n) * 3 // 7})[-offsets:]  # a row's place in the batch must not matter either
            for start in starts:
                rows = slice(start, start + n)
                where = f"{name}: {n} rows from row {start}, {threads} threads"
                tally.equal(engine_op(*(x[rows].clone() for x in inputs)), whole[rows], where)
            if n % kernels.ROWS == 0:  # the learner pads its tokens to a multiple of 16
                tally.equal(learner_op(*(x[rows].clone() for x in inputs)), whole[rows], where + ", learner")
    torch.set_num_threads(s.threads)


@torch.no_grad()
def c3(s: Subject, tally: Tally) -> None:
    """linear layers, rows and merged matrices"""
    attn, mlp, engine = s.layer.self_attn, s.layer.mlp, s.engine_layer
    linear = kernels.linear if s.mode == "aligned" else F.linear
    separate = lambda *layers: lambda x: torch.cat([linear(x, layer.weight, layer.bias) for layer in layers], -1)  # noqa: E731
    head = s.runner.model.lm_head
    for i, (name, engine_op, *layers) in enumerate([
        ("q/k/v", lambda x: engine.self_attn.qkv_proj(x)[0], attn.q_proj, attn.k_proj, attn.v_proj),
        ("o_proj", lambda x: engine.self_attn.o_proj(x)[0], attn.o_proj),
        ("gate/up", lambda x: engine.mlp.gate_up_proj(x)[0], mlp.gate_proj, mlp.up_proj),
        ("down", lambda x: engine.mlp.down_proj(x)[0], mlp.down_proj),
        ("lm_head", lambda x: head.quant_method.apply(head, x, None)[:, : s.config.vocab_size], s.model.lm_head),
    ]):  # fmt: skip
        x = s.random(512, layers[0].in_features, seed=i)
        compare_rows(s, tally, name, engine_op, separate(*layers), x, offsets=1 if name == "lm_head" else 3)
        if s.mode == "aligned" and len(layers) > 1:  # as hidden_states computes it
            tally.equal(F.linear(x, *kernels._merged(*layers)), separate(*layers)(x), f"{name}: one matrix or several")


@torch.no_grad()
def c4(s: Subject, tally: Tally) -> None:
    """RMSNorm, with and without residual"""

    def norm(module, x):
        return kernels.RMSNorm.apply(x, module.weight, module.variance_epsilon) if s.mode == "aligned" else module(x)

    def add_norm(module, x, residual):
        if s.mode == "aligned":
            return torch.cat(kernels.AddRMSNorm.apply(x, residual, module.weight, module.variance_epsilon), -1)
        return torch.cat([module(x + residual), x + residual], -1)

    x, residual = (s.random(512, s.config.hidden_size, scale=scale, seed=scale) for scale in (1, 6))
    for name, engine, learner in [
        ("input norm", s.engine_layer.input_layernorm, s.layer.input_layernorm),
        ("post-attention norm", s.engine_layer.post_attention_layernorm, s.layer.post_attention_layernorm),
        ("final norm", s.runner.model.model.norm, s.model.model.norm),
    ]:
        compare_rows(s, tally, name, engine, lambda x: norm(learner, x), x)
        compare_rows(s, tally, f"{name} with residual", lambda x, r: torch.cat(engine(x, r), -1), lambda x, r: add_norm(learner, x, r), x, residual)
    if hasattr(s.layer.self_attn, "q_norm"):
        heads, D = (s.config.num_attention_heads, s.config.num_key_value_heads), s.head
        qkv = s.random(512, (heads[0] + 2 * heads[1]) * D, scale=2)
        for name, first, n in (("q_norm", 0, heads[0]), ("k_norm", heads[0] * D, heads[1])):
            engine, learner = getattr(s.engine_layer.self_attn, name), getattr(s.layer.self_attn, name)
            part = lambda qkv: qkv[:, first : first + n * D]  # noqa: E731  (a view with the strides of q/k/v, as in the model)
            compare_rows(
                s, tally, name, lambda x: engine(part(x).view(len(x), n, D)).reshape(len(x), n * D),
                lambda x: norm(learner, part(x).reshape(-1, D)).view(len(x), n * D), qkv,
            )  # fmt: skip


@torch.no_grad()
def c5(s: Subject, tally: Tally) -> None:
    """rotary embedding, SwiGLU"""
    H, K, D = s.config.num_attention_heads, s.config.num_key_value_heads, s.head
    q, k = s.random(512, H * D, scale=2), s.random(512, K * D, scale=2, seed=1)
    positions = torch.randint(0, s.config.max_position_embeddings, (512,), generator=torch.Generator().manual_seed(0))

    def rotary(positions, q, k):
        if s.mode == "aligned":
            return torch.cat(kernels.Rotary.apply(q, k, positions, s.learner.cos_sin, D), -1)
        heads = [x.view(1, len(x), -1, D).transpose(1, 2) for x in (q, k)]
        cos, sin = s.model.model.rotary_emb(q, positions[None])
        return torch.cat([x.transpose(1, 2).flatten(2)[0] for x in _stock(s.model).apply_rotary_pos_emb(*heads, cos, sin)], -1)

    def swiglu(x):
        return kernels.swiglu(x) if s.mode == "aligned" else F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]

    engine_rotary = s.engine_layer.self_attn.rotary_emb
    compare_rows(s, tally, "rotary", lambda p, q, k: torch.cat(engine_rotary(p, q, k), -1), rotary, positions, q, k)
    compare_rows(s, tally, "SwiGLU", s.engine_layer.mlp.act_fn, swiglu, s.random(512, 2 * s.config.intermediate_size, scale=3))


def _stock(model):
    return sys.modules[type(model).__module__]


@torch.no_grad()
def c6(s: Subject, tally: Tally) -> None:
    """attention: decode, prefill, chunks, batches"""
    H, K, D, L = s.config.num_attention_heads, s.config.num_key_value_heads, s.head, max(LENGTHS)
    q, k, v = (s.random(L, heads * D, scale=scale, seed=i) for i, (heads, scale) in enumerate(((H, 1.5), (K, 1.5), (K, 1.0))))
    torch.set_num_threads(1)
    whole = learner_attention(s, q, k, v, [L])
    filled = engine_attention(s, q, k, v, [(0, L)])[1]  # its later tokens are what a reused block holds: stale values
    for threads in sorted({1, 2, s.threads}):
        torch.set_num_threads(threads)

        def check(spans, what, cache=None):
            got = engine_attention(s, q, k, v, spans, cache)[0]
            tally.equal(got, torch.cat([whole[a:b] for a, b in spans]), f"{what}, {threads} threads")

        for n in LENGTHS:
            check([(0, n)], f"prefill of {n} tokens")
            check([(n - 1, n)], f"decode of token {n}", filled)
            for chunk in (1, 16, 100, 127, 128, 129, 256):
                if chunk < n:
                    check([(chunk, n)], f"prefill of {n} tokens in chunks, the second from {chunk}", filled)
        ends = [min(L, LENGTHS[i * 7 % len(LENGTHS)] + i // len(LENGTHS)) for i in range(SEQS)]
        for n in range(1, SEQS + 1):
            check([(end - 1, end) for end in ends[:n]], f"decode of {n} sequences", filled)
        check([(0, n) for n in LENGTHS], f"prefill of {len(LENGTHS)} sequences", filled)
        check([(0, 40), (128, 129), (100, 300), (0, 1), (511, 512), (128, 257)], "decode and prefill in one batch", filled)
        rows = learner_attention(s, *(torch.cat([x[:n] for n in LENGTHS]) for x in (q, k, v)), LENGTHS)
        tally.equal(rows, torch.cat([whole[:n] for n in LENGTHS]), f"the learner's batch of {len(LENGTHS)}, {threads} threads")
    torch.set_num_threads(s.threads)
    if s.mode == "aligned":
        _attention_at_once(s, tally, (q, k, v), whole)


def _attention_at_once(s: Subject, tally: Tally, qkv, whole, seconds: float = 1.0) -> None:
    """The learner's and the engine's attention at once, in two threads, as in a run: the lock keeps them apart."""
    end, results = time.monotonic() + seconds, []

    def learn():
        torch.set_num_threads(s.threads)
        while time.monotonic() < end:
            results.append(learner_attention(s, *qkv, [len(whole)]))

    thread = threading.Thread(target=learn)
    thread.start()
    while thread.is_alive():
        tally.equal(engine_attention(s, *qkv, [(0, len(whole))])[0], whole, "attention of both threads at once, engine")
    thread.join()
    for got in results:
        tally.equal(got, whole, "attention of both threads at once, learner")


@torch.no_grad()
def learner_attention(s: Subject, q, k, v, lengths) -> torch.Tensor:
    """The learner's attention over packed sequences: q [T, H*D], k and v [T, K*D] -> [T, H*D]."""
    H, K, D, n = s.config.num_attention_heads, s.config.num_key_value_heads, s.head, len(q)
    if s.mode == "standard":
        split = [x.view(n, -1, D).transpose(0, 1).split(lengths, 1) for x in (q, k, v)]
        outs = [F.scaled_dot_product_attention(*(x[None] for x in one), is_causal=True, enable_gqa=True)[0] for one in zip(*split)]
        return torch.cat([x.transpose(0, 1).reshape(-1, H * D) for x in outs])
    packed, isa = kernels.pack([[0] * length for length in lengths]), kernels._isa(s.dtype, D)
    with kernels.ATTENTION_LOCK:
        plan = kernels._row_metadata(packed.row_lens, H, K, D, s.dtype, isa)
    q, k, v = (F.pad(x, (0, 0, 0, -n % kernels.ROWS)) for x in (q, k, v))
    return kernels.Attention.apply(q, k, v, packed, D, plan, isa)[:n]


@torch.no_grad()
def engine_attention(s: Subject, q, k, v, spans, cache=None):
    """The engine's attention, through its own metadata builder and implementation, for requests that have the same tokens
    and compute those from a to b each: ([rows, H*D], KV cache). Without a cache: an empty one."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    builder, layer = s.runner.attn_groups[0][0].get_metadata_builder(), s.engine_layer.self_attn.attn
    K, D, blocks = s.config.num_key_value_heads, s.head, -(-len(q) // kernels.BLOCK)
    cache = torch.zeros(blocks, K, kernels.BLOCK, 2 * D, dtype=s.dtype) if cache is None else cache
    slots = torch.cat([torch.arange(a, b) for a, b in spans])
    sizes = torch.tensor([b - a for a, b in spans])
    starts = F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    ends = torch.tensor([b for _, b in spans], dtype=torch.int32)
    metadata = builder.build(0, CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=ends, num_reqs=len(spans), num_actual_tokens=len(slots),
        max_query_len=int(sizes.max()), max_seq_len=int(ends.max()), slot_mapping=slots,
        block_table_tensor=torch.arange(blocks, dtype=torch.int32).repeat(len(spans), 1),
    ))  # fmt: skip
    rows = [x[slots].view(len(slots), -1, D) for x in (q, k, v)]
    out = torch.zeros_like(rows[0])
    layer.impl.do_kv_cache_update(layer, *rows[1:], cache, slots)
    layer.impl.forward(layer, *rows, cache, metadata, out)
    return out.view(len(slots), -1), cache


@torch.no_grad()
def c7(s: Subject, tally: Tally) -> None:
    """head, temperature, log-softmax"""
    sampler = s.runner.sampler
    for temperature in (1.0, 0.7):

        def engine_op(hidden):
            logits = s.runner.model.compute_logits(hidden).float()
            logits = sampler.apply_temperature(logits, torch.full((len(hidden),), temperature), True)
            generators = {i: torch.Generator().manual_seed(i) for i in range(len(hidden))}
            return sampler.topk_topp_sampler(logits, generators, None, None)[1]

        def learner_op(hidden):
            return log_softmax(s, hidden, temperature)

        hidden = s.random(512, s.config.hidden_size, scale=2)
        compare_rows(s, tally, f"log-softmax, temperature {temperature}", engine_op, learner_op, hidden, offsets=1)
        targets = torch.arange(512) % s.config.vocab_size
        got = kernels.token_logprobs(hidden, s.model.lm_head, targets, temperature)[0]
        tally.equal(got, learner_op(hidden).gather(1, targets[:, None])[:, 0], f"token log-probability, temperature {temperature}")


def log_softmax(s: Subject, hidden, temperature: float = 1.0) -> torch.Tensor:
    """[rows, V] float32, which kernels.TokenLogprobs computes and does not return."""
    return torch.log_softmax(kernels._logits(hidden, s.model.lm_head.weight, s.model.lm_head.bias, temperature), -1)


# ---------------------------------------------------------------------------------------------------------------------
# C8 to C10: sampled tokens


def run_requests(s: Subject, prompts, lengths, prompt_logprobs=None) -> list:
    """vLLM's outputs for one request per prompt, request i of exactly lengths[i] tokens at temperature 1, seed i."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        params = SamplingParams(
            temperature=1.0, max_tokens=length, seed=i, logprobs=0, prompt_logprobs=prompt_logprobs, flat_logprobs=True,
            ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        s.engine.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    outputs = [None] * len(prompts)
    while s.engine.engine.has_unfinished_requests():
        for output in s.engine.engine.step():
            if output.finished:
                outputs[int(output.request_id)] = output
    return outputs


def same_samples(tally: Tally, got: list, expected: list, where: str) -> None:
    for a, b in zip(got, expected):
        a, b = a.outputs[0], b.outputs[0]
        same = [x == y for x, y in zip(a.token_ids, b.token_ids)]
        n = same.index(False) if False in same else len(same)  # what follows another token is not comparable
        tally.equal(torch.tensor(a.logprobs.logprobs[:n]), torch.tensor(b.logprobs.logprobs[:n]), f"{where}: log-probabilities")
        tally.require(n == len(a.token_ids) == len(b.token_ids), f"{where}: sampled tokens")


def c8(s: Subject, tally: Tally) -> None:
    """engine with itself: batch, cache, preemption"""
    s.sync()
    # Request i samples i + 2 tokens, so that 64, 63, ..., 1 sequences are decoded at once; then all is read as one prompt.
    prompts, lengths = s.prompts([LENGTHS[i % 5] for i in range(SEQS)]), list(range(2, SEQS + 2))
    together = run_requests(s, prompts, lengths)
    whole = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, together)]
    for first in range(0, SEQS, 8):
        part = slice(first, first + 8)
        for out, output in zip(together[part], run_requests(s, whole[part], [1] * 8, prompt_logprobs=0)):
            prefill = torch.tensor(output.prompt_logprobs.logprobs)[-len(out.outputs[0].token_ids) :]
            for step, (a, b) in enumerate(zip(torch.tensor(out.outputs[0].logprobs.logprobs), prefill)):
                tally.equal(a, b, f"decode of {min(SEQS, SEQS + 1 - step)} sequences at once against prefill")
    for i in (0, 5, 30):  # seed i is request i's own, so it has to stand in its place
        s.engine.llm.reset_prefix_cache()
        alone = run_requests(s, [[1]] * i + [prompts[i]], [1] * i + lengths[i : i + 1])
        same_samples(tally, alone[i:], together[i : i + 1], "one long sequence against 64 at once")

    prompts, miss = s.prompts([128, 129, 200, 256, 257, 300], seed=1, shared=150), []
    for i in range(len(prompts)):
        s.engine.llm.reset_prefix_cache()
        miss.append(run_requests(s, [[1]] * i + [prompts[i]], [1] * i + [8])[i])
    tally.require(not any(o.num_cached_tokens for o in miss), "prefix cache: a miss was a hit")
    run_requests(s, prompts, [1] * len(prompts))
    hit = run_requests(s, prompts, [8] * len(prompts))
    tally.require(sum(o.num_cached_tokens >= kernels.BLOCK for o in hit) == len(hit) - 1, "prefix cache: no hit")
    same_samples(tally, hit, miss, "prefix-cache hit against miss")

    prompts, lengths = s.prompts([100, 90, 120, 110, 95, 127], seed=2), [40] * 6
    s.engine.llm.reset_prefix_cache()
    roomy = run_requests(s, prompts, lengths)
    with few_blocks(s, 5) as preempted:
        cramped = run_requests(s, prompts, lengths)
    tally.require(len(preempted) > 0, "no request was preempted")
    same_samples(tally, cramped, roomy, "after preemption and block reuse")
    s.engine.llm.reset_prefix_cache()


@contextlib.contextmanager
def few_blocks(s: Subject, free: int):
    """Leave the engine only `free` blocks of its KV cache; gives the list of requests that were preempted."""
    pool, preempt, preempted = s.scheduler.kv_cache_manager.block_pool, s.scheduler._preempt_request, []
    s.engine.llm.reset_prefix_cache()
    held = pool.get_new_blocks(pool.get_num_free_blocks() - free)
    s.scheduler._preempt_request = lambda request, *rest, **more: (preempted.append(request.request_id), preempt(request, *rest, **more))[1]
    try:
        yield preempted
    finally:
        s.scheduler._preempt_request = preempt
        pool.free_blocks(held)


def c9(s: Subject, tally: Tally) -> None:
    """learner's log-probabilities of sampled tokens"""
    from rollout import Request, sample_seed

    s.sync()
    new, done, rounds = min(64, s.longest // 4), 0, 0
    sizes, draw = [SEQS, 1, 7, 43, 44, 20], random.Random(0)
    while done < s.tokens:
        n = min(sizes[rounds % len(sizes)], max(1, (s.tokens - done) // new))
        lengths = [draw.choice([*range(1, 40), 127, 128, 129]) for _ in range(n)]
        lengths[0] = [s.longest - new, 257, 1, 513, 1025][rounds % 5]
        lengths = [min(length, s.longest - new) for length in lengths]
        temperature, threads = ((1.0, 0.7)[rounds // 2 % 2], sorted({1, 2, s.threads})[rounds % len({1, 2, s.threads})])
        torch.set_num_threads(threads)
        requests = [Request(ids, sample_seed(rounds, i)) for i, ids in enumerate(s.prompts(lengths, seed=rounds))]
        with torch.no_grad():
            samples = s.engine.generate(requests, new, temperature, 0)
            s.learner.temperature = temperature
            torch.set_num_threads(s.threads)
            for part in s.learner.microbatches(samples):
                part = [samples[i] for i in part]
                got, expected = torch.cat([x.logprobs for x in part]), s.learner.score(part)[0]
                tally.equal(got, expected, f"batch of {n} sequences, temperature {temperature}, {threads} threads")
                done += len(got)
        rounds += 1
    s.learner.temperature = 1.0


def c10(s: Subject, tally: Tally, steps: int = 4, lag: int = 1) -> None:
    """the same while training, prefix cache in use"""
    from rollout import Request, RolloutThread, WeightStore, sample_seed

    learner, step, cached = s.learner, s.engine.engine.step, []
    # An optimizer without state, which is 8 bytes per parameter less; each step is 0.02% of the weights' norm.
    kept = {name: getattr(learner, name) for name in ("max_grad_norm", "optimizer", "audit", "tokens_per_microbatch")}
    learner.max_grad_norm, learner.audit, learner.tokens_per_microbatch = 1e-3, SEQS, 256
    learner.optimizer = torch.optim.SGD([learner.master], lr=0.2 * learner.master.detach().norm().item())
    prompts = s.prompts([135, 150], seed=3, shared=130)

    def counting_step():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    def make_requests(b):
        return [Request(p, sample_seed(b, i, j)) for i, p in enumerate(prompts) for j in range(4)]

    def grade(b, samples):
        draw = random.Random(b)
        for i, sample in enumerate(samples):
            sample.group, sample.reward = i // 4, draw.random()
        return [""] * len(samples)

    store, s.engine.engine.step = WeightStore(), counting_step
    store.publish(0, learner.weights())
    thread = RolloutThread(
        s.engine, store, make_requests, grade, start=0, steps=steps, lag=lag, schedule="fixed", max_new_tokens=24,
        temperature=1.0, timeout=600, threads=s.threads, on_error=lambda: None,
    )  # fmt: skip
    s.engine.version = None  # whatever it holds, load version 0
    thread.start()
    try:
        for k in range(steps):
            batch = thread.next(lambda: False)
            metrics = learner.update(batch.samples, k, weights_of=store.get)
            store.publish(k + 1, learner.weights())
            moved = any(not torch.equal(w, store.get(k)[name]) for name, w in store.get(k + 1).items())
            store.drop_before(max(0, k + 1 - lag))
            tally.values += metrics["tokens"]
            if metrics["mismatch_max"] != 0:  # NaN too
                tally.different += round((1 - metrics["mismatch_exact"]) * metrics["tokens"]) or 1
                tally.largest = max(tally.largest, metrics["mismatch_max"])
                tally.fault = tally.fault or f"batch {k}, sampled by version {batch.samples[0].version}"
            tally.require(moved, f"update {k} changed nothing (gradient norm {metrics['grad_norm']:.3g})")
        tally.require(sum(cached) > 0, "prefix cache: no hit")
    finally:
        thread.close()
        s.engine.engine.step, s.engine.cancelled = step, False
        vars(learner).update(kept)


CHECKS = {"C0 setting": c0, "C1 weights": c1, "C2 tokens": c2, "C3 linear": c3, "C4 norm": c4, "C5 elementwise": c5,
          "C6 attention": c6, "C7 log-probability": c7, "C8 engine with itself": c8, "C9 learner with engine": c9,
          "C10 over updates": c10}  # fmt: skip


def run_check(name: str, s: Subject) -> Tally:
    torch.set_num_threads(s.threads)
    tally, started = Tally(name, CHECKS[name].__doc__), time.perf_counter()
    CHECKS[name](s, tally)
    tally.seconds = time.perf_counter() - started
    return tally


# ---------------------------------------------------------------------------------------------------------------------
# The locator


# in the order of computation; what an operation is called in kernels.py's trace and in the report
LAYER = {"input_residual": "residual", "input_norm": "norm", "qkv": "q/k/v", "qk_norm": "q/k norm", "rotary": "rotary",
         "attention": "attention", "o_proj": "o_proj", "residual": "residual", "post_attention_norm": "norm",
         "gate_up": "gate/up", "activation": "activation", "down": "down"}  # fmt: skip
MERGED = {"qkv": ("q_proj", "k_proj", "v_proj"), "qk_norm": ("q_norm", "k_norm"), "gate_up": ("gate_proj", "up_proj")}
RESIDUALS = {"input_norm": "input_residual", "post_attention_norm": "residual", "final_norm": "final_residual"}
LAST = {"final_residual": "residual", "final_norm": "final norm", "logits": "logits", "log_softmax": "log-softmax"}


class Recorder:
    """Forward hooks that keep what the engine's modules compute, token by token, while the context is open.

    tensors: by operation, a row for each of `rows`, (request, position); the last two of LAST only for rows `sampled`.
    """

    def __init__(self, s: Subject):
        self.runner, self.rows, self.sampled, self.parts, self.handles = s.runner, [], [], defaultdict(list), []

    def __enter__(self):
        model = self.runner.model.model
        self.handles.append(model.embed_tokens.register_forward_hook(self._begin))
        self._watch({"rotary": model.layers[0].self_attn.rotary_emb})  # one object, which all layers share
        for layer in model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            self._watch({"input_norm": layer.input_layernorm, "qkv": attn.qkv_proj, "q_norm": getattr(attn, "q_norm", None),
                         "k_norm": getattr(attn, "k_norm", None), "attention": attn.attn, "o_proj": attn.o_proj,
                         "post_attention_norm": layer.post_attention_layernorm, "gate_up": mlp.gate_up_proj,
                         "activation": mlp.act_fn, "down": mlp.down_proj})  # fmt: skip
        sampler = self.runner.sampler.topk_topp_sampler
        self._watch({"final_norm": model.norm, "logits": self.runner.model.logits_processor, "log_softmax": sampler})
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()
        self.tensors = {op: torch.cat(parts) for op, parts in self.parts.items()}

    def index(self, sequences) -> torch.Tensor:
        """For each row, its place among the sequences laid end to end."""
        starts = [sum(map(len, sequences[:i])) for i in range(len(sequences))]
        return torch.tensor([starts[request] + position for request, position in self.rows])

    def _begin(self, module, args, out):  # a forward of the model begins: whose tokens are these?
        batch, self.layer = self.runner.input_batch, -1
        ends = self.runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        for i, (a, b) in enumerate(zip(ends, ends[1:])):
            request, done = int(batch.req_ids[i].split("-")[0]), int(batch.num_computed_tokens_cpu[i])
            self.rows += [(request, done + j) for j in range(b - a)]
            self.sampled.append(len(self.rows) - 1)
        self.count = ends[-1]
        self._keep("ids", args[0])
        self._keep("embedding", out)

    def _watch(self, modules):
        for op, module in modules.items():
            if module is not None:
                self.handles.append(module.register_forward_hook(lambda m, args, out, op=op: self._see(op, args, out)))

    def _see(self, op, args, out):
        self.layer += op == "input_norm"
        at = "" if op in LAST else f"layers.{self.layer}."
        if op == "rotary":
            if self.layer == 0:
                self._keep("positions", args[0])
            out = torch.cat([x.flatten(1) for x in out], -1)
        elif op == "q_norm":
            self.q = out.flatten(1)
            return
        elif op == "k_norm":
            op, out = "qk_norm", torch.cat([self.q, out.flatten(1)], -1)
        elif op == "log_softmax":
            out = out[1]
        elif op in RESIDUALS and isinstance(out, tuple):
            self._keep(at + RESIDUALS[op], out[1])
        self._keep(at + op, out[0] if isinstance(out, tuple) else out)

    def _keep(self, op, tensor):
        self.parts[op].append(tensor[: self.count].clone())  # later operations write in place


@torch.no_grad()
def learner_tensors(s: Subject, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """Every operation's output in the learner, [tokens, ...] for sequences laid end to end; the names of kernels.py's trace."""
    if s.mode == "standard":
        return stock_tensors(s.model, sequences)
    found, packed, add_norm = {}, kernels.pack(sequences), kernels._add_norm
    residuals = [f"layers.{i}.{op}" for i in range(s.config.num_hidden_layers) for op in ("input_residual", "residual")]
    residuals = iter([*residuals, "final_residual"])

    def traced(x, residual, norm):
        out = add_norm(x, residual, norm)
        found[next(residuals)] = out[1]
        return out

    kernels._add_norm = traced
    try:
        kernels.hidden_states(s.model, packed, s.learner.cos_sin, trace=found.__setitem__)
    finally:
        kernels._add_norm = add_norm
    return {op: x[: packed.tokens] for op, x in found.items()}


def stock_tensors(model, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """The same of the stock transformers model, one sequence at a time."""
    found, hooks, stock = defaultdict(list), [], _stock(model)
    apply_rotary, layers = stock.apply_rotary_pos_emb, len(model.model.layers)

    def watch(at, outputs, inputs):
        for op, module in outputs.items():
            hooks.append(module.register_forward_hook(lambda m, args, out, op=op: found[at + op].append(out[0].flatten(1))))
        for op, module in inputs.items():
            hooks.append(module.register_forward_pre_hook(lambda m, args, op=op: found[at + op].append(args[0][0])))

    def rotary(*args, **kwargs):
        q, k = apply_rotary(*args, **kwargs)  # [1, heads, L, D]
        found["rotary"].append(torch.cat([x[0].transpose(0, 1).flatten(1) for x in (q, k)], -1))
        return q, k

    for i, layer in enumerate(model.model.layers):
        attn, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        outputs = {"input_norm": layer.input_layernorm, "o_proj": attn.o_proj, "post_attention_norm": norm, "down": mlp.down_proj}
        outputs |= {name: part for part_of in MERGED.values() for name in part_of for part in [getattr(attn, name, getattr(mlp, name, None))] if part}
        inputs = {"input_residual": layer.input_layernorm, "attention": attn.o_proj, "residual": norm, "activation": mlp.down_proj}
        watch(f"layers.{i}.", outputs, inputs)
    watch("", {"embedding": model.model.embed_tokens, "final_norm": model.model.norm}, {"final_residual": model.model.norm})
    stock.apply_rotary_pos_emb = rotary
    try:
        for sequence in sequences:
            model.model(input_ids=torch.tensor([sequence]), use_cache=False)
    finally:
        stock.apply_rotary_pos_emb = apply_rotary
        for hook in hooks:
            hook.remove()
    rotated = found.pop("rotary")
    found = {op: torch.cat(parts) for op, parts in found.items()}
    for i in range(layers):
        found[f"layers.{i}.rotary"] = torch.cat(rotated[i::layers])
        for op, parts in MERGED.items():
            if f"layers.{i}.{parts[0]}" in found:
                found[f"layers.{i}.{op}"] = torch.cat([found[f"layers.{i}.{part}"] for part in parts], -1)
    return found


@torch.no_grad()
def locate(s: Subject, lengths=(1, 5, 17, 33, 129), new: int = 6) -> dict | None:
    """The first operation whose output differs between engine and learner, in one pass over each: prompts of these lengths
    and `new` sampled tokens. {"layer", "op", "values", "different", "largest"}, or None when all are equal."""
    from rollout import Request

    s.sync()
    requests = [Request(ids, i) for i, ids in enumerate(s.prompts(lengths, seed=9))]
    stop_ids, s.engine.stop_ids = s.engine.stop_ids, []
    with Recorder(s) as record:
        samples = s.engine.generate(requests, new, 1.0, 0)
    s.engine.stop_ids = stop_ids
    sequences = [x.prompt_ids + x.response_ids for x in samples]
    found, index = learner_tensors(s, sequences), record.index(sequences)
    found = {op: x[index] for op, x in found.items()}
    hidden = found["final_norm"][record.sampled]
    found["logits"] = kernels.linear(hidden, s.model.lm_head.weight, s.model.lm_head.bias)
    # all of a row's log-probabilities and, once more, that of the token that was sampled
    sampled = torch.tensor([sequences[i][position + 1] for i, position in (record.rows[row] for row in record.sampled)])
    logp = kernels.token_logprobs(hidden, s.model.lm_head, sampled)[0]
    found["log_softmax"] = torch.cat([log_softmax(s, hidden), logp[:, None]], 1)
    engine_logp = record.tensors["log_softmax"]
    record.tensors["log_softmax"] = torch.cat([engine_logp, engine_logp.gather(1, sampled[:, None])], 1)
    order = [("embedding", None, "embedding")]
    order += [(f"layers.{i}.{op}", i, label) for i in range(s.config.num_hidden_layers) for op, label in LAYER.items()]
    for key, layer, label in [*order, *((op, None, label) for op, label in LAST.items())]:
        if key in record.tensors and not torch.equal(got := record.tensors[key], expected := found[key]):
            tally = Tally("", "")
            tally.equal(got.flatten(1), expected.flatten(1), key)
            return {"layer": layer, "op": label, "values": tally.values, "different": tally.different, "largest": tally.largest}
    return None


def describe(found: dict | None) -> str:
    if found is None:
        return "locator: no operation differs in 5 sequences alone, so the difference lies in what the check above varied"
    layer = "" if found["layer"] is None else f"layer {found['layer']}, "
    return f"first difference: {layer}{found['op']}: {found['different']:,} of {found['values']:,} values, by up to {found['largest']:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# The command


def table(tallies: list[Tally]) -> str:
    lines = [f"{'check':<23} {'compared':<46} {'values':>13} {'largest difference':>19}  {'exact':<5} {'seconds':>7}"]
    for t in tallies:
        exact = "no" if t.fault else "yes"
        lines.append(f"{t.check:<23} {t.compared:<46} {t.values:>13,} {t.largest:>19.3g}  {exact:<5} {t.seconds:>7.1f}")
    return "\n".join(lines)


def parse(argv):
    parser = argparse.ArgumentParser(prog="kernels.py", description="Alignment checks C0 to C10: do rollout and learner agree to the bit?")
    parser.add_argument("--model", default="base", help='"base" (a small model made here), a local Hugging Face folder, or a hub name')
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the weights that both sides compute with")
    parser.add_argument("--kernels", default="aligned", choices=["aligned", "standard"], help="standard: how far apart stock vLLM and stock transformers are")
    parser.add_argument("--only", nargs="+", metavar="C", choices=[name.split()[0] for name in CHECKS], help="run these checks alone, for example C6 C9")
    parser.add_argument("--tokens", type=int, default=5000, help="sampled tokens that C9 compares (default 5000)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of both sides; the default is all. C3 to C7 run on 1 and 2 as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """0: all is exact; 1: something differs; 2: cannot be checked."""
    args = parse(argv)
    try:
        from transformers import AutoConfig

        path = run_async.resolve_model(args.model)
        config = AutoConfig.from_pretrained(path)
        kernels.require_supported(config)
        if config.max_position_embeddings < 512:
            raise run_async.UserError(f"--model {args.model}: has {config.max_position_embeddings} positions, the checks need 512")
        if args.tokens < 1:
            raise run_async.UserError(f"--tokens {args.tokens}: must be at least 1")
    except (run_async.UserError, ValueError, OSError) as error:
        print(f"kernels.py: {error}", file=sys.stderr)
        return 2
    with console() as (say, bar_file, log):
        try:
            return run(args, str(path), config, say, bar_file)
        except BaseException:
            say(f"kernels.py: failed; vLLM's log is {log}")
            raise


@contextlib.contextmanager
def console():
    """(function that prints to standard output, file for the progress bar, log file): everything else goes to the log."""
    stdout, stderr = os.dup(1), os.dup(2)
    handle, log = tempfile.mkstemp(prefix="kernels-", suffix=".log")
    os.close(handle)
    bar = run_async.quiet(log)

    def say(text):
        os.write(stdout, (text + "\n").encode())

    try:
        yield say, bar, log
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(stdout, 1), os.dup2(stderr, 2), os.close(stdout), os.close(stderr), bar.close()


def run(args, path: str, config, say, bar_file) -> int:
    from tqdm import tqdm

    import rollout
    from learn import Learner

    threads = args.threads or run_async.default_threads(0)
    chosen = [name for name in CHECKS if not args.only or name.split()[0] in args.only]
    tallies, found = [], None
    with tqdm(chosen, file=bar_file, desc="loading", unit="check", dynamic_ncols=True) as bar:
        learner = Learner(path, args.dtype, args.kernels, allow_mismatch=True, tokens_per_microbatch=2048)
        cache_bytes = rollout._kv_cache_bytes  # room for 8 sequences of full length is enough for what is sampled here
        with mock.patch.object(rollout, "_kv_cache_bytes", lambda model, dtype, length, seqs: cache_bytes(model, dtype, length, 7)):
            engine = rollout.Engine(path, args.dtype, args.kernels, min(config.max_position_embeddings, 2048), SEQS, stop_ids=())
        s = Subject(learner, engine, args.tokens, threads)
        s.sync()
        for name in bar:
            bar.set_description(name)
            tallies.append(run_check(name, s))
            if tallies[-1].fault and args.kernels == "aligned":
                break
        exact = not any(t.fault for t in tallies)
        if not exact:
            bar.set_description("locating")
            found = locate(s)
    say(f"{args.model}, {args.dtype}, {args.kernels} kernels, {threads} threads\n{table(tallies)}")
    for t in tallies:
        if t.fault:
            say(f"{t.check.split()[0]}: {t.different:,} of {t.values:,} values differ; the first: {t.fault}")
    say("all exact" if exact else describe(found))
    if args.json:
        result = {"model": args.model, "dtype": args.dtype, "kernels": args.kernels, "threads": threads, "exact": exact, "first_difference": found}
        with open(args.json, "w") as file:
            json.dump(result | {"checks": [asdict(t) | {"exact": t.fault is None} for t in tallies]}, file, indent=2)
    return 0 if exact else 1
